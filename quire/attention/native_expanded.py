"""Steps of the native back end whose prompts are expanded (quire/attention/expanded.py).

Projections, the matrices between latents and heads, and the tokens in the absorbed form are native; scores and weighted
sums of prompts are products of torch, which beside native kernels has one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from quire.attention.expanded import Prompt, attend_expanded, expanded_prompts, rest_of
from quire.attention.interface import AttentionBatch
from quire.attention.latent import ExpansionRule, LatentExpansion, LatentShape
from quire.attention.native_backend import NativeAttention
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import Buffer, RecordedProgram, Recorder, rounded_rows
from quire.kernels.cpu.runtime import NativeRuntime


class ExpandingAttention:
    """Takes the place of the back end while a program for steps with prompts is recorded, and computes their latent
    attention when it runs. rule: of the model's layers, which are alike."""

    def __init__(self, backend: NativeAttention, runtime: NativeRuntime, rule: ExpansionRule) -> None:
        self.backend = backend
        self.rule = rule
        self._runtime = runtime
        self._programs: dict[tuple[int, object], _Program] = {}
        self._prompts: list[Prompt] = []
        self._batch: AttentionBatch | None = None
        self._rest: torch.Tensor | None = None
        self._rest_plans: list[_native.AttentionPlan] = []

    def plan(self, batch: AttentionBatch) -> bool:
        """Take up a step; returns whether it has prompts to expand: without any, the ordinary program computes it."""
        self._prompts = expanded_prompts(self.rule, batch.query_start.numpy(), batch.start_positions.numpy())
        self._batch, self._rest = batch, None
        found = rest_of(batch, self._prompts) if self._prompts else None
        if found is not None:
            self._rest, self._rest_plans = found[0], self.backend.plan_beside(found[1])
        return bool(self._prompts)

    def record(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        inputs: tuple[Buffer, Buffer, Buffer, Buffer],
        rotation: Buffer | None,
    ) -> Buffer:
        """Leave the program for `attend`."""
        function = partial(self.attend, shape, expansion)
        turned = () if rotation is None else (rotation,)
        return inputs[0].recorder.call_torch(function, shape.num_heads * expansion.value_dim, (*inputs, *turned))

    def attend(self, shape: LatentShape, expansion: LatentExpansion, *rows: torch.Tensor) -> torch.Tensor:
        """rows: as `CacheOperations.attend_expanded` has its inputs, and the rotation, of a step's tokens."""
        query, turned_query, latent, turned_key = rows[:4]
        assert self._batch is not None, "plan comes before attend"
        out = query.new_empty(len(query), shape.num_heads * expansion.value_dim)
        if self._rest is not None:
            out[self._rest] = self._attend_rest(shape, expansion, [each[self._rest] for each in rows])
        group, pages = self.backend.latent_rows(shape.layer)
        if len(rows) > 4:
            turned_query, turned_key = (_turn(each, shape.rope_dim, rows[4]) for each in (turned_query, turned_key))
        query = query.unflatten(1, (shape.num_heads, -1))
        turned_query = turned_query.unflatten(1, (shape.num_heads, -1))
        expand = replace(expansion, parts=tuple(self._part(each, shape) for each in expansion.parts))
        slots, tables = self._batch.slot_mapping[group], self._batch.block_tables[group]
        block_size = self.backend.block_size
        for prompt in self._prompts:
            tokens = prompt.tokens
            kept = torch.cat((latent[tokens], turned_key[tokens]), dim=1).to(pages.dtype)
            pages.index_copy_(0, slots[tokens], kept)
            positions = torch.arange(prompt.num_keys)
            found = tables[prompt.sequence].long()[positions // block_size] * block_size + positions % block_size
            out[tokens] = attend_expanded(
                shape, expand, (query[tokens], turned_query[tokens]), pages[found], prompt.start
            )
        return out

    def _attend_rest(self, shape: LatentShape, expansion: LatentExpansion, rows: list[torch.Tensor]) -> torch.Tensor:
        def record(*buffers: Buffer) -> Buffer:
            query = expansion.absorb(buffers[0])
            turned_query, latent, turned_key, *rotation = buffers[1:]
            inputs = query, turned_query, latent, turned_key
            return expansion.values(self.backend.record_latent(shape, inputs, rotation[0] if rotation else None))

        return self._program(shape.layer, "rest", record)(rows, self._rest_plans)

    def _part(self, expand: Callable[[Buffer], Buffer], shape: LatentShape) -> Callable[[torch.Tensor], torch.Tensor]:
        program = self._program(shape.layer, expand, expand)
        return lambda latents: program([latents], [])

    def _program(self, layer: int, key: object, record: Callable[..., Buffer]) -> _Program:
        found = self._programs.get((layer, key))
        if found is None:
            found = self._programs[layer, key] = _Program(record, self._runtime)
        return found


class _Program:
    """A function of buffers, recorded for rows that each call brings."""

    def __init__(self, record: Callable[..., Buffer], runtime: NativeRuntime) -> None:
        self._record = record
        self._runtime = runtime
        self._program: RecordedProgram | None = None
        self._width = 0

    def __call__(self, rows: list[torch.Tensor], plans: list[_native.AttentionPlan]) -> torch.Tensor:
        """rows: [N, width] each -> [N, width], float32."""
        num_rows = len(rows[0])
        program = self._program
        if program is None or program.max_rows < num_rows:
            program = self._make([each.shape[1] for each in rows], num_rows)
        out = rows[0].new_empty(num_rows, self._width)
        program.run(num_rows, plans=plans, externals=[*(each.contiguous() for each in rows), out])
        return out

    def _make(self, widths: list[int], num_rows: int) -> RecordedProgram:
        self._program = None
        recorder = Recorder()
        result = self._record(*(recorder.external(width, width) for width in widths))
        self._width = result.width
        recorder.redirect(result, recorder.external(result.width, result.width))
        self._program = recorder.finish_program(result, self._runtime, rounded_rows(num_rows))
        return self._program


def _turn(rows: torch.Tensor, rope_dim: int, rotation: torch.Tensor) -> torch.Tensor:
    """rows: [T, heads * rope_dim]; rotation: [T, rope_dim], cosines and then sines, as the native kernel makes them."""
    first, second = rows.unflatten(1, (-1, 2, rope_dim // 2)).unbind(2)
    cos, sin = rotation[:, None].chunk(2, dim=-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=2).flatten(1)
