"""Attention of encoders, recorded for native execution."""

from __future__ import annotations

from quire.attention.native_encoder import NativeEncoder
from quire.kernels.cpu.recorder import Buffer
from quire.layers.encoder_operations import EncoderHeads


class NativeEncoderOperations:
    """EncoderOperations over a recorder's placeholders. A run brings the plan of its step."""

    def attend_encoder(self, heads: EncoderHeads, qkv: Buffer, rotation: Buffer | None, step: NativeEncoder) -> Buffer:
        return qkv.recorder.call(
            "attend_encoder",
            heads.num_heads * heads.head_dim,
            buffers={"qkv": qkv, "rotation": rotation},
            num_heads=heads.num_heads,
            head_dim=heads.head_dim,
            scale=heads.scale,
            window=heads.window or 0,
            rotary_dim=0 if rotation is None else rotation.width,
        )
