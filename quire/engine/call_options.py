"""Keyword arguments that vLLM's calls share, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from quire.engine.adapters import LoRARequests
from quire.engine.input_processor import Prompt
from quire.errors import UserError, reject_unknown
from quire.multimodal.inputs import MediaOptions

TRUNCATION = ("truncate_prompt_tokens", "truncation_side")


class CallOptions(TypedDict, total=False):
    """Keywords of engine calls besides prompts and parameters. tokenization_kwargs: `truncate_prompt_tokens` and
    `truncation_side`, which override the parameters. mm_processor_kwargs: options of the prompts' pictures, within the
    engine's."""

    tokenization_kwargs: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None


class PoolingOptions(CallOptions, total=False):
    """Keywords of pooling calls. lora_request: one adapter for all prompts, or one per prompt."""

    lora_request: LoRARequests


def truncation_of(options: CallOptions | PoolingOptions) -> dict[str, Any]:
    """Turn `tokenization_kwargs` into fields of SamplingParams. Raises UserError for unknown or unsupported ones."""
    reject_unknown(options, PoolingOptions.__annotations__, "argument")
    given = dict(options.get("tokenization_kwargs") or {})
    if given.pop("add_special_tokens", True) is not True:
        raise UserError("add_special_tokens must be true here: give token ids instead", param="tokenization_kwargs")
    reject_unknown(given, TRUNCATION, "key of tokenization_kwargs")
    return given


def with_processor_kwargs(prompt: Prompt, options: CallOptions | PoolingOptions) -> Prompt:
    """Prompt with the call's `mm_processor_kwargs`, unless it has its own. Raises ConfigError for wrong ones."""
    given = options.get("mm_processor_kwargs")
    if not given:
        return prompt
    MediaOptions.of(given)
    found: Any = {"mm_processor_kwargs": given, **prompt} if isinstance(prompt, Mapping) else prompt
    return found  # type: ignore[no-any-return]
