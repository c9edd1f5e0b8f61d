"""Attention back end of encoders by the native CPU kernels."""

from __future__ import annotations

import torch

from quire.attention.interface import AttentionBatch, AttentionStep
from quire.kernels.arguments import HeadWeights
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import Buffer


class NativeEncoder:
    """AttentionBackend without a pool; programs are recorded for any step. is_narrow: bfloat16 weights: programs round
    queries, keys, values and weights to bfloat16, as torch does."""

    def __init__(self, is_narrow: bool) -> None:
        precision = _native.MatmulPrecision
        self.precision = precision.BFLOAT16 if is_narrow else precision.FLOAT32
        self._plan = _native.EncoderPlan()

    def plan(self, batch: AttentionBatch) -> NativeEncoderStep:
        """Sequences must be in the batch from their first token on. Raises ValueError for decreasing query starts."""
        assert not bool(batch.start_positions.any()), "an encoder computes whole sequences"
        starts = batch.query_start
        assert starts.dtype == torch.int64, "query starts are int64"
        assert starts.is_contiguous(), "in one piece"
        self._plan.set(len(starts) - 1, starts.data_ptr())
        return NativeEncoderStep(self, self._plan)


class NativeEncoderStep(AttentionStep):
    """One step's plan, valid until the back end plans again; it also records kernels for any step."""

    __slots__ = ("backend", "encoder")

    def __init__(self, backend: NativeEncoder, encoder: _native.EncoderPlan) -> None:
        self.backend = backend
        self.encoder = encoder

    def attend(self, heads: HeadWeights, qkv: Buffer, rotation: Buffer | None) -> Buffer:
        shape = heads.shape
        return qkv.recorder.call(
            "attend_encoder",
            shape.num_heads * shape.head_dim,
            buffers={"qkv": qkv, "rotation": rotation},
            num_heads=shape.num_heads,
            head_dim=shape.head_dim,
            scale=shape.scale,
            window=shape.window or 0,
            rotary_dim=0 if rotation is None else rotation.width,
            precision=self.backend.precision,
        )
