"""`python -m benchmarks.kernels` with kernels that only move a clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import command
from benchmarks.kernels.cases import QUICK, Selection, every_case, select
from benchmarks.kernels.command import main
from benchmarks.kernels.measure import Method
from benchmarks.kernels.run import BF16_PEAK, FLOAT_PEAK, INTEGER_PEAK, READ, Bench
from quire.clock import VirtualClock
from tests.benchmarks.kernels.builders import taking
from tests.benchmarks.kernels.test_run import FakeSubject


class AnySubject(FakeSubject):
    SECONDS = dict.fromkeys((name for case in every_case() for name in case.variants), 0.5)

    def memory_bytes(self, of: Any) -> int:
        return 0


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> AnySubject:
    clock = VirtualClock()
    found = AnySubject(clock)

    def bench(num_threads: int, *, with_twins: bool) -> tuple[Bench, dict[str, Any]]:
        limits = {name: taking(clock, 1.0, 1000) for name in (READ, FLOAT_PEAK, INTEGER_PEAK, BF16_PEAK)}
        method = Method(clock, lambda: None, min_rounds=1, max_rounds=1)
        return Bench(method, limits, lambda _: found, 1, with_twins), {"isa": "none", "threads": num_threads}

    monkeypatch.setattr(command, "_bench", bench)
    return found


CHOICE = ["--kernels", "linear", "--models", "8B", "--shapes", "down,o", "--rows", "1,32", "--types", "bf16,w8a8"]


def test_table_and_json(subject: AnySubject, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert main([*CHOICE, "--threads", "3", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "kernels, none, 3 threads" in printed
    assert printed.count("│ linear │ 8B") == 8
    assert "20.00" in printed  # times faster than the twin, which takes ten seconds
    assert "linear bf16, m >= 32" in printed
    result = json.loads(file.read_text())
    assert result["benchmark"] == "kernels"
    assert result["machine"] == {"isa": "none", "threads": 3}
    assert result["options"]["rows"] == [1, 32]
    assert result["limits"] == {"read": 1000.0, "float_peak": 1000.0, "integer_peak": 1000.0, "bf16_peak": 1000.0}
    assert {(one["shape"], one["rows"], one["type"], one["seconds"]) for one in result["results"]} == {
        (shape, rows, type_, 0.5) for shape in ("down", "o") for rows in (1, 32) for type_ in ("bf16", "w8a8")
    }
    assert [one["target"] for one in result["targets"]] == [
        "linear bf16, m = 1",
        "linear bf16, m >= 32",
        "linear w8a8, m >= 32",
    ]
    assert result["skipped"] == []


def test_without_twins(subject: AnySubject, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert main([*CHOICE, "--no-twins", "--json", str(file)]) == 0
    assert {str(one["speedup"]) for one in json.loads(file.read_text())["results"]} == {"{}"}


def test_a_wrong_result_is_shown_and_fails(subject: AnySubject, capsys: pytest.CaptureFixture[str]) -> None:
    subject.error = 0.5
    assert main([*CHOICE]) == 1
    assert "bf16 WRONG (0.5)" in capsys.readouterr().out


def test_what_was_left_out_is_named(subject: AnySubject, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert main([*CHOICE, "--seconds", "20", "--json", str(file)]) == 0
    line = "not measured: linear 8B down x32 (bf16, w8a8): out of time"
    assert line in capsys.readouterr().out
    assert line in json.loads(file.read_text())["skipped"]


def test_quick_is_a_default_for_what_is_not_named(subject: AnySubject) -> None:
    assert main(["--quick", "--seconds", "1e9", "--rows", "1", "--kernels", "linear"]) == 0
    expected = select(Selection(("linear",), QUICK.models, QUICK.shapes, (1,)))
    assert subject.prepared == [list(case.variants) for case in expected]
    assert 1 <= len(expected) <= 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--types", "fp9"], "--types: 'fp9'"),
        (["--rows", "one"], "invalid list of integers value: 'one'"),
        (["--seconds", "0"], "must be a positive number"),
        (["--seconds", "inf"], "must be a positive number"),
        (["--threads", "0"], "must be at least 1"),
        (["--json", "/no/such/dir/x.json"], "cannot write"),
    ],
)
def test_wrong_use_measures_nothing(
    subject: AnySubject, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments]) == 2
    assert message in capsys.readouterr().err
    assert subject.prepared == []
