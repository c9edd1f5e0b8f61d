"""The model slice: what the engine must know about a model before any tensor exists."""

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
"""Of the vocabulary, of hidden states, of what a layer has inside: products of two such sizes stay far from 2**63."""
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**16
MAX_POSITIONS = 2**24
CACHE_SCALE_BYTES = {"int8": 4}
"""What a quantised cache stores besides: one float32 for each token's key and value in each head."""


@dataclass(frozen=True)
class ModelConfig:
    """A model, read from its Hugging Face `config.json` or from the metadata of its GGUF file.

    name: what the user asked for (path, hub id or `bundled`); path: the local directory, or the GGUF file that is
    the whole model.
    architecture: the entry of `architectures` that the model registry knows.
    shape: its sizes, layer by layer, as config.json has them: what it says of dtypes and positions is not resolved.
    dtype: of weights that are not quantised, resolved ("float32", "bfloat16" or "float16"). The native CPU kernels
    add in float32 whatever it is (DeviceConfig says what they multiply); the plain torch path computes in it.
    kv_cache_dtype: what keys and values are stored in, resolved (a key of CACHE_DTYPE_BYTES).
    max_model_len: most tokens (prompt + output) of one sequence, resolved against the model's own limit.
    eos_token_ids: from generation_config.json, else config.json; they end a sequence unless `ignore_eos`, and the
    tokenizer's own end-of-sequence token does.
    hf: the parsed config.json, read-only, for what only one family needs; of a model of several modalities what it says
    of the language model.
    quantization: of the checkpoint's weights; None: they are floating point.
    activation_bits: least bits that activations keep where the native kernels multiply integers and 4-bit floats: 8
    (whole numbers, a scale for each group or 128 values of a row), 16 or 32; 0: what matmul_precision says.
    pooling: how it makes a vector of a text; None: it generates.
    expands_prompts: whether latent attention computes prompts with keys and values of each head: a token's bits then
    depend on whether it is part of a prompt.
    impl: what computes it: "quire", or "transformers" (modelling code of that library).
    sampling_defaults: what requests get that do not say otherwise, by field of SamplingParams (generation_config.json).
    is_multimodal: this is the language model of one, whose other parts (images, sound) are not loaded.
    vision: what config.json says of the vision tower beside it, read-only, as it stands there; None: nothing.
    image_token_id: of the placeholders of images; None: config.json names none.
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
    impl: str = "quire"
    expands_prompts: bool = False
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        """Whether the weights come from a GGUF file, each tensor in the format that it has there."""
        return self.path.suffix == GGUF_SUFFIX

    @property
    def weight_format(self) -> str:
        """What matrices of weights are stored in, for people."""
        if self.quantization is not None:
            return self.quantization.method
        return "the GGUF file's" if self.is_gguf else self.dtype

    @property
    def cache_format(self) -> str:
        """What keys and values are stored in, for people, with the reason where it is not the dtype of the weights."""
        is_default = self.is_gguf and self.kv_cache_dtype == "bfloat16" != self.dtype
        return f"{self.kv_cache_dtype} KV cache{' (the default for GGUF files)' if is_default else ''}"

    @property
    def is_encoder(self) -> bool:
        """Whether every token attends to all others of its sequence, and nothing is kept for later tokens."""
        return self.shape.attention.kind == "none"

    @property
    def has_pooling_head(self) -> bool:
        """Whether what was pooled goes through projections of the model's own, to logits or to another vector."""
        return self.pooling is not None and (self.pooling.task == "classify" or bool(self.pooling.dense))

    @property
    def vector_size(self) -> int:
        """Elements of a text's vector."""
        dense = () if self.pooling is None else self.pooling.dense
        return dense[-1].out_features if dense else self.hidden_size

    @property
    def takes_whole_prompts(self) -> bool:
        """Whether a step must compute a prompt from its first token to its last: the tokens attend to later ones, or
        all of them are pooled."""
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
        """Per layer the window in tokens, None for full attention."""
        return self.shape.windows

    def resolved_shape(self) -> ModelShape:
        """The shape as this engine has it: what it stores weights in, and its own limit on a sequence."""
        stored = self.dtype if self.quantization is None else self.quantization.stored_type
        only_experts = self.quantization is not None and self.quantization.checkpoint_format == "mxfp4"
        dense = self.dtype if only_experts else stored
        return replace(self.shape, max_model_len=self.max_model_len, dtype=dense, expert_dtype=stored)
