"""Tiny random encoders and classifiers, as Transformers builds them, and what Transformers computes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 256,
}
ROBERTA = {**SMALL, "max_position_embeddings": 258, "type_vocab_size": 1, "pad_token_id": 1}
MODERN = {
    **SMALL,
    "num_hidden_layers": 4,
    "local_attention": 20,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}

ENCODERS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertModel(BertConfig(**SMALL)),
    "roberta": lambda: RobertaModel(RobertaConfig(**ROBERTA)),
    "xlm-roberta": lambda: XLMRobertaModel(XLMRobertaConfig(**ROBERTA)),
    "modernbert": lambda: ModernBertModel(ModernBertConfig(**MODERN)),
}
CLASSIFIERS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SMALL, num_labels=3)),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**ROBERTA, num_labels=1)),
    "modernbert": lambda: ModernBertForSequenceClassification(ModernBertConfig(**MODERN, num_labels=4)),
    "modernbert-one": lambda: ModernBertForSequenceClassification(ModernBertConfig(**MODERN, num_labels=1)),
    "modernbert-mean": lambda: ModernBertForSequenceClassification(
        ModernBertConfig(**MODERN, num_labels=2, classifier_pooling="mean", classifier_bias=True, norm_bias=True)
    ),
}


def hidden_states(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    """[tokens, hidden size]: Transformers' last hidden states of one prompt."""
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return states


def class_logits(model: PreTrainedModel, prompt: Sequence[int], second_segment: int = 0) -> torch.Tensor:
    """[labels]: Transformers' logits of one prompt. second_segment: as EngineRequest has it."""
    options = {}
    if second_segment:
        options["token_type_ids"] = torch.tensor([[int(i >= second_segment) for i in range(len(prompt))]])
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt]), **options).logits[0]
    return logits
