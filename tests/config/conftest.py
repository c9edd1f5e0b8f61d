"""The model that options are resolved for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONTEXT = 128


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory with nothing but the config.json of a tiny LLaMA."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)
