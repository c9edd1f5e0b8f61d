"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): projections around attention over latents. The cache
holds one compressed vector and one rotated key per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from quire.attention.interface import AttentionStep
from quire.config.model import CACHE_DTYPE_BYTES, CACHE_SCALE_BYTES
from quire.errors import ConfigError
from quire.kernels.arguments import LatentExpansion, LatentShape
from quire.kernels.rotation import RotationTable
from quire.kernels.value import ReadRows, Value
from quire.kv_cache.spec import LatentSpec
from quire.layers.adapters import split_place
from quire.layers.context import LayerContext, WeightSlot, WeightSlots, prefixed
from quire.layers.head_adapters import ExpansionPlace, HeadAdapters
from quire.layers.latent_index import IndexHeads, LatentIndexer
from quire.layers.linear import LocalRows, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.quantization.file_tensor import FileTensor
from quire.quantization.integer_weight import WeightSource
from quire.quantization.interface import LinearShape

NORM_EPSILON = 1e-6
"""Epsilon of the norms over compressed vectors in every model."""
EXPANDED_HEADS = 16
"""Heads whose latents are expanded together, a bound of scratch memory."""


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Latent heads of a layer, over all ranks. rank: size of compressed keys and values. nope_dim, rope_dim: unrotated
    and rotated elements of a head's query. value_dim: size of a head's result. query_rank: size of compressed queries
    (None: uncompressed). scale: factor of scores. bias: projections have biases, except of uncompressed queries.
    interleaved: the checkpoint stores rotated pairs side by side. expansion_apart: expansion matrices per head,
    transposed for keys (GGUF)."""

    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None
    scale: float
    bias: bool
    interleaved: bool
    expansion_apart: bool = False


class LatentAttention:
    """Latent attention with heads shared by the ranks; latents are whole on each. index: an indexer chooses the
    keys that tokens read (None: all). Tensor names are DeepSeek's. Raises ConfigError for unsupported latents and for
    heads that ranks cannot share."""

    def __init__(
        self,
        hidden_size: int,
        layer: int,
        heads: LatentHeads,
        context: LayerContext,
        index: IndexHeads | None = None,
        *,
        expands_prompts: bool = False,
    ) -> None:
        ranks = context.group.size
        if heads.num_heads % ranks:
            raise ConfigError(
                f"tensor_parallel_size={ranks} is not possible for this model: it has {heads.num_heads} heads",
                param="tensor_parallel_size",
            )
        self._heads = heads
        self._context = context
        self._num_local = num_local = heads.num_heads // ranks
        top = 0 if index is None else index.top
        self._shape = LatentShape(layer, num_local, heads.rank, heads.rope_dim, heads.scale, top)
        context.operations.check_latent(self._shape)
        self._compress_query: LocalRows | None = None
        self._query_norm: RMSNorm | None = None
        query_size = hidden_size
        if heads.query_rank is not None:
            query_size = heads.query_rank
            self._compress_query = LocalRows(hidden_size, query_size, context, bias=heads.bias)
            self._query_norm = RMSNorm(query_size, NORM_EPSILON, context)
        self._indexer: LatentIndexer | None = None
        if index is not None:
            self._indexer = LatentIndexer(hidden_size, query_size, layer, self._shape.width, index, context)
        self._query_size = query_size
        self._hidden_size = hidden_size
        self._query = LocalRows(query_size, num_local * heads.nope_dim, context)
        self._turned_query = LocalRows(query_size, num_local * heads.rope_dim, context)
        self._compress = LocalRows(hidden_size, heads.rank, context, bias=heads.bias)
        self._norm = RMSNorm(heads.rank, NORM_EPSILON, context)
        self._turned_key = LocalRows(hidden_size, heads.rope_dim, context, bias=heads.bias)
        self._absorb = _HeadMatrices(heads.nope_dim, heads.rank, num_local, context)
        self._expand = _HeadMatrices(heads.rank, heads.value_dim, num_local, context)
        self._expanded: ExpandedHeads | None = None
        if expands_prompts:
            self._expanded = ExpandedHeads(heads.rank, heads.nope_dim, heads.value_dim, num_local, context)
            self._expansion = LatentExpansion(
                heads.nope_dim, heads.value_dim, EXPANDED_HEADS, self._absorb, self._expand, self._expanded.parts
            )
        attended = heads.num_heads * heads.value_dim
        self._output = RowParallelLinear(attended, hidden_size, bias=heads.bias, context=context)

    def __call__(
        self,
        x: Value,
        residual: Value,
        rotation: RotationTable | None,
        step: AttentionStep,
        rows: ReadRows | None = None,
    ) -> Value:
        """[T, hidden_size] -> [T, hidden_size], or the read rows; the residual is overwritten."""
        operations = self._context.operations
        queries = x
        if self._compress_query is not None and self._query_norm is not None:
            queries = self._query_norm(self._compress_query(x))
        selected = None if self._indexer is None else self._indexer(x, queries, rotation, step)
        query = self._query(queries)
        rest = self._turned_query(queries), self._norm(self._compress(x)), self._turned_key(x)
        if self._expanded is None:
            inputs = (self._absorb(query), *rest)
            attended = step.attend_latent(self._shape, inputs, rotation, selected)
        else:
            attended = step.attend_expanded(self._shape, self._expansion, (query, *rest), rotation)
        if rows is not None:
            attended = operations.gather_rows(attended, rows)
            residual = operations.gather_rows(residual, rows)
        return self._output(self._expand(attended) if self._expanded is None else attended, residual)

    def cache_spec(self) -> LatentSpec:
        """KV-cache spec of the layer."""
        dtype = self._context.cache_dtype
        sizes = self._shape.width, CACHE_DTYPE_BYTES[dtype], CACHE_SCALE_BYTES.get(dtype, 0)
        index = (0, 0) if self._indexer is None else (self._indexer.shape.dim, self._indexer.shape.top)
        return LatentSpec(*sizes, *index, dealt_to=self._context.dealt_to)

    def slots(self) -> WeightSlots:
        heads = self._heads
        query = heads.num_heads * (heads.nope_dim + heads.rope_dim)
        compressed = heads.rank + heads.rope_dim
        slots = {
            **self._split_slots("kv_a_proj_with_mqa", compressed, self._load_compressed, bias=heads.bias),
            **prefixed("kv_a_layernorm", self._norm.slots()),
            **self._expansion_slots(),
            **self._output.slots("o_proj"),
            **({} if self._indexer is None else prefixed("indexer", self._indexer.slots())),
        }
        places = self._query.place(), self._turned_query.place()
        queries = WeightSlot(
            (query, self._query_size),
            self._load_queries,
            self._query.nbytes + self._turned_query.nbytes,
            adapter=split_place(query, places, self._query_rows()),
        )
        if self._compress_query is None or self._query_norm is None:
            return {**slots, "q_proj.weight": queries}
        return {
            **slots,
            "q_b_proj.weight": queries,
            **self._compress_query.slots("q_a_proj"),
            **prefixed("q_a_layernorm", self._query_norm.slots()),
        }

    def _expansion_slots(self) -> WeightSlots:
        heads = self._heads
        if not heads.expansion_apart:
            shape = heads.num_heads * (heads.nope_dim + heads.value_dim), heads.rank
            nbytes = self._absorb.nbytes + self._expand.nbytes + self._num_local * self._kept_bytes
            return {
                "kv_b_proj.weight": WeightSlot(shape, self._load_expansion, nbytes, adapter=self._expansion_place())
            }
        parts = {"k_b_proj": (self._absorb, heads.rank, heads.nope_dim, self._kept_bytes)}
        parts["v_b_proj"] = (self._expand, heads.value_dim, heads.rank, 0)
        return {
            f"{name}.{self._first_head + head}.weight": WeightSlot(
                (rows, columns), partial(self._load_head, name, head), matrices.nbytes // self._num_local + kept
            )
            for name, (matrices, rows, columns, kept) in parts.items()
            for head in range(self._num_local)
        }

    def _expansion_place(self) -> ExpansionPlace | None:
        """Target of adapters; None without, and where prompts are expanded."""
        adapters, heads = self._context.adapters, self._heads
        if adapters is None or self._expanded is not None or not adapters.storage.adds_in_torch:
            return None
        self._absorb.adapters, self._expand.adapters = HeadAdapters(adapters), HeadAdapters(adapters)
        sizes, first = (heads.rank, heads.nope_dim, heads.value_dim), self._first_head
        own = range(first, first + self._num_local)
        return ExpansionPlace(sizes, own, heads.num_heads, self._absorb.adapters, self._expand.adapters)

    def _split_slots(
        self, name: str, num_rows: int, load: Callable[[str, WeightSource], None], *, bias: bool
    ) -> WeightSlots:
        whole, turned = self._compress, self._turned_key
        rows = torch.arange(self._heads.rank), self._heads.rank + self._turned_rows()
        slots = {
            f"{name}.weight": WeightSlot(
                (num_rows, self._hidden_size),
                partial(load, "weight"),
                whole.nbytes + turned.nbytes,
                adapter=split_place(num_rows, (whole.place(), turned.place()), rows),
            )
        }
        if bias:
            slots[f"{name}.bias"] = WeightSlot(
                (num_rows,), partial(load, "bias"), whole.bias_bytes + turned.bias_bytes, dummy_std=0.0
            )
        return slots

    def _load_compressed(self, suffix: str, tensor: WeightSource) -> None:
        rank, rope_dim = self._heads.rank, self._heads.rope_dim
        self._compress.load(tensor.narrow(0, 0, rank), suffix)
        turned = tensor.narrow(0, rank, rope_dim)
        self._turned_key.load(turned[self._turned_rows()], suffix)

    def _load_queries(self, tensor: WeightSource) -> None:
        size = self._heads.nope_dim + self._heads.rope_dim
        first = self._first_head * size
        local = tensor.narrow(0, first, self._num_local * size)
        for layer, rows in zip((self._query, self._turned_query), self._query_rows(), strict=True):
            layer.load(local[rows - first])

    def _query_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers of this rank's heads in the checkpoint's query matrix: unrotated, rotated."""
        nope_dim, size = self._heads.nope_dim, self._heads.nope_dim + self._heads.rope_dim
        first_rows = size * (self._first_head + torch.arange(self._num_local))[:, None]
        plain, turned = torch.arange(nope_dim), nope_dim + self._turned_rows()
        return (first_rows + plain).flatten(), (first_rows + turned).flatten()

    def _load_expansion(self, tensor: WeightSource) -> None:
        nope_dim, value_dim = self._heads.nope_dim, self._heads.value_dim
        size = nope_dim + value_dim
        local = tensor.narrow(0, self._first_head * size, self._num_local * size)
        for head in range(self._num_local):
            keys = local.narrow(0, head * size, nope_dim)
            plain = keys if isinstance(keys, torch.Tensor) else keys.dequantize()
            self._absorb.load(head, plain.t())
            values = local.narrow(0, head * size + nope_dim, value_dim)
            self._expand.load(head, values)
            if self._expanded is not None:
                self._expanded.load_keys(head, keys)
                self._expanded.load_values(head, values)

    def _load_head(self, name: str, head: int, tensor: WeightSource) -> None:
        whole = tensor.read() if isinstance(tensor, FileTensor) else tensor
        (self._absorb if name == "k_b_proj" else self._expand).load(head, whole)
        if self._expanded is None:
            return
        if name == "k_b_proj":
            plain = whole if isinstance(whole, torch.Tensor) else whole.dequantize()
            self._expanded.load_keys(head, plain.t())
        else:
            self._expanded.load_values(head, whole)

    @property
    def _kept_bytes(self) -> int:
        return 0 if self._expanded is None else self._expanded.head_bytes

    @property
    def _first_head(self) -> int:
        return self._context.group.rank * self._num_local

    def _turned_rows(self) -> torch.Tensor:
        rows = torch.arange(self._heads.rope_dim)
        return torch.cat((rows[::2], rows[1::2])) if self._heads.interleaved else rows


