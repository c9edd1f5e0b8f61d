"""Models of other kinds than Qwen3-8B: experts, latent attention, layers with states. Imports the standard library
alone, since other engines run them too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SHARED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
ITEMSIZE = 2
"""Bytes of an element of weights and cache: bfloat16."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model's configuration. published_layers: layers of the model that has the name; settings may have fewer.
    warm_layers: layers that launch every kernel of the model."""

    name: str
    settings: Mapping[str, Any]
    published_layers: int
    warm_layers: int

    itemsize = ITEMSIZE

    @property
    def dtype(self) -> str:
        return str(self.config()["dtype"])

    @property
    def vocab(self) -> int:
        return int(self.settings["vocab_size"])

    @property
    def num_layers(self) -> int:
        return int(self.settings["num_hidden_layers"])

    def with_layers(self, number: int) -> Family:
        return replace(self, settings={**self.settings, "num_hidden_layers": number})

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {**SHARED, **self.settings}

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config(), indent=2))
        return directory


QWEN3_MOE = Family(
    "Qwen3-30B-A3B",
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1e6,
    },
    published_layers=48,
    warm_layers=1,
)
DEEPSEEK_V2 = Family(
    "DeepSeek-V2-Lite",
    {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rope_theta": 10000.0,
    },
    published_layers=27,
    warm_layers=2,
)
QWEN3_NEXT = Family(
    "Qwen3-Next-80B-A3B",
    {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1e7,
    },
    published_layers=48,
    warm_layers=4,
)
"""Three layers of four keep states."""
DEEPSEEK_V32 = Family(
    "DeepSeek-V3.2",
    {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "rope_theta": 10000.0,
    },
    published_layers=61,
    warm_layers=4,
)
"""128 heads over latents, of which an indexer chooses 2,048."""
FAMILIES = {
    "qwen3-moe": QWEN3_MOE,
    "deepseek-v2": DEEPSEEK_V2,
    "qwen3-next": QWEN3_NEXT,
    "deepseek-v3.2": DEEPSEEK_V32,
}


TINY: Mapping[str, int] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""Sizes of every family where there is no card, of the keys that it has."""


def tiny(family: Family) -> Family:
    """The same kinds of layers, small enough for Triton's interpreter."""
    smaller = {key: value for key, value in TINY.items() if family.settings.get(key)}
    heads = {"num_key_value_heads": 4 if "kv_lora_rank" in smaller else 2}
    return replace(
        family, settings={**family.settings, **smaller, **heads, "torch_dtype": "float32", "dtype": "float32"}
    )
