"""Attention of ranks that share prompts' tokens: each computes some rows of a step; all keep every key.

A rank writes its rows' keys and values to its cache, then the others', before it attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from quire.attention.interface import AttentionBatch
from quire.attention.native_backend import NativeAttention, NativeAttentionStep, write_rows
from quire.kernels.arguments import HeadWeights
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import Buffer, RecordedProgram, Recorder, rounded_rows
from quire.kernels.cpu.runtime import NativeRuntime
from quire.parallel.interface import ProcessGroup

PREPARED = {"query_norm": 0, "key_norm": 0, "rotary_dim": 0, "length_floor": 0}
"""Arguments of attention for rows normed, rotated and scaled."""


class RowExchange:
    """Exchange of rows between ranks with different numbers of them."""

    def __init__(self, group: ProcessGroup, runtime: NativeRuntime) -> None:
        self.group = group
        self._runtime = runtime
        self._memory = torch.empty(0)

    def others(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Rows of the other ranks in rank order, valid until the next call. rows: this rank's, [N, width] float32, each
        in one piece. counts: numbers of rows of all ranks."""
        group, width = self.group, rows.shape[1]
        num_others = sum(counts) - counts[group.rank]
        if num_others * width > len(self._memory):
            self._memory = torch.empty(num_others * width)
        out = self._memory[: num_others * width].view(num_others, width)
        if group.native is not None:
            places = rows.data_ptr(), rows.stride(0), out.data_ptr(), width
            group.native.gather_others(self._runtime.pool, *places, counts, width)
            return out
        padded = rows.new_zeros(max(counts), width)
        padded[: len(rows)] = rows
        every = group.all_gather(padded[None], dim=0)
        parts = [every[rank, :count] for rank, count in enumerate(counts) if rank != group.rank]
        return torch.cat(parts, out=out)


class KeyExchange:
    """Writes the keys and values of other ranks' rows to this rank's cache, layer by layer."""

    def __init__(self, backend: NativeAttention, rows: RowExchange, runtime: NativeRuntime) -> None:
        self.backend = backend
        self.rows = rows
        self._runtime = runtime
        self._programs: dict[int, RecordedProgram] = {}
        self._counts: Sequence[int] = ()
        self._plans: Sequence[_native.AttentionPlan] = ()
        self._batch: AttentionBatch | None = None

    def start_step(self, counts: Sequence[int], others: AttentionBatch) -> None:
        """Plan the others' writes, before the first layer. counts: rows of all ranks in the step. others: rows of the
        other ranks, in rank order."""
        self._counts, self._batch, self._plans = counts, others, self.backend.plan_beside(others)

    def exchange(self, heads: HeadWeights, qkv: torch.Tensor) -> torch.Tensor:
        """Give this rank's keys and values, and write the others', in each layer. qkv: this rank's prepared rows;
        returns a column of them."""
        shape = heads.shape
        found = self.rows.others(qkv[:, shape.num_heads * shape.head_dim :], self._counts)
        num_rows = len(found)
        program = self._programs.get(shape.layer)
        if program is None or program.max_rows < num_rows:
            program = self._programs[shape.layer] = self._record(heads, found.shape[1], num_rows)
        program.run(num_rows, plans=self._plans, externals=[found])
        return qkv[:, :1]

    def _record(self, heads: HeadWeights, width: int, num_rows: int) -> RecordedProgram:
        recorder = Recorder()
        rows = recorder.external(width, width)
        written = recorder.call(
            "attention",
            width,
            over=rows,
            in_place=True,
            output="qkv",
            buffers={"rotation": None, "out": None},
            **self.backend.head_constants(heads) | PREPARED,
        )
        recorder.redirect(written, rows)
        return recorder.finish_program(written, self._runtime, rounded_rows(num_rows))


class SharedPromptsStep(NativeAttentionStep):
    """One step of which this rank has some rows."""

    __slots__ = ("_keys",)

    def __init__(self, keys: KeyExchange, step: NativeAttentionStep) -> None:
        """step: the plan of this rank's rows."""
        super().__init__(step.backend, step.plans, step.batch)
        self._keys = keys

    def attend(self, heads: HeadWeights, qkv: Buffer, rotation: Buffer | None) -> Buffer:
        recorder, shape = qkv.recorder, heads.shape
        recorder.keep.append(heads)
        constants = self.backend.head_constants(heads, rotation)
        rows = write_rows(heads, qkv, rotation, constants)
        recorder.call_torch(partial(self._keys.exchange, heads), 1, [rows])
        return recorder.call(
            "attention",
            shape.num_heads * shape.head_dim,
            buffers={"qkv": rows, "rotation": None},
            writes=False,
            **constants | PREPARED,
        )
