"""Compiles every Triton kernel for a GPU that is not there, as its wrapper launches it for shapes of real models.

    python -m tests.kernels.triton.ahead_of_time 90|80 [WHAT] [cache] [for=python3.12] [libtriton=FILE]

WHAT: products (only what multiplies matrices, where cards differ most), words (the two smallest kernels), sweep (what
the sweeps of `benchmarks.gpu` compare; experts, delta: one of them), or a name in `calls_of`. cache: also into the
cache that an engine uses, `QUIRE_TRITON_CACHE`, with launchers and every kind of tiles that a model of these shapes
needs (`make triton-cache`). for: for an engine of another Python, whose Triton pip fetches or is FILE.

Prints a line of JSON for each launch: kernel, bytes of shared memory, registers, bytes of stack (spills), and counts
of the widest loads and of tensor cores' products. Here is seen what the interpreter does not see: types that do not
fit, blocks that are no powers of two, too little shared memory. Tensors are the host's; nothing touches their memory.
Each kernel is launched by Triton and bound, with stand-ins for the driver: both must hand over the same. Run without
TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver

from benchmarks.gpu import attention_sweep, delta_sweep, expert_sweep
from benchmarks.gpu.product_sweep import ProductSweep
from benchmarks.gpu.shapes import QWEN3_8B as QWEN3_8B_SHAPE
from quire import envs
from quire.attention.device_batch import DeviceBatch, DeviceStateStep
from quire.attention.triton_backend import TritonAttention
from quire.kernels.arguments import (
    CacheScale,
    ConvolutionWeights,
    DeltaRule,
    GatedNormWeights,
    HeadWeights,
    IndexShape,
    LatentShape,
    LayerAttention,
    NormWeights,
    Routing,
)
from quire.kernels.rotation import DeviceRotation
from quire.kernels.triton.activation import activation
from quire.kernels.triton.adapters import AdapterMatrices, SlotTiles, add_adapted, add_looked_up
from quire.kernels.triton.attention_tiles import SHARED_MEMORY, DeviceLimits
from quire.kernels.triton.block_copy import PageTable, copy_pages
from quire.kernels.triton.delta_prompt import prompt_rule
from quire.kernels.triton.drafts import DraftTables, accept_drafts, find_drafts, place_drafts, recall_drafts
from quire.kernels.triton.embedding import embedding
from quire.kernels.triton.encoder_attention import attend_both_ways
from quire.kernels.triton.experts import ExpertAdapterMatrices, ExpertMatrices, apply_experts
from quire.kernels.triton.linear_state import gated_delta_rule, gated_norm, rule_parts, short_convolution
from quire.kernels.triton.matmul import head_matmul, matmul
from quire.kernels.triton.model_drafts import begin_pass, last_tokens, write_behind, write_guesses
from quire.kernels.triton.norm import norm, sum_parts
from quire.kernels.triton.quantized_product import quantized_matmul
from quire.kernels.triton.rotary import rotation_angles
from quire.kernels.triton.routing import gate_rows, route, sort_by_expert
from quire.kernels.triton.rows import InputBuffers, RowTables, StepColumns, copy_words, prepare_inputs, write_words
from quire.kernels.triton.runtime import BoundKernel, recorded_launches
from quire.kernels.triton.weight_formats import E4M3, I4, I8, MXFP4, NVFP4, PLAIN, StoredMatrix
from quire.kernels.triton.widen import widen
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec, LatentSpec
from tests.architecture.source import ROOT
from tests.kernels.triton.sampling_calls import sampling_calls
from tests.kernels.triton.stored_launchers import Python, keys_of, stored_for

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class AbsentGPU:
    """What Triton asks a driver for while it compiles, and while it launches if `launcher_cls` is a launcher."""

    launcher_cls: Any = None
    utils: Any = None

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class NotingLauncher:
    """Stands for a launcher that Triton has compiled. calls: what kernels were enqueued with, compile-time arguments
    as None."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, source: Any, metadata: Any) -> None:
        self._is_read = [kind != "constexpr" for kind in source.signature.values()]
        self.launch_cooperative_grid, self.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl

    def __call__(self, *args: Any) -> None:
        self.launch(*args[:5], self.launch_cooperative_grid, self.launch_pdl, None, None, *args[5:])

    def launch(self, *args: Any) -> None:
        settings, values = (*args[:7], args[9]), args[13:]
        pointers = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
        read = [value if is_read else None for value, is_read in zip(pointers, self._is_read, strict=True)]
        self.calls.append((*settings, *read))


