"""Model classes by the architecture that config.json names. `config/families/` says which of them run."""

from __future__ import annotations

from quire.registry import Registry


def model_architectures() -> Registry:
    """A registry of its own for each caller; entries are called as `cls(config: ModelConfig, context: LayerContext)`
    and give a CausalLM."""
    return Registry(
        "model architecture",
        {
            "BertForMaskedLM": "quire.models.bert:BertModel",
            "BertForSequenceClassification": "quire.models.bert:BertForSequenceClassification",
            "BertModel": "quire.models.bert:BertModel",
            "GPT2LMHeadModel": "quire.models.gpt2:GPT2LMHeadModel",
            "Gemma2ForCausalLM": "quire.models.gemma:gemma2",
            "Gemma3ForCausalLM": "quire.models.gemma:gemma3",
            "GemmaForCausalLM": "quire.models.gemma:gemma",
            "Glm4ForCausalLM": "quire.models.glm:glm4",
            "GlmForCausalLM": "quire.models.dense:DenseDecoder",
            "GraniteForCausalLM": "quire.models.granite:granite",
            "LlamaForCausalLM": "quire.models.decoder:LlamaLike",
            "LlamaForSequenceClassification": "quire.models.pooled_decoder:LlamaLikeClassifier",
            "LlamaModel": "quire.models.decoder:LlamaLike",
            "MistralForCausalLM": "quire.models.decoder:LlamaLike",
            "MistralForSequenceClassification": "quire.models.pooled_decoder:LlamaLikeClassifier",
            "MistralModel": "quire.models.decoder:LlamaLike",
            "ModernBertForMaskedLM": "quire.models.modernbert:ModernBertModel",
            "ModernBertForSequenceClassification": "quire.models.modernbert:ModernBertForSequenceClassification",
            "ModernBertModel": "quire.models.modernbert:ModernBertModel",
            "OPTForCausalLM": "quire.models.opt:OPTForCausalLM",
            "Olmo2ForCausalLM": "quire.models.olmo:olmo",
            "Olmo3ForCausalLM": "quire.models.olmo:olmo",
            "Phi3ForCausalLM": "quire.models.dense:DenseDecoder",
            "Qwen2ForCausalLM": "quire.models.decoder:LlamaLike",
            "Qwen2ForSequenceClassification": "quire.models.pooled_decoder:LlamaLikeClassifier",
            "Qwen2Model": "quire.models.decoder:LlamaLike",
            "Qwen3ForCausalLM": "quire.models.decoder:LlamaLike",
            "Qwen3ForSequenceClassification": "quire.models.pooled_decoder:LlamaLikeClassifier",
            "Qwen3Model": "quire.models.decoder:LlamaLike",
            "RobertaForMaskedLM": "quire.models.bert:RobertaModel",
            "RobertaForSequenceClassification": "quire.models.bert:RobertaForSequenceClassification",
            "RobertaModel": "quire.models.bert:RobertaModel",
            "SmolLM3ForCausalLM": "quire.models.dense:DenseDecoder",
            "XLMRobertaForMaskedLM": "quire.models.bert:RobertaModel",
            "XLMRobertaForSequenceClassification": "quire.models.bert:RobertaForSequenceClassification",
            "XLMRobertaModel": "quire.models.bert:RobertaModel",
        },
    )
