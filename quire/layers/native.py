"""Operations whose kernels are recorded for native execution."""

from __future__ import annotations

import torch

from quire.attention.native_backend import NativeAttention
from quire.kernels.cpu.recorder import Buffer, RecordedIndices
from quire.layers.operations import HeadWeights, NormWeights, RotaryFrequencies


class NativeOperations:
    """Instance of Operations over a recorder's placeholders. The step that `attend` takes is the back end itself:
    a program is recorded for the memory of one pool."""

    def norm(self, weights: NormWeights, x: Buffer) -> Buffer:
        x.recorder.keep.append(weights)
        return x.recorder.call(
            "norm",
            x.width,
            buffers={"x": x},
            weight=_address(weights.weight),
            bias=_address(weights.bias),
            epsilon=weights.epsilon,
            subtract_mean=weights.centred,
            width=x.width,
        )

    def rotation(self, frequencies: RotaryFrequencies, positions: RecordedIndices) -> Buffer:
        assert positions.by_position, "rotations are of positions"
        assert positions.shift == 0, "of the positions themselves"
        positions.recorder.keep.append(frequencies)
        rotary_dim = 2 * len(frequencies.inverse_frequencies)
        return positions.recorder.call(
            "rotation",
            rotary_dim,
            inverse_frequencies=_address(frequencies.inverse_frequencies),
            rotary_dim=rotary_dim,
            magnitude=frequencies.magnitude,
        )

    def attend(self, heads: HeadWeights, qkv: Buffer, rotation: Buffer | None, step: NativeAttention) -> Buffer:
        shape, norm = heads.shape, heads.query_norm
        qkv.recorder.keep.append(heads)
        return qkv.recorder.call(
            "attention",
            shape.num_heads * shape.head_dim,
            buffers={"qkv": qkv, "rotation": rotation},
            **step.layer_constants(shape),
            query_norm=0 if heads.query_norm is None else _address(heads.query_norm.weight),
            key_norm=0 if heads.key_norm is None else _address(heads.key_norm.weight),
            norm_epsilon=0.0 if norm is None else norm.epsilon,
            rotary_dim=0 if rotation is None else rotation.width,
        )

    def upcast_logits(self, x: Buffer) -> Buffer:
        return x


def _address(vector: torch.Tensor | None) -> int:
    if vector is None:
        return 0
    assert vector.dtype == torch.float32, "kernels take float32 vectors"
    assert vector.is_contiguous(), "in one piece"
    return vector.data_ptr()
