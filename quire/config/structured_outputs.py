from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from quire.config.checks import choice, converted
from quire.errors import ConfigError
from quire.structured_outputs_params import StructuredOutputsParams

OTHER_BACKENDS = ("xgrammar", "outlines", "lm-format-enforcer")
BACKENDS = ("auto", "guidance", *OTHER_BACKENDS)
OPTION = "structured_outputs_config"


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """Engine's `structured_outputs_config`, with vLLM's names. backend: one of BACKENDS, without effect: llguidance
    compiles every grammar. disable_any_whitespace, disable_additional_properties: see StructuredOutputsParams; they
    hold for all requests, but a request's whitespace_pattern stays. enable_in_reasoning: the constraint begins with the
    first token, not after the reasoning."""

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StructuredOutputsConfig:
        """Read the option's JSON object. Raises ConfigError for unknown names and wrong values."""
        given = {name: value for name, value in given.items() if not (name in _ELSEWHERE and not value)}
        names = [field.name for field in fields(cls)]
        wrong = next((name for name in given if name not in names), None)
        if wrong in _ELSEWHERE:
            raise ConfigError(f"{OPTION}.{wrong} is not supported: {_ELSEWHERE[wrong]}", param=OPTION)
        config = converted(OPTION, given, cls, names)
        choice(OPTION, config.backend, BACKENDS)
        return config

    def apply(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Request's constraint with these settings, before its grammar is written."""
        if not (self.disable_any_whitespace or self.disable_additional_properties):
            return params
        return msgspec.structs.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace
            or (self.disable_any_whitespace and params.whitespace_pattern is None),
            disable_additional_properties=params.disable_additional_properties or self.disable_additional_properties,
        )


_ELSEWHERE = {
    "reasoning_parser": "name it by --reasoning-parser",
    "reasoning_parser_plugin": "no plugins are loaded",
    "disable_fallback": "there is one backend",
}
"""vLLM's refused fields -> reason. Their defaults pass."""
