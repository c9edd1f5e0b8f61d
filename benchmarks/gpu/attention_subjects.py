"""Attention over paged memory: decodes and prompts against their limits, beside FlashAttention 3 where it is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch

from benchmarks.gpu.limits import Work
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.subjects import Build, Subject
from benchmarks.gpu.timing import Call
from quire.attention.device_batch import DeviceBatch
from quire.attention.triton_backend import TritonAttention, TritonAttentionStep
from quire.kernels.arguments import HeadWeights, LayerAttention, NormWeights
from quire.kernels.rotation import DeviceRotation
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kernels.triton.rotary import rotation_angles
from quire.kernels.triton.runtime import INTERPRETED
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Batch:
    """num_seqs sequences that each compute `num_new` tokens and are `length` tokens long then."""

    num_seqs: int
    num_new: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.num_seqs} x {self.num_new} of {self.length} tokens"


@dataclass(frozen=True, slots=True)
class Prepared:
    """pages: [num_blocks, 2, block_size, num_kv_heads, head_dim]. qkv: of the new tokens, used up by the step.
    positions: of the new tokens."""

    pages: torch.Tensor
    step: TritonAttentionStep
    heads: HeadWeights
    qkv: torch.Tensor
    positions: torch.Tensor


BLOCK_SIZE = 16
PLANNED_LEN = 40960
"""Qwen3-8B's context. Full CUDA graphs plan their splits for the longest sequence that the engine allows."""
DECODES = (Batch(256, 1, 1024), Batch(32, 1, 8192), Batch(1, 1, 8192))
PROMPTS = (Batch(1, 8192, 8192), Batch(8, 1024, 1024), Batch(1, 2048, 16384))
PEER = "FlashAttention 3, paged"


