"""Inputs and results of a model that makes drafts on a device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.drafts import DraftTables
from quire.kernels.triton.rows import StepColumns
from quire.kernels.triton.runtime import blocks_of, launch

SEQUENCES = 64


@triton.jit(do_not_specialize=["num_passed"])
def _begin_kernel(
    starts, query_start, num_drafts, sources, counts, own_starts, ends, num_passed,
    HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_passed
    source = tl.load(sources + index, mask=mask, other=0)
    count = tl.load(query_start + source + 1, mask=mask, other=0) - tl.load(query_start + source, mask=mask, other=0)
    drafted = tl.load(num_drafts + source, mask=mask, other=0)
    end = tl.load(starts + source, mask=mask, other=0) + count - drafted
    own = tl.load(counts + index + 1, mask=mask, other=0) - tl.load(counts + index, mask=mask, other=0)
    if HAS_MASKS:
        own -= tl.maximum(drafted - 1, 0)
    tl.store(own_starts + index, end - own, mask=mask)
    tl.store(ends + index, end, mask=mask)


def begin_pass(
    step: StepColumns,
    num_drafts: torch.Tensor,
    sources: torch.Tensor,
    query_start: torch.Tensor,
    *,
    has_masks: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find where P sequences begin in a pass over their last known tokens. step: S sequences, with the device's own
    starts. All int32. num_drafts: [S], drafts among each one's last tokens. sources: [P], indices into the step.
    query_start: [P + 1], of the pass. has_masks: it has mask tokens for all drafts but the first. Returns starts of the
    pass, and numbers of known tokens, [P]."""
    num_passed = len(sources)
    starts, ends = (torch.empty_like(sources) for _ in range(2))
    grid = (blocks_of(num_passed, SEQUENCES),)
    columns = step.starts, step.query_start, num_drafts, sources, query_start
    launch(_begin_kernel, grid, *columns, starts, ends, num_passed, HAS_MASKS=has_masks, BLOCK=SEQUENCES)
    return starts, ends


@triton.jit(do_not_specialize=["token_width", "texts_start", "place", "num_guesses"])
def _guess_kernel(
    arena, rows, ends, guesses, starts, token_width, texts_start, place, num_guesses,
    HAS_TEXTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_guesses
    row = tl.load(rows + index, mask=mask, other=0).to(tl.int64)
    position = tl.load(ends + index, mask=mask, other=0) + place
    token = tl.load(guesses + index, mask=mask, other=0).to(tl.int32)
    if HAS_TEXTS:
        known = tl.load(arena + texts_start + row * token_width + position, mask=mask, other=-1)
        token = tl.where(known >= 0, known, token)
    tl.store(arena + row * token_width + position, token, mask=mask)
    tl.store(starts + index, position, mask=mask)


def write_guesses(
    arena: torch.Tensor,
    tables: DraftTables,
    rows: torch.Tensor,
    ends: torch.Tensor,
    guesses: torch.Tensor,
    starts: torch.Tensor,
    place: int,
) -> None:
    """Write draft number `place` of G rows behind their known tokens, or a recorded text's (an oracle's) token in its
    place. rows, ends: at least [G] int32, request slots and numbers of known tokens. guesses: [G] int64. starts: at
    least [G] int32, output: positions of these drafts."""
    num_guesses = len(guesses)
    grid = (blocks_of(num_guesses, SEQUENCES),)
    places = tables.token_width, tables.texts, place, num_guesses
    constants = {"HAS_TEXTS": tables.texts >= 0, "BLOCK": SEQUENCES}
    launch(_guess_kernel, grid, arena, rows, ends, guesses, starts, *places, **constants)


@triton.jit(do_not_specialize=["token_width", "texts_start", "num_tokens"])
def _behind_kernel(
    arena, rows, ends, sources, places, tokens, token_width, texts_start, num_tokens,
    HAS_TEXTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_tokens
    source = tl.load(sources + index, mask=mask, other=0)
    row = tl.load(rows + source, mask=mask, other=0).to(tl.int64)
    position = tl.load(ends + source, mask=mask, other=0) + tl.load(places + index, mask=mask, other=0)
    token = tl.load(tokens + index, mask=mask, other=0).to(tl.int32)
    if HAS_TEXTS:
        known = tl.load(arena + texts_start + row * token_width + position, mask=mask, other=-1)
        token = tl.where(known >= 0, known, token)
    tl.store(arena + row * token_width + position, token, mask=mask)


def write_behind(
    arena: torch.Tensor,
    tables: DraftTables,
    sequences: tuple[torch.Tensor, torch.Tensor],
    where: tuple[torch.Tensor, torch.Tensor],
    tokens: torch.Tensor,
    *,
    has_texts: bool,
) -> None:
    """Write G tokens behind known ones, or a recorded text's (an oracle's) in their place. sequences: request slots and
    numbers of known tokens, [P] int32. where: [G] int32, indices into `sequences` and distances from the last known
    token, from 0. tokens: [G] int64. has_texts: recorded texts are looked at."""
    num_tokens = len(tokens)
    numbers = tables.token_width, tables.texts, num_tokens
    constants = {"HAS_TEXTS": has_texts and tables.texts >= 0, "BLOCK": SEQUENCES}
    grid = (blocks_of(num_tokens, SEQUENCES),)
    launch(_behind_kernel, grid, arena, *sequences, *where, tokens, *numbers, **constants)


@triton.jit(do_not_specialize=["computed_start", "num_seqs"])
def _last_kernel(
    arena, rows, starts, query_start, is_sampled, last, computed_start, num_seqs, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_seqs
    row = tl.load(rows + index, mask=mask, other=0).to(tl.int64)
    first = tl.load(query_start + index, mask=mask, other=0)
    end = tl.load(query_start + index + 1, mask=mask, other=0)
    sampled = tl.load(is_sampled + index, mask=mask, other=0) != 0
    computed = tl.load(arena + computed_start + row, mask=sampled, other=0)
    kept = computed - tl.load(starts + index, mask=sampled, other=0)
    found = tl.where(sampled, first + kept, end) - 1
    tl.store(last + index, tl.minimum(tl.maximum(found, first), end - 1).to(tl.int64), mask=mask)


def last_tokens(arena: torch.Tensor, tables: DraftTables, step: StepColumns, is_sampled: torch.Tensor) -> torch.Tensor:
    """Find each sequence's last token of a step without rejected drafts. is_sampled: [S] int32, 1 for sequences that
    `accept_drafts` has counted. Returns indices into the step's tokens, [S] int64."""
    num_seqs = len(step.rows)
    last = torch.empty(num_seqs, dtype=torch.int64, device=arena.device)
    columns = step.rows, step.starts, step.query_start, is_sampled
    grid = (blocks_of(num_seqs, SEQUENCES),)
    launch(_last_kernel, grid, arena, *columns, last, tables.computed, num_seqs, BLOCK=SEQUENCES)
    return last
