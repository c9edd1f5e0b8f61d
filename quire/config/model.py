from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.config.model_shape import ModelShape
from quire.config.pooling import PoolingConfig
from quire.config.quantization import QuantizationConfig
from quire.utils.gguf import SUFFIX as GGUF_SUFFIX

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
MAX_LAYERS = 4096
MAX_WIDTH = 2**24
"""Limit of vocabulary, hidden and inner sizes."""
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**16
MAX_POSITIONS = 2**24
CACHE_SCALE_BYTES = {"int8": 4}
"""Extra bytes of a quantised cache: a float32 for each token's key and value in each head."""


@dataclass(frozen=True)
class ModelConfig:
    """Model, read from its Hugging Face `config.json` or its GGUF file's metadata.

    name: user's text (path, hub id or `bundled`). path: local directory, or the GGUF file. architecture: entry of
    `architectures` in the model registry. shape: sizes, layer by layer. dtype: dtype of weights not quantised.
    kv_cache_dtype: dtype of stored keys and values (a key of CACHE_DTYPE_BYTES). max_model_len: most tokens of a
    sequence (prompt + output). eos_token_ids: see hf_config; the tokenizer's own also ends a sequence. hf: parsed
    config.json (the language model's part). activation_bits: least bits of activations multiplied natively with
    integers and 4-bit floats: 8, 16 or 32; 0: matmul_precision decides. pooling: None: the model generates.
    expands_prompts: latent attention computes prompts with keys and values of each head. impl: "quire" or
    "transformers". sampling_defaults: by field of SamplingParams. is_multimodal: other parts of the model are not
    loaded. vision: config.json's part on the vision tower. image_token_id: placeholder of images. mmproj: GGUF file of
    the vision tower.
    """

    name: str
    path: Path
    architecture: str
    shape: ModelShape
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    hf: Mapping[str, Any]
    quantization: QuantizationConfig | None = None
    activation_bits: int = 0
    pooling: PoolingConfig | None = None
    is_multimodal: bool = False
    vision: Mapping[str, Any] | None = None
    image_token_id: int | None = None
    mmproj: Path | None = None
    impl: str = "quire"
    expands_prompts: bool = False
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        """True for a GGUF file, where each tensor keeps its format."""
        return self.path.suffix == GGUF_SUFFIX

    @property
    def weight_format(self) -> str:
        """Storage format of weight matrices, for messages."""
        if self.quantization is not None:
            return self.quantization.method
        return "the GGUF file's" if self.is_gguf else self.dtype

    @property
    def cache_format(self) -> str:
        """Storage format of keys and values, for messages, with the reason if it is not the weights' dtype."""
        is_default = self.is_gguf and self.kv_cache_dtype == "bfloat16" != self.dtype
        return f"{self.kv_cache_dtype} KV cache{' (the default for GGUF files)' if is_default else ''}"

    @property
    def is_encoder(self) -> bool:
        """True if every token attends to all others of its sequence; nothing is kept for later tokens."""
        return self.shape.attention.kind == "none"

    @property
    def has_pooling_head(self) -> bool:
        """True if projections follow pooling, for logits or another vector."""
        return self.pooling is not None and (self.pooling.task == "classify" or bool(self.pooling.dense))

    @property
    def vector_size(self) -> int:
        dense = () if self.pooling is None else self.pooling.dense
        return dense[-1].out_features if dense else self.hidden_size

    @property
    def takes_whole_prompts(self) -> bool:
        """True if a step must compute a whole prompt: tokens attend to later ones, or all are pooled."""
        return self.is_encoder or (self.pooling is not None and self.pooling.method != "last")

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab

    @property
    def hidden_size(self) -> int:
        return self.shape.hidden

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def num_heads(self) -> int:
        return self.shape.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.shape.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.shape.attention.key_dim

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Window of each layer in tokens; None: full attention."""
        return self.shape.windows

    def resolved_shape(self) -> ModelShape:
        """Shape with this engine's weight types and length limit, for memory planning."""
        stored = self.dtype if self.quantization is None else self.quantization.stored_type
        only_experts = self.quantization is not None and self.quantization.checkpoint_format == "mxfp4"
        dense = self.dtype if only_experts else stored
        return replace(self.shape, max_model_len=self.max_model_len, dtype=dense, expert_dtype=stored)
