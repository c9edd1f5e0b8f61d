"""Drafts on a device: writing after known tokens, acceptance, and look-up for the next step, by the rules of
quire/worker/drafts.py (host version)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import blocks_of, bound, launch, next_power_of_2

SEQUENCES = 64
"""Sequences per program that places or accepts."""
POSITIONS = 1024
"""Positions that a program examines at once."""
NOT_COMPUTED = 2**31 - 1
"""Count of a row without a sampled token; its plans give its start."""


@dataclass(frozen=True, slots=True)
class DraftTables:
    """First words of tables in the arena. token_width: words per row of the token table, which starts it. computed:
    first word of [num_rows]. found: first word of [num_rows, max drafts]. texts: first word of an oracle's tokens, as
    wide as the token table, with -1 where it knows none (-1: no oracle)."""

    token_width: int
    computed: int
    found: int
    max_drafts: int
    texts: int = -1


@triton.jit(do_not_specialize=["token_width", "computed_start", "found_start", "most_ahead", "num_seqs"])
def _place_kernel(
    arena, rows, starts, query_start, num_drafts, given_at, given_from, given, shifts, token_width, computed_start,
    found_start, most_ahead, num_seqs, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_seqs
    row = tl.load(rows + index, mask=mask, other=0).to(tl.int64)
    planned = tl.load(starts + index, mask=mask, other=0)
    start = tl.minimum(planned, tl.load(arena + computed_start + row, mask=mask, other=0))
    tl.store(starts + index, start, mask=mask)
    tl.store(shifts + index, planned - start, mask=mask)
    end = (
        start + tl.load(query_start + index + 1, mask=mask, other=0) - tl.load(query_start + index, mask=mask, other=0)
    )
    count = tl.load(num_drafts + index, mask=mask, other=0)
    at = tl.load(given_at + index, mask=mask, other=-1)
    ahead = end - count - tl.load(given_from + index, mask=mask, other=0)
    ahead = tl.minimum(tl.maximum(ahead, 0), most_ahead)
    for place in tl.static_range(WIDTH):
        is_draft = mask & (place < count)
        token = tl.load(given + at + ahead + place, mask=is_draft & (at >= 0), other=0)
        token += tl.load(arena + found_start + row * WIDTH + place, mask=is_draft & (at < 0), other=0)
        tl.store(arena + row * token_width + end - count + place, token, mask=is_draft)


def place_drafts(
    arena: torch.Tensor,
    tables: DraftTables,
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    drafts: Sequence[torch.Tensor],
    shifts: torch.Tensor,
    most_ahead: int = 0,
) -> None:
    """Write S sequences' drafts to the token table, and correct their starts. All int32. columns: rows and starts, [S],
    and query_start, [S + 1]. drafts: number of draft tokens, [S]; index of the host's proposal in `given`, [S] (-1:
    found ones); the sequence's tokens before that proposal, [S]; and `given`. Drafts are the proposal's tokens behind
    the sequence's own, at most `most_ahead`. shifts: [S], output: tokens by which a sequence starts earlier than
    planned."""
    num_seqs = len(columns[0])
    launch(
        _place_kernel,
        (blocks_of(num_seqs, SEQUENCES),),
        arena,
        *columns,
        *drafts,
        shifts,
        tables.token_width,
        tables.computed,
        tables.found,
        most_ahead,
        num_seqs,
        WIDTH=tables.max_drafts,
        BLOCK=SEQUENCES,
    )


@triton.jit(do_not_specialize=["computed_start", "num_samples"])
def _accept_kernel(
    arena, chosen, rows, lengths, firsts, tokens_at, token_ids, counts, ends, computed_start, num_samples,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_samples
    first = tl.load(firsts + index, mask=mask, other=0)
    last = tl.load(firsts + index + 1, mask=mask, other=0) - 1
    count = tl.full((BLOCK,), 1, tl.int32)
    goes_on = mask & (tl.load(chosen + 2 * first + 1, mask=mask, other=0) != 0)
    for place in tl.static_range(WIDTH):
        goes_on = goes_on & (first + place < last)
        at = first + place
        token = tl.load(chosen + 2 * at, mask=goes_on, other=0)
        draft = tl.load(token_ids + tl.load(tokens_at + at, mask=goes_on, other=0) + 1, mask=goes_on, other=-1)
        is_sound = tl.load(chosen + 2 * at + 3, mask=goes_on, other=0) != 0
        goes_on = goes_on & (token == draft.to(tl.int32)) & is_sound
        count += goes_on.to(tl.int32)
    end = tl.load(lengths + first, mask=mask, other=0) + count
    row = tl.load(rows + first, mask=mask, other=0)
    tl.store(arena + computed_start + row, end - 1, mask=mask)
    tl.store(counts + index, count, mask=mask)
    tl.store(ends + index, end, mask=mask)


def accept_drafts(
    arena: torch.Tensor,
    tables: DraftTables,
    chosen: torch.Tensor,
    samples: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    token_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the tokens that N samples get; record them as computed. chosen: [R, 2] int32, token of each row and
    whether its scores are finite. samples, int32: rows (request slots) and lengths, [R]; first row of each sample,
    [N + 1]; token of the step that each row reads, [R]. token_ids: [T] int64. Returns counts and resulting lengths,
    [N] int32."""
    rows, lengths, firsts, tokens_at = samples
    num_samples = len(firsts) - 1
    counts, ends = (torch.empty(num_samples, dtype=torch.int32, device=arena.device) for _ in range(2))
    launch(
        _accept_kernel,
        (blocks_of(num_samples, SEQUENCES),),
        arena,
        chosen,
        rows,
        lengths,
        firsts,
        tokens_at,
        token_ids,
        counts,
        ends,
        tables.computed,
        num_samples,
        WIDTH=tables.max_drafts,
        BLOCK=SEQUENCES,
    )
    return counts, ends


