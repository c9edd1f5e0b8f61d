"""Shares of the limits, targets and the JSON form."""

from __future__ import annotations

import json

import pytest

from benchmarks.kernels.cases import Work
from benchmarks.kernels.measure import Timing
from benchmarks.kernels.results import Limits, overall_limits, result_json
from benchmarks.kernels.targets import TARGETS, verdict_json, verdicts
from tests.benchmarks.kernels.builders import LIMITS, case, result


def test_shares_of_the_limits() -> None:
    """10 GB/s, 100 GFLOP/s: 1 GB and 4 GFLOP cannot take less than 0.1 s."""
    found = result(case(bf16=Work(10**9, 4 * 10**9)), "bf16", 0.2)
    assert found.bandwidth == pytest.approx(5e9)
    assert found.bandwidth_share == pytest.approx(0.5)
    assert found.rate == pytest.approx(20e9)
    assert found.peak_share == pytest.approx(0.2)
    assert found.roofline_share == pytest.approx(0.5)


def test_integers_may_pass_the_floating_point_peak() -> None:
    found = result(case(w8a8=Work(10**6, integer_operations=40 * 10**9)), "w8a8", 0.2)
    assert found.peak_share == pytest.approx(2.0)
    assert found.roofline_share == pytest.approx(0.5)


def test_bfloat16_has_a_limit_of_its_own() -> None:
    found = result(case(w16a16=Work(10**6, bf16_operations=20 * 10**9)), "w16a16", 0.2)
    assert (found.peak_share, found.bf16_share) == (pytest.approx(1.0), pytest.approx(0.5))
    assert found.roofline_share == pytest.approx(0.5)
    without = result(case(), "bf16", 0.2, limits=Limits(1.0, 1.0, 1.0))
    assert without.bf16_share == 0.0


def test_speedup_over_a_twin() -> None:
    found = result(case(), "bf16", 0.2, twins={"f32": Timing((0.1, 0.5, 0.4))})
    assert found.speedup("f32") == pytest.approx(2.0)
    assert found.speedup("bf16") is None


def test_overall_limits_count_a_case_once() -> None:
    low, high = Limits(1.0, 10.0, 100.0, 40.0), Limits(3.0, 30.0, 300.0, 60.0)
    results = [result(case(), "bf16", 1.0, limits=limits) for limits in (low, low, low, high)]
    assert overall_limits(results) == Limits(2.0, 20.0, 200.0, 50.0)
    old = [result(case(), "bf16", 1.0, limits=Limits(1.0, 10.0, 100.0))]
    assert overall_limits(old) == Limits(1.0, 10.0, 100.0, None)


def test_json() -> None:
    found = result(case(bf16=Work(10**9, 10**9)), "bf16", 0.2, twins={"f32": Timing((0.4,))}, error=1e-6)
    data = json.loads(json.dumps(result_json(found)))
    assert data == {
        "kernel": "linear",
        "model": "tiny",
        "shape": "qkv",
        "rows": 1,
        "type": "bf16",
        "bytes": 10**9,
        "float_operations": 10**9,
        "integer_operations": 0,
        "bf16_operations": 0,
        "seconds": 0.2,
        "samples": [0.2],
        "bandwidth": pytest.approx(5e9),
        "bandwidth_share": pytest.approx(0.5),
        "rate": pytest.approx(5e9),
        "peak_share": pytest.approx(0.05),
        "roofline_share": pytest.approx(0.5),
        "limits": {"read": 10e9, "float_peak": 100e9, "integer_peak": 400e9, "bf16_peak": 200e9},
        "twin_seconds": {"f32": 0.4},
        "speedup": {"f32": pytest.approx(2.0)},
        "error": 1e-6,
        "sound": True,
    }


def linear(type_: str, rows: int, share: float) -> object:
    """A result that reaches `share` of both limits."""
    seconds = 1.0
    work = Work(int(share * LIMITS.read), int(share * LIMITS.float_peak))
    return result(case(rows=rows, **{type_: work}), type_, seconds)


def test_verdicts_name_the_worst_case_and_count() -> None:
    results = [linear("bf16", 1, 0.9), linear("bf16", 1, 0.6), linear("bf16", 1, 0.86), linear("int8", 2, 0.1)]
    (verdict,) = verdicts(results)  # type: ignore[arg-type]
    assert verdict_json(verdict) == {
        "target": "linear bf16, m = 1",
        "share": 0.85,
        "of": "of the streaming bandwidth",
        "lowest": pytest.approx(0.6),
        "lowest_case": "linear tiny qkv x1 bf16",
        "median": pytest.approx(0.86),
        "num_cases": 3,
        "num_reached": 2,
    }


def test_a_wrong_result_reaches_nothing() -> None:
    assert verdicts([result(case(), "bf16", 1e-9, sound=False)]) == []


def test_bfloat16_products_are_held_against_their_own_peak() -> None:
    work = Work(1, bf16_operations=150 * 10**9)
    (verdict,) = verdicts([result(case(rows=64, w16a16=work), "w16a16", 1.0)])
    assert (verdict.lowest, verdict.num_reached) == (pytest.approx(0.75), 1)


@pytest.mark.parametrize(
    ("kernel", "type_", "shape", "rows", "text"),
    [
        ("linear", "bf16", "qkv", 1, "linear bf16, m = 1"),
        ("linear", "int8", "qkv", 1, "linear int8, m = 1"),
        ("linear", "int4", "qkv", 1, "linear int4, m = 1"),
        ("linear", "bf16", "qkv", 8, "linear bf16, m = 8"),
        ("linear", "bf16", "qkv", 32, "linear bf16, m >= 32"),
        ("linear", "bf16", "qkv", 512, "linear bf16, m >= 32"),
        ("linear", "w8a8", "qkv", 32, "linear w8a8, m >= 32"),
        ("linear", "w16a16", "qkv", 1, "linear w16a16, m = 1"),
        ("linear", "w16a16", "qkv", 32, "linear w16a16, m >= 32"),
        ("decode", "int8", "1024", 8, "decode attention, context >= 1K"),
        ("prefill", "bf16", "prompt", 512, "prefill attention"),
        ("linear", "bf16", "qkv", 16, None),
        ("linear", "w4a8", "qkv", 1, None),
        ("decode", "f32", "256", 1, None),
        ("norm", "f32", "hidden", 1, None),
    ],
)
def test_which_target_a_case_has(kernel: str, type_: str, shape: str, rows: int, text: str | None) -> None:
    found = result(case(kernel, shape, rows, **{type_: Work(1, 1)}), type_, 1.0)
    assert [target.text for target in TARGETS if target.applies(found)] == ([] if text is None else [text])
