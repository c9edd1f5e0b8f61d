"""Operations over the KV cache, recorded for native execution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from quire.attention.latent import IndexShape, LatentExpansion, LatentShape
from quire.attention.native_backend import NativeAttention
from quire.attention.native_expanded import ExpandingAttention
from quire.kernels.cpu.paged_attention import check_index, check_latent
from quire.kernels.cpu.recorder import Buffer

if TYPE_CHECKING:
    from quire.kernels.arguments import HeadWeights


class NativeCacheOperations:
    """CacheOperations and `Operations.attend` over a recorder's placeholders. The step that they take is the back end
    itself: a program is recorded for the memory of one pool."""

    def attend(self, heads: HeadWeights, qkv: Buffer, rotation: Buffer | None, step: NativeAttention) -> Buffer:
        shape = heads.shape
        qkv.recorder.keep.append(heads)
        return qkv.recorder.call(
            "attention",
            shape.num_heads * shape.head_dim,
            buffers={"qkv": qkv, "rotation": rotation},
            **_constants(heads, rotation, step),
        )

    def write_kv(self, heads: HeadWeights, key_value: Buffer, rotation: Buffer | None, step: NativeAttention) -> None:
        key_value.recorder.keep.append(heads)
        key_value.recorder.call(
            "attention",
            key_value.width,
            over=key_value,
            in_place=True,
            output="qkv",
            buffers={"rotation": rotation, "out": None},
            **_constants(heads, rotation, step),
        )

    def attend_cached(
        self, heads: HeadWeights, query: Buffer, rotation: Buffer | None, step: NativeAttention
    ) -> Buffer:
        query.recorder.keep.append(heads)
        return query.recorder.call(
            "attention",
            query.width,
            buffers={"qkv": query, "rotation": rotation},
            writes=False,
            **_constants(heads, rotation, step),
        )

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: tuple[Buffer, Buffer, Buffer, Buffer],
        rotation: Buffer | None,
        step: NativeAttention,
        selected: Buffer | None = None,
    ) -> Buffer:
        return step.record_latent(shape, inputs, rotation, selected)

    def attend_expanded(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        inputs: tuple[Buffer, Buffer, Buffer, Buffer],
        rotation: Buffer | None,
        step: NativeAttention | ExpandingAttention,
    ) -> Buffer:
        if isinstance(step, ExpandingAttention):
            return step.record(shape, expansion, inputs, rotation)
        absorbed = (expansion.absorb(inputs[0]), *inputs[1:])
        return expansion.values(step.record_latent(shape, absorbed, rotation))

    def select_keys(
        self,
        shape: IndexShape,
        inputs: tuple[Buffer, Buffer, Buffer],
        rotation: Buffer | None,
        step: NativeAttention,
    ) -> Buffer:
        query, key, weights = inputs
        return query.recorder.call(
            "select_keys",
            shape.top,
            buffers={"query": query, "key": key, "weights": weights, "rotation": rotation},
            **step.index_constants(shape),
        )

    def check_index(self, shape: IndexShape) -> None:
        check_index(shape.num_heads, shape.dim, shape.top)

    def check_latent(self, shape: LatentShape) -> None:
        check_latent(shape.rank, shape.rope_dim)


def address_of(vector: torch.Tensor | None) -> int:
    """The address of a vector that a kernel reads; 0 for None."""
    if vector is None:
        return 0
    assert vector.dtype == torch.float32, "kernels take float32 vectors"
    assert vector.is_contiguous(), "in one piece"
    return vector.data_ptr()


def _constants(heads: HeadWeights, rotation: Buffer | None, step: NativeAttention) -> dict[str, Any]:
    """What `_native.Program.attention` takes besides the rows."""
    norm = heads.query_norm
    return {
        **step.layer_constants(heads.shape),
        "query_norm": 0 if heads.query_norm is None else address_of(heads.query_norm.weight),
        "key_norm": 0 if heads.key_norm is None else address_of(heads.key_norm.weight),
        "norm_epsilon": 0.0 if norm is None else norm.epsilon,
        "rotary_dim": 0 if rotation is None else rotation.width,
    }
