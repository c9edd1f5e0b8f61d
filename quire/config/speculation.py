"""The engine's drafts: tokens that a step computes before it is known that they are a sequence's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.config.checks import converted
from quire.errors import ConfigError, nearest_name

METHODS = ("ngram", "ngram_gpu")
"""Two names of one method: the drafts are looked up where the model runs."""
MAX_DRAFTS, MAX_LOOKUP = 31, 64
USUAL_LOOKUP = 5
OPTION = "speculative_config"


@dataclass(frozen=True)
class SpeculationConfig:
    """max_drafts: most drafts of a sequence in a step; 0: none are made. lookup_min, lookup_max: how many of a
    sequence's last tokens are looked up in what comes before them, at least and at most; what followed there are the
    drafts. by_batch_size: (running sequences, most drafts of each up to as many), ascending; the last one holds for
    more sequences, too. adapts: a sequence whose drafts are rejected computes fewer."""

    max_drafts: int = 0
    lookup_min: int = USUAL_LOOKUP
    lookup_max: int = USUAL_LOOKUP
    by_batch_size: tuple[tuple[int, int], ...] = ()
    adapts: bool = True

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
        by_batch_size = _by_batch_size(
            fields.num_speculative_tokens_per_batch_size or [], fields.num_speculative_tokens
        )
        return cls(fields.num_speculative_tokens, least, most, by_batch_size, fields.adaptive)


def _by_batch_size(ranges: list[tuple[int, int, int]], most: int) -> tuple[tuple[int, int], ...]:
    """Ranges (first, last number of running sequences, drafts), which must follow one another from 1 on."""
    name = f"{OPTION}.num_speculative_tokens_per_batch_size"
    next_first = 1
    for first, last, number in ranges:
        if first != next_first or last < first:
            raise ConfigError(
                f"{name} must be ranges [first, last, drafts] that follow one another from 1 on, not "
                f"[{first}, {last}, {number}] where one from {next_first} on is due",
                param=OPTION,
            )
        if not 0 <= number <= most:
            raise ConfigError(
                f"{name} may ask for 0 to {most} drafts (num_speculative_tokens), not {number}", param=OPTION
            )
        next_first = last + 1
    return tuple((last, number) for _, last, number in ranges)


class _Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The option as the caller writes it."""

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    adaptive: bool = True
