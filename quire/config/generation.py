"""Defaults of sampling that come with a model: its generation_config.json, and what the user puts over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.config.hf_json import read_json, read_optional_json
from quire.errors import ConfigError, UserError
from quire.sampling_params import SamplingParams

FILE = "generation_config.json"
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)
"""The keys that count, as in vLLM, and what SamplingParams calls them."""


def read_generation(path: Path, source: str, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """What generation_config.json says, with the user's keys over it.

    path: of the model. source: "auto" (the model's own file, if it has one), "vllm" (no file) or a directory with such
    a file. Raises ModelLoadError for a file that cannot be read, ConfigError for a directory without one.
    """
    if source == "vllm":
        values = {}
    elif source == "auto":
        values = read_optional_json(path / FILE)
    else:
        file = Path(source).expanduser() / FILE
        if not file.is_file():
            raise ConfigError(
                f"generation_config must be auto, vllm or a directory with {FILE}, not {source!r}",
                param="generation_config",
            )
        values = read_json(file)
    return {**values, **(overrides or {})}


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What of `generation` requests get that do not say otherwise, by field of SamplingParams; `max_tokens` bounds also
    those that do. Raises ConfigError for values that no request could have."""
    found = {ours: generation[theirs] for theirs, ours in NAMES.items() if generation.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except UserError as error:
        raise ConfigError(f"{FILE} or override_generation_config: {error.message}", param="generation_config") from None
    return found
