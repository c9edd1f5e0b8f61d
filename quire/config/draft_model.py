from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from quire.config.eagle import fitting_head, head_method, head_values, read_eagle
from quire.config.hf_config import read_config, read_directory_config
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.parallel import check_ranks_fit
from quire.config.speculation import DraftModelConfig, SpeculationConfig
from quire.config.speculation_keys import OPTION
from quire.errors import ConfigError, UserError

MOST_PADDING = 1024
"""Largest difference, in rows, between vocabulary matrices of two models with one tokenizer."""


def with_draft_model(
    speculation: SpeculationConfig,
    options: EngineOptions,
    model: ModelConfig,
    backend: str,
    complete: Callable[[EngineOptions], ModelConfig],
) -> SpeculationConfig:
    """`speculation` with its draft model's configuration read. A head for drafts is also recognised by its config.json
    alone. backend: attention backend of `model`. complete: reads the model of options. Raises ConfigError for a model
    that cannot make drafts."""
    chosen = speculation.draft_model
    if chosen is None:
        return speculation
    num_ranks = draft_ranks(chosen, options.tensor_parallel_size)
    try:
        is_head = speculation.method != "draft_model"
        read = read_config if is_head else read_directory_config
        raw = read(chosen.name, chosen.revision, options.download_dir)
        method = head_method(raw)
        if is_head:
            method = speculation.method
        values = head_values(raw, chosen.name) if method else None
        own = draft_options(options, chosen, model, backend, values)
        draft = complete(own)
        if num_ranks > 1:
            check_ranks_fit(own, draft)
        head = read_eagle(method, raw, model, chosen.name) if method else None
    except UserError as error:
        said = error.message.removeprefix(f"{OPTION}: ")
        raise ConfigError(f"{OPTION}.model: {said}", param=OPTION) from None
    if head is None:
        draft = fitting_draft(draft, model)
    elif model.impl != "quire":
        raise _refused(f"{model.name} runs through Transformers, which shows a head no hidden states yet")
    else:
        draft = fitting_head(draft, head, model, chosen.max_model_len)
    found = replace(chosen, num_ranks=num_ranks, model=draft, head=head, mask_token=_mask_token(chosen, raw, draft))
    return replace(speculation, draft_model=found, method=method or speculation.method)


def draft_options(
    options: EngineOptions,
    chosen: DraftModelConfig,
    model: ModelConfig,
    backend: str,
    overrides: Mapping[str, Any] | None = None,
) -> EngineOptions:
    """Draft model's options. Its keys and values have the types of `model`. backend: attention backend of `model`.
    overrides: keys of a head's config.json; a head is as long as the model."""
    given: dict[str, Any] = {
        "model": chosen.name,
        "runner": "generate",
        "revision": chosen.revision,
        "quantization": chosen.quantization,
        "max_model_len": None if overrides else chosen.max_model_len,
        "load_format": "dummy" if options.load_format == "dummy" else "auto",  # as draft_load has it
        "kv_cache_dtype": model.kv_cache_dtype,
        "attention_backend": backend,
        "mla_prompt": "auto",
        "batch_invariant": True,  # of its prompts: a device knows no starts of theirs
        "matmul_precision": "auto",
        "hf_overrides": overrides,
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


def _mask_token(chosen: DraftModelConfig, raw: Mapping[str, Any], draft: ModelConfig) -> int | None:
    """Token id that stands for unknown tokens in a model for parallel drafts (PARD); None for others. raw: its
    config.json."""
    if not chosen.is_parallel:
        return None
    found = raw.get("pard_token", raw.get("ptd_token_id"))
    if found is None:
        raise _refused(f"config.json of {chosen.name} has neither pard_token nor ptd_token_id: it drafts one by one")
    if type(found) is not int or not 0 <= found < draft.vocab_size:
        raise _refused(f"pard_token of {chosen.name} must be from 0 to {draft.vocab_size - 1}, not {found!r}")
    return found


def draft_ranks(chosen: DraftModelConfig, num_ranks: int) -> int:
    """Ranks that share the draft model's layers, in an engine of `num_ranks`."""
    wanted = num_ranks if chosen.num_ranks is None else chosen.num_ranks
    if wanted not in (1, num_ranks):
        raise _refused(f"draft_tensor_parallel_size must be 1 or that of the model, {num_ranks}, not {wanted}")
    return wanted


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"{OPTION}: {reason}", param=OPTION)
