"""Mistral, Ministral and Mixtral: LLaMA without biases, with a sliding window in every layer."""

from dataclasses import replace

from quire.config.families.family import EXPERT, NEVER, Family, GGUFNames
from quire.config.families.llama import GGUF_TOP, gguf_experts
from quire.config.rope import RopeDefaults

_GGUF_EXPERTS = gguf_experts("block_sparse_moe.gate", f"block_sparse_moe.experts.{EXPERT}", "w1", "w3", "w2")
_MISTRAL = Family("", query_bias=NEVER, output_bias=NEVER, mlp_bias=NEVER, windows="everywhere")
FAMILIES = (
    replace(
        _MISTRAL,
        model_type="mistral",
        architectures=("MistralForCausalLM", "MistralModel", "MistralForSequenceClassification"),
        is_runnable=True,
    ),
    replace(_MISTRAL, model_type="ministral", architectures=("MinistralForCausalLM",)),
    replace(
        _MISTRAL,
        model_type="mixtral",
        architectures=("MixtralForCausalLM",),
        is_runnable=True,
        has_experts=True,
        rope=RopeDefaults(theta=1_000_000.0),
        gguf=GGUFNames("llama", GGUF_TOP, _GGUF_EXPERTS, interleaved=True, windowed="MixtralForCausalLM"),
    ),
)
