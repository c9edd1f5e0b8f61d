"""How a step's forward pass is run: kernel by kernel, as graphs between the layers' attention, or as one graph.

A pure function of numbers that the host knows before it prepares the step's inputs; `quire doctor` prints it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.config.device import DeviceConfig

Kind = Literal["eager", "piecewise", "full"]


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """full_sizes: numbers of sequences that decode batches are padded to, piecewise_sizes: numbers of tokens that other
    batches are padded to; both ascending, empty where there are no such graphs."""

    full_sizes: tuple[int, ...] = ()
    piecewise_sizes: tuple[int, ...] = ()

    def without_full(self) -> ExecutionSettings:
        """The same for a step that no full graph computes."""
        return replace(self, full_sizes=())


@dataclass(frozen=True, slots=True)
class Execution:
    """num_tokens, num_seqs: sizes that the step's inputs are prepared at, padding included."""

    kind: Kind
    num_tokens: int
    num_seqs: int


def execution_settings(device: DeviceConfig, max_num_seqs: int) -> ExecutionSettings:
    """What the configuration allows. Decode batches larger than the largest full graph are not decode batches here:
    they may have piecewise graphs."""
    sizes = device.cuda_graph_sizes
    return ExecutionSettings(
        full_sizes=tuple(size for size in sizes if size <= max_num_seqs) if device.has_full_graphs else (),
        piecewise_sizes=sizes if device.has_piecewise_graphs else (),
    )


def choose_execution(num_tokens: int, num_seqs: int, max_query_len: int, settings: ExecutionSettings) -> Execution:
    """num_tokens, num_seqs: of the step, without padding. max_query_len: most new tokens of one sequence.

    Every sequence has one new token: a full graph of the next size, with as many padded sequences. Else piecewise
    graphs of the next size: tokens are padded, sequences are not, since attention is run for the step as it is.
    """
    if max_query_len == 1:
        size = _next(settings.full_sizes, num_seqs)
        if size is not None:
            return Execution("full", size, size)
    size = _next(settings.piecewise_sizes, num_tokens)
    if size is not None:
        return Execution("piecewise", size, num_seqs)
    return Execution("eager", num_tokens, num_seqs)


def _next(sizes: Sequence[int], number: int) -> int | None:
    """The smallest of `sizes` that is at least `number`."""
    index = bisect_left(sizes, number)
    return sizes[index] if index < len(sizes) else None
