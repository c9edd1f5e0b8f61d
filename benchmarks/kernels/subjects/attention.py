"""Paged attention, the write of keys and values, and copies of blocks, beside the plain torch back end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.kernels.cases import BLOCK_SIZE, CACHE_BYTES, FLOAT_BYTES, Case, Work, kv_bytes
from benchmarks.kernels.measure import Runner
from benchmarks.kernels.run import Prepared
from benchmarks.kernels.subjects.machine import (
    Machine,
    aligned_rows,
    calls_per_run,
    in_turn,
    parts,
    relative_error,
)
from quire.attention.interface import AttentionBatch
from quire.attention.native_backend import NativeAttention, RecordedAttention
from quire.attention.torch_backend import TorchAttention
from quire.kernels import reference
from quire.kernels.arguments import HeadWeights, LayerAttention, RotaryFrequencies
from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.paged_attention import copy_blocks
from quire.kernels.cpu.recorder import RecordedIndices, Recorder
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec
from quire.layers.native import NativeOperations
from quire.layers.operations import TorchOperations

CACHE_DTYPES = {"f32": "float32", "bf16": "bfloat16", "bf16a16": "bfloat16", "int8": "int8", "fp8": "fp8"}
TWINS = {"f32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"f32": 1e-4, "bf16": 2e-2, "bf16a16": 3e-2, "int8": 4e-2, "fp8": 0.15}
"""What rounded keys and values explain, and rounded queries and probabilities."""
FILLED_BLOCKS = 32
"""Different blocks in the pool; the others are copies of them."""
ROTARY_BASE = 10000.0
COPY_LAYERS = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """One step's attention in one layer. qkv: [T, (num_heads + 2 num_kv_heads) * head_dim]. filled: every block holds
    keys and values before the step. frequencies: of the rotation of queries and keys; None: none."""

    layer: LayerAttention
    num_blocks: int
    batch: AttentionBatch
    qkv: torch.Tensor
    filled: bool
    frequencies: RotaryFrequencies | None

    def layout(self, name: str, copies: int) -> KVCacheLayout:
        """A pool in which `copies` layers have the same content."""
        scale = FLOAT_BYTES if name == "int8" else 0
        spec = AttentionSpec(
            self.layer.num_kv_heads, self.layer.head_dim, self.layer.head_dim, CACHE_BYTES[name], scale
        )
        return KVCacheLayout(BLOCK_SIZE, self.num_blocks, *group_layers([spec] * copies, BLOCK_SIZE))

    def layers(self, copies: int) -> list[LayerAttention]:
        return [replace(self.layer, layer=index) for index in range(copies)]

    def filling(self) -> tuple[torch.Tensor, AttentionBatch]:
        """Rows of qkv, and a step that writes their keys and values to the first FILLED_BLOCKS blocks."""
        slots = BLOCK_SIZE + torch.arange(min(FILLED_BLOCKS, self.num_blocks - 1) * BLOCK_SIZE)
        torch.manual_seed(1)
        return torch.randn(len(slots), self.qkv.shape[1]), scattered(slots)


def repeat_blocks(pages: torch.Tensor) -> None:
    """Fill a layer's pages [num_blocks, ...] with copies of their first FILLED_BLOCKS blocks (block 0 apart)."""
    for start in range(1 + FILLED_BLOCKS, len(pages), FILLED_BLOCKS):
        part = pages[start : start + FILLED_BLOCKS]
        part.copy_(pages[1 : 1 + len(part)])


