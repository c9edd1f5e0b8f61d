"""Which attention back end a CPU has for a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention.encoder_backend import EncoderAttention
from quire.attention.interface import AttentionBackend
from quire.attention.torch_backend import TorchAttention
from quire.config.engine import EngineConfig
from quire.kv_cache.layout import KVCacheLayout
from quire.worker.kv_tensors import STORED_DTYPES, layer_pages


def make_attention(
    config: EngineConfig, layout: KVCacheLayout, pages: Sequence[torch.Tensor], *, is_native: bool
) -> AttentionBackend:
    """is_native: over native kernels, else over plain torch operators. An encoder's has no pool."""
    model = config.model
    if not is_native:
        if model.is_encoder:
            return EncoderAttention()
        return TorchAttention(layout, layer_pages(pages, layout, STORED_DTYPES[model.kv_cache_dtype]))
    if model.is_encoder:
        from quire.attention.native_encoder import NativeEncoder  # the native module may not be built

        return NativeEncoder()
    from quire.attention.native_backend import NativeAttention

    return NativeAttention(layout, pages, model.kv_cache_dtype, model.num_heads, config.device.num_threads)
