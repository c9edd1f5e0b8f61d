"""Configuration of a draft model: its options, and its agreement with the target model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.speculation import DraftModelConfig
from quire.config.speculation_keys import OPTION
from quire.errors import ConfigError

MOST_PADDING = 1024
"""Largest difference, in rows, between vocabulary matrices of two models with one tokenizer."""


def draft_options(options: EngineOptions, chosen: DraftModelConfig, model: ModelConfig, backend: str) -> EngineOptions:
    """Options of the draft model as an engine of its own. Its keys and values have the types of `model`, in whose
    blocks they lie. backend: attention backend of `model`."""
    given: dict[str, Any] = {
        "model": chosen.name,
        "runner": "generate",
        "revision": chosen.revision,
        "quantization": chosen.quantization,
        "max_model_len": chosen.max_model_len,
        "load_format": "dummy" if options.load_format == "dummy" else "auto",  # as draft_load has it
        "kv_cache_dtype": model.kv_cache_dtype,
        "attention_backend": backend,
        "mla_prompt": "auto",
        "matmul_precision": "auto",
        "hf_overrides": None,
        "activation_bits": "auto",
        "load_draft_head": False,
        "speculative_config": None,
        "expert_counts": False,
        "enable_lora": False,
    }
    return msgspec.structs.replace(options, **given)


def fitting_draft(draft: ModelConfig, model: ModelConfig) -> ModelConfig:
    """`draft` with sequences no longer than those of `model`. Raises ConfigError if it cannot make drafts for
    `model`."""
    if draft.impl != "quire":
        raise _refused(f"{draft.name} runs through Transformers, which makes no drafts yet")
    if any(layer.attention.kind == "state" for layer in draft.shape.layers):
        raise _refused(f"{draft.architecture} keeps states, which models that make drafts cannot do yet")
    if abs(draft.vocab_size - model.vocab_size) > MOST_PADDING:
        raise _refused(
            f"{draft.name} has a vocabulary of {draft.vocab_size} tokens, and {model.name} one of {model.vocab_size}: "
            f"they may differ by padding alone, which is at most {MOST_PADDING} rows"
        )
    return replace(draft, max_model_len=min(draft.max_model_len, model.max_model_len))


def draft_ranks(chosen: DraftModelConfig, num_ranks: int) -> int:
    """Ranks that share the draft model's layers, in an engine of `num_ranks`."""
    wanted = num_ranks if chosen.num_ranks is None else chosen.num_ranks
    if wanted not in (1, num_ranks):
        raise _refused(f"draft_tensor_parallel_size must be 1 or that of the model, {num_ranks}, not {wanted}")
    return wanted


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"{OPTION}: {reason}", param=OPTION)
