"""The benchmark of JSON schemas: what it counts as followed, narrower and wrong, crashes, and shards put together."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.json_schema.__main__ import print_lost, print_table, read
from benchmarks.json_schema.data import Case, bench_cases, keywords_of
from benchmarks.json_schema.engines import ENGINES
from benchmarks.json_schema.trial import run

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def case(*texts: tuple[str, bool], schema: Any = SCHEMA) -> Case:
    return Case("name", "group", schema, texts)


@pytest.mark.parametrize("engine", ["quire", "llguidance"])
def test_a_schema_that_is_followed(engine: str) -> None:
    found = run(case(('{"a":1}', True), ('{"a":1.0}', True), ('{"a":"x"}', False)), ENGINES[engine], 2)
    assert (found.state, found.narrow, found.wrong) == ("followed", ['{"a":1.0}'], [])
    assert found.keywords == ["properties", "required", "type"]
    assert found.mask_times


def test_texts_that_are_taken_and_do_not_follow() -> None:
    found = run(case(("1", False), schema={"type": "string"}), lambda _: ENGINES["quire"]({"type": "integer"}), 1)
    assert found.wrong[0] == "1"


def test_a_schema_that_is_refused_or_crashes() -> None:
    assert run(case(schema={"uniqueItems": True, "type": "array"}), ENGINES["quire"]).state == "refused"
    assert run(case(), lambda _: os.kill(os.getpid(), signal.SIGTERM)).state == "crashed"
    assert run(case(), lambda _: os.kill(os.getpid(), signal.SIGXCPU)).state == "slow"


def test_keywords_are_told_from_names_and_data() -> None:
    schema = {
        "properties": {"enum": {"const": {"pattern": "x"}}},
        "$defs": {"minimum": {"allOf": [{"maxLength": 1}]}},
        "default": {"oneOf": []},
        "title": "x",
    }
    assert keywords_of(schema) == ["$defs", "allOf", "const", "maxLength", "properties"]


def test_shards_are_all_schemas_once(tmp_path: Path) -> None:
    folder = tmp_path / "maskbench" / "data"
    folder.mkdir(parents=True)
    for number in range(7):
        text = json.dumps({"schema": {"const": number}, "tests": [{"data": number, "valid": True}]})
        (folder / f"Set_{number}---x{number}.json").write_text(text)
    shards = [list(bench_cases(tmp_path, first, 3)) for first in range(3)]
    assert [len(shard) for shard in shards] == [3, 2, 2]
    assert sorted(each.schema["const"] for shard in shards for each in shard) == list(range(7))
    assert {each.group for shard in shards for each in shard} == {"Set"}


def test_results_of_shards_are_printed_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for number in range(2):
        found = run(case(("1", True), schema={"const": number}), ENGINES["quire"], 1)
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps({"bench": {"quire": [vars(found)], "llguidance": [vars(found)]}}))
    results = read(paths)["bench"]
    assert len(results["quire"]) == 2
    print_table("bench, quire", results["quire"], 1)
    print_lost(results["quire"], results["llguidance"], 1)
    printed = capsys.readouterr().out
    assert "all                                  2         0         0         0         1         0" in printed
    assert "narrow name: 1" in printed
    assert "lost: 0, gained: 0, narrower than llguidance alone: 0" in printed
