"""Keys of `speculative_config` for single methods, and vLLM's keys without effect."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError
from quire.logging import get_logger

logger = get_logger(__name__)

OPTION = "speculative_config"
_OF_WEIGHTS = (
    *("kv_cache_dtype", "attention_backend", "moe_backend", "enforce_eager", "draft_sample_method"),
    *("use_local_argmax_reduction", "disable_padded_drafter_batch", "parallel_drafting", "tensor_parallel_size"),
)
_OF_MODELS = (
    *("model", "draft_tensor_parallel_size", "quantization", "max_model_len", "revision", "code_revision"),
    *("use_heterogeneous_vocab", "draft_load_config", *_OF_WEIGHTS),
)
OF_METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
        "suffix": (
            *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
            *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
        ),
        "custom_class": ("model",),
        "draft_model": _OF_MODELS,
        "eagle": (*_OF_MODELS, "disable_eagle_block_drop"),
        "eagle3": (*_OF_MODELS, "disable_eagle_block_drop"),
        "mtp": ("index_share_for_mtp_iteration", "disable_eagle_block_drop", *_OF_WEIGHTS),
    }
)
"""Method -> its own keys. All others belong to every method."""
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "code_revision": "no code of a checkpoint is run",
        "attention_backend": "the draft model computes with the kernels of the model",
        "moe_backend": "the draft model computes with the kernels of the model",
        "enforce_eager": "the draft model runs as the model does",
        "use_local_argmax_reduction": "every rank has all logits",
        "disable_eagle_block_drop": "no block is dropped",
        "disable_padded_drafter_batch": "drafts are computed without padding",
    }
)
ONE_VALUE: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "kv_cache_dtype": ((None, "auto"), "the draft model keeps keys and values as the model does"),
        "draft_sample_method": (("greedy",), "a draft is the likeliest token"),
        "use_heterogeneous_vocab": ((False,), "both models must have one vocabulary"),
        "draft_load_config": ((None,), "the draft model is loaded as the model is"),
        "index_share_for_mtp_iteration": ((None, False), "each draft chooses its own keys"),
        "tensor_parallel_size": ((None,), "the key is draft_tensor_parallel_size"),
    }
)
"""Key -> (permitted values, reason)."""
REJECTION_METHODS = ("standard", "block")
"""Names of one rule here: a draft is accepted if it equals the drawn token."""


def check_keys(given: Mapping[str, Any], method: str) -> None:
    """Log keys of `speculative_config` without effect. Raises ConfigError for a key of another method, and for a
    refused value."""
    for key, value in given.items():
        of = [name for name, keys in OF_METHODS.items() if key in keys]
        if of and method not in of:
            raise ConfigError(f"{OPTION} has no {key!r} for method {method!r}: it is of {', '.join(of)}", param=OPTION)
        values, reason = ONE_VALUE.get(key, ((value,), ""))
        if value not in values:
            raise ConfigError(f"{OPTION}.{key} cannot be {value!r}: {reason}", param=OPTION)
        if key in WITHOUT_EFFECT and value not in (None, False):
            logger.warning("%s.%s has no effect: %s", OPTION, key, WITHOUT_EFFECT[key])
    found = given.get("rejection_sample_method", "standard")
    if found not in REJECTION_METHODS:
        known = ", ".join(REJECTION_METHODS)
        raise ConfigError(f"{OPTION}.rejection_sample_method must be one of {known}, not {found!r}", param=OPTION)
