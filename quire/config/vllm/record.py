"""How one flag of `vllm serve` is described: how its value is written, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

NO_VALUES: Mapping[Any, Any] = MappingProxyType({})

MEANT, NOTED, REFUSED = "accepted", "no effect", "refused"
"""What becomes of a flag: it has its meaning; it is accepted with a note that says why it has no effect; it is an
error that says why."""

KINDS = ("flag", "int", "float", "text", "count", "length", "texts", "ints", "appended", "json", "json list", "any")
"""flag: --x or --no-x. count: an integer, or 4k (4000), 4K (4096). length: a count, auto or -1. texts, ints: one or
more values. appended: a text, the flag several times. json: an object, or single keys as --x.key value. json list: one
JSON list. any: a text or a number, as vLLM takes several kinds."""


@dataclass(frozen=True)
class VllmFlag:
    """One flag, which is also a keyword of vLLM's `LLM` and `AsyncEngineArgs` where `is_keyword`.

    name: with underscores. fate: MEANT, NOTED or REFUSED. target: the field of EngineOptions or ServerSettings that
    gets the value; None where the flag says what is so anyway. why: what differs in the meaning, why there is no
    effect, or the reason of the refusal. short: other ways to write the flag. values: our words for vLLM's. known: the
    only values that reach the target; any other is noted with `why`. harmless: values that ask for nothing, about which
    nothing is said.
    """

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
    """A flag with its meaning. target: where the name differs."""
    return VllmFlag(name, kind, MEANT, target or name, why, **more)


def so(name: str, kind: str, why: str, *harmless: Any, **more: Any) -> VllmFlag:
    """A flag that asks for what is so anyway. harmless: the values that do, where others are noted."""
    return VllmFlag(name, kind, MEANT, None, why, harmless=harmless, **more)


def noted(name: str, kind: str, why: str, *harmless: Any, **more: Any) -> VllmFlag:
    """A flag without effect on what clients get."""
    return VllmFlag(name, kind, NOTED, None, why, harmless=harmless, **more)


def refused(name: str, kind: str, why: str, *harmless: Any, **more: Any) -> VllmFlag:
    """A flag whose effect cannot be had. harmless: its default, mostly."""
    return VllmFlag(name, kind, REFUSED, None, why, harmless=harmless, **more)
