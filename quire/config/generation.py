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
"""vLLM's keys that count -> field of SamplingParams."""


def read_generation(path: Path, source: str, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Content of generation_config.json with the user's keys over it. path: the model. source: "auto" (the model's own
    file, if any), "vllm" (no file) or a directory with such a file. Raises ModelLoadError for an unreadable file,
    ConfigError for a directory without one."""
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
    """Defaults of requests by field of SamplingParams; `max_tokens` bounds also requests that set it. Raises
    ConfigError for values that no request could have."""
    found = {ours: generation[theirs] for theirs, ours in NAMES.items() if generation.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except UserError as error:
        raise ConfigError(f"{FILE} or override_generation_config: {error.message}", param="generation_config") from None
    return found
