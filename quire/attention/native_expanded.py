from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from quire.attention.expanded import PIECE_KEYS, Prompt, expanded_prompts, rest_of
from quire.attention.interface import AttentionBatch, AttentionStep
from quire.attention.native_backend import Inputs, NativeAttention, RecordedAttention
from quire.config.device import NATIVE_HEAD_MULTIPLE
from quire.kernels.arguments import ExpansionRule, HeadWeights, LatentExpansion, LatentShape, LayerAttention
from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.recorder import Buffer, RecordedProgram, Recorder, rounded_rows
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec


class ExpandingAttention(AttentionStep):
    """AttentionStep for recording programs of steps with prompts; it computes their latent attention at run time."""

    def __init__(self, backend: NativeAttention, runtime: NativeRuntime, rule: ExpansionRule) -> None:
        self.backend = backend
        self.rule = rule
        self._runtime = runtime
        self._programs: dict[tuple[int, object], _Program] = {}
        self._scratch: dict[int, _Scratch] = {}
        """Scratch pages by number of heads: a full part's, and the last one's."""
        self._prompts: list[Prompt] = []
        self._batch: AttentionBatch | None = None
        self._rest: tuple[torch.Tensor, list[_native.AttentionPlan]] | None = None

    def plan(self, batch: AttentionBatch) -> bool:
        """Prepare a step before its program runs. Returns False without prompts to expand: use the ordinary program."""
        self._prompts = expanded_prompts(self.rule, batch.query_start.numpy(), batch.start_positions.numpy())
        self._batch, self._rest = batch, None
        found = rest_of(batch, self._prompts) if self._prompts else None
        if found is not None:
            self._rest = found[0], self.backend.plan_beside(found[1])
        return bool(self._prompts)

    def attend_expanded(
        self, shape: LatentShape, expansion: LatentExpansion, inputs: Inputs, rotation: Buffer | None
    ) -> Buffer:
        """Record a call of `compute`, which attends with expanded prompts."""
        function = partial(self.compute, shape, expansion)
        turned = () if rotation is None else (rotation,)
        return inputs[0].recorder.call_torch(function, shape.num_heads * expansion.value_dim, (*inputs, *turned))

    def compute(self, shape: LatentShape, expansion: LatentExpansion, *rows: torch.Tensor) -> torch.Tensor:
        """Result of `attend_expanded` for the prepared step; the program calls it. rows: its inputs, and the
        rotation."""
        query, turned_query, latent, turned_key = rows[:4]
        assert self._batch is not None, "plan comes before compute"
        out = query.new_empty(len(query), shape.num_heads * expansion.value_dim)
        if self._rest is not None:
            others, plans = self._rest
            out[others] = self._compute_rest(shape, expansion, [each[others] for each in rows], plans)
        group, pages = self.backend.latent_rows(shape.layer)
        if len(rows) > 4:
            turned_query, turned_key = (_turn(each, shape.rope_dim, rows[4]) for each in (turned_query, turned_key))
        parts = query.unflatten(1, (shape.num_heads, -1)), turned_query.unflatten(1, (shape.num_heads, -1))
        queries, results = torch.cat(parts, dim=2), out.unflatten(1, (shape.num_heads, -1))
        slots, tables = self._batch.slot_mapping[group], self._batch.block_tables[group]
        block_size = self.backend.block_size
        for prompt in self._prompts:
            tokens = prompt.tokens
            kept = torch.cat((latent[tokens], turned_key[tokens]), dim=1).to(pages.dtype)
            pages.index_copy_(0, slots[tokens], kept)
            positions = torch.arange(prompt.num_keys)
            found = tables[prompt.sequence].long()[positions // block_size] * block_size + positions % block_size
            for index, expand in enumerate(expansion.parts):
                heads = slice(index * expansion.heads, (index + 1) * expansion.heads)
                scratch = self._scratch_for(shape, expansion, queries[tokens, heads], prompt.num_keys)
                for first in range(0, prompt.num_keys, PIECE_KEYS):
                    latents = pages[found[first : first + PIECE_KEYS]].float()
                    expanded = self._program(shape.layer, expand, expand)([latents[:, : shape.rank]], [])
                    scratch.write(first, expanded, latents[:, shape.rank :], expansion)
                attended = scratch.read(queries[tokens, heads], prompt.start)
                results[tokens, heads] = attended[..., : expansion.value_dim]
        return out

    def _compute_rest(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        rows: list[torch.Tensor],
        plans: list[_native.AttentionPlan],
    ) -> torch.Tensor:
        operations = RecordedAttention(self.backend)

        def record(*buffers: Buffer) -> Buffer:
            query, turned_query, latent, turned_key, *rotation = buffers
            inputs = query, turned_query, latent, turned_key
            return operations.attend_expanded(shape, expansion, inputs, rotation[0] if rotation else None)

        return self._program(shape.layer, "rest", record)(rows, plans)

    def _scratch_for(
        self, shape: LatentShape, expansion: LatentExpansion, query: torch.Tensor, num_keys: int
    ) -> _Scratch:
        num_heads, key_dim = query.shape[1:]
        dim = -(-max(key_dim, expansion.value_dim) // NATIVE_HEAD_MULTIPLE) * NATIVE_HEAD_MULTIPLE
        layer = LayerAttention(0, num_heads, num_heads, dim, shape.scale)
        found = self._scratch.get(num_heads)
        if found is None or found.num_keys < num_keys:
            self._scratch.pop(num_heads, None)  # free the old pages before allocating
            found = _Scratch(layer, 1 << (num_keys - 1).bit_length(), self.backend, self._runtime)
            self._scratch[num_heads] = found
        return found

    def _program(self, layer: int, key: object, record: Callable[..., Buffer]) -> _Program:
        found = self._programs.get((layer, key))
        if found is None:
            found = self._programs[layer, key] = _Program(record, self._runtime)
        return found


class _Scratch:
    """Pages for the expanded heads of one sequence of at most `num_keys` keys, in the back end's dtype."""

    def __init__(self, layer: LayerAttention, num_keys: int, backend: NativeAttention, runtime: NativeRuntime) -> None:
        self.num_keys = num_keys
        self._layer, self._heads = layer, HeadWeights(layer, None, None)
        block_size, dtype = backend.block_size, backend.latent_dtype
        spec = AttentionSpec(layer.num_kv_heads, layer.head_dim, layer.head_dim, dtype.itemsize)
        groups, layers_per_group = group_layers([spec], block_size)
        num_blocks = 1 + -(-num_keys // block_size)
        layout = KVCacheLayout(block_size, num_blocks, groups, layers_per_group)
        pages = allocate(num_blocks * layout.page_bytes).view(num_blocks, -1)
        name = str(dtype).removeprefix("torch.")
        self._backend = NativeAttention(layout, [pages], name, layer.num_heads, backend.num_threads)
        self._table = torch.arange(1, num_blocks, dtype=torch.int32)[None]
        self._writes, self._reads = (_Program(each, runtime) for each in (self._record_write, self._record_read))

    def write(self, first: int, expanded: torch.Tensor, turned_keys: torch.Tensor, expansion: LatentExpansion) -> None:
        """Write keys from position `first` on. expanded: [N, heads * (nope_dim + value_dim)]; turned_keys: [N,
        rope_dim]."""
        layer = self._layer
        keys, values = expanded.unflatten(1, (layer.num_heads, -1)).split((expansion.nope_dim, expansion.value_dim), 2)
        rows = expanded.new_zeros(len(expanded), 2, layer.num_heads, layer.head_dim)
        rows[:, 0, :, : expansion.nope_dim] = keys
        rows[:, 0, :, expansion.nope_dim : expansion.nope_dim + turned_keys.shape[1]] = turned_keys[:, None]
        rows[:, 1, :, : expansion.value_dim] = values
        self._writes([rows.flatten(1)], self._backend.plan(self._batch(first, len(rows))).plans)

    def read(self, query: torch.Tensor, start: int) -> torch.Tensor:
        """Attention of the queries from position `start` on over the written keys. query: [T, heads, key_dim]. Returns
        [T, heads, head_dim]."""
        layer = self._layer
        padded = F.pad(query, (0, layer.head_dim - query.shape[2])).flatten(1)
        plans = self._backend.plan_beside(self._batch(start, len(query)))
        return self._reads([padded], plans).unflatten(1, (layer.num_heads, -1))

    def _batch(self, start: int, count: int) -> AttentionBatch:
        positions = torch.arange(start, start + count)
        return AttentionBatch(
            query_start=torch.tensor([0, count]),
            start_positions=torch.tensor([start]),
            slot_positions=positions,
            sequence_index=torch.zeros(count, dtype=torch.int64),
            block_tables=(self._table,),
            slot_mapping=(positions + self._backend.block_size,),  # block 0 is no sequence's
        )

    def _record_write(self, key_value: Buffer) -> Buffer:
        recorder, width = key_value.recorder, key_value.width
        scale = _native.Elementwise.SCALE  # copy: a kernel may not overwrite the input
        copied = recorder.call(
            "elementwise", width, buffers={"x": key_value, "y": None}, kind=scale, factor=1.0, width=width
        )
        return recorder.call(
            "attention",
            width,
            over=copied,
            in_place=True,
            output="qkv",
            buffers={"rotation": None, "out": None},
            **self._backend.head_constants(self._heads),
        )

    def _record_read(self, query: Buffer) -> Buffer:
        buffers: dict[str, Buffer | None] = {"qkv": query, "rotation": None}
        return query.recorder.call(
            "attention", query.width, buffers=buffers, writes=False, **self._backend.head_constants(self._heads)
        )


class _Program:
    def __init__(self, record: Callable[..., Buffer], runtime: NativeRuntime) -> None:
        self._record = record
        self._runtime = runtime
        self._program: RecordedProgram | None = None
        self._width = 0

    def __call__(self, rows: list[torch.Tensor], plans: list[_native.AttentionPlan]) -> torch.Tensor:
        """Run one matrix program over rows: [N, width] each -> [N, width], float32."""
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
    """Rotate the heads' rotated elements. rows: [T, heads * rope_dim]; rotation: [T, rope_dim], cosines, then sines."""
    first, second = rows.unflatten(1, (-1, 2, rope_dim // 2)).unbind(2)
    cos, sin = rotation[:, None].chunk(2, dim=-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=2).flatten(1)