@triton.jit(do_not_specialize=["token_width", "found_start", "LEAST", "MOST"])
def _find_kernel(
    arena, rows, firsts, ends, num_found, token_width, found_start, LEAST, MOST,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    row = tl.load(rows + tl.load(firsts + sample)).to(tl.int64)
    length = tl.load(ends + sample)
    tokens = arena + row * token_width
    best = tl.zeros((), tl.int64)
    for start in range(0, bound(length), BLOCK):
        end = start + 1 + tl.arange(0, BLOCK)
        run = end < length
        count = tl.zeros((BLOCK,), tl.int32)
        for back in range(bound(tl.minimum(MOST, length - 1))):
            token = tl.load(tokens + end - 1 - back, mask=run & (end > back), other=-1)
            run = run & (end > back) & (token == tl.load(tokens + length - 1 - back))
            count += run.to(tl.int32)
        key = tl.where(count >= LEAST, count.to(tl.int64) * 4294967296 + end, 0)
        best = tl.maximum(best, tl.max(key))
    end = best % 4294967296
    place = tl.arange(0, PLACES)
    is_found = (place < WIDTH) & (best > 0)
    source = end + place % tl.maximum(length - end, 1)  # beyond the sequence's end, continue with the drafts themselves
    token = tl.load(tokens + source, mask=is_found, other=0)
    tl.store(arena + found_start + row * WIDTH + place, token, mask=is_found)
    tl.store(num_found + sample, tl.where(best > 0, WIDTH, 0))


def find_drafts(
    arena: torch.Tensor,
    tables: DraftTables,
    samples: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lookup: tuple[int, int],
) -> torch.Tensor:
    """Find drafts for N samples. samples, int32: rows, [R], first row of each, [N + 1], and token counts, [N].
    lookup: fewest and most last tokens to match. Returns the number of drafts of each, [N] int32."""
    return _fill(_find_kernel, arena, tables, samples, *lookup, BLOCK=POSITIONS)


def _fill(
    kernel: Any,
    arena: torch.Tensor,
    tables: DraftTables,
    samples: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *arguments: int,
    **constants: int,
) -> torch.Tensor:
    """Launch a kernel that writes N samples' drafts to `tables.found`. Returns the number of each, [N] int32."""
    rows, firsts, ends = samples
    num_found = torch.empty_like(ends)
    places = tables.token_width, tables.found, *arguments
    constants |= {"WIDTH": tables.max_drafts, "PLACES": next_power_of_2(tables.max_drafts)}
    launch(kernel, (len(ends),), arena, rows, firsts, ends, num_found, *places, **constants)
    return num_found


@triton.jit(do_not_specialize=["token_width", "found_start", "texts_start"])
def _recall_kernel(
    arena, rows, firsts, ends, num_found, token_width, found_start, texts_start,
    WIDTH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    row = tl.load(rows + tl.load(firsts + sample)).to(tl.int64)
    place = tl.arange(0, PLACES)
    position = tl.load(ends + sample) + place
    is_known = (place < WIDTH) & (position < token_width)
    token = tl.load(arena + texts_start + row * token_width + position, mask=is_known, other=-1)
    is_known = is_known & (token >= 0)  # from some place on it knows none
    tl.store(arena + found_start + row * WIDTH + place, token, mask=is_known)
    tl.store(num_found + sample, tl.sum(is_known.to(tl.int32), 0))


def recall_drafts(
    arena: torch.Tensor, tables: DraftTables, samples: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Store a recorded text's next tokens as N samples' drafts (benchmarks). The rest: see `find_drafts`."""
    return _fill(_recall_kernel, arena, tables, samples, tables.texts)
