"""Unusual configurations: Quire's logits are Transformers', or Quire refuses them by the key's name.

Cases that the fuzz (config_fuzz.py) found, and a slice of it.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.models.config_fuzz import CHUNKED, FULL, SLIDING, Case, basis, draw, outcome_of, run

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
DEFAULT = {"rope_type": "default", "rope_theta": 900.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [1.0, 1.5, 2.0, 4.0]}
MENDED: list[tuple[str, dict[str, Any]]] = [
    # Windows: the keys that the class reads, by its own rule.
    ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2, "_sliding_window_pattern": 3}),
    ("gemma3_text", {"sliding_window": 5, "_sliding_window_pattern": 2}),
    ("gemma2", {"sliding_window": 5, "sliding_window_pattern": 3}),
    ("mistral", {"sliding_window": 5, "layer_types": [FULL, SLIDING, FULL]}),
    ("qwen3_moe", {"sliding_window": 5, "use_sliding_window": True, "layer_types": [FULL, SLIDING, FULL]}),
    ("qwen2_moe", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2}),
    ("smollm3", {"sliding_window": 5, "use_sliding_window": True, "no_rope_layers": [0, 1, 0]}),
    ("smollm3", {"sliding_window": 5, "layer_types": [FULL, SLIDING, FULL]}),
    ("llama4_text", {"attention_chunk_size": 7, "layer_types": [FULL, CHUNKED, FULL], "no_rope_layers": []}),
    # Rotations: bases and scalings that are left out, given twice, or given to a family that ignores them.
    ("mixtral", {}),
    ("gpt_oss", {}),
    ("gpt_oss", {"rope_parameters": LINEAR}),
    ("llama", {"rope_parameters": DEFAULT, "rope_scaling": YARN}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"original_max_position_embeddings": 16, "rope_scaling": LLAMA3}),
    ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}}),
    ("phi3", {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 16, **FACTORS}}),
    ("phi3", {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16, **FACTORS}}),
    ("olmo3", {"rope_theta": 100.0, "layer_types": [FULL, SLIDING, FULL]}),
    ("gemma3_text", {"rope_parameters": LINEAR, "layer_types": [FULL, SLIDING, FULL]}),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 4.0}, "layer_types": [FULL, SLIDING, FULL]}),
    ("olmo3", {"rope_parameters": {FULL: {**YARN, "truncate": False}}, "layer_types": [FULL, SLIDING, FULL]}),
    ("gemma3_text", {"rope_parameters": {SLIDING: {"rope_type": "dynamic", "factor": 4.0}}}),
    # Values that a class has where the file has none, and keys that only other classes read.
    ("olmo2", {"rms_norm_eps": None}),
    ("phi3", {"rms_norm_eps": None}),
    ("glm", {"rms_norm_eps": None}),
    ("deepseek_v3", {"routed_scaling_factor": None, "n_group": 2, "topk_group": 1}),
    ("deepseek_v3", {"moe_layer_freq": 2, "mlp_bias": True}),
    ("deepseek_v2", {"rope_interleave": False}),
    ("qwen3_5_moe_text", {"mlp_only_layers": [0, 1], "decoder_sparse_step": 2, "full_attention_interval": 2}),
    ("mixtral", {"moe_intermediate_size": 99, "num_experts": 3, "num_local_experts": None}),
    ("gpt2", {"hidden_size": 32, "n_embd": None, "num_attention_heads": 4, "n_head": None}),
]
"""Families and keys; None: the key is left out."""
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ("llama", {"is_causal": False}, "is_causal False is not supported"),
    ("llama", {"per_layer_config": {"1": {"num_key_value_heads": 4}}}, "per_layer_config .* is not supported"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is not supported"),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "'factor' is missing"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'low_freq_factor' is missing"),
    ("llama", {"rope_scaling": {"rope_type": None}}, "'rope_type' is missing"),
    ("phi3", {"rope_scaling": LINEAR}, "rope_type 'linear' is not supported"),
    ("llama", {"partial_rotary_factor": 0.5, "rope_scaling": LINEAR}, "partial_rotary_factor 0.5 is not supported"),
]


def case(name: str, keys: dict[str, Any], head: str = "as saved") -> Case:
    config = {key: value for key, value in {**basis(name, 3, 64), **keys}.items() if keys.get(key, 0) is not None}
    return Case(name, config, head)


@pytest.mark.parametrize(("name", "keys"), MENDED, ids=[f"{name}-{'-'.join(keys)[:40]}" for name, keys in MENDED])
def test_logits_are_transformers(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    outcome = run(case(name, keys), tmp_path)
    assert outcome.kind == "same", outcome.said


@pytest.mark.parametrize(
    ("name", "keys", "message"), REFUSED, ids=[f"{each[0]}-{'-'.join(each[1])}" for each in REFUSED]
)
def test_refusals_name_the_key(name: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = case(name, keys)
    config.config |= {key: None for key, value in keys.items() if value is None}
    outcome = run(config, tmp_path)
    assert outcome.kind in ("refused by Quire", "refused by both")
    assert re.search(message, outcome.said), outcome.said


@pytest.mark.parametrize("head", ["another", "alone"])
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "opt", "deepseek_v2", "qwen3_5_text"])
def test_a_head_beside_or_in_place_of_a_tied_embedding(name: str, head: str, tmp_path: Path) -> None:
    keys = {"tie_word_embeddings": True} | ({"full_attention_interval": 2} if name == "qwen3_5_text" else {})
    outcome = run(case(name, keys, head), tmp_path)
    assert outcome.kind == "same", outcome.said


@pytest.mark.long
def test_a_slice_of_the_fuzz() -> None:
    outcomes = {seed: outcome_of(draw(seed)) for seed in range(500_000, 500_150)}
    assert {seed: outcome for seed, outcome in outcomes.items() if outcome.kind == "differs"} == {}
    assert Counter(outcome.kind for outcome in outcomes.values())["same"] > 75
