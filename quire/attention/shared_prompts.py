"""Attention of ranks that share prompts' tokens: each computes some rows of a step; all keep every key.

A rank writes its rows' keys and values to its cache, then the others', before it attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from quire.attention.interface import AttentionBatch
from quire.attention.native_backend import LATENT_ROWS, Inputs, NativeAttention, NativeAttentionStep
from quire.kernels.arguments import HeadWeights, IndexShape, LatentShape
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


class LayerKeys(NamedTuple):
    """Kernel that writes a layer's keys. rows: parameters of what it writes; it may change the last one in place.
    absent: parameters that prepared rows go without."""

    kernel: str
    layer: int
    rows: tuple[str, ...]
    absent: tuple[str, ...]
    constants: dict[str, Any]

    def write(self, rows: Sequence[Buffer], **beside: Buffer | None) -> Buffer:
        """Record the write alone. beside: parameters that are not absent. Returns the last rows."""
        *before, last = rows
        absent = dict.fromkeys((*self.absent, "rotation", "out"))
        return last.recorder.call(
            self.kernel,
            last.width,
            over=last,
            in_place=True,
            output=self.rows[-1],
            buffers={**absent, **dict(zip(self.rows, before, strict=False)), **beside},
            **self.constants,
        )


class KeyExchange:
    """Writes the keys of other ranks' rows to this rank's cache, layer by layer."""

    def __init__(self, backend: NativeAttention, rows: RowExchange, runtime: NativeRuntime) -> None:
        self.backend = backend
        self.rows = rows
        self._runtime = runtime
        self._programs: dict[tuple[str, int], RecordedProgram] = {}
        self._counts: Sequence[int] = ()
        self._plans: Sequence[_native.AttentionPlan] = ()
        self._batch: AttentionBatch | None = None

    def start_step(self, counts: Sequence[int], others: AttentionBatch) -> None:
        """Plan the others' writes, before the first layer. counts: rows of all ranks in the step. others: rows of the
        other ranks, in rank order."""
        self._counts, self._batch, self._plans = counts, others, self.backend.plan_beside(others)

    def record(self, keys: LayerKeys, rows: Sequence[Buffer], first_column: int = 0) -> None:
        """Record an exchange of prepared rows (`LayerKeys.rows`), the first of them from a column on."""
        rows[0].recorder.call_torch(partial(self._exchange, keys, first_column), 1, rows)

    def _exchange(self, keys: LayerKeys, first_column: int, *prepared: torch.Tensor) -> torch.Tensor:
        parts = [prepared[0][:, first_column:], *prepared[1:]]
        widths = [each.shape[1] for each in parts]
        found = self.rows.others(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), self._counts)
        num_rows, place = len(found), (keys.kernel, keys.layer)
        program = self._programs.get(place)
        if program is None or program.max_rows < num_rows:
            recorder = Recorder()
            rows = [recorder.external(width, sum(widths)) for width in widths]
            written = keys.write(rows)
            recorder.redirect(written, rows[-1])
            program = recorder.finish_program(written, self._runtime, rounded_rows(num_rows))
            self._programs[place] = program
        program.run(num_rows, plans=self._plans, externals=found.split(widths, dim=1))
        return prepared[0][:, :1]


class SharedPromptsStep(NativeAttentionStep):
    """One step of which this rank has some rows."""

    __slots__ = ("_keys",)

    def __init__(self, keys: KeyExchange, step: NativeAttentionStep) -> None:
        """step: the plan of this rank's rows."""
        super().__init__(step.backend, step.plans, step.batch)
        self._keys = keys

    def attend(self, heads: HeadWeights, qkv: Buffer, rotation: Buffer | None) -> Buffer:
        recorder, shape = qkv.recorder, heads.shape
        dealt = self.backend.dealt_in(shape.layer)
        recorder.keep.append(heads)
        rows, width = self.write_rows(heads, qkv, rotation), shape.num_heads * shape.head_dim
        constants = self.backend.head_constants(heads, rotation) | PREPARED
        self._keys.record(LayerKeys("attention", shape.layer, ("qkv",), (), constants), [rows], width)
        if dealt is not None:
            return self.attend_dealt(dealt, heads, rows)
        return recorder.call("attention", width, buffers={"qkv": rows, "rotation": None}, writes=False, **constants)

    def attend_latent(
        self, shape: LatentShape, inputs: Inputs, rotation: Buffer | None, selected: Buffer | None = None
    ) -> Buffer:
        query, turned_query, latent, _ = inputs
        constants = self.backend.latent_constants(shape)
        absent = ("query", "turned_query", "selected")
        keys = LayerKeys("latent", shape.layer, LATENT_ROWS[2:], absent, constants)
        self._keys.record(keys, [latent, self.write_latents(shape, inputs, rotation)])
        dealt = self.backend.dealt_in(shape.layer)
        if dealt is not None:
            return self.attend_dealt_latents(dealt, shape, inputs)
        buffers = {"query": query, "turned_query": turned_query, "selected": selected}
        buffers |= dict.fromkeys((*keys.rows, "rotation"))
        return query.recorder.call("latent", query.width, buffers=buffers, writes=False, **constants)

    def select_keys(self, shape: IndexShape, inputs: tuple[Buffer, Buffer, Buffer], rotation: Buffer | None) -> Buffer:
        query, key, weights = inputs
        constants = self.backend.index_constants(shape)
        keys = LayerKeys("select_keys", shape.layer, ("key",), ("query", "weights"), constants)
        self._keys.record(keys, [keys.write([key], query=query, rotation=rotation)])
        buffers: dict[str, Buffer | None] = {"query": query, "weights": weights, "key": None, "rotation": None}
        return query.recorder.call("select_keys", shape.top, buffers=buffers, writes=False, **constants)
