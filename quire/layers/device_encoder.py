"""Attention of encoders on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.kernels.triton.encoder_attention import attend
from quire.layers.encoder_operations import EncoderHeads

if TYPE_CHECKING:
    from quire.attention.triton_encoder import TritonEncoderStep
    from quire.layers.device_cache import DeviceRotation


class DeviceEncoderOperations:
    """EncoderOperations over tensors of one device."""

    def attend_encoder(
        self, heads: EncoderHeads, qkv: torch.Tensor, rotation: DeviceRotation | None, step: TritonEncoderStep
    ) -> torch.Tensor:
        turn = None if rotation is None else (rotation.cos, rotation.sin)
        return attend(qkv, turn, step.tiles, heads.num_heads, heads.scale, heads.window)
