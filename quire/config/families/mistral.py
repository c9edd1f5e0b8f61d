"""Mistral, Ministral and Mixtral: LLaMA without biases, with a sliding window in every layer."""

from dataclasses import replace

from quire.config.families.family import NEVER, Family

_MISTRAL = Family("", query_bias=NEVER, output_bias=NEVER, mlp_bias=NEVER, windows="everywhere")
FAMILIES = (
    replace(
        _MISTRAL,
        model_type="mistral",
        architectures=("MistralForCausalLM", "MistralModel", "MistralForSequenceClassification"),
        is_runnable=True,
    ),
    replace(_MISTRAL, model_type="ministral", architectures=("MinistralForCausalLM",)),
    replace(_MISTRAL, model_type="mixtral", architectures=("MixtralForCausalLM",)),
)
