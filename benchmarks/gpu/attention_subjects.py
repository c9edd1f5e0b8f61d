"""Attention over paged memory: decode and prompts against their limits, and beside memory that lies in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.attention_peers import peers
from benchmarks.gpu.limits import Work
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.subjects import BLOCK_SIZE, Build, Subject
from benchmarks.gpu.timing import Call
from quire.attention.device_batch import DeviceBatch
from quire.attention.interface import LayerAttention
from quire.attention.triton_backend import TritonAttention, TritonAttentionStep
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kernels.triton.rotary import rotation_angles
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec
from quire.layers.device_cache import DeviceRotation
from quire.layers.operations import HeadWeights, NormWeights


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


LARGER_BLOCKS = (64, 128)
"""Block sizes to compare with the default: longer runs of memory, fewer table entries."""
PLANNED_LEN = 40960
"""Qwen3-8B's context. Full CUDA graphs plan their splits for the longest sequence that the engine allows."""
RAGGED = (32768, *[512] * 15)
"""Lengths of a decode batch that one sequence dominates."""
DECODES = (Batch(256, 1, 1024), Batch(256, 1, 2048), Batch(32, 1, 8192), Batch(8, 1, 32768), Batch(1, 1, 8192))
PROMPTS = (Batch(1, 8192, 8192), Batch(4, 2048, 2048), Batch(1, 2048, 16384), Batch(8, 1024, 1024))


class AttentionSubjects:
    """Over one layer of a shape. scale: divides lengths and numbers of sequences, for trying things out."""

    def __init__(self, shape: Shape, device: torch.device, scale: int = 1) -> None:
        self.shape = shape
        self.device = device
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        self._scale = scale

    def all(self) -> Iterator[Subject]:
        for kernel, batches in (("decode attention", DECODES), ("prefill attention", PROMPTS)):
            for batch in map(self.scaled, batches):
                yield Subject(kernel, batch.name, self.work(batch), self._variants(batch))
        yield self.ragged()

    def _variants(self, batch: Batch) -> dict[str, Build]:
        # "contiguous", one block a sequence: the same kernel over keys and values in one piece.
        sizes = {"triton": BLOCK_SIZE, "contiguous": padded(batch.length)}
        sizes |= {f"block size {size}": size for size in LARGER_BLOCKS}
        variants: dict[str, Build] = {name: partial(self.paged, batch, size) for name, size in sizes.items()}
        if batch.num_new == 1:
            planned = max(batch.length, PLANNED_LEN // self._scale)
            variants["planned for 40,960"] = partial(self.paged, batch, BLOCK_SIZE, planned)
        return variants | {"torch, contiguous": partial(self.torch_contiguous, batch)} | self._peers(batch)

    def ragged(self) -> Subject:
        """A decode step of one long sequence and many short ones."""
        lengths = [max(2, length // self._scale) for length in RAGGED]
        padded_batch = Batch(len(lengths), 1, max(lengths))
        work = self.work(Batch(1, 1, sum(lengths)))
        return Subject(
            "ragged decode attention",
            "1 x 32768 and 15 x 512 tokens",
            work,
            {"triton": partial(self.paged, padded_batch, BLOCK_SIZE, padded_batch.length, lengths)},
        )

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

    def paged(
        self, batch: Batch, block_size: int, planned_len: int | None = None, lengths: list[int] | None = None
    ) -> Call:
        """One layer of the engine: head norms, rotation, the write and attention, over blocks scattered at random.
        planned_len, lengths: as in `prepare`."""
        case = self.prepare(batch, block_size, planned_len, lengths)
        half = self.shape.head_dim // 2
        frequencies = (1e6 ** -(torch.arange(half) / half)).to(self.device)
        rotation = DeviceRotation(*rotation_angles(case.positions, frequencies, 1.0))
        return lambda: case.step.attend(case.heads, case.qkv, rotation, None)

    def prepare(
        self, batch: Batch, block_size: int, planned_len: int | None = None, lengths: list[int] | None = None
    ) -> Prepared:
        """Random pages, and everything that one layer's attention over them takes. planned_len: the longest sequence
        that splits are planned for (that of the batch). lengths: of sequences that are shorter than the batch says."""
        shape = self.shape
        tables, num_blocks = scattered_tables(batch, block_size, self.device)
        spec = AttentionSpec(shape.num_kv_heads, shape.head_dim, shape.head_dim, shape.itemsize)
        groups, layers_per_group = group_layers([spec], block_size)
        layout = KVCacheLayout(block_size, num_blocks, groups, layers_per_group)
        pages = self._random(num_blocks, 2, block_size, shape.num_kv_heads, shape.head_dim)
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
        if lengths is not None:
            described = shortened(described, lengths, tables, block_size)
        qkv = self._random(described.num_tokens, shape.qkv_width)
        return Prepared(pages, backend.plan(described), self._heads(), qkv, described.positions)

    def torch_contiguous(self, batch: Batch) -> Call:
        """torch's attention over keys and values in one piece, heads first: no pages, no writes, no rotation."""
        shape = self.shape
        query = self._random(batch.num_seqs, shape.num_heads, batch.num_new, shape.head_dim)
        key, value = (self._random(batch.num_seqs, shape.num_kv_heads, batch.length, shape.head_dim) for _ in range(2))
        if batch.num_new == 1:
            return lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        if batch.num_new == batch.length:
            return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        positions = torch.arange(batch.length, device=self.device)
        seen = positions <= (batch.length - batch.num_new + positions[: batch.num_new])[:, None]
        return lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)

    def _peers(self, batch: Batch) -> dict[str, Build]:
        return {name: partial(peer, batch, self.shape, self.device) for name, peer in peers(self.device).items()}

    def _heads(self) -> HeadWeights:
        shape = self.shape
        layer = LayerAttention(0, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5)
        query, key = (
            NormWeights(shape.head_dim, self._random(shape.head_dim), None, 1e-6, centred=False) for _ in range(2)
        )
        return HeadWeights(layer, query, key)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


def padded(length: int) -> int:
    """The block size that keeps a sequence in one block: the power of two that is not shorter."""
    return max(16, 1 << (length - 1).bit_length())


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
        positions=positions,
        slot_mapping=(slots,),
        block_tables=(tables,),
    )


def shortened(batch: DeviceBatch, lengths: list[int], tables: torch.Tensor, block_size: int) -> DeviceBatch:
    """The decode step of sequences of these lengths, over the first blocks of each table row."""
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=tables.device)
    positions = seq_lens.long() - 1
    rows = torch.arange(len(lengths), device=tables.device)
    slots = tables[rows, positions // block_size].long() * block_size + positions % block_size
    return replace(batch, seq_lens=seq_lens, positions=positions, slot_mapping=(slots,))


def device_limits(device: torch.device) -> DeviceLimits:
    if device.type != "cuda":
        return DeviceLimits()
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits((properties.major, properties.minor), properties.multi_processor_count)
