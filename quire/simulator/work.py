"""The work of one plan, in the numbers from which its cost is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from quire.step import HostTransfers, StepPlan


class Chunk(NamedTuple):
    """Attention to the positions of a token's own chunk of `size`, up to its own."""

    size: int


Windows = Sequence[int | Chunk | None]
"""The distinct attention windows of a model's layers, None for full attention."""


class StepWork(msgspec.Struct, kw_only=True):
    """One step. The lists have one entry for each distinct window of the model.

    A sequence that computes one token attends with it to its context, which is read once for it (`decode_context`). A
    chunk of several tokens reads its context once for all of them (`prefill_context`) and compares each token with the
    positions up to its own (`prefill_pairs`).
    """

    num_tokens: int = 0
    num_sequences: int = 0
    num_sampled: int = 0
    num_new: int = 0
    """Sequences that get a row."""
    num_chunks: int = 0
    """Sequences that compute more than one token."""
    num_decodes: int = 0
    """Sequences that compute one."""
    decode_context: list[int] = []
    prefill_context: list[int] = []
    prefill_pairs: list[int] = []
    num_copied_blocks: int = 0
    num_swapped_out: int = 0
    """Blocks that go to the host."""
    num_swapped_in: int = 0
    waits_for_swap: bool = False
    """The plan hands out blocks that it also saves: who writes them waits until they are saved."""

    @classmethod
    def of(cls, plan: StepPlan, windows: Windows = (None,)) -> StepWork:
        """The work of a plan. Sums over its columns; with windows, or chunks, a step of Python for each."""
        starts, counts = plan.start_positions, plan.num_tokens
        num_tokens, num_sequences = sum(counts), len(counts)
        none = [0] * len(windows)
        chunks: list[tuple[int, int]] = []
        if num_tokens != num_sequences:
            chunks = [(start, count) for start, count in zip(starts, counts, strict=True) if count > 1]
        num_decodes = num_sequences - len(chunks)
        decode_starts = starts
        if chunks:
            decode_starts = [start for start, count in zip(starts, counts, strict=True) if count == 1]
        work = cls(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_sampled=len(plan.sample_seq_ids) - len(plan.pooled),
            num_new=len(plan.new_sequences),
            num_decodes=num_decodes,
            decode_context=[_decode_context(decode_starts, num_decodes, window) for window in windows],
            prefill_context=none,
            prefill_pairs=none,
            num_copied_blocks=len(plan.block_copies),
        )
        if chunks:
            work.num_chunks = len(chunks)
            work.prefill_context = [sum(_chunk_context(*chunk, window) for chunk in chunks) for window in windows]
            work.prefill_pairs = [sum(_chunk_pairs(*chunk, window) for chunk in chunks) for window in windows]
        if plan.transfers is not None:
            swap_out, swap_in = plan.transfers.swap_out, plan.transfers.swap_in
            work.num_swapped_out, work.num_swapped_in = len(swap_out), len(swap_in)
            work.waits_for_swap = bool(swap_out) and _hands_out_saved(plan, plan.transfers)
        return work


def _decode_context(starts: Sequence[int], count: int, window: int | Chunk | None) -> int:
    """Positions that single tokens at `starts` read."""
    if window is None:
        return sum(starts) + count
    if isinstance(window, Chunk):
        return sum(start % window.size for start in starts) + count
    return sum(start + 1 if start < window else window for start in starts)


def _chunk_context(start: int, count: int, window: int | Chunk | None) -> int:
    """Positions that a chunk of tokens reads."""
    end = start + count
    if isinstance(window, Chunk):
        return end - start // window.size * window.size
    return end if window is None else min(end, window - 1 + count)


def _chunk_pairs(start: int, count: int, window: int | Chunk | None) -> int:
    """Pairs of a token of the chunk and a position that it attends to."""
    end = start + count
    if isinstance(window, Chunk):
        return _pairs_before(end, window.size) - _pairs_before(start, window.size)
    if window is None or end <= window:
        return count * start + count * (count + 1) // 2
    if start >= window:
        return count * window
    inside = window - start
    return inside * start + inside * (inside + 1) // 2 + (count - inside) * window


def _pairs_before(end: int, size: int) -> int:
    """Pairs of a token in front of `end` and a position of its chunk of `size` that it attends to."""
    chunks, rest = divmod(end, size)
    return chunks * (size * (size + 1) // 2) + rest * (rest + 1) // 2


def _hands_out_saved(plan: StepPlan, transfers: HostTransfers) -> bool:
    """Whether something that this plan writes to is a block that it saves first."""
    saved = {block for block, _ in transfers.swap_out}
    written = {block for groups in plan.new_blocks.values() for blocks in groups for block in blocks}
    written.update(block for new in plan.new_sequences for table in new.block_ids for block in table)
    written.update(block for _, block in plan.block_copies)
    written.update(block for _, block in transfers.swap_in)
    return not saved.isdisjoint(written)
