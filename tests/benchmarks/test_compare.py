"""The pure parts of the comparison with other engines: what is run, in which order, and what the table says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.peers.compare import (
    Request,
    Samples,
    Workload,
    alternate,
    parse_options,
    parse_workload,
    shifted,
    table,
)
from benchmarks.peers.compare import speed as speed_of

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
    quire: Any = FakeEngine("quire", order)
    peer: Any = FakeEngine("peer", order)
    samples = alternate(quire, peer, parse_workload("pair", NAMED), repeats=3)
    assert order == ["quire", "peer", "quire", "peer", "peer", "quire", "quire", "peer"]
    assert (samples.quire, samples.peer) == ([2, 3, 4], [2, 3, 4])


def test_options_are_json_or_text() -> None:
    texts = ["dtype=bfloat16", "num_threads=2", "enable_prefix_caching=false", "note=a=b"]
    expected = {"dtype": "bfloat16", "num_threads": 2, "enable_prefix_caching": False, "note": "a=b"}
    assert parse_options(texts) == expected
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse_options(["dtype"])


def test_table_has_medians_and_the_median_of_the_ratios_of_the_pairs() -> None:
    samples = Samples(parse_workload("pair", NAMED), quire=[10.0, 40.0, 90.0], peer=[10.0, 20.0, 30.0])
    header, row, ready = table([samples], ready=(2.0, 80.0), peer="other").splitlines()
    assert header.split() == ["workload", "Quire", "other", "Quire/peer", "least-greatest"]
    assert row.split() == ["pair", "output", "tok/s", "40.0", "20.0", "2.00", "1.00-3.00"]
    assert ready.split()[:5] == ["ready", "s", "2.0", "80.0", "40.0x"]
