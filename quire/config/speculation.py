"""The engine's drafts: tokens that a step computes before it is known that they are a sequence's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.config.checks import converted
from quire.errors import ConfigError, nearest_name

METHODS = ("ngram",)
MAX_DRAFTS, MAX_LOOKUP = 31, 64
USUAL_LOOKUP = 5
OPTION = "speculative_config"


@dataclass(frozen=True)
class SpeculationConfig:
    """max_drafts: most drafts of a sequence in a step; 0: none are made. lookup_min, lookup_max: how many of a
    sequence's last tokens are looked up in what comes before them, at least and at most; what followed there are the
    drafts."""

    max_drafts: int = 0
    lookup_min: int = USUAL_LOOKUP
    lookup_max: int = USUAL_LOOKUP

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> SpeculationConfig:
        """given: by vLLM's names (None: no drafts). Raises ConfigError for names and values that there are not."""
        if given is None:
            return cls()
        fields = converted(OPTION, given, _Given, _Given.__struct_fields__)
        if fields.method not in METHODS:
            nearest = nearest_name(fields.method, METHODS)
            known = ", ".join(METHODS)
            raise ConfigError(f"{OPTION}.method must be one of {known}, not {fields.method!r}{nearest}", param=OPTION)
        least, most = fields.prompt_lookup_min, fields.prompt_lookup_max
        most = (least or USUAL_LOOKUP) if most is None else most
        least = most if least is None else least
        for name, value, limit in (
            ("num_speculative_tokens", fields.num_speculative_tokens, MAX_DRAFTS),
            ("prompt_lookup_max", most, MAX_LOOKUP),
            ("prompt_lookup_min", least, most),
        ):
            if not 1 <= value <= limit:
                raise ConfigError(f"{OPTION}.{name} must be from 1 to {limit}, not {value}", param=OPTION)
        return cls(fields.num_speculative_tokens, least, most)


class _Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The option as the caller writes it."""

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
