"""Plans of recurrent states for native kernels. For the page layout see csrc/linear_state.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire.attention.interface import StateStep
from quire.kernels.cpu import _native


class StatePlans:
    """Native plan of `layers`' recurrent states, set before each step's programs. Recorded kernels refer to a layer by
    its index."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._plan = _native.StatePlan()
        self._step: StateStep | None = None
        self._arguments: tuple[Any, ...] = ()
        self._query_start = torch.empty(0, dtype=torch.int64)

    def set(self, states: StateStep) -> _native.StatePlan:
        """Plan of one step, valid until the next call. The step's tensors are kept alive and must not change meanwhile.
        Raises ValueError for wrong tensors and accesses outside the pool."""
        if states is not self._step:  # decodes of the same sequences reuse the object
            query_start = torch.tensor(states.query_start, dtype=torch.int64)
            self._arguments = self._checked(states, query_start)
            self._step, self._query_start = states, query_start
        self._plan.set(*self._arguments)
        return self._plan

    def _checked(self, states: StateStep, query_start: torch.Tensor) -> tuple[Any, ...]:
        starts, num_sequences = states.starts, len(states.query_start) - 1
        if starts.dtype != torch.int64 or tuple(starts.shape) != (num_sequences,) or not starts.is_contiguous():
            raise ValueError(f"starts: int64 [{num_sequences}] expected, got {starts.dtype} {list(starts.shape)}")
        pages = [states.pages[layer] for layer in self._layers]
        tables = [states.tables[layer] for layer in self._layers]
        for page in pages:
            if page.dtype != torch.uint8 or page.dim() != 2 or page.stride(1) != 1:
                raise ValueError(f"pages of states: uint8 [blocks, bytes] expected, got {page.dtype}")
        for table in tables:
            if table.dtype != torch.int32 or table.dim() != 2 or len(table) != num_sequences or table.stride(1) != 1:
                raise ValueError(f"tables of states: int32 rows of {num_sequences} sequences expected")
        return (
            num_sequences,
            query_start.data_ptr(),
            starts.data_ptr(),
            states.interval,
            [page.data_ptr() for page in pages],
            [page.stride(0) for page in pages],
            [len(page) for page in pages],
            [table.data_ptr() for table in tables],
            [table.stride(0) for table in tables],
            min((table.shape[1] for table in tables), default=0),
        )