class _HeadMatrices:
    """Matrix [out_features, in_features] per local head (absorbing queries, expanding values)."""

    def __init__(self, in_features: int, out_features: int, num_heads: int, context: LayerContext) -> None:
        self._linear, self._context = context.linear, context
        self._out_features = out_features
        self.adapters: HeadAdapters | None = None
        shape = LinearShape(in_features, out_features, False, context.dtype, context.device)
        self._stack = context.linear.create_stack(shape, num_heads)
        self.nbytes = num_heads * context.linear.stored_bytes((out_features, in_features))

    def __call__(self, x: Value) -> Value:
        """[T, num_heads * in_features] -> [T, num_heads * out_features]."""
        y = self._linear.apply_heads(self._stack, x)
        slots = None if self.adapters is None or self._context.adapters is None else self._context.adapters.step
        if slots is None or self.adapters is None:
            return y
        return self._context.operations.add_head_adapted(self.adapters, x, y, slots)

    def load(self, head: int, tensor: WeightSource) -> None:
        whole = tensor.read() if isinstance(tensor, FileTensor) else tensor
        self._linear.load_rows(self._stack[head], "weight", whole, 0, self._out_features)


class ExpandedHeads:
    """Expansion matrices for prompts, beside the absorbed ones: keys and values, `EXPANDED_HEADS` heads per part. rank:
    size of compressed vectors."""

    def __init__(self, rank: int, nope_dim: int, value_dim: int, num_heads: int, context: LayerContext) -> None:
        self._nope_dim, self._value_dim = nope_dim, value_dim
        rows = nope_dim + value_dim
        counts = [min(EXPANDED_HEADS, num_heads - first) for first in range(0, num_heads, EXPANDED_HEADS)]
        self.parts = tuple(_LatentMatrix(rank, count * rows, context) for count in counts)
        self.head_bytes = context.linear.stored_bytes((rows, rank))

    def load_keys(self, head: int, tensor: WeightSource) -> None:
        """Load one head's matrix from latents to keys. tensor: [nope_dim, rank]."""
        self._load(head, 0, self._nope_dim, tensor)

    def load_values(self, head: int, tensor: WeightSource) -> None:
        """Load one head's matrix from latents to values. tensor: [value_dim, rank]."""
        self._load(head, self._nope_dim, self._value_dim, tensor)

    def _load(self, head: int, first: int, num_rows: int, tensor: WeightSource) -> None:
        part, index = divmod(head, EXPANDED_HEADS)
        start = index * (self._nope_dim + self._value_dim) + first
        self.parts[part].load(tensor, start, num_rows)


class _LatentMatrix:
    """Matrix [out_features, rank]."""

    def __init__(self, rank: int, out_features: int, context: LayerContext) -> None:
        self._linear = context.linear
        self._parameters = self._linear.create(LinearShape(rank, out_features, False, context.dtype, context.device))

    def __call__(self, x: Value) -> Value:
        """[N, rank] -> [N, out_features]."""
        return self._linear.apply(self._parameters, x)

    def load(self, tensor: WeightSource, first_row: int, num_rows: int) -> None:
        whole = tensor.read() if isinstance(tensor, FileTensor) else tensor
        self._linear.load_rows(self._parameters, "weight", whole, first_row, num_rows)