class AttentionSubjects:
    """Over one layer of a shape. scale: divides lengths and numbers of sequences, for trying things out."""

    def __init__(self, shape: Shape, device: torch.device, scale: int = 1) -> None:
        self.shape = shape
        self.device = device
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        self._scale = scale

    def all(self) -> Iterator[Subject]:
        for kernel, batches in (("decode attention", DECODES), ("prompt attention", PROMPTS)):
            for batch in map(self.scaled, batches):
                yield Subject(kernel, batch.name, self.work(batch), self._variants(batch))

    def _variants(self, batch: Batch) -> dict[str, Build]:
        variants: dict[str, Build] = {"quire": partial(self.paged, batch)}
        if batch.num_new == 1:
            planned = max(batch.length, PLANNED_LEN // self._scale)
            variants["planned for 40,960"] = partial(self.paged, batch, planned)
        if self.device.type == "cuda" and find_spec("flash_attn_interface") is not None:
            variants[PEER] = partial(self.flash_attention, batch)
        return variants

    def scaled(self, batch: Batch) -> Batch:
        """Smaller by `scale`, with at least two sequences of two tokens where there were more."""
        if self._scale == 1:
            return batch
        length = max(2, batch.length // self._scale)
        new = 1 if batch.num_new == 1 else max(2, min(length, batch.num_new // self._scale))
        return Batch(max(min(2, batch.num_seqs), batch.num_seqs // self._scale), new, length)

    def work(self, batch: Batch) -> Work:
        """One layer: keys and values of all tokens are read once, those of the new ones written, queries read and
        results written; each new token meets those before it and itself."""
        shape, new = self.shape, batch.num_seqs * batch.num_new
        moved = new * (shape.qkv_width + shape.num_heads * shape.head_dim) * shape.itemsize
        met = batch.num_seqs * batch.num_new * (batch.length - (batch.num_new - 1) / 2)
        return Work(
            moved + (batch.num_seqs * batch.length + new) * shape.kv_bytes,
            4.0 * met * shape.num_heads * shape.head_dim,
        )

    def paged(self, batch: Batch, planned_len: int | None = None, page_dtype: torch.dtype | None = None) -> Call:
        """One layer of the engine: head norms, rotation, the write and attention, over blocks scattered at random.
        planned_len, page_dtype: as in `prepare`."""
        case = self.prepare(batch, BLOCK_SIZE, planned_len, page_dtype)
        half = self.shape.head_dim // 2
        frequencies = (1e6 ** -(torch.arange(half) / half)).to(self.device)
        rotation = DeviceRotation(*rotation_angles(case.positions, frequencies, 1.0))
        return lambda: case.step.attend(case.heads, case.qkv, rotation, None)

    def prepare(
        self,
        batch: Batch,
        block_size: int,
        planned_len: int | None = None,
        page_dtype: torch.dtype | None = None,
    ) -> Prepared:
        """Random pages, and everything that one layer's attention over them takes. planned_len: the longest sequence
        that splits are planned for (that of the batch). page_dtype: of keys and values (the model's)."""
        shape = self.shape
        tables, num_blocks = scattered_tables(batch, block_size, self.device)
        page_dtype = page_dtype or self.dtype
        spec = AttentionSpec(shape.num_kv_heads, shape.head_dim, shape.head_dim, page_dtype.itemsize)
        groups, layers_per_group = group_layers([spec], block_size)
        layout = KVCacheLayout(block_size, num_blocks, groups, layers_per_group)
        pages = self._random(num_blocks, 2, block_size, shape.num_kv_heads, shape.head_dim).to(page_dtype)
        if INTERPRETED and page_dtype.itemsize == 1:
            pages = pages.view(torch.uint8)
        backend = TritonAttention(
            layout,
            {0: pages},
            device_limits(self.device),
            num_heads=shape.num_heads,
            dtype=self.dtype,
            max_num_seqs=batch.num_seqs,
            max_model_len=planned_len or batch.length,
        )
        described = device_batch(batch, tables, block_size, self.device)
        if planned_len is not None:
            described = replace(described, max_seq_len=planned_len)
        qkv = self._random(described.num_tokens, shape.qkv_width)
        return Prepared(pages, backend.plan(described), self._heads(), qkv, described.slot_positions)

    def flash_attention(self, batch: Batch) -> Call:
        """FlashAttention 3 over scattered pages of our shape: keys and values are strided views of them. Without head
        norms, rotation and the write, which ours has in it."""
        from flash_attn_interface import flash_attn_with_kvcache

        shape = self.shape
        tables, num_blocks = scattered_tables(batch, BLOCK_SIZE, self.device)
        pages = self._random(num_blocks, 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        starts = torch.arange(batch.num_seqs + 1, dtype=torch.int32, device=self.device)
        return partial(
            flash_attn_with_kvcache,
            self._random(batch.num_seqs * batch.num_new, shape.num_heads, shape.head_dim),
            pages[:, 0],
            pages[:, 1],
            cache_seqlens=torch.full((batch.num_seqs,), batch.length, dtype=torch.int32, device=self.device),
            page_table=tables,
            cu_seqlens_q=starts * batch.num_new,
            max_seqlen_q=batch.num_new,
            causal=True,
        )

    def _heads(self) -> HeadWeights:
        shape = self.shape
        layer = LayerAttention(0, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5)
        query, key = (
            NormWeights(shape.head_dim, self._random(shape.head_dim), None, 1e-6, centred=False) for _ in range(2)
        )
        return HeadWeights(layer, query, key)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


def scattered_tables(batch: Batch, block_size: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Block tables [num_seqs, blocks of a sequence] int32 over distinct blocks in random order, and how many blocks the
    pool has. Block 0 belongs to no sequence."""
    blocks = -(-batch.length // block_size)
    total = batch.num_seqs * blocks
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)) + 1
    return order.to(torch.int32).view(batch.num_seqs, blocks).to(device), total + 1


def device_batch(batch: Batch, tables: torch.Tensor, block_size: int, device: torch.device) -> DeviceBatch:
    """The step in which every sequence computes its last `num_new` tokens."""
    start = batch.length - batch.num_new
    positions = torch.arange(start, batch.length, device=device).repeat(batch.num_seqs)
    sequence = torch.arange(batch.num_seqs, device=device).repeat_interleave(batch.num_new)
    slots = tables[sequence, positions // block_size].long() * block_size + positions % block_size
    return DeviceBatch(
        num_seqs=batch.num_seqs,
        num_tokens=batch.num_seqs * batch.num_new,
        max_query_len=batch.num_new,
        max_seq_len=batch.length,
        rows=torch.arange(batch.num_seqs, dtype=torch.int32, device=device),
        query_start=torch.arange(batch.num_seqs + 1, dtype=torch.int32, device=device) * batch.num_new,
        seq_lens=torch.full((batch.num_seqs,), batch.length, dtype=torch.int32, device=device),
        slot_positions=positions,
        slot_mapping=(slots,),
        block_tables=(tables,),
    )


def device_limits(device: torch.device) -> DeviceLimits:
    if device.type != "cuda":
        return DeviceLimits()
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits((properties.major, properties.minor), properties.multi_processor_count)
