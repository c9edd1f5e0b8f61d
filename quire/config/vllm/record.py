from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

NO_VALUES: Mapping[Any, Any] = MappingProxyType({})

MEANT, NOTED, REFUSED = "accepted", "no effect", "refused"
"""Fates of a flag: it has its meaning; no effect, and a note says why; an error that says why."""

KINDS = ("flag", "int", "float", "text", "count", "length", "texts", "ints", "appended", "json", "json list", "any")
"""Kinds of values of vLLM's flags. flag: --x or --no-x. count: an integer, or 4k (4000), 4K (4096). length: a count,
auto or -1. texts, ints: one or more values. appended: a text; the flag may be repeated. json: an object, or keys as
--x.key value. json list: one JSON list. any: a text or a number."""


@dataclass(frozen=True)
class VllmFlag:
    """Flag of `vllm serve`; with `is_keyword` also a keyword of its `LLM`. fate: MEANT, NOTED or REFUSED. target: field
    of EngineOptions or ServerSettings that gets the value; None if the flag asks for what always holds. why: difference
    in meaning, or reason. short: other spellings. values: vLLM's value -> ours. known: the only values that reach the
    target; others are noted. harmless: values that pass silently."""

    name: str
    kind: str
    fate: str
    target: str | None = None
    why: str = ""
    short: tuple[str, ...] = ()
    values: Mapping[Any, Any] = field(default_factory=lambda: NO_VALUES)
    known: tuple[Any, ...] | None = None
    harmless: tuple[Any, ...] = ()
    is_keyword: bool = True

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def to(name: str, kind: str, target: str = "", why: str = "", **more: Any) -> VllmFlag:
    """Entry of a flag with its meaning. target: our name, if different."""
    return VllmFlag(name, kind, MEANT, target or name, why, **more)


def so(name: str, kind: str, why: str, *harmless: Any, **more: Any) -> VllmFlag:
    """Entry of a flag that asks for what always holds. harmless: values that fit; others are noted."""
    return VllmFlag(name, kind, MEANT, None, why, harmless=harmless, **more)


def noted(name: str, kind: str, why: str, *harmless: Any, **more: Any) -> VllmFlag:
    """Entry of a flag without effect on answers."""
    return VllmFlag(name, kind, NOTED, None, why, harmless=harmless, **more)


def refused(name: str, kind: str, why: str, *harmless: Any, **more: Any) -> VllmFlag:
    """Entry of a flag that raises ConfigError, as its effect is not available. harmless: its default, mostly."""
    return VllmFlag(name, kind, REFUSED, None, why, harmless=harmless, **more)
