"""The engine's settings of structured outputs: what they change in a request's constraint, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.config.structured_outputs import StructuredOutputsConfig
from quire.errors import ConfigError
from quire.structured_output.writer import GrammarWriter
from quire.structured_outputs_params import StructuredOutputsParams
from quire.tokenization.tokenizer import load_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def config_of(**fields: Any) -> StructuredOutputsConfig:
    return resolve(EngineOptions.from_keywords({"structured_outputs_config": fields})).structured_outputs


def grammar(config: StructuredOutputsConfig, **fields: Any) -> str:
    writer = GrammarWriter(load_tokenizer("bundled"), 4096)
    writer.config = config
    return writer.write(StructuredOutputsParams(json=SCHEMA, **fields))


@pytest.mark.parametrize("name", ["disable_any_whitespace", "disable_additional_properties"])
def test_a_setting_is_that_of_every_request(name: str) -> None:
    by_engine = grammar(config_of(**{name: True}))
    assert by_engine == grammar(config_of(), **{name: True})
    assert by_engine != grammar(config_of())


def test_a_request_keeps_its_own_blanks() -> None:
    compact = config_of(disable_any_whitespace=True)
    assert grammar(compact, whitespace_pattern=" ") == grammar(config_of(), whitespace_pattern=" ")


@pytest.mark.parametrize("backend", ["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"])
def test_names_of_backends_are_taken(backend: str) -> None:
    assert grammar(config_of(backend=backend)) == grammar(config_of())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "gidance"}, "did you mean 'guidance'"),
        ({"disable_any_whitespaces": True}, "did you mean 'disable_any_whitespace'"),
        ({"disable_any_whitespace": "yes"}, "disable_any_whitespace"),
        ({"reasoning_parser": "qwen3"}, "name it by --reasoning-parser"),
        ({"reasoning_parser_plugin": "x.py"}, "no plugins"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_of(**fields)
    assert caught.value.param == "structured_outputs_config"


def test_defaults_of_vllm_are_taken() -> None:
    assert config_of(reasoning_parser="", reasoning_parser_plugin="", disable_fallback=False) == config_of()
