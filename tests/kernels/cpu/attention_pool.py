"""A pool of one layer that native attention is run over, step by step, and the same computed densely in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.attention.interface import AttentionBatch
from quire.kernels.arguments import LayerAttention, first_seen
from quire.kernels.cpu import _native
from quire.kernels.cpu.paged_attention import CACHE_TYPES, AttentionPlans, block_bytes
from quire.kernels.reference import paged_attention_dense
from quire.kv_cache.deal import ALL_TOKENS, Deal
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec, ChunkedSpec, SlidingWindowSpec
from quire.worker.block_tables import TableShape
from tests.kernels.cpu.linear_calls import BF16_ISAS

ISAS = [isa for isa in _native.available_isas() if isa != "amx"]
"""Those with kernels of their own for every cache: amx has some for products in bfloat16 alone."""
POOLS = {threads: _native.Pool(threads, pin=False, whole=True) for threads in (1, 2, 3, 8)}
PRODUCTS = "bfloat16 products"
"""A bfloat16 cache with queries and weights in bfloat16, among the names of caches."""
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
WAYS = [*((isa, cache) for isa in ISAS for cache in STORED), *((isa, PRODUCTS) for isa in BF16_ISAS)]
"""Instruction sets and caches, with the precisions that they have."""


@dataclass(frozen=True)
class Options:
    """What a layer may have besides its shape."""

    sinks: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    epsilon: float = 1e-6
    rotary_dim: int = 0


@dataclass
class History:
    """Queries, keys and values of one whole sequence: [n, heads, head_dim] float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, length: int, layer: LayerAttention, seed: int) -> History:
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(length, heads, layer.head_dim, generator=generator)

        return cls(draw(layer.num_heads) * 2, draw(layer.num_kv_heads) * 2, draw(layer.num_kv_heads))

    def rows(self, start: int, count: int) -> torch.Tensor:
        part = [x[start : start + count].flatten(1) for x in (self.q, self.k, self.v)]
        return torch.cat(part, dim=1)


@dataclass(frozen=True)
class Setting:
    """How the kernels run. cache: a key of STORED, or PRODUCTS. deal: of the tokens; where it is not all of them the
    output is parts (quire/attention/dealt.py)."""

    isa: str
    threads: int = 1
    cache: str = "float32"
    block_size: int = 16
    seed: int = 3
    deal: Deal = ALL_TOKENS

    @property
    def stored(self) -> str:
        return "bfloat16" if self.cache == PRODUCTS else self.cache

    @property
    def precision(self) -> _native.MatmulPrecision:
        return _native.MatmulPrecision.BFLOAT16 if self.cache == PRODUCTS else _native.MatmulPrecision.FLOAT32


