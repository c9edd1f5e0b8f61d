"""Model classes by config.json's architecture. `config/families/` describes which are supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.model import ModelConfig
from quire.layers.context import LayerContext
from quire.models.interface import LoadableModel
from quire.registry import Registry

if TYPE_CHECKING:
    from quire.models.eager_calls import EagerCalls


def model_architectures() -> Registry:
    """New registry of classes `cls(config: ModelConfig, context: LayerContext)` that make a CausalLM."""
    return Registry(
        "model architecture",
        {
            "BertForMaskedLM": "quire.models.bert:BertModel",
            "BertForSequenceClassification": "quire.models.bert:BertForSequenceClassification",
            "BertModel": "quire.models.bert:BertModel",
            "DeepseekV2ForCausalLM": "quire.models.deepseek:DeepseekForCausalLM",
            "DeepseekV32ForCausalLM": "quire.models.deepseek:DeepseekForCausalLM",
            "DeepseekV3ForCausalLM": "quire.models.deepseek:DeepseekForCausalLM",
            "GPT2LMHeadModel": "quire.models.gpt2:GPT2LMHeadModel",
            "Gemma2ForCausalLM": "quire.models.gemma:gemma2",
            "Gemma3ForCausalLM": "quire.models.gemma:gemma3",
            "GemmaForCausalLM": "quire.models.gemma:gemma",
            "Glm4ForCausalLM": "quire.models.glm:glm4",
            "GlmForCausalLM": "quire.models.dense:DenseDecoder",
            "GptOssForCausalLM": "quire.models.gpt_oss:GptOssForCausalLM",
            "GraniteForCausalLM": "quire.models.granite:granite",
            "Llama4ForCausalLM": "quire.models.llama4:llama4",
            "LlamaForCausalLM": "quire.models.decoder:LlamaLike",
            "LlamaForSequenceClassification": "quire.models.pooled_decoder:LlamaLikeClassifier",
            "LlamaModel": "quire.models.decoder:LlamaLike",
            "MistralForCausalLM": "quire.models.decoder:LlamaLike",
            "MistralForSequenceClassification": "quire.models.pooled_decoder:LlamaLikeClassifier",
            "MistralModel": "quire.models.decoder:LlamaLike",
            "MixtralForCausalLM": "quire.models.mixture:MixtureLlama",
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
            "Qwen2MoeForCausalLM": "quire.models.mixture:MixtureLlama",
            "Qwen2_5_VLForCausalLM": "quire.models.qwen_vl:QwenVLText",
            "Qwen3ForCausalLM": "quire.models.decoder:LlamaLike",
            "Qwen3ForSequenceClassification": "quire.models.pooled_decoder:LlamaLikeClassifier",
            "Qwen3Model": "quire.models.decoder:LlamaLike",
            "Qwen3MoeForCausalLM": "quire.models.mixture:MixtureLlama",
            "Qwen3NextForCausalLM": "quire.models.qwen_next:HybridDecoder",
            "Qwen3VLForCausalLM": "quire.models.qwen_vl:QwenVLText",
            "Qwen3VLMoeForCausalLM": "quire.models.qwen_vl:QwenVLMixtureText",
            "Qwen3_5ForCausalLM": "quire.models.qwen_vl:QwenVLHybridText",
            "Qwen3_5MoeForCausalLM": "quire.models.qwen_vl:QwenVLHybridText",
            "RobertaForMaskedLM": "quire.models.bert:RobertaModel",
            "RobertaForSequenceClassification": "quire.models.bert:RobertaForSequenceClassification",
            "RobertaModel": "quire.models.bert:RobertaModel",
            "SmolLM3ForCausalLM": "quire.models.dense:DenseDecoder",
            "XLMRobertaForMaskedLM": "quire.models.bert:RobertaModel",
            "XLMRobertaForSequenceClassification": "quire.models.bert:RobertaForSequenceClassification",
            "XLMRobertaModel": "quire.models.bert:RobertaModel",
        },
    )


def build_model(config: ModelConfig, context: LayerContext, calls: EagerCalls | None = None) -> LoadableModel:
    """Build the model with memory for its weights in `context`. calls: operations for modelling code that knows only
    tensors; None: the context's own. Raises ModelLoadError."""
    if config.impl == "quire":
        model: LoadableModel = model_architectures().load(config.architecture)(config, context)
        if config.pooling is not None and config.pooling.dense:
            from quire.models.decoder import Decoder
            from quire.models.pooled_vectors import DenseHead

            assert isinstance(model, Decoder), "what pools is one of the models here"
            model.project_vectors(DenseHead(config, context))
        return model
    from quire.models.eager_calls import TensorCalls
    from quire.models.transformers_model import TransformersModel

    return TransformersModel(config, context, calls or TensorCalls())
