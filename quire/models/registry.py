"""Model classes by the architecture that config.json names. `config/hf_config.py` knows the same names."""

from __future__ import annotations

from quire.registry import Registry


def model_architectures() -> Registry:
    """A registry of its own for each caller; entries are called as `cls(config: ModelConfig, context: LayerContext)`
    and give a CausalLM."""
    return Registry(
        "model architecture",
        {
            "GPT2LMHeadModel": "quire.models.gpt2:GPT2LMHeadModel",
            "LlamaForCausalLM": "quire.models.llama:LlamaForCausalLM",
            "MistralForCausalLM": "quire.models.mistral:MistralForCausalLM",
            "OPTForCausalLM": "quire.models.opt:OPTForCausalLM",
            "Qwen2ForCausalLM": "quire.models.qwen:Qwen2ForCausalLM",
            "Qwen3ForCausalLM": "quire.models.qwen:Qwen3ForCausalLM",
        },
    )
