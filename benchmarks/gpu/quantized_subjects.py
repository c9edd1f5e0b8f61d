"""Products with quantised weights, experts and latent attention: fewer bytes for the same operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.attention_subjects import Batch, device_batch, scattered_tables
from benchmarks.gpu.limits import Work
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.subjects import BLOCK_SIZE, Subject
from benchmarks.gpu.timing import Call
from quire.attention.latent import LatentShape
from quire.attention.triton_backend import TritonAttention
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kernels.triton.experts import ExpertMatrices, apply_experts
from quire.kernels.triton.matmul import matmul
from quire.kernels.triton.runtime import INTERPRETED
from quire.kernels.triton.weight_formats import E4M3, I4, I8, MXFP4, PAIRED, StoredMatrix
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import LatentSpec

PRODUCT_ROWS = (1, 64, 256, 8192)
EXPERT_ROWS = (1, 64, 256)
"""Rows of each expert, on average."""
BLOCK = 128
"""Columns that share a scale of e4m3 numbers."""
GROUP = 32
"""Of four bits."""
FORMATS = (("fp8", E4M3.value, 8), ("int8", I8.value, 8), ("int4", I4.value, 4), ("mxfp4", MXFP4.value, 4))
"""Names, kinds and bits of a weight."""
DECODES = (Batch(64, 1, 4096), Batch(8, 1, 32768))


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer of experts: sizes of each, how many there are, how many a token passes."""

    size: int
    intermediate: int
    num_experts: int
    top_k: int


QWEN3_30B_A3B = Mixture(2048, 768, 128, 8)
TINY_MIXTURE = Mixture(64, 32, 4, 2)
DEEPSEEK_V3 = LatentShape(0, 128, 512, 64, 0.1)
TINY_LATENT = LatentShape(0, 2, 32, 16, 0.1)


