"""Operations of layers that keep a state, recorded for native execution."""

from __future__ import annotations

import torch

from quire.attention.device_batch import StepStates
from quire.kernels.arguments import NORM_EPSILON, ConvolutionWeights, DeltaRule, GatedNormWeights
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import Buffer

ACTIVATIONS = {None: _native.Activation.NONE, "silu": _native.Activation.SILU, "swish": _native.Activation.SILU}


class NativeStates:
    """StateOperations over a recorder's placeholders. The states come with each run."""

    def short_convolution(self, weights: ConvolutionWeights, x: Buffer, states: StepStates | None) -> Buffer:
        recorder, (width, channels) = x.recorder, weights.kernel.shape
        recorder.keep.append(weights)
        return recorder.call(
            "convolution",
            x.width,
            buffers={"x": x},
            layer=recorder.state_layer(weights.layer),
            offset=weights.offset,
            channels=channels,
            width=width,
            kept=weights.num_kept,
            kernel=_address(weights.kernel),
            bias=0 if weights.bias is None else _address(weights.bias),
            activation=ACTIVATIONS[weights.activation],
        )

    def gated_delta_rule(self, rule: DeltaRule, qkv: Buffer, gates: Buffer, states: StepStates | None) -> Buffer:
        recorder = qkv.recorder
        recorder.keep.append(rule)
        return recorder.call(
            "delta_rule",
            rule.num_value_heads * rule.value_dim,
            buffers={"qkv": qkv, "gates": gates},
            layer=recorder.state_layer(rule.layer),
            offset=rule.offset,
            key_heads=rule.num_key_heads,
            value_heads=rule.num_value_heads,
            key_dim=rule.key_dim,
            value_dim=rule.value_dim,
            rate=_address(rule.rate),
            time_bias=_address(rule.time_bias),
            epsilon=NORM_EPSILON,
        )

    def gated_norm(self, weights: GatedNormWeights, x: Buffer, gate: Buffer) -> Buffer:
        x.recorder.keep.append(weights)
        return x.recorder.call(
            "gated_norm",
            x.width,
            over=x,
            buffers={"x": x, "gate": gate},
            weight=_address(weights.weight),
            epsilon=weights.epsilon,
            heads=x.width // weights.size,
            width=weights.size,
        )


def _address(tensor: torch.Tensor) -> int:
    assert tensor.dtype == torch.float32, "kernels take float32 vectors"
    assert tensor.is_contiguous(), "in one piece"
    return tensor.data_ptr()
