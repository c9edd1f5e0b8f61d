from __future__ import annotations

import numpy as np
import pytest

from quire.bench.metrics import RequestRecord, meets, parse_goodput, percentile, summarize, summarize_values
from quire.errors import UserError


def record(sent: float, times: list[float], num_output: int | None = None, **fields: object) -> RequestRecord:
    return RequestRecord(
        due=float(fields.pop("due", sent)),  # type: ignore[arg-type]
        sent=sent,
        chunk_times=tuple(times),
        num_prompt_tokens=int(fields.pop("num_prompt", 10)),  # type: ignore[call-overload]
        num_output_tokens=len(times) if num_output is None else num_output,
        error=fields.pop("error", None),  # type: ignore[arg-type]
    )


def test_one_timeline() -> None:
    one = record(2.0, [2.5, 2.75, 3.5])
    assert one.ttft == 0.5
    assert one.e2el == 1.5
    assert one.tpot == 0.5
    assert one.itl == [0.25, 0.75]


def test_tpot_counts_tokens_where_chunks_carry_several() -> None:
    assert record(0.0, [1.0, 2.0], num_output=5).tpot == 0.25


def test_a_single_token_has_no_tpot() -> None:
    one = record(0.0, [1.0])
    assert one.tpot is None
    assert one.itl == []
    assert meets(one, {"tpot": 1e-9, "itl": 1e-9, "ttft": 1.0})


@pytest.mark.parametrize("percent", [0, 12.5, 50, 90, 99, 100])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_percentile_is_numpys(percent: float, size: int) -> None:
    values = sorted(np.random.default_rng(size).normal(size=size).tolist())
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-12)


def test_describe() -> None:
    found = summarize_values([4.0, 1.0, 3.0, 2.0], percentiles=(25, 50))
    assert found is not None
    assert (found.count, found.mean, found.median, found.min, found.max) == (4, 2.5, 2.5, 1.0, 4.0)
    assert found.std == pytest.approx(np.std([1, 2, 3, 4]))
    assert found.percentiles == {25: 1.75, 50: 2.5}
    assert found.scaled(1000)["p25"] == 1750
    assert summarize_values([]) is None


def test_summary_of_a_run() -> None:
    records = [
        record(1.0, [2.0, 3.0], due=1.0, num_prompt=5),
        record(1.5, [1.75, 2.0, 2.25], due=1.25, num_prompt=7),
        record(2.0, [], error="HTTP 500: boom", num_prompt=0),
        record(2.0, [2.5], error="timeout", num_prompt=100),
        record(2.5, [], error="HTTP 500: boom", num_prompt=0),
    ]
    report = summarize(records, goodput={"ttft": 0.5})
    assert report.duration == 2.0
    assert (report.num_requests, report.num_completed, report.num_failed) == (5, 2, 3)
    assert report.failures == {"HTTP 500: boom": 2, "timeout": 1}
    assert (report.num_prompt_tokens, report.num_output_tokens) == (12, 5)
    assert report.rate(report.num_output_tokens) == 2.5
    assert report.num_good == 1
    assert report.max_send_delay == 0.25
    ttft, tpot, itl, e2el = (report.latencies[name] for name in ("ttft", "tpot", "itl", "e2el"))
    assert ttft is not None
    assert tpot is not None
    assert itl is not None
    assert e2el is not None
    assert (ttft.mean, ttft.max) == (0.625, 1.0)
    assert (tpot.min, tpot.max) == (0.25, 1.0)
    assert (itl.count, itl.max) == (3, 1.0)
    assert (e2el.min, e2el.max) == (0.75, 2.0)


def test_summary_of_nothing_and_of_failures_only() -> None:
    assert summarize([]).rate(5) == 0.0
    report = summarize([record(1.0, [], error="timeout")])
    assert report.num_completed == 0
    assert report.latencies["ttft"] is None
    assert report.num_good is None


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 0.5}, True),
        ({"ttft": 0.49}, False),
        ({"tpot": 0.5, "e2el": 1.5}, True),
        ({"tpot": 0.5, "e2el": 1.4}, False),
        ({"itl": 0.74}, False),
        ({"itl": 0.75}, True),
    ],
)
def test_objectives_are_upper_limits(objectives: dict[str, float], good: bool) -> None:
    assert meets(record(2.0, [2.5, 2.75, 3.5]), objectives) is good


def test_parse_goodput() -> None:
    assert parse_goodput(["ttft:500", "tpot:50.5"]) == {"ttft": 0.5, "tpot": 0.0505}


@pytest.mark.parametrize("term", ["tfft:5", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf"])
def test_bad_goodput(term: str) -> None:
    with pytest.raises(UserError, match="--goodput"):
        parse_goodput([term])
