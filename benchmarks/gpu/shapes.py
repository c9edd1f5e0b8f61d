"""The model that everything is measured in the shape of, and the same small enough for Triton's interpreter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Qwen3 model. dtype: of weights, activations and KV cache."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def qkv_width(self) -> int:
        """Columns of queries, keys and values of a token."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def layer_parameters(self) -> int:
        """Of all layers and the last norm: what every token is multiplied with."""
        projections = self.hidden * (self.qkv_width + self.num_heads * self.head_dim)
        norms = 2 * self.hidden + 2 * self.head_dim
        return self.num_layers * (projections + 3 * self.hidden * self.intermediate + norms) + self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the projection to the vocabulary (and as many of the input embedding, which is looked up)."""
        return self.vocab * self.hidden

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "dtype": self.dtype,
            "torch_dtype": self.dtype,
        }

    def write(self, directory: Path) -> Path:
        """A model directory with a configuration and nothing else, for load_format="dummy"."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config(), indent=2))
        return directory


QWEN3_8B = Shape(4096, 12288, 36, 32, 8, 128, 151936)
TINY = Shape(64, 96, 2, 4, 2, 16, 97, dtype="float32")
"""For trying things out without a card."""
