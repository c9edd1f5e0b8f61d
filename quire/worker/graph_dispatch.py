"""The way in which a step's forward pass is run: kernel by kernel, as graphs between the layers' attention, or as one
graph.

A pure function of numbers that the host knows before it prepares the step's inputs; `quire doctor` prints it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.config.device import DeviceConfig

Kind = Literal["eager", "piecewise", "full"]


MOST_DRAFT_TOKENS = 128
"""Tokens of the largest full graph of sequences with drafts. Up to here a step's time is that of reading the weights:
rows of sequences without drafts cost nothing. Larger steps outlast the launches of pieces."""


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """full_sizes: numbers of sequences that decode batches are padded to, piecewise_sizes: numbers of tokens that other
    batches are padded to; both ascending, empty where there are no such graphs. draft_rows: tokens that a sequence with
    drafts has in a full graph (0: there are none)."""

    full_sizes: tuple[int, ...] = ()
    piecewise_sizes: tuple[int, ...] = ()
    draft_rows: int = 0

    @property
    def draft_sizes(self) -> tuple[int, ...]:
        """Numbers of sequences that decode batches with drafts are padded to."""
        return tuple(size for size in self.full_sizes if 0 < size * self.draft_rows <= MOST_DRAFT_TOKENS)

    def executions(self) -> list[Execution]:
        """Every pass that is captured, in the order of its kind: pieces, decodes, decodes with drafts; each kind from
        its largest. Pieces serve any number of sequences, and say 1."""
        return [
            *(Execution("piecewise", size, 1) for size in reversed(self.piecewise_sizes)),
            *(Execution("full", size, size) for size in reversed(self.full_sizes)),
            *(Execution("full", size * self.draft_rows, size) for size in reversed(self.draft_sizes)),
        ]

    def without_full(self) -> ExecutionSettings:
        """The same for a step that no full graph computes."""
        return replace(self, full_sizes=())


@dataclass(frozen=True, slots=True)
class Execution:
    """num_tokens, num_seqs: sizes that the step's inputs are prepared at, padding included. overlaid: layers behind
    which an overlay adds rows (None: there is none)."""

    kind: Kind
    num_tokens: int
    num_seqs: int
    overlaid: tuple[int, ...] | None = None

    @property
    def captured_as(self) -> Execution:
        """Its place among the captured passes, as `ExecutionSettings.executions` has them."""
        return replace(self, num_seqs=1) if self.kind == "piecewise" else self


def execution_settings(device: DeviceConfig, max_num_seqs: int, max_drafts: int) -> ExecutionSettings:
    """The ways to run a forward pass that the configuration allows. Decode batches larger than the largest full graph
    are not decode batches here: they may have piecewise graphs. max_drafts: most drafts of a sequence in a step."""
    sizes = device.cuda_graph_sizes
    return ExecutionSettings(
        full_sizes=tuple(size for size in sizes if size <= max_num_seqs) if device.has_full_graphs else (),
        piecewise_sizes=sizes if device.has_piecewise_graphs else (),
        draft_rows=1 + max_drafts if max_drafts else 0,
    )


def choose_execution(
    num_tokens: int, num_seqs: int, max_query_len: int, settings: ExecutionSettings, *, is_decode: bool = False
) -> Execution:
    """The way to run a step's forward pass. num_tokens, num_seqs: the step's, without padding. max_query_len: most new
    tokens of one sequence. is_decode: all new tokens of a sequence but the first are drafts.

    Every sequence has one new token, or one and drafts: a full graph of the next size, with as many padded sequences.
    Else piecewise graphs of the next size: tokens are padded, sequences are not, since attention is run for the step as
    it is.
    """
    if max_query_len == 1:
        size = _next(settings.full_sizes, num_seqs)
        if size is not None:
            return Execution("full", size, size)
    elif is_decode and max_query_len <= settings.draft_rows:
        size = _next(settings.draft_sizes, num_seqs)
        if size is not None:
            return Execution("full", size * settings.draft_rows, size)
    size = _next(settings.piecewise_sizes, num_tokens)
    if size is not None:
        return Execution("piecewise", size, num_seqs)
    return Execution("eager", num_tokens, num_seqs)


def _next(sizes: Sequence[int], number: int) -> int | None:
    """The smallest of `sizes` that is at least `number`."""
    index = bisect_left(sizes, number)
    return sizes[index] if index < len(sizes) else None
