"""Torch attention back end of encoders, without a pool."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from quire.attention.interface import AttentionBatch, AttentionStep
from quire.kernels.arguments import HeadWeights
from quire.kernels.rotation import Rotation


class EncoderStep(AttentionStep):
    """Bidirectional step, one sequence at a time, so no bit depends on other sequences."""

    def __init__(self, spans: tuple[tuple[int, int], ...]) -> None:
        """spans: first row of each sequence, and its end."""
        self._spans = spans

    def attend(self, heads: HeadWeights, qkv: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        shape = heads.shape
        parts = qkv.unflatten(1, (3 * shape.num_heads, shape.head_dim))
        turned, value = parts.split((2 * shape.num_heads, shape.num_heads), dim=1)
        if rotation is not None:
            turned = rotation.apply(turned)
        query, key = turned.split(shape.num_heads, dim=1)
        out = query.new_empty(query.shape)
        for start, end in self._spans:
            q, k, v = (part[None, start:end].transpose(1, 2) for part in (query, key, value))
            mask = None if shape.window is None else _window_mask(end - start, shape.window)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scale)
            out[start:end] = attended[0].transpose(0, 1)
        return out.flatten(1)


class EncoderAttention:
    """AttentionBackend of encoders."""

    def plan(self, batch: AttentionBatch) -> EncoderStep:
        """Plan a step of whole sequences, in the batch from their first token on."""
        assert not bool(batch.start_positions.any()), "an encoder computes whole sequences"
        bounds: list[int] = batch.query_start.tolist()
        return EncoderStep(tuple(pairwise(bounds)))


def _window_mask(length: int, window: int) -> torch.Tensor:
    """[length, length] bool: True where a token (row) sees another."""
    position = torch.arange(length)
    return (position[:, None] - position).abs() <= window