class StoringLauncher(NotingLauncher):
    """Also compiles what a card would launch with, into the cache (`stored_for`)."""

    def __init__(self, source: Any, metadata: Any) -> None:
        super().__init__(source, metadata)
        CudaLauncher(source, metadata)


class LoadingUtilities:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[9, 0] << 10}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and most threads."""
        return 1, zlib.crc32(binary), 0, 0, 1024


class LaunchingGPU(AbsentGPU):
    launcher_cls = NotingLauncher
    utils = LoadingUtilities()


class CompilingRecorder:
    """Compiles what is launched, launches it in two ways, and prints what came of it."""

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        compiled = kernel.warmup(*args, grid=grid, **constants)
        ptx = compiled.asm.get("ptx", "")  # a cache for engines has the last stage alone
        wide = Counter(re.findall(r"\b(?:ld|st)\.global\.v4|\bwgmma\.mma_async|\bmma\.sync|\bcp\.async\.c\w", ptx))
        line = {"kernel": kernel.__name__, "shared": compiled.metadata.shared, **resources(compiled.asm["cubin"])}
        print(json.dumps(line | wide), flush=True)
        given = dict(zip(kernel.arg_names, args, strict=False))
        literal = {each.name for each in kernel.params if each.is_constexpr}
        # Every other argument is fixed. A second launch finds the kernel.
        fixed = {name: value for name, value in list(given.items())[::2] if name not in literal}
        left = [value for name, value in given.items() if name not in fixed]
        bound = BoundKernel(kernel, fixed, constants)
        with recorded_launches(None):
            bound(grid, *left)
            bound(grid, *left)
        assert bound._compiled is not None
        assert not bound._compiled.is_tritons, "the second launch is ours"
        tritons, ours = NotingLauncher.calls[-2:]
        assert tritons == ours, f"{kernel.__name__}: {tritons} is not {ours}"


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", run.stdout)[-1]
    return {"registers": int(registers), "stack": int(stack)}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


Calls = list[Callable[[], object]]
float32 = partial(empty, dtype=torch.float32)
int32 = partial(empty, dtype=torch.int32)


def layer_calls() -> Calls:
    """Between the products of a layer, in the shapes of Qwen3-8B and GPT-2."""
    pages = PageTable(empty(36, dtype=torch.int64), 65536, 65536, ())
    return [
        lambda: norm(empty(8, 4096), empty(4096), None, 1e-6, centred=False),
        lambda: norm(empty(8, 4096), empty(4096), None, 1e-6, centred=False, residual=empty(8, 4096)),
        lambda: norm(empty(8, 768), empty(768), empty(768), 1e-5, centred=True),
        lambda: rotation_angles(empty(8, dtype=torch.int64), float32(64), 1.0),
        lambda: sum_parts(empty(2, 8, 4096)),
        lambda: activation(empty(8, 2 * 12288), "silu", gated=True),
        lambda: activation(empty(8, 3072), "gelu", gated=False),
        lambda: activation(empty(8, 3072), "gelu_new", gated=False),
        lambda: activation(empty(8, 3072), "relu", gated=False),
        lambda: embedding(empty(151936, 4096), int32(8)),
        lambda: embedding(empty(1024, 768), empty(8, dtype=torch.int64), empty(8, 768)),
        lambda: copy_pages(pages, pages, int32(4, 2)),
    ]


def adapter_calls() -> Calls:
    """Adapters of Qwen3-8B's query, key and value, of the least and the largest rank, and of mixed dtypes."""
    calls: Calls = []
    order = SlotTiles(int32(8), int32(5, 3))
    pieces = [(0, 4096), (4096, 1024), (5120, 1024)]
    for rank, dtype in ((16, torch.bfloat16), (512, torch.bfloat16), (16, torch.float32)):
        matrices = AdapterMatrices.empty(4, rank, 4096, pieces, dtype, torch.device("cpu"))
        calls.append(partial(add_adapted, matrices, empty(8, 4096), empty(8, 6144), order))
        table = AdapterMatrices.empty(4, rank, 151936, [(0, 4096)], dtype, torch.device("cpu"))
        calls.append(partial(add_looked_up, table, empty(8, dtype=torch.int64), empty(8, 4096), order))
        pairs = empty(64, 6144, dtype=torch.float32)
        calls.append(partial(add_adapted, matrices, empty(8, 4096), pairs, order, empty(64, dtype=torch.float32), 8))
    of_experts = ExpertAdapterMatrices(None, None, torch.ones(1024, dtype=torch.int64), 4)
    stored = [StoredMatrix.plain(empty(8, *shape)) for shape in ((1536, 2048), (2048, 768))]
    stack, rows = ExpertMatrices(*stored, None, None, adapters=of_experts), (empty(1024, 2048), torch.zeros(1024, 4))
    calls.append(lambda: apply_experts(stack, *rows, None, "silu", None, False))
    return calls


