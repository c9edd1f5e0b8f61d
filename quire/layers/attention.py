"""Attention block: projections around one call of the attention back end."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.attention.interface import AttentionStep
from quire.config.model import CACHE_DTYPE_BYTES, CACHE_SCALE_BYTES
from quire.kernels.arguments import HeadWeights, LayerAttention
from quire.kernels.rotation import RotationTable
from quire.kernels.value import ReadRows, Value
from quire.kv_cache.spec import AttentionSpec, ChunkedSpec, LayerSpec, SlidingWindowSpec
from quire.layers.context import LayerContext, WeightSlot, WeightSlots, prefixed
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.quantization.integer_weight import WeightSource, copy_into


class Attention:
    """Grouped-query self-attention with fused query, key and value projections; ranks share the heads. shape: the whole
    layer's. norm, norm_epsilon: head norms of queries and keys (None: none). has_sinks: a learned score per head
    without a value. Raises ConfigError for heads that the back end does not support."""

    def __init__(
        self,
        hidden_size: int,
        shape: LayerAttention,
        *,
        qkv_bias: bool,
        output_bias: bool,
        context: LayerContext,
        norm_epsilon: float | None = None,
        norm: type[RMSNorm] = RMSNorm,
        has_sinks: bool = False,
    ) -> None:
        ranks, dim = context.group.size, shape.head_dim
        kv_shares = min(ranks, shape.num_kv_heads)
        heads = shape.num_heads // ranks
        self._first_head = context.group.rank * heads
        sinks = torch.empty(heads, dtype=torch.float32, device=context.device) if has_sinks else None
        local = replace(shape, num_heads=heads, num_kv_heads=shape.num_kv_heads // kv_shares, sinks=sinks)
        context.cache_scales[local.layer] = local.cache_scale
        self._qkv = ColumnParallelLinear(
            hidden_size,
            (shape.num_heads * dim, shape.num_kv_heads * dim, shape.num_kv_heads * shape.value_width),
            bias=qkv_bias,
            context=context,
            num_shares=(ranks, kv_shares, kv_shares),
        )
        attended = shape.num_heads * shape.value_width
        self._output = RowParallelLinear(attended, hidden_size, bias=output_bias, context=context)
        self._norms = () if norm_epsilon is None else tuple(norm(dim, norm_epsilon, context) for _ in range(2))
        query_norm, key_norm = (each.weights for each in self._norms) if self._norms else (None, None)
        self._heads = HeadWeights(local, query_norm, key_norm)
        context.operations.check_heads(self._heads)
        self._operations = context.operations
        self._num_heads = shape.num_heads
        self._cache_dtype = context.cache_dtype
        self._dealt_to = context.dealt_to

    def __call__(
        self,
        x: Value,
        residual: Value | None,
        rotation: RotationTable | None,
        step: AttentionStep,
        rows: ReadRows | None = None,
    ) -> Value:
        """x, residual (or None): [T, hidden_size] -> [T, hidden_size]; the residual is overwritten. rotation: cos and
        sin at the tokens' positions, or None. rows: [R], tokens whose results are needed (None: all): then [R,
        hidden_size], while all keys and values are kept."""
        return self.attend(self._project(x), residual, rotation, step, rows)

    def attend(
        self,
        projected: Value,
        residual: Value | None,
        rotation: RotationTable | None,
        step: AttentionStep,
        rows: ReadRows | None,
    ) -> Value:
        """`__call__` after the first product. projected: queries, keys and values, one row per token."""
        attended = step.attend(self._heads, projected, rotation)
        if rows is not None:
            attended = self._operations.gather_rows(attended, rows)
            residual = None if residual is None else self._operations.gather_rows(residual, rows)
        return self._output(attended, residual)

    def cache_spec(self) -> LayerSpec:
        """KV-cache spec of this rank's heads, for the cache's layout."""
        shape, dtype = self._heads.shape, self._cache_dtype
        widths = (shape.num_kv_heads, shape.head_dim, shape.value_width)
        sizes = (*widths, CACHE_DTYPE_BYTES[dtype], CACHE_SCALE_BYTES.get(dtype, 0))
        if shape.window is None:
            return AttentionSpec(*sizes, dealt_to=self._dealt_to)
        return (ChunkedSpec if shape.is_chunked else SlidingWindowSpec)(*sizes, window=shape.window)

    def slots(self, qkv: tuple[str, ...], output: str, *, transposed: bool = False) -> WeightSlots:
        """Slots by checkpoint names. qkv: the projections' (one if fused). output: the output projection's. transposed:
        the checkpoint stores [in, out]. Head norms are q_norm and k_norm."""
        slots = {
            **self._qkv.slots(qkv, transposed=transposed),
            **self._output.slots(output, transposed=transposed),
        }
        if self._norms:
            slots |= prefixed("q_norm", self._norms[0].slots()) | prefixed("k_norm", self._norms[1].slots())
        if self._heads.shape.sinks is not None:
            slots["sinks"] = WeightSlot((self._num_heads,), self._load_sinks, 4 * self._num_heads)
        return slots

    def _project(self, x: Value) -> Value:
        return self._qkv(x)

    def _load_sinks(self, tensor: WeightSource) -> None:
        sinks = self._heads.shape.sinks
        assert sinks is not None, "a layer with sinks has a slot for them"
        copy_into(sinks, tensor.narrow(0, self._first_head, len(sinks)))