class NativePool:
    """Sequences with scattered blocks. Unused memory holds NaN (0xFF bytes)."""

    def __init__(
        self, layer: LayerAttention, lengths: Sequence[int], setting: Setting, options: Options | None = None
    ) -> None:
        self.layer, self.setting, self.options = layer, setting, options or Options()
        self.images: Sequence[tuple[int, int]] = ()
        """First and last + 1 position of tokens that see one another, of every sequence."""
        size, ranks = setting.block_size, setting.deal.num_ranks
        self.entries = TableShape(size * ranks, deal=setting.deal)
        per_sequence = [self.entries.width(length) for length in lengths]
        self.num_blocks = 1 + sum(per_sequence)
        self.block_bytes = block_bytes(size, layer.num_kv_heads, layer.head_dim, setting.stored)
        self.memory = torch.full((self.num_blocks * self.block_bytes,), 0xFF, dtype=torch.uint8)
        shape = (layer.num_kv_heads, layer.head_dim, layer.head_dim, 4)
        windowed = ChunkedSpec if layer.is_chunked else SlidingWindowSpec
        full = layer.window is None
        spec = AttentionSpec(*shape, dealt_to=ranks) if full else windowed(*shape, window=layer.window)
        groups, count = group_layers([spec], size)
        layout = KVCacheLayout(size, self.num_blocks, groups, count)
        self.plans = AttentionPlans(layout, layer.num_heads // ranks, setting.threads, setting.deal)
        order = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(setting.seed)) + 1
        self.tables = [blocks.int() for blocks in order.split(per_sequence)]
        self.computed = [0] * len(lengths)
        self.max_rows = max(64, sum(lengths))
        self._program()

    def _program(self) -> None:
        layer, options = self.layer, self.options
        self.qkv_stride = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim + 16
        self.is_dealt = self.setting.deal.num_ranks > 1
        self.out_width = layer.num_heads * (layer.head_dim + self.is_dealt)
        self.out_stride = self.out_width + 3
        pool, precision = POOLS[self.setting.threads], self.setting.precision
        self.program = _native.Program(self.setting.isa, pool, self.max_rows, precision)
        constants = {
            "group": 0,
            "cache": CACHE_TYPES[self.setting.stored],
            "pages": self.memory.data_ptr(),
            "block_bytes": self.block_bytes,
            "num_blocks": self.num_blocks,
            "block_size": self.setting.block_size,
            "num_heads": layer.num_heads,
            "num_kv_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim,
            "scale": layer.stored_scale,
            "key_scale": layer.cache_scale.key,
            "value_scale": layer.cache_scale.value,
            "soft_cap": layer.soft_cap or 0.0,
            "window": layer.window or 0,
            "chunked": layer.is_chunked,
            "sinks": _address(options.sinks),
            "query_norm": _address(options.query_norm),
            "key_norm": _address(options.key_norm),
            "norm_epsilon": options.epsilon,
            "rotary_dim": options.rotary_dim,
            "rotation": _native.Ref(2, 0, max(16, options.rotary_dim)),
            "qkv": _native.Ref(0, 0, self.qkv_stride),
        }
        out = _native.Ref(1, 0, self.out_stride)
        if self.is_dealt:
            self.program.attention(**constants, out=_native.Ref(), query_heads=layer.num_heads)
            self.program.attention(**constants, out=out, writes=False, parts=True)
        else:
            self.program.attention(**constants, out=out)
        self.scratch = torch.empty(self.program.scratch_bytes + 64, dtype=torch.uint8)

    def batch(self, work: Sequence[tuple[int, int]]) -> AttentionBatch:
        """work: (sequence, new tokens)."""
        counts = torch.tensor([count for _, count in work])
        starts = torch.tensor([self.computed[sequence] for sequence, _ in work])
        table = torch.nn.utils.rnn.pad_sequence([self.tables[sequence] for sequence, _ in work], batch_first=True)
        index = torch.repeat_interleave(torch.arange(len(work)), counts)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        slots = torch.from_numpy(self.entries.slots(table.numpy(), index.numpy(), positions.numpy()))
        query_start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        last_seen = self.last_seen(positions) if self.images else None
        return AttentionBatch(query_start, starts, positions, index, (table,), (slots,), last_seen=last_seen)

    def last_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """[T]: the last position that a token at each of these sees."""
        last = positions.clone()
        for start, end in self.images:
            last[(positions >= start) & (positions < end)] = end - 1
        return last

    def run(self, batch: AttentionBatch, rows: torch.Tensor) -> torch.Tensor:
        """rows: [T, (num_heads + 2 num_kv_heads) * head_dim]. Returns [T, num_heads, head_dim]; parts are [T, num_heads
        * (head_dim + 1)]."""
        layer, count = self.layer, len(rows)
        qkv = torch.full((count, self.qkv_stride), float("nan"))
        qkv[:, : rows.shape[1]] = rows
        out = torch.full((count, self.out_stride), float("nan"))
        rotation = rotations(batch.slot_positions, self.options.rotary_dim)
        areas = [qkv.data_ptr(), out.data_ptr(), rotation.data_ptr()]
        plans = self.plans.set(batch)
        columns, scratch = [0, batch.slot_positions.data_ptr()], -(-self.scratch.data_ptr() // 64) * 64
        self.program.bind(count, columns, plans, areas, scratch)()
        width = self.out_width
        assert out[:, width:].isnan().all(), "written beyond a row"
        return out[:, :width] if self.is_dealt else out[:, :width].reshape(count, layer.num_heads, layer.head_dim)

    def step(self, histories: Sequence[History], work: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        rows = torch.cat([histories[s].rows(self.computed[s], n) for s, n in work])
        out = self.run(self.batch(work), rows)
        for sequence, count in work:
            self.computed[sequence] += count
        return list(out.split([count for _, count in work]))

    def whole(self, history: History, chunk: int = 1 << 20) -> torch.Tensor:
        """Sequence 0 from its first token to its last, `chunk` tokens a step."""
        parts = []
        while left := len(history.q) - self.computed[0]:
            parts += self.step([history], [(0, min(chunk, left))])
        return torch.cat(parts)

    def stored(self) -> torch.Tensor:
        """What the blocks hold, by the layout that csrc/attention.h describes: [num_blocks, 2, block_size,
        num_kv_heads, head_dim] float64."""
        layer, size = self.layer, self.setting.block_size
        heads, depth, width = layer.num_kv_heads, layer.head_dim, min(16, size)
        element = STORED[self.setting.stored]
        shares = self.memory.view(self.num_blocks, heads, -1)
        scale_bytes = 8 * size if element == torch.int8 else 0
        elements = shares[:, :, scale_bytes:].contiguous().view(element).double().view(self.num_blocks, heads, 2, -1)
        packed = 4 // element.itemsize
        shape = (self.num_blocks, heads, size, depth)
        keys = elements[:, :, 0].view(self.num_blocks, heads, size // width, depth // packed, width, packed)
        shared = min(packed, size)
        values = elements[:, :, 1].view(self.num_blocks, heads, size // shared, depth, shared)
        both = torch.stack((keys.transpose(3, 4).reshape(shape), values.transpose(3, 4).reshape(shape)), dim=1)
        if scale_bytes:
            scales = shares[:, :, :scale_bytes].contiguous().view(torch.float32).double()
            both = both * scales.view(self.num_blocks, heads, 2, size, 1).transpose(1, 2)
        return both.transpose(2, 3)

    def check(self, out: torch.Tensor, sequence: int, query: torch.Tensor, start: int, precision: float) -> None:
        """Compare with dense attention over what the blocks hold now, in float64. query: [n, num_heads, head_dim],
        normed and rotated. precision: the largest difference that float32 explains."""
        pages = self.stored()
        allowed: torch.Tensor | float = precision
        if self.setting.cache == PRODUCTS:
            # Queries are rounded before they are multiplied, weights by half a unit of 8 digits each.
            query = (query.float() * self.layer.scale).bfloat16().double() / self.layer.scale
            pages[:, 1].abs_()
            allowed = precision + self._dense(pages, sequence, query, start) / 256
            pages = self.stored()
        difference = (out.double() - self._dense(pages, sequence, query, start)).abs()
        assert (difference <= allowed).all(), float((difference / allowed).max())

    def _dense(self, pages: torch.Tensor, sequence: int, query: torch.Tensor, start: int) -> torch.Tensor:
        length = start + len(query)
        table = self.tables[sequence][: -(-length // self.setting.block_size)]
        if self.options.sinks is None:
            last_seen = self.last_seen(torch.arange(start, length))
            return paged_attention_dense(pages, table, query.double(), start, self.layer, last_seen)
        # A sink is a key whose score is given and whose value is zero: one more dimension gives it that score.
        layer, sinks = self.layer, self.options.sinks.double()
        positions = torch.arange(length)
        blocks = table.long()[positions // self.setting.block_size]
        kept = pages[blocks, :, positions % self.setting.block_size].repeat_interleave(
            layer.num_heads // layer.num_kv_heads, dim=2
        )
        scores = torch.einsum("nhd,lhd->hnl", query.double(), kept[:, 0]) * layer.stored_scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        own = start + torch.arange(len(query))
        hidden = positions > own[:, None]
        if layer.window is not None:
            hidden |= positions < first_seen(own, layer.window, is_chunked=layer.is_chunked)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        with_sink = torch.cat((scores, sinks[:, None, None].expand(-1, len(query), 1)), dim=-1)
        return torch.einsum("hnl,lhd->nhd", torch.softmax(with_sink, dim=-1)[..., :-1], kept[:, 1]) * (
            layer.cache_scale.value
        )


def rotations(positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """[T, max(16, rotary_dim)] float32: cosines, then sines."""
    half = rotary_dim // 2
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(half) / max(1, half))
    out = torch.zeros(len(positions), max(16, rotary_dim))
    out[:, :half], out[:, half : 2 * half] = angles.cos(), angles.sin()
    return out


def narrower(layer: LayerAttention, window: int | None) -> LayerAttention:
    return replace(layer, window=window)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
