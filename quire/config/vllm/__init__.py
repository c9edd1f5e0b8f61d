"""Flags of `vllm serve` and keywords of vLLM's `LLM`: a table, and their translation to options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.config.vllm import engine_flags as engine
from quire.config.vllm import running_flags as running
from quire.config.vllm.record import MEANT, NOTED, REFUSED, VllmFlag
from quire.config.vllm.server_flags import HTTP, SERVER
from quire.errors import ConfigError

VERSION = "0.33"
"""vLLM's version of these flags. Flags of older versions come last."""

OLDER = running.OLDER
GROUPS: Mapping[str, tuple[VllmFlag, ...]] = MappingProxyType(
    {
        "Model": engine.MODEL,
        "Loading": engine.LOADING,
        "Layers": engine.ATTENTION,
        "Ranks": running.PARALLEL,
        "Memory": engine.CACHE,
        "Images, sound and video": engine.MEDIA,
        "Adapters": running.ADAPTERS,
        "Observation": running.OBSERVABILITY,
        "Scheduler": running.SCHEDULER,
        "Kernels": running.KERNELS,
        "Features": running.FEATURES,
        "Chat and answers": SERVER,
        "HTTP": HTTP,
        "Of older versions": OLDER,
    }
)
FLAGS: Mapping[str, VllmFlag] = MappingProxyType({entry.name: entry for group in GROUPS.values() for entry in group})
KEYWORDS: Mapping[str, VllmFlag] = MappingProxyType({**FLAGS, **{entry.name: entry for entry in engine.KEYWORDS}})
"""Keywords of `LLM` and `AsyncEngineArgs`; `is_keyword` is False for the server's flags."""


def translate(entry: VllmFlag, value: Any, spelled: str) -> tuple[dict[str, Any], str | None]:
    """Translate a flag or keyword to (our option and its value, if any; a note, if any). spelled: name as the user
    wrote it. Raises ConfigError for refused ones."""
    is_harmless = value is None or any(type(each) is type(value) and each == value for each in _alike(entry.harmless))
    if entry.fate == REFUSED and not is_harmless:
        raise ConfigError(f"{spelled} is not supported: {entry.why}", param=entry.name)
    if entry.target is not None:
        ours = entry.values.get(value, value) if isinstance(value, str | int | float) else value
        if entry.known is None or ours in entry.known:
            return {entry.target: ours}, None
    elif is_harmless or entry.fate == REFUSED or (entry.fate == MEANT and not entry.harmless):
        return {}, None
    return {}, f"{spelled} {_shown(value)}has no effect: {entry.why}"


def translate_keywords(keywords: Mapping[str, Any], ours: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Translate keywords of vLLM's `LLM`; returns options and notes. ours: names of our options, which keep our
    meanings. Names unknown to Quire and vLLM stay. Raises ConfigError for refused ones."""
    found: dict[str, Any] = {}
    notes = []
    if short := {key: keywords[name] for name, key in SPECULATION_KEYS.items() if keywords.get(name) is not None}:
        keywords = {name: value for name, value in keywords.items() if name not in SPECULATION_KEYS}
        keywords["speculative_config"] = {**(keywords.get("speculative_config") or {}), **short}
    for name, value in keywords.items():
        entry = KEYWORDS.get(name)
        if entry is None or not (entry.is_keyword or name in (*ours, *OF_SERVERS)):
            found[name] = value
            continue
        if name in TRACES:
            if value:
                raise ConfigError(f"{name} is not supported: only the server traces requests", param=name)
            continue
        if name in OF_SERVERS or (entry.target is not None and entry.target not in (*ours, "hf_token")):
            notes += (
                [f"{name} has no effect: it is an option of servers"] if value and name not in OF_SERVERS[:3] else []
            )
            continue
        if name == "dtype" and type(value).__module__ == "torch":
            value = str(value).removeprefix("torch.")
        more, note = translate(entry, value, name)
        found |= {target: ours for target, ours in more.items() if ours is not None}
        notes += [] if note is None else [note]
    return finish(found), notes


OF_SERVERS = (
    *("served_model_name", "enable_sleep_mode", "disable_log_stats"),
    *("max_num_queued_reqs", "max_num_queued_tokens", "enable_log_requests"),
    *("log_config_file", "shutdown_timeout", "tokens_only"),
)
"""Keywords of `LLM` that are flags of our server."""
SPECULATION_KEYS: Mapping[str, str] = MappingProxyType(
    {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
)
"""Keywords and flags that are keys of `speculative_config`."""
TRACES = ("otlp_traces_endpoint", "collect_detailed_traces")
"""Keywords of `LLM` that only the server can support."""


def finish(options: dict[str, Any]) -> dict[str, Any]:
    """Translated options with those that follow from others: a bare number of `swap_space` (GiB, as in older vLLM)
    turns swapping on."""
    space = options.get("swap_space")
    is_bare = isinstance(space, int | float) and not isinstance(space, bool)
    if is_bare and not options.keys() & {"preemption_mode", "kv_offload_dir"}:
        options["preemption_mode"] = "auto"
    return options


def _alike(values: tuple[Any, ...]) -> tuple[Any, ...]:
    floats = tuple(float(each) for each in values if type(each) is int)
    return (*values, *floats)


def _shown(value: Any) -> str:
    return "" if isinstance(value, bool | dict) else f"{value!r:.60} "


__all__ = [
    "FLAGS",
    "GROUPS",
    "KEYWORDS",
    "MEANT",
    "NOTED",
    "REFUSED",
    "VERSION",
    "VllmFlag",
    "translate",
    "translate_keywords",
]
