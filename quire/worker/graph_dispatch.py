"""Choice of how a step's forward pass runs: kernel by kernel, as graphs between attention calls, or as one graph.
`quire doctor` prints the choice."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.config.device import DeviceConfig

Kind = Literal["eager", "piecewise", "full"]


MOST_DRAFT_TOKENS = 128
"""Maximum tokens of a full graph for sequences with drafts; up to it padded rows are free."""


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """Sizes that passes are captured at and padded to. full_sizes: sequence counts of decode batches. piecewise_sizes:
    token counts of other batches. Both ascend and may be empty. draft_rows: tokens per sequence with drafts in a full
    graph (0: none). adapts: steps with adapters have graphs of their own."""

    full_sizes: tuple[int, ...] = ()
    piecewise_sizes: tuple[int, ...] = ()
    draft_rows: int = 0
    adapts: bool = False

    @property
    def draft_sizes(self) -> tuple[int, ...]:
        """Numbers of sequences that decode batches with drafts are padded to, one CUDA graph each."""
        return tuple(size for size in self.full_sizes if 0 < size * self.draft_rows <= MOST_DRAFT_TOKENS)

    def executions(self) -> list[Execution]:
        """All captured passes: pieces, decodes, decodes with drafts; each kind from its largest; then the same with
        adapters. Pieces have num_seqs 1 and serve any number."""
        plain = [
            *(Execution("piecewise", size, 1) for size in reversed(self.piecewise_sizes)),
            *(Execution("full", size, size) for size in reversed(self.full_sizes)),
            *(Execution("full", size * self.draft_rows, size) for size in reversed(self.draft_sizes)),
        ]
        return [*plain, *(replace(each, adapts=True) for each in plain)] if self.adapts else plain

    def without_full(self) -> ExecutionSettings:
        return replace(self, full_sizes=())


@dataclass(frozen=True, slots=True)
class Execution:
    """Step's way to run. num_tokens, num_seqs: sizes of the prepared inputs, with padding. overlaid: layers after
    which an overlay adds rows (None: no overlay). adapts: some tokens have adapters."""

    kind: Kind
    num_tokens: int
    num_seqs: int
    overlaid: tuple[int, ...] | None = None
    adapts: bool = False

    @property
    def captured_as(self) -> Execution:
        """Key of the captured pass that serves this execution."""
        return replace(self, num_seqs=1) if self.kind == "piecewise" else self


def execution_settings(
    device: DeviceConfig, max_num_seqs: int, max_drafts: int, *, adapts: bool = False
) -> ExecutionSettings:
    """Execution settings of the configuration. Decode batches larger than the largest full graph may use piecewise
    graphs. max_drafts: maximum drafts of a sequence per step. adapts: requests may have adapters."""
    sizes = device.cuda_graph_sizes
    return ExecutionSettings(
        full_sizes=tuple(size for size in sizes if size <= max_num_seqs) if device.has_full_graphs else (),
        piecewise_sizes=sizes if device.has_piecewise_graphs else (),
        draft_rows=1 + max_drafts if max_drafts else 0,
        adapts=adapts,
    )


def choose_execution(
    num_tokens: int, num_seqs: int, max_query_len: int, settings: ExecutionSettings, *, is_decode: bool = False
) -> Execution:
    """Choose how a step runs. num_tokens, num_seqs: unpadded. max_query_len: most new tokens of a sequence.
    is_decode: all new tokens but the first are drafts. Decode batches use a full graph of the next size, with padded
    sequences; others piecewise graphs, with padded tokens."""
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
    index = bisect_left(sizes, number)
    return sizes[index] if index < len(sizes) else None
