"""The model slice: what the engine must know about a model before any tensor exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.quantization import QuantizationConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
MAX_LAYERS = 4096
MAX_WIDTH = 2**24
"""Of the vocabulary, of hidden states, of what a layer has inside: products of two such sizes stay far from 2**63."""
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**16
MAX_POSITIONS = 2**24
CACHE_SCALE_BYTES = {"int8": 4}
"""What a quantised cache stores besides: one float32 for each token's key and value in each head."""


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape, read from its Hugging Face `config.json` or from the metadata of its GGUF file.

    name: what the user asked for (path, hub id or `bundled`); path: the local directory, or the GGUF file that is
    the whole model.
    architecture: the entry of `architectures` that the model registry knows.
    dtype: of weights that are not quantised, resolved ("float32", "bfloat16" or "float16"). The native CPU kernels
    add in float32 whatever it is (DeviceConfig says what they multiply); the plain torch path computes in it.
    kv_cache_dtype: what keys and values are stored in, resolved (a key of CACHE_DTYPE_BYTES).
    max_model_len: most tokens (prompt + output) of one sequence, resolved against the model's own limit.
    sliding_windows: per layer the window in tokens, None for full attention.
    eos_token_ids: from generation_config.json, else config.json; they end a sequence unless `ignore_eos`.
    hf: the parsed config.json, read-only, for what only one family needs.
    quantization: of the checkpoint's weights; None: they are floating point.
    """

    name: str
    path: Path
    architecture: str
    dtype: str
    kv_cache_dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    hf: Mapping[str, Any]
    quantization: QuantizationConfig | None = None

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]
