"""The attention back end of encoders on Triton kernels: a step's sequences, cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.attention.interface import AttentionBatch
from quire.kernels.triton.encoder_attention import encoder_tiles


@dataclass(frozen=True, slots=True)
class TritonEncoderStep:
    """tiles: of `encoder_tiles`, on the device."""

    tiles: torch.Tensor


class TritonEncoder:
    """AttentionBackend without a pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, batch: AttentionBatch) -> TritonEncoderStep:
        """Every sequence must be in the batch from its first token on."""
        assert not bool(batch.start_positions.any()), "an encoder computes whole sequences"
        return TritonEncoderStep(encoder_tiles(batch.query_start.numpy(), self._device))