def row_calls() -> Calls:
    """What a step changes in the rows, its inputs, of two KV groups, and its drafts."""
    int64 = partial(empty, dtype=torch.int64)
    inputs = InputBuffers(int64(8192), int64(8192), int64(2, 8192), int64(2, 8192), int32(256), int32(257), int32(256))
    columns = StepColumns(int32(5), int32(5), int32(6))
    tables = RowTables(40964, int32(2, 2), 10**5, int32(2))
    drafts, samples = DraftTables(40964, 10**5, 10**5 + 256, 3), (int32(9), int32(9), int32(6), int32(9))
    placed, given = (columns.rows, columns.starts, columns.query_start), [int32(5), int32(5), int32(5), int32(4)]
    return [
        lambda: place_drafts(int32(10**6), drafts, placed, given, int32(5), 4),
        lambda: accept_drafts(int32(10**6), drafts, int32(9, 2), samples, int64(9)),
        lambda: find_drafts(int32(10**6), drafts, (int32(9), int32(6), int32(5)), (1, 4)),
        *(partial(begin_pass, columns, int32(5), int32(4), int32(5), has_masks=masks) for masks in (False, True)),
        lambda: write_behind(
            int32(10**6), drafts, (int32(5), int32(5)), (int32(4), int32(4)), int64(4), has_texts=False
        ),
        lambda: write_guesses(int32(10**6), drafts, int32(5), int32(5), int64(4), int32(5), 1),
        lambda: last_tokens(int32(10**6), drafts, columns, int32(5)),
        lambda: recall_drafts(int32(10**6), drafts, (int32(9), int32(6), int32(5))),
        lambda: prepare_inputs(int32(10**6), tables, columns, inputs, 9, (8, 16), 16),
        *word_calls(),
    ]


def word_calls() -> Calls:
    """The two smallest kernels of a step: what is known of a cache is known by them."""
    return [
        lambda: write_words(int32(10**6), int32(9), int32(9)),
        lambda: copy_words(int32(10**6), int32(3, 3), 5000),
    ]


