"""The pure parts of the comparison with other engines: what is run, in which order, and what the table says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.peers.compare import parse_options, take_turns
from benchmarks.peers.workload import Request, Workload, parse_workload, shifted
from benchmarks.peers.workload import speed as speed_of

NAMED = {
    "pair": [{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}, {"prompt_token_ids": [5, 6], "max_tokens": 3}],
    "prompt": [{"prompt_token_ids": [1, 2, 3], "max_tokens": 1}],
}


def fake_measure(requests: Sequence[Request], max_tokens: int | None) -> dict[str, float]:
    """A second for each prompt and a tenth for each token after its first."""
    outputs = [max_tokens or request["max_tokens"] for request in requests]
    return {
        "seconds": sum(1 + (output - 1) / 10 for output in outputs),
        "input_tokens": sum(len(request["prompt_token_ids"]) for request in requests),
        "output_tokens": sum(outputs),
    }


class FakeEngine:
    """Writes its name where the order is kept, and gets faster by 1 token/s with every run."""

    def __init__(self, name: str, order: list[str]) -> None:
        self._name, self._order, self._runs = name, order, 0

    def speed(self, _workload: Workload) -> float:
        self._order.append(self._name)
        self._runs += 1
        return float(self._runs)


def test_a_workload_is_a_name_or_a_shape() -> None:
    assert parse_workload("pair", NAMED) == Workload("pair", tuple(NAMED["pair"]), "all")
    shape = parse_workload("3x16/8:decode", NAMED)
    assert [(len(each["prompt_token_ids"]), each["max_tokens"]) for each in shape.requests] == [(16, 8)] * 3
    assert shape.part == "decode"
    assert len({tuple(each["prompt_token_ids"][:1]) for each in shape.requests}) == 3


@pytest.mark.parametrize("text", ["other", "0x16/8", "3x16", "pair:first", "prompt:decode", "3x16/1:decode"])
def test_what_is_no_workload_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_workload(text, NAMED)


def test_runs_share_nothing_with_each_other_and_what_prompts_share_they_keep() -> None:
    first, second = (shifted(NAMED["pair"], run) for run in (1, 2))
    assert first[0]["prompt_token_ids"][:2] == first[1]["prompt_token_ids"]
    assert first[0]["prompt_token_ids"][0] != second[0]["prompt_token_ids"][0]
    assert [request["max_tokens"] for request in first] == [4, 3]
    assert [request["max_tokens"] for request in shifted(NAMED["pair"], 1, max_tokens=1)] == [1, 1]
    wrapped = shifted([{"prompt_token_ids": list(range(16_000)), "max_tokens": 1}], 400)[0]["prompt_token_ids"]
    assert (min(wrapped), max(wrapped)) == (3, 15_999)


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("pair", "output tok/s", 7 / 2.5),
        ("prompt", "input tok/s", 3 / 1),
        ("pair:prefill", "input tok/s", 5 / 2),
        ("pair:decode", "output tok/s", 5 / 0.5),
    ],
)
def test_speed_is_that_of_the_part_that_counts(text: str, unit: str, expected: float) -> None:
    workload = parse_workload(text, NAMED)
    assert workload.unit == unit
    assert speed_of(workload, fake_measure) == pytest.approx(expected)


def test_engines_take_turns_and_the_first_runs_do_not_count() -> None:
    order: list[str] = []
    engines: dict[str, Any] = {name: {"pair": FakeEngine(name, order)} for name in ("quire", "peer", "other")}
    samples = take_turns(engines, [parse_workload("pair", NAMED)], repeats=2)
    assert order == ["quire", "peer", "other", "peer", "other", "quire", "other", "quire", "peer"]
    assert samples == {"pair": {"quire": [2, 3], "peer": [2, 3], "other": [2, 3]}}


def test_turns_end_when_time_is_over_and_engines_without_a_workload_are_left_out_of_it() -> None:
    order: list[str] = []
    quire: Any = FakeEngine("quire", order)
    peer: Any = FakeEngine("peer", order)
    engines = {"quire": {"pair": quire, "prompt": quire}, "peer": {"prompt": peer}}
    answers, known = iter([True, True, False]), []
    workloads = [parse_workload(name, NAMED) for name in ("pair", "prompt")]
    samples = take_turns(engines, workloads, 3, lambda: next(answers), lambda some: known.append(len(some["prompt"])))
    assert order == ["quire", "quire", "peer", "quire", "peer", "quire"]
    assert samples == {"pair": {"quire": [3]}, "prompt": {"peer": [2], "quire": [4]}}
    assert known == [0, 2]


def test_options_are_json_or_text() -> None:
    texts = ["dtype=bfloat16", "num_threads=2", "enable_prefix_caching=false", "note=a=b"]
    expected = {"dtype": "bfloat16", "num_threads": 2, "enable_prefix_caching": False, "note": "a=b"}
    assert parse_options(texts) == expected
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse_options(["dtype"])