class QuantizedSubjects:
    """Over a matrix of a shape, a mixture and latents. scale: divides numbers of tokens; if not 1, sizes are tiny."""

    def __init__(self, shape: Shape, device: torch.device, scale: int = 1) -> None:
        self._shape = shape
        self._device = device
        self._scale = scale
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._mixture, self._latent = (QWEN3_30B_A3B, DEEPSEEK_V3) if scale == 1 else (TINY_MIXTURE, TINY_LATENT)

    def all(self) -> Iterator[Subject]:
        yield from self.products()
        yield from self.experts()
        yield from self.latents()

    def products(self) -> Iterator[Subject]:
        """The gate and up matrix. The limit counts operations at the peak of bfloat16, which products of 8-bit numbers
        exceed. With rounded activations int8 is w8a8, int4 w4a8."""
        n, k = 2 * self._shape.intermediate, self._shape.hidden
        for count in PRODUCT_ROWS:
            t = max(1, count // self._scale)
            for name, kind, bits in FORMATS:
                work = Work(n * k * bits / 8 + t * (n + k) * self._shape.itemsize, 2.0 * t * n * k)
                variants = {"triton": partial(self._product, t, n, k, kind, False)}
                if kind != MXFP4.value:
                    variants["rounded activations"] = partial(self._product, t, n, k, kind, True)
                yield Subject(f"{name} product gate_up", f"{count} tokens", work, variants)

    def _product(self, t: int, n: int, k: int, kind: int, rounds: bool) -> Call:
        x, matrix = self._random(t, k), self._stored(kind, 1, n, k)
        return lambda: matmul(x, matrix, rounds_activations=rounds)

    def experts(self) -> Iterator[Subject]:
        """Gate, up and down of all experts, each with as many rows as another. Integers as w8a8 and w4a8 alone."""
        mixture = self._mixture
        for rows in EXPERT_ROWS:
            pairs = max(1, rows // self._scale) * mixture.num_experts
            weights = 3 * mixture.num_experts * mixture.size * mixture.intermediate
            moved = pairs * (mixture.size + 2 * mixture.intermediate) * self._shape.itemsize + 4 * pairs * mixture.size
            operations = 6.0 * pairs * mixture.size * mixture.intermediate
            for name, kind, bits in (("bf16", None, 16), *FORMATS):
                variants = {}
                if kind not in (I8.value, I4.value):
                    variants["triton"] = partial(self._experts, pairs, kind, False)
                if kind not in (None, MXFP4.value):
                    variants["rounded activations"] = partial(self._experts, pairs, kind, True)
                work = Work(weights * bits / 8 + moved, operations)
                yield Subject(f"{name} experts", f"{rows} rows an expert", work, variants)

    def _experts(self, pairs: int, kind: int | None, rounds: bool) -> Call:
        mixture = self._mixture
        num_rows = pairs // mixture.top_k
        shapes = (2 * mixture.intermediate, mixture.size), (mixture.size, mixture.intermediate)
        if kind is None:
            stored = [StoredMatrix.plain(self._random(mixture.num_experts, *shape)) for shape in shapes]
        else:
            stored = [self._stored(kind, mixture.num_experts, *shape) for shape in shapes]
        x = self._random(num_rows, mixture.size)
        chosen = torch.arange(pairs, device=self._device).view(num_rows, -1) % mixture.num_experts
        routing = torch.cat((chosen.sort(1).values.float(), torch.ones_like(chosen).float()), dim=1)
        matrices = ExpertMatrices(stored[0], stored[1], None, None, rounds)
        return lambda: apply_experts(matrices, x, routing, None, "silu", None, False)

    def latents(self) -> Iterator[Subject]:
        """Decodes of one layer of latent attention, the write included: each latent is read once."""
        shape = self._latent
        for batch in DECODES:
            batch = Batch(batch.num_seqs, 1, max(8, batch.length // self._scale))
            keys = batch.num_seqs * batch.length
            moved = batch.num_seqs * shape.num_heads * (2 * shape.rank + shape.rope_dim) * self._shape.itemsize
            operations = 2.0 * keys * shape.num_heads * (shape.width + shape.rank)
            for name, dtype in (("latent", self._dtype), ("fp8 latent", torch.float8_e4m3fn)):
                work = Work(keys * shape.width * dtype.itemsize + moved, operations)
                yield Subject(f"{name} attention", batch.name, work, {"triton": partial(self._attend, batch, dtype)})

    def _attend(self, batch: Batch, dtype: torch.dtype) -> Call:
        shape = self._latent
        tables, num_blocks = scattered_tables(batch, BLOCK_SIZE, self._device)
        pages = self._random(num_blocks, BLOCK_SIZE, shape.width).to(dtype)
        limits = DeviceLimits()
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            limits = DeviceLimits((properties.major, properties.minor), properties.multi_processor_count)
        backend = TritonAttention(
            KVCacheLayout(BLOCK_SIZE, num_blocks, *group_layers([LatentSpec(shape.width, dtype.itemsize)], BLOCK_SIZE)),
            {0: pages.view(torch.uint8) if dtype.itemsize == 1 and INTERPRETED else pages},
            limits,
            num_heads=shape.num_heads,
            dtype=self._dtype,
            max_num_seqs=batch.num_seqs,
            max_model_len=batch.length,
        )
        step = backend.plan(device_batch(batch, tables, BLOCK_SIZE, self._device))
        heads = shape.num_heads
        inputs = tuple(
            self._random(batch.num_seqs, width)
            for width in (heads * shape.rank, heads * shape.rope_dim, shape.rank, shape.rope_dim)
        )
        return lambda: step.attend_latent(shape, inputs, None)

    def _stored(self, kind: int, count: int, rows: int, columns: int) -> StoredMatrix:
        """Random codes. (Of MXFP4 exponents around 0.)"""
        if kind == E4M3.value:
            codes = torch.randn(count, rows, columns, device=self._device).to(torch.float8_e4m3fn)
            group_size = BLOCK if columns > BLOCK else 0
            scales = torch.ones(count, rows, -(-columns // BLOCK), device=self._device)
            return StoredMatrix(kind, columns, codes.view(torch.uint8) if INTERPRETED else codes, scales, group_size)
        if kind == I8.value:
            codes = torch.randint(-127, 128, (count, rows, columns), dtype=torch.int8, device=self._device)
            return StoredMatrix(kind, columns, codes, torch.full((count, rows, 1), 0.01, device=self._device))
        size = count, rows, -(-columns // PAIRED) * PAIRED // 2
        codes = torch.randint(256, size, dtype=torch.uint8, device=self._device)
        groups = count, rows, -(-columns // GROUP)
        if kind == MXFP4.value:
            scale_codes = torch.randint(120, 128, groups, dtype=torch.uint8, device=self._device)
            return StoredMatrix(kind, columns, codes, scale_codes, GROUP)
        scales = torch.full(groups, 0.01, device=self._device)
        return StoredMatrix(kind, columns, codes, scales, GROUP, -8 * scales)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).to(self._dtype)
