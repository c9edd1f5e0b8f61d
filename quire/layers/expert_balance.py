"""Experts that change their ranks between steps, so ranks compute equally many rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch

from quire.config.load import ExpertBalance
from quire.errors import ModelLoadError
from quire.kernels.arguments import ExpertWeights
from quire.parallel.expert_placement import Move, Placement, balanced, busiest, moves_between, places_of
from quire.parallel.interface import ProcessGroup

BYTES_A_STEP = 32 << 20
"""Bytes of experts sent before one step; one move is made in any case."""
LARGEST_SHARE = Fraction(95, 100)
"""Share of the busiest rank's rows left by a change, up to which it pays."""

Sent = tuple[torch.Tensor, Sequence[Any]]


class BalancedExperts:
    """One layer's experts on this rank. placement: experts of all ranks."""

    def __init__(self, weights: ExpertWeights, placement: Placement, group: ProcessGroup) -> None:
        assert weights.counts is not None, "rows are counted"
        assert weights.places is not None, "each rank has some of the experts"
        self._weights = weights
        self._group = group
        self.rows = weights.counts.by_expert
        self._places = weights.places
        self.placement = placement

    def check(self, number: int) -> None:
        """Raise ModelLoadError if experts are not stored alike, here and on other ranks; all ranks call it at start.
        number: of the layer among those with experts."""
        kinds = {tuple((tensor.dtype, tuple(tensor.shape)) for tensor in self._stored(slot)) for slot in self._slots}
        own = torch.tensor([[len(kinds), self.nbytes]])
        found = self._group.all_gather(own, dim=0)
        if bool((found != torch.tensor([1, self.nbytes])).any()):
            raise ModelLoadError(
                f"enable_eplb is not possible: the experts of layer {number} of those with experts are stored in "
                "different formats, so that they cannot change places"
            )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._stored(0))

    def apply(self, move: Move) -> int:
        """Carry out a move of an expert between ranks; all ranks call it. Returns bytes sent."""
        here, there = (move.source, move.source_slot), (move.to, move.to_slot)
        given = self._broadcast(*here)
        sent = [given]
        if move.is_swap:
            sent.append(self._broadcast(*there))
            self._take(*here, sent[1])
        self._take(*there, given)
        self.placement = move.applied(self.placement)
        places = places_of(self.placement, self._group.rank, len(self.rows))
        self._places.copy_(torch.tensor(places, dtype=self._places.dtype))
        return sum(data.nbytes + sum(each.nbytes for each in adapters if each is not None) for data, adapters in sent)

    @property
    def _slots(self) -> range:
        return range(len(self._weights.down))

    def _stored(self, slot: int) -> list[torch.Tensor]:
        stored: list[torch.Tensor] = [*self._weights.gate_up[slot].stored(), *self._weights.down[slot].stored()]
        return stored

    def _broadcast(self, rank: int, slot: int) -> Sent:
        own = self._stored(slot if rank == self._group.rank else 0)
        data = self._group.broadcast(torch.cat([_bytes(tensor) for tensor in own]), rank)
        adapters = self._weights.adapters
        return data, [] if adapters is None else adapters.broadcast(self._group, rank, slot)

    def _take(self, rank: int, slot: int, sent: Sent) -> None:
        if rank != self._group.rank:
            return
        data, matrices = sent
        if self._weights.adapters is not None:
            self._weights.adapters.replace(slot, matrices)
        tensors = self._stored(slot)
        for tensor, part in zip(tensors, data.split([tensor.nbytes for tensor in tensors]), strict=True):
            _bytes(tensor).copy_(part)


class ExpertBalancer:
    """Layers whose experts change their ranks (`--enable-eplb`), and the steps at which they do."""

    def __init__(self, config: ExpertBalance) -> None:
        self._config = config
        self.layers: list[BalancedExperts] = []
        self._num_steps = 0
        self._marks: deque[tuple[int, list[list[int]]]] = deque()
        """Number of steps before a window begins, and the rows by layer and expert until then."""
        self._undecided: deque[tuple[BalancedExperts, list[int]]] = deque()
        """Layers to look at, each with the rows of the last window."""
        self._moves: deque[tuple[BalancedExperts, Move]] = deque()

    @property
    def num_redundant(self) -> int:
        """Expert copies a layer adds, on all ranks together."""
        return self._config.num_redundant_experts

    def add_layer(self, layer: BalancedExperts) -> None:
        self.layers.append(layer)

    def begin(self) -> None:
        """Forget the steps so far, after warm-up, which reset the counters. All ranks call it. Raises ModelLoadError
        for experts that cannot change places."""
        self._num_steps = 0
        self._marks.clear()
        for number, layer in enumerate(self.layers):
            layer.check(number)

    def before_step(self, end_loads: Callable[[], None]) -> None:
        """Look at the rows of a window that has ended, or make some moves. All ranks' workers call it before the same
        steps. end_loads: waits for adapters."""
        if not self._moves and self._undecided:
            self._decide(*self._undecided.popleft())
        budget = BYTES_A_STEP
        if self._moves:
            end_loads()  # they look up where experts are
        while self._moves and budget > 0:
            layer, move = self._moves.popleft()
            budget -= layer.apply(move)
        window, interval = self._config.window_size, self._config.step_interval
        if self._num_steps and self._num_steps % interval == 0 and not self._moves and not self._undecided:
            self._undecided.extend(zip(self.layers, self._rows_since(self._num_steps - window), strict=True))
        if (self._num_steps + window) % interval == 0:
            self._marks.append((self._num_steps, self._rows()))
        self._num_steps += 1

    def _rows(self) -> list[list[int]]:
        return [layer.rows.tolist() for layer in self.layers]

    def _rows_since(self, step: int) -> list[list[int]]:
        while self._marks and self._marks[0][0] < step:
            self._marks.popleft()
        rows = self._rows()
        if not self._marks or self._marks[0][0] != step:
            return rows
        return [
            [now - then for now, then in zip(after, before, strict=True)]
            for after, before in zip(rows, self._marks[0][1], strict=True)
        ]

    def _decide(self, layer: BalancedExperts, rows: Sequence[int]) -> None:
        wanted = balanced(rows, layer.placement)
        if busiest(rows, wanted) <= LARGEST_SHARE * busiest(rows, layer.placement):
            self._moves.extend((layer, move) for move in moves_between(layer.placement, wanted))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
