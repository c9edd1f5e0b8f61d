"""Model classes by the architecture that config.json names. `config/families/` says which of them run."""

from __future__ import annotations

from quire.registry import Registry


def model_architectures() -> Registry:
    """A registry of its own for each caller; entries are called as `cls(config: ModelConfig, context: LayerContext)`
    and give a CausalLM."""
    return Registry(
        "model architecture",
        {
            "GPT2LMHeadModel": "quire.models.gpt2:GPT2LMHeadModel",
            "Gemma2ForCausalLM": "quire.models.gemma:gemma2",
            "Gemma3ForCausalLM": "quire.models.gemma:gemma3",
            "GemmaForCausalLM": "quire.models.gemma:gemma",
            "Glm4ForCausalLM": "quire.models.glm:glm4",
            "GlmForCausalLM": "quire.models.dense:DenseDecoder",
            "GraniteForCausalLM": "quire.models.granite:granite",
            "LlamaForCausalLM": "quire.models.decoder:LlamaLike",
            "MistralForCausalLM": "quire.models.decoder:LlamaLike",
            "OPTForCausalLM": "quire.models.opt:OPTForCausalLM",
            "Olmo2ForCausalLM": "quire.models.olmo:olmo",
            "Olmo3ForCausalLM": "quire.models.olmo:olmo",
            "Phi3ForCausalLM": "quire.models.dense:DenseDecoder",
            "Qwen2ForCausalLM": "quire.models.decoder:LlamaLike",
            "Qwen3ForCausalLM": "quire.models.decoder:LlamaLike",
            "Qwen3NextForCausalLM": "quire.models.qwen_next:HybridDecoder",
            "Qwen3_5ForCausalLM": "quire.models.qwen_next:HybridDecoder",
            "SmolLM3ForCausalLM": "quire.models.dense:DenseDecoder",
        },
    )
