"""Grammars are written once for equal constraints, and never taken for one another's."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.structured_output import writer as writer_module
from quire.structured_output.writer import GrammarWriter
from quire.structured_outputs_params import StructuredOutputsParams
from quire.tokenization.tokenizer import load_tokenizer


@pytest.fixture
def writer() -> GrammarWriter:
    return GrammarWriter(load_tokenizer("bundled"), 4096)


def write(writer: GrammarWriter, **fields: Any) -> str:
    return writer.write(StructuredOutputsParams(**fields))


def test_written_once(writer: GrammarWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(writer, json={"const": 2**70})
    monkeypatch.setattr(writer_module, "write_grammar", lambda *_: pytest.fail("written again"))
    assert write(writer, json={"const": 2**70}) == first


def test_constraints_that_compare_equal_in_python_are_told_apart(writer: GrammarWriter) -> None:
    values: list[Any] = [1, True, 0, False, "1", None]
    assert len({write(writer, json={"const": value}) for value in values}) == len(values)
    assert write(writer, json={"type": "object", "properties": {"a": {}, "b": {}}}) != write(
        writer, json={"type": "object", "properties": {"b": {}, "a": {}}}
    ), "texts have the schema's order of keys"
    assert write(writer, regex="a") != write(writer, choice=["a"])


def test_settings_of_the_engine_count(writer: GrammarWriter) -> None:
    plain = write(writer, json={"type": "array"})
    writer.config = StructuredOutputsConfig(disable_any_whitespace=True)
    assert write(writer, json={"type": "array"}) != plain


def test_bounded(writer: GrammarWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_KEPT", 3)
    for number in range(9):
        write(writer, choice=[str(number)])
    assert len(writer._kept.entries) == 3
    assert writer._kept.num_characters == sum(len(key) + len(text) for key, text in writer._kept.entries.items())
