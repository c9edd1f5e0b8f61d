"""Mistral, Ministral and Mixtral: LLaMA without biases, with a sliding window in every layer."""

from dataclasses import replace

from quire.config.families.family import EXPERT, NEVER, Family, GGUFNames
from quire.config.families.llama import GGUF_TOP, LLAMA_VALUES, gguf_experts
from quire.config.rope import RopeDefaults

_GGUF_EXPERTS = gguf_experts("block_sparse_moe.gate", f"block_sparse_moe.experts.{EXPERT}", "w1", "w3", "w2")
_MISTRAL = Family("", query_bias=NEVER, output_bias=NEVER, mlp_bias=NEVER, windows="everywhere")
FAMILIES = (
    replace(
        _MISTRAL,
        model_type="mistral",
        architectures=("MistralForCausalLM", "MistralModel", "MistralForSequenceClassification"),
        is_runnable=True,
        usual_values=LLAMA_VALUES | {"num_key_value_heads": 8, "sliding_window": 4096},
        nullable=("sliding_window",),
    ),
    replace(_MISTRAL, model_type="ministral", architectures=("MinistralForCausalLM",)),
    replace(
        _MISTRAL,
        model_type="mixtral",
        architectures=("MixtralForCausalLM",),
        is_runnable=True,
        has_experts=True,
        rope=RopeDefaults(theta=1_000_000.0),
        usual_values=LLAMA_VALUES
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        renamed={"num_experts": "num_local_experts"},
        gguf=GGUFNames("llama", GGUF_TOP, _GGUF_EXPERTS, interleaved=True, windowed="MixtralForCausalLM"),
    ),
)
