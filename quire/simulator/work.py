from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from quire.step import HostTransfers, StepPlan


class ChunkTokens(NamedTuple):
    """Window of chunked attention: a token reads its own stretch of `size` positions, up to itself (no prefill
    chunk)."""

    size: int


Windows = Sequence[int | ChunkTokens | None]
"""Distinct attention windows of a model's layers; None: full attention."""


class StepWork(msgspec.Struct, kw_only=True):
    """Work of one step, for the cost model. Lists have one entry for each distinct window of the model. decode_context:
    positions that sequences with one token read. prefill_context: positions that chunks read, once for all tokens.
    prefill_pairs: pairs of a chunk's token and a position up to its own."""

    num_tokens: int = 0
    num_sequences: int = 0
    num_sampled: int = 0
    num_new: int = 0
    """Sequences that get a row."""
    num_chunks: int = 0
    """Sequences that compute more than one token, those with drafts too."""
    num_decodes: int = 0
    """Sequences that compute one token."""
    decode_context: list[int] = []
    prefill_context: list[int] = []
    prefill_pairs: list[int] = []
    num_copied_blocks: int = 0
    num_swapped_out: int = 0
    """Blocks that go to the host."""
    num_swapped_in: int = 0
    waits_for_swap: bool = False
    """Plan hands out blocks that it also saves: writes to them wait for the copies."""

    @classmethod
    def of(cls, plan: StepPlan, windows: Windows = (None,)) -> StepWork:
        """Work of a plan: sums over its columns. windows: see `windows_of`."""
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
            num_sampled=len(plan.sample_seq_ids) - len(plan.pooled) + sum(plan.num_drafts),
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


def _decode_context(starts: Sequence[int], count: int, window: int | ChunkTokens | None) -> int:
    if window is None:
        return sum(starts) + count
    if isinstance(window, ChunkTokens):
        return sum(start % window.size for start in starts) + count
    return sum(start + 1 if start < window else window for start in starts)


def _chunk_context(start: int, count: int, window: int | ChunkTokens | None) -> int:
    end = start + count
    if isinstance(window, ChunkTokens):
        return end - start // window.size * window.size
    return end if window is None else min(end, window - 1 + count)


def _chunk_pairs(start: int, count: int, window: int | ChunkTokens | None) -> int:
    end = start + count
    if isinstance(window, ChunkTokens):
        return _pairs_before(end, window.size) - _pairs_before(start, window.size)
    if window is None or end <= window:
        return count * start + count * (count + 1) // 2
    if start >= window:
        return count * window
    inside = window - start
    return inside * start + inside * (inside + 1) // 2 + (count - inside) * window


def _pairs_before(end: int, size: int) -> int:
    chunks, rest = divmod(end, size)
    return chunks * (size * (size + 1) // 2) + rest * (rest + 1) // 2


def _hands_out_saved(plan: StepPlan, transfers: HostTransfers) -> bool:
    saved = {block for block, _ in transfers.swap_out}
    written = {block for groups in plan.new_blocks.values() for blocks in groups for block in blocks}
    written.update(block for new in plan.new_sequences for table in new.block_ids for block in table)
    written.update(block for _, block in plan.block_copies)
    written.update(block for _, block in transfers.swap_in)
    return not saved.isdisjoint(written)