def routing_calls() -> Calls:
    """The choice of experts as in Qwen3-30B-A3B, Qwen3-Next and DeepSeek-V3, and the order of pairs."""
    grouped = Routing(256, 8, "sigmoid", True, 2.5, float32(256), num_groups=8, top_groups=4, group_best=2)
    return [
        lambda: route(Routing(128, 8), empty(8, 128)),
        lambda: route(Routing(512, 10), empty(8, 512)),
        lambda: route(grouped, float32(8, 256)),
        lambda: sort_by_expert(float32(8, 16), 128, 64),
        lambda: sort_by_expert(float32(8, 20), 512, 64),
        lambda: sort_by_expert(float32(8192, 20), 512, 128),
        lambda: gate_rows(empty(8, 512), empty(8, 1)),
    ]


def tower_calls(capability: int) -> Calls:
    """Attention of towers, rotated, with heads of 72 and 80, one of them in float32: both are padded alike."""

    def call(dim: int, dtype: torch.dtype) -> None:
        rotation = float32(64, dim // 2), float32(64, dim // 2)
        attend_both_ways(empty(64, 3 * 16 * dim, dtype=dtype), rotation, int32(3), 16, 0.1, None)

    dims = (72, 80) if capability < 90 else (80, 72)
    return [partial(call, dim, dtype) for dim, dtype in zip(dims, (torch.float32, torch.bfloat16), strict=True)]


def stored(kind: int, rows: int, columns: int, capability: int, count: int = 1) -> StoredMatrix:
    """A quantised matrix, its groups as checkpoints have them; a stack if `count` is not 1."""
    if kind == E4M3.value:
        dtype = torch.float8_e4m3fn if capability >= 89 else torch.uint8
        return StoredMatrix(kind, columns, empty(count, rows, columns, dtype=dtype), float32(count, rows, 32), 128)
    if kind == I8.value:
        codes = empty(count, rows, columns, dtype=torch.int8)
        return StoredMatrix(kind, columns, codes, float32(count, rows, 1))
    codes = empty(count, rows, columns // 2, dtype=torch.uint8)
    if kind == I4.value:
        scales = float32(count, rows, columns // 32)
        return StoredMatrix(kind, columns, codes, scales, 32, scales)
    group = 32 if kind == MXFP4.value else 16
    scale_codes = empty(count, rows, columns // group, dtype=torch.uint8)
    row_scales = None if kind == MXFP4.value else float32(count, rows)
    return StoredMatrix(kind, columns, codes, scale_codes, group, row_scales=row_scales)


def quantized_calls(capability: int, *, complete: bool) -> Calls:
    """Products of quantised matrices, one by one and of experts; also multiplied as integers, and as e4m3 numbers where
    the card does. complete: False: each kind of matrix meets experts on one card, and on both the largest tiles for few
    rows and for more, in which a smaller one fits as well."""
    kinds = [each.value for each in (E4M3, I8, I4, MXFP4, NVFP4)]
    of_experts = [PLAIN.value, *(kinds if complete else (I8.value, I4.value, MXFP4.value))]
    if capability < 90 and not complete:
        of_experts = [PLAIN.value, E4M3.value, NVFP4.value]
    rows = (8, 16, 32, 64) if complete else (16, 64)

    def experts(kind: int, *, rounds: bool = False, fixed: bool = True) -> torch.Tensor:
        shapes = (2 * 768, 2048), (2048, 768)
        if kind == PLAIN.value:
            matrices = [StoredMatrix.plain(empty(8, *shape)) for shape in shapes]
        else:
            matrices = [stored(kind, *shape, capability, 8) for shape in shapes]
        stack, x, routing = ExpertMatrices(*matrices, None, None, rounds), empty(1024, 2048), torch.zeros(1024, 4)
        return apply_experts(stack, x, routing, None, "silu", None, False, batch_invariant=fixed)

    calls: Calls = [partial(matmul, empty(8, 4096), stored(kind, 4096, 4096, capability)) for kind in kinds]
    calls += [partial(by_rows, m, kind, capability, False) for kind in kinds for m in rows]
    calls += [partial(by_rows, m, E4M3.value, capability, False) for m in (8, 32)]
    calls += [partial(experts, kind) for kind in of_experts]
    calls += [partial(experts, PLAIN.value, fixed=False)] if capability >= 90 else []
    for kind in (I8.value, I4.value):
        matrix = stored(kind, 4096, 4096, capability)
        calls += [
            partial(matmul, empty(8, 4096), matrix, rounds_activations=True),
            *([partial(experts, kind, rounds=True)] if complete or kind == I4.value or capability >= 90 else []),
        ]
        calls += [partial(by_rows, m, kind, capability, True) for m in (8, 16, 32, 128)]
    if capability >= 89:
        matrix = stored(E4M3.value, 4096, 4096, capability)
        calls += [
            partial(matmul, empty(8, 4096), matrix, rounds_activations=True),
            partial(matmul, empty(8, 4096), replace(matrix, group_size=0), rounds_activations=True),
            partial(experts, E4M3.value, rounds=True),
        ]
        for each in (matrix, replace(matrix, group_size=0)):
            calls += [
                partial(quantized_matmul, empty(m, 4096), each, rounds_activations=True) for m in (8, 16, 32, 128)
            ]
    return calls


def by_rows(m: int, kind: int, capability: int, rounds: bool) -> None:
    """A product in the mode that is fastest for a number of rows, and the matrix in bfloat16."""
    matrix = stored(kind, 4096, 4096, capability)
    quantized_matmul(empty(m, 4096), matrix, rounds_activations=rounds)
    widen(matrix, torch.bfloat16)


def float8_layer_calls() -> Calls:
    """Products of Qwen3-8B in FP8 with a scale for each row, in every range of numbers of rows."""

    def call(m: int, n: int, k: int, *, adds: bool) -> None:
        codes = empty(1, n, k, dtype=torch.float8_e4m3fn)
        matrix = StoredMatrix(E4M3.value, k, codes, float32(1, n, 1))
        quantized_matmul(empty(m, k), matrix, None, empty(m, n) if adds else None, rounds_activations=True)

    shapes = ((24576, 4096, False), (6144, 4096, False), (4096, 4096, True), (4096, 12288, True))
    return [partial(call, m, n, k, adds=adds) for n, k, adds in shapes for m in (8, 16, 32, 64, 128)]


def product_calls() -> Calls:
    """What multiplies matrices."""
    return [
        lambda: matmul(empty(8, 12288), empty(4096, 12288), None, empty(8, 4096)),
        lambda: matmul(empty(8, 4096), empty(24576, 4096)),
        lambda: matmul(empty(8, 768), empty(3072, 768), empty(3072)),
        lambda: matmul(float32(8, 4096), float32(4096, 4096)),
        lambda: head_matmul(empty(8, 128 * 512), empty(128, 128, 512)),
    ]


QWEN3_8B = LayerAttention(0, 32, 8, 128, 0.1)
WIDE_HEADS = LayerAttention(0, 8, 4, 256, 0.1, window=4096, soft_cap=50.0)


def attention_call(
    layer: LayerAttention,
    capability: int,
    new_tokens: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_dtype: torch.dtype | None = None,
    fixed: bool = False,
    longest: int = 8192,
) -> Callable[[], object]:
    """One layer of the back end over four sequences of up to `longest` tokens, with norms and rotation."""
    page_dtype = page_dtype or dtype
    spec = AttentionSpec(layer.num_kv_heads, layer.head_dim, layer.head_dim, page_dtype.itemsize)
    backend = TritonAttention(
        KVCacheLayout(16, 9, *group_layers([spec], 16)),
        {layer.layer: empty(9, 2, 16, layer.num_kv_heads, layer.head_dim, dtype=page_dtype)},
        DeviceLimits(divmod(capability, 10), 132),
        num_heads=layer.num_heads,
        dtype=dtype,
        max_num_seqs=4,
        max_model_len=8192,
        batch_invariant=fixed,
    )
    num_tokens = 4 if new_tokens == 1 else 3 + new_tokens
    long = empty(num_tokens, dtype=torch.int64)
    batch = DeviceBatch(
        4, num_tokens, new_tokens, longest, int32(4), int32(5), int32(4), long, (long,), (int32(256, 512),)
    )
    norms = [NormWeights(layer.head_dim, empty(layer.head_dim, dtype=dtype), None, 1e-6, False) for _ in range(2)]
    qkv = empty(num_tokens, (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim, dtype=dtype)
    rotation = DeviceRotation(*float32(2, num_tokens, layer.head_dim // 2).unbind())
    heads, step = HeadWeights(layer, *norms), backend.plan(batch)
    return lambda: step.attend(heads, qkv, rotation, None)


def latent_call(
    capability: int, new_tokens: int, *, page_dtype: torch.dtype = torch.bfloat16, fixed: bool = False, top: int = 0
) -> Callable[[], object]:
    """One layer of DeepSeek-V3's latent attention over four sequences. top: keys that V3.2's indexer chooses first."""
    shape, dtype = LatentShape(0, 128, 512, 64, 0.1, top), torch.bfloat16
    index = IndexShape(0, 64, 128, 64, top, shape.width, 0.01)
    width = shape.width + (index.dim if top else 0)
    backend = TritonAttention(
        KVCacheLayout(16, 9, *group_layers([LatentSpec(width, page_dtype.itemsize)], 16)),
        {0: empty(9, 16, width, dtype=page_dtype)},
        DeviceLimits(divmod(capability, 10), 132),
        num_heads=shape.num_heads,
        dtype=dtype,
        max_num_seqs=4,
        max_model_len=8192,
        batch_invariant=fixed,
    )
    num_tokens = 4 * new_tokens
    long = empty(num_tokens, dtype=torch.int64)
    batch = DeviceBatch(
        4, num_tokens, new_tokens, 8192, int32(4), int32(5), int32(4), long, (long,), (int32(256, 512),)
    )
    widths = (128 * 512, 128 * 64, 512, 64)
    rotation = DeviceRotation(*float32(2, num_tokens, shape.rope_dim // 2).unbind())
    inputs, step = tuple(empty(num_tokens, width) for width in widths), backend.plan(batch)
    if not top:
        return lambda: step.attend_latent(shape, inputs, rotation)
    scored = empty(num_tokens, 64 * 128), empty(num_tokens, 128), empty(num_tokens, 64)
    selected = int32(num_tokens, top)

    def both() -> None:
        step.select_keys(index, scored, rotation, selected)
        step.attend_latent(shape, inputs, rotation, selected)

    return both


def state_calls(*, complete: bool) -> Calls:
    """One layer of Qwen3-Next's delta nets over four sequences: the convolution, the rule, and the norm behind it.
    complete: False: the rule's kernel for pieces, which spills for seconds, in one mode."""
    rule = DeltaRule(16, 32, 128, 128, float32(32), float32(32), 0, 0)
    width = 2 * rule.num_key_heads * rule.key_dim + rule.num_value_heads * rule.value_dim
    convolution = ConvolutionWeights(float32(4, width), None, "silu", 0, rule.end_offset)
    long = empty(8, dtype=torch.int64)
    batch = DeviceBatch(4, 8, 5, 8192, int32(4), int32(5), int32(4), long, (), ())
    pages = torch.empty(2, convolution.inputs.end_offset, dtype=torch.uint8)
    states = DeviceStateStep(batch, {0: int32(256, 16)}, 512, {0: pages})
    qkv, gates, result = empty(8, width), empty(8, 64), empty(8, 4096)
    fast = replace(states, batch_invariant=False)
    parts = rule_parts(rule, states)
    if not complete:
        fast = replace(fast, batch=replace(batch, max_query_len=1))
    return [
        lambda: short_convolution(convolution, qkv, empty(8, width), states),
        lambda: gated_delta_rule(rule, qkv, gates, result, states),
        lambda: gated_delta_rule(rule, qkv, gates, result, fast),
        lambda: prompt_rule(rule, (qkv, gates, result, float32(8, 32)), parts, fast),
        lambda: gated_norm(GatedNormWeights(128, empty(128), 1e-6), result, result),
    ]


def attention_calls(capability: int) -> Calls:
    """A chunk of 512 tokens beside single ones: the split and the varlen kernel. Batch-invariant, too, and with wide
    heads, a window and a soft cap on the newer card."""
    float8 = torch.float8_e4m3fn if capability >= 89 else torch.uint8
    plain = [
        attention_call(QWEN3_8B, capability, 512),
        attention_call(replace(QWEN3_8B, cache_scale=CacheScale(0.5, 2.0)), capability, 512, page_dtype=float8),
        latent_call(capability, 1, page_dtype=float8),
    ]
    if capability < 90:
        return plain
    return [
        *plain,
        attention_call(QWEN3_8B, capability, 512, longest=1024),
        attention_call(QWEN3_8B, capability, 512, fixed=True),
        attention_call(WIDE_HEADS, capability, 512),
        latent_call(capability, 512),
        latent_call(capability, 512, fixed=True),
        latent_call(capability, 512, top=2048),
    ]


def all_attention_calls(capability: int) -> Calls:
    """Every kind of tiles of Qwen3-8B's heads, which those of Llama 3 8B are too: prompts of one tile, of the middle
    one and of whole ones, and decoding, in both modes, over short contexts and long ones."""
    lengths = (1, 5, 17, 512)
    return [
        attention_call(QWEN3_8B, capability, length, fixed=fixed, longest=longest)
        for length in lengths
        for fixed in (False, True)
        for longest in (1024, 8192)
    ]


def calls_of(capability: int, words: Sequence[str]) -> Calls:
    """words: of the command line."""
    complete = "cache" in words
    if "words" in words:
        return word_calls()
    if "rows" in words:
        return row_calls()
    if "states" in words:
        return state_calls(complete=complete)
    if "adapters" in words:
        return adapter_calls()
    if "routing" in words:
        return routing_calls()
    if "towers" in words:
        return tower_calls(capability)
    if "sweep" in words:
        products = ProductSweep(QWEN3_8B_SHAPE, torch.device("cpu"), empty=True)
        sweeps = attention_sweep, expert_sweep, delta_sweep
        return [*products.calls(), *chain.from_iterable(sweep.dry_calls() for sweep in sweeps)]
    if "experts" in words:
        return list(expert_sweep.dry_calls())
    if "delta" in words:
        return list(delta_sweep.dry_calls())
    if "index" in words:
        return [latent_call(capability, 512, top=2048)]
    calls = product_calls() + quantized_calls(capability, complete=complete) + attention_calls(capability)
    if "products" not in words:
        calls += layer_calls() + adapter_calls() + row_calls() + routing_calls() + sampling_calls()
        calls += state_calls(complete=complete)
    if complete:
        calls += all_attention_calls(capability)
        calls.append(latent_call(capability, 1))
        calls += float8_layer_calls() if capability >= 89 else []
    return calls


def main() -> None:
    capability, words = int(sys.argv[1]), sys.argv[2:]
    named = dict(word.split("=", 1) for word in words if "=" in word)
    device = LaunchingGPU(capability)
    driver.set_active(device)
    with ExitStack() as stack:
        if "cache" in words:
            envs.keep_triton_cache()
            knobs.compilation.store_binary_only = True
            python = Python.of(named.get("for", sys.executable))
            if "for" in named:
                libtriton = named.get("libtriton") or python.fetch_libtriton(ROOT / "build" / "triton")
                stack.enter_context(keys_of(Path(libtriton)))
            stack.enter_context(stored_for(python))
            device.launcher_cls = StoringLauncher
        stack.enter_context(recorded_launches(CompilingRecorder()))
        for call in calls_of(capability, words):
            call()


if __name__ == "__main__":
    main()