def scattered(slots: torch.Tensor) -> AttentionBatch:
    """A token for each slot, alone at position 0: it sees the first key of the block that it is written to."""
    count = torch.arange(len(slots) + 1)
    zeros = torch.zeros(len(slots), dtype=torch.int64)
    tables = (slots // BLOCK_SIZE).to(torch.int32)[:, None].contiguous()
    return AttentionBatch(count, zeros, zeros, count[:-1], (tables,), (slots,))


def new_tokens(num_sequences: int, start: int, count: int) -> AttentionBatch:
    """`count` tokens of each sequence, after `start` others. Blocks lie in any order."""
    blocks_each = -(-(start + count) // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    tables = 1 + torch.randperm(num_sequences * blocks_each, generator=generator).view(num_sequences, blocks_each)
    places = torch.arange(start + count)
    slots = tables[:, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    return AttentionBatch(
        query_start=torch.arange(num_sequences + 1) * count,
        start_positions=torch.full((num_sequences,), start),
        slot_positions=places[start:].repeat(num_sequences),
        sequence_index=torch.arange(num_sequences).repeat_interleave(count),
        block_tables=(tables.to(torch.int32),),
        slot_mapping=(slots[:, start:].flatten().contiguous(),),
    )


def problem_of(case: Case) -> Problem:
    model = case.model
    if case.kernel == "decode":
        batch = new_tokens(case.rows, int(case.shape) - 1, 1)
    elif case.kernel == "prefill":
        batch = new_tokens(1, 0, case.rows)
    else:
        batch = scattered(BLOCK_SIZE + torch.arange(case.rows))
    dim = model.head_dim
    turns = 1.0 / ROTARY_BASE ** (torch.arange(0, dim, 2).float() / dim)
    torch.manual_seed(0)
    return Problem(
        layer=LayerAttention(0, model.num_heads, model.num_kv_heads, dim, dim**-0.5),
        num_blocks=1 + int(max(table.max() for table in batch.block_tables)),
        batch=batch,
        qkv=torch.randn(case.rows, (model.num_heads + 2 * model.num_kv_heads) * dim),
        filled=case.kernel == "decode",
        frequencies=RotaryFrequencies(turns, 1.0, torch.float32) if case.kernel == "write" else None,
    )


class AttentionSubject:
    """Decode, prefill and write."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def memory_bytes(self, case: Case) -> int:
        tokens = case.rows * (int(case.shape) if case.kernel == "decode" else 1)
        sizes = [kv_bytes(case.model, name, tokens + BLOCK_SIZE) for name in (*case.variants, *TWINS)]
        rows = case.rows * (case.model.num_heads + 2 * case.model.num_kv_heads) * case.model.head_dim * FLOAT_BYTES
        return sum(size * self._machine.num_copies(size) for size in sizes) + 4 * rows

    def prepare(self, case: Case) -> Prepared:
        problem = problem_of(case)
        some_work = next(iter(case.variants.values()))
        twins = {name: _Twin(self._machine, problem, name, some_work) for name in TWINS}
        natives = {name: _Native(self._machine, problem, name, work) for name, work in case.variants.items()}
        expected = twins["f32"].compute()
        return Prepared(
            natives={name: native.runner() for name, native in natives.items()},
            twins={name: twin.runner() for name, twin in twins.items()},
            errors={name: relative_error(native.compute(), expected) for name, native in natives.items()},
            tolerances=TOLERANCES,
        )


class _Native:
    """The recorded kernels over layers that are used in turn."""

    def __init__(self, machine: Machine, problem: Problem, name: str, work: Work) -> None:
        self._machine, self._problem, self._work = machine, problem, work
        self._runtime = machine.runtime_for("bfloat16" if work.bf16_operations else "float32")
        layer, layout = problem.layer, problem.layout(name, 1)
        page_bytes = layout.page_bytes
        self._copies = machine.num_copies(layout.num_blocks * page_bytes)
        pages = allocate(self._copies * layout.num_blocks * page_bytes).view(-1, layout.num_blocks, page_bytes)
        self._backend = NativeAttention(
            problem.layout(name, self._copies),
            list(pages),
            CACHE_DTYPES[name],
            layer.num_heads,
            machine.runtime.pool.threads,
        )
        if problem.filled:
            rows, batch = problem.filling()
            self._plans = self._backend.plan(batch).plans
            self._computation(rows, batch.slot_positions, [layer], None)[0]()
            repeat_blocks(pages[0])
            pages[1:] = pages[0]
        # One plan serves all layers of a step: it is no part of what is timed.
        self._plans = self._backend.plan(problem.batch).plans

    def runner(self) -> Runner:
        problem = self._problem
        calls = calls_per_run(self._copies, self._work.bytes, self._work.operations)
        return in_turn(
            [
                self._computation(problem.qkv, problem.batch.slot_positions, layers, problem.frequencies)[0]
                for layers in parts(problem.layers(self._copies), calls)
            ]
        )

    def compute(self) -> torch.Tensor:
        """[T, num_heads * head_dim] of one layer."""
        problem = self._problem
        run, out = self._computation(problem.qkv, problem.batch.slot_positions, [problem.layer], problem.frequencies)
        run()
        return out

    def _computation(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        layers: Sequence[LayerAttention],
        frequencies: RotaryFrequencies | None,
    ) -> tuple[Runner, torch.Tensor]:
        """Attention in `layers`, one call each, and where the last one's result will be. Each layer rotates the
        queries where they lie: only the first run of the first layer has those of `qkv`."""
        recorder, step = Recorder(), RecordedAttention(self._backend)
        rows = aligned_rows(*qkv.shape)
        rows.copy_(qkv)
        out = aligned_rows(len(qkv), self._problem.layer.num_heads * self._problem.layer.head_dim)
        source = recorder.external(rows.shape[1], rows.stride(0))
        target = recorder.external(out.shape[1], out.stride(0))
        rotation = None
        if frequencies is not None:
            rotation = NativeOperations().rotation(frequencies, RecordedIndices(recorder, _native.SLOT_POSITIONS))
        for layer in layers:
            result = step.attend(HeadWeights(layer, None, None), source, rotation)
            recorder.redirect(result, target)
        program = recorder.finish_program(result, self._runtime, len(qkv))

        def run() -> int:
            program.run(len(rows), (None, positions), plans=self._plans, externals=[rows, out])
            return len(layers)

        return run, out


class _Twin:
    """The plain torch back end over layers that are used in turn."""

    def __init__(self, machine: Machine, problem: Problem, name: str, work: Work) -> None:
        self._problem, self._work, dtype = problem, work, TWINS[name]
        layer = problem.layer
        shape = (problem.num_blocks, 2, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
        size = torch.Size(shape).numel() * dtype.itemsize
        self._copies = machine.num_copies(size)
        pages = allocate(self._copies * size).view(dtype).view(self._copies, *shape)
        self._backend = TorchAttention(problem.layout(name, self._copies), dict(enumerate(pages)))
        if problem.filled:
            rows, batch = problem.filling()
            heads = rows.view(len(rows), -1, layer.head_dim)
            _, key, value = torch.split(heads, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
            reference.write_kv(pages[0], reference.key_rows(batch.slot_mapping[0], BLOCK_SIZE), key, value)
            repeat_blocks(pages[0])
            pages[1:] = pages[0]
        self._operations = TorchOperations()
        self._step = self._backend.plan(problem.batch)
        rotation = problem.frequencies
        self._rotation = None if rotation is None else replace(rotation, dtype=dtype)
        self._qkv = problem.qkv.to(dtype)

    def runner(self) -> Runner:
        calls = calls_per_run(self._copies, self._work.bytes, self._work.operations)
        return in_turn([self._run(layers) for layers in parts(self._problem.layers(self._copies), calls)])

    def compute(self) -> torch.Tensor:
        return self._attend(self._problem.layer)

    def _run(self, layers: Sequence[LayerAttention]) -> Runner:
        def run() -> int:
            for layer in layers:
                self._attend(layer)
            return len(layers)

        return run

    def _attend(self, layer: LayerAttention) -> torch.Tensor:
        rotation = None
        if self._rotation is not None:
            rotation = self._operations.rotation(self._rotation, self._problem.batch.slot_positions)
        return self._step.attend(HeadWeights(layer, None, None), self._qkv, rotation)


class CopySubject:
    """Copies of whole blocks in several layers at a time: a call is one layer's share."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def memory_bytes(self, case: Case) -> int:
        sizes = [kv_bytes(case.model, name, case.rows * BLOCK_SIZE) for name in (*case.variants, *TWINS)]
        return sum(2 * size * COPY_LAYERS * self._num_turns(size) for size in sizes)

    def prepare(self, case: Case) -> Prepared:
        natives = {name: self._copies(case, name, torch.uint8) for name in case.variants}
        pool = self._machine.runtime.pool
        return Prepared(
            natives={name: copies.runner(pool) for name, copies in natives.items()},
            twins={name: self._copies(case, name, dtype).runner(None) for name, dtype in TWINS.items()},
            errors={name: copies.error(pool) for name, copies in natives.items()},
            tolerances=dict.fromkeys(natives, 0.0),
        )

    def _num_turns(self, num_bytes: int) -> int:
        """How many times other blocks are copied before the first ones come again."""
        return max(2, self._machine.num_copies(2 * num_bytes * COPY_LAYERS))

    def _copies(self, case: Case, name: str, dtype: torch.dtype) -> _Copies:
        block_bytes = kv_bytes(case.model, name, BLOCK_SIZE)
        return _Copies(block_bytes // dtype.itemsize, dtype, case.rows, self._num_turns(block_bytes * case.rows))


class _Copies:
    """Layers of blocks of `elements`; `count` of them are copied at a time, others in each turn."""

    def __init__(self, elements: int, dtype: torch.dtype, count: int, turns: int) -> None:
        num_blocks = 2 * count * turns
        size = num_blocks * elements * dtype.itemsize
        torch.manual_seed(0)
        self._layers = [allocate(size).view(dtype).view(num_blocks, elements) for _ in range(COPY_LAYERS)]
        for layer in self._layers:
            layer.copy_(torch.randint(1, 100, (num_blocks, 1)))
        blocks = torch.randperm(num_blocks).view(turns, count, 2).tolist()
        self._pairs = [[(source, destination) for source, destination in turn] for turn in blocks]

    def runner(self, pool: _native.Pool | None) -> Runner:
        """pool: of the native kernel; None: the plain function."""
        return in_turn([self._run(pairs, pool) for pairs in self._pairs])

    def error(self, pool: _native.Pool) -> float:
        before = self._layers[-1].clone()
        self._run(self._pairs[0], pool)()
        reference.copy_blocks([before], self._pairs[0])
        return relative_error(self._layers[-1], before)

    def _run(self, pairs: list[tuple[int, int]], pool: _native.Pool | None) -> Runner:
        layers = self._layers
        num_blocks, block_bytes = len(layers[0]), layers[0][0].nbytes

        def run() -> int:
            if pool is None:
                reference.copy_blocks(layers, pairs)
            else:
                copy_blocks(pool, layers, block_bytes, num_blocks, pairs)
            return len(layers)

        return run
