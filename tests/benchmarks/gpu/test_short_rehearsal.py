"""Every script of a GPU run from its first line to its last, in seconds: launches of kernels are recorded instead of
made, so that only what surrounds them runs. `benchmarks/gpu/run.sh --rehearse` interprets the kernels, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import breakdown, counted, counters, engine, experiments, kernels, machine, records
from benchmarks.gpu.parts import Outcome
from benchmarks.gpu.run import STAND_INS
from benchmarks.gpu.shapes import TINY
from benchmarks.gpu.summary import summarize
from benchmarks.gpu.workloads import Workload, fitting
from quire.kernels.triton.runtime import recorded_launches

pytestmark = pytest.mark.long


class Counting:
    """Launches nothing."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.names.append(kernel.__name__)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that would have been launched. Results that no kernel writes are ones: a token that exists,
    and a sound row."""
    monkeypatch.setattr(torch, "empty", torch.ones)
    monkeypatch.setattr(torch, "empty_like", torch.ones_like)
    recorder = Counting()
    with recorded_launches(recorder):
        yield recorder.names


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[records.Record]]:
    def call(script: Any, *arguments: str) -> list[records.Record]:
        out = tmp_path / "results.jsonl"
        monkeypatch.setattr(sys, "argv", ["script", "--out", str(out), "--tiny", *arguments])
        script.main()
        found = records.read(out)
        assert [record for record in found if "error" in record] == []
        return found

    return call


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(STAND_INS / "bin"), prepend=":")


Run = Callable[..., list[records.Record]]


def test_engine(run: Run, launches: list[str]) -> None:
    found = run(engine, "--tasks", "single,ladder,idle,long,ragged,batch")
    whats = [record["what"] for record in found]
    expected = ["ready", "graphs", "single", "ladder", "ladder", "idle", "long", "ragged", "peer work", "batch"]
    assert whats == expected
    assert all(record["num_preemptions"] == 0 and record["is_complete"] for record in found if "is_complete" in record)
    ladder = [record for record in found if record["what"] == "ladder"]
    assert all(record["host"] > 0 and record["launching"] > 0 for record in ladder)
    assert {"_split_kernel", "_norm_kernel", "_scan_kernel"} <= set(launches)


def test_preemptions_are_counted(launches: list[str], tmp_path: Path) -> None:
    """Two sequences of three blocks in a pool of four."""
    options = {"device": "cpu", "attention_backend": "triton", "max_model_len": 64, "num_blocks_override": 4}
    driven = engine.Engine(TINY, options, tmp_path)
    try:
        assert driven.num_slots == 4 * 16
        first, second = (driven.run(Workload(2, 20, 20), seed=seed) for seed in (1, 2))
        assert first.is_complete
        assert first.num_preemptions == second.num_preemptions > 0, "of each run, not of all so far"
        assert driven.run(fitting(Workload(2, 20, 20), driven.num_slots, 16), seed=3).num_preemptions == 0
    finally:
        driven.close()


def test_breakdown(run: Run, launches: list[str]) -> None:
    found = run(breakdown, "--max-model-lens", "40960,4096")
    assert [(record["max_model_len"], record["num_seqs"]) for record in found] == [
        (40960, 1),
        (40960, 2),
        (4096, 1),
        (4096, 2),
    ]
    for record in found:
        assert record["launches_per_step"] > 10
        assert 0 < record["busy"] <= 1
        longest = [row["microseconds_per_step"] for row in record["kernels"]]
        assert longest == sorted(longest, reverse=True)
        assert record["gaps"][0]["name"].count(" -> ") == 1


def test_kernels(run: Run, launches: list[str]) -> None:
    found = run(kernels)
    timed = {(record["kernel"], record["variant"]) for record in found if record["what"] == "kernel"}
    for variant in ("triton", "contiguous", "block size 64", "block size 128", "planned for 40,960"):
        assert ("decode attention", variant) in timed
    assert {name for name, _ in timed} >= {
        "ragged decode attention",
        "product qkv",
        "product o",
        "penalties",
        "RMSNorm",
    }
    assert found[0]["what"] == "limits"
    order = [record["kernel"] for record in found if record["what"] == "kernel"]
    first = [order.index(name) for name in ("decode attention", "product gate_up", "greedy sampling", "RMSNorm")]
    assert first == sorted(first)


def test_experiments(run: Run, launches: list[str]) -> None:
    found = run(experiments)
    assert {record["what"] for record in found} == {"bits", "attention tiles", "launch", "library", "fp8"}
    assert all(record["equal"] for record in found if "equal" in record)
    assert launches.count("_add_kernel") >= experiments.CHAIN


def test_the_summary_of_everything_is_a_page(
    run: Run, launches: list[str], stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a card, of what the scripts really write. Their times mean nothing."""
    run(machine)
    run(kernels)
    run(engine, "--tasks", "single,ladder,idle,long,ragged,batch")
    run(breakdown)
    run(experiments)
    monkeypatch.setattr(counters, "SCRIPT", (sys.executable, "-c", "pass"))
    found = run(counters, "--log", str(tmp_path / "ncu.csv"))
    names = ("machine", "kernels", "engine", "breakdown", "experiments", "counters")
    found += [{"part": name, "what": "clocks", "before": {}, "after": machine.clocks()} for name in names]
    found += [{"part": "gate", "what": "missing", "name": "tests/gpu/none.py"}]
    text = summarize(found, [Outcome(name, "done", 1.0) for name in names], tmp_path)
    for title in ("First to fix", "Parts", "Targets", "Limits", "Attention", "Engine", "A decode step", "Experiments"):
        assert f"== {title}" in text, title
    assert "not there: tests/gpu/none.py" in text
    assert len(text.splitlines()) <= 90


def test_launches_that_are_counted(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["counted", "--tiny"])
    counted.main()
    assert {"_split_kernel", "_varlen_kernel", "_norm_kernel", "_matmul_kernel", "_scan_kernel"} <= set(launches)


def test_counters(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool is a stand-in; what it runs is replaced by nothing here, since another test runs it."""
    monkeypatch.setattr(counters, "SCRIPT", (sys.executable, "-c", "pass"))
    out = tmp_path / "results.jsonl"
    counters.main(["--out", str(out), "--log", str(tmp_path / "ncu.csv"), "--tiny"])
    share = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
    assert [(record["kernel"], record[share]) for record in records.read(out)] == [
        ("_split_kernel", 1087.5),
        ("_varlen_kernel", 12.25),
    ]


def test_only_counters_that_the_card_has_are_asked_for(stand_ins: None) -> None:
    assert counters.available() == ["dram__throughput.avg.pct_of_peak_sustained_elapsed"]
    log = Path("log")
    some, none = (counters.command(log, metrics, tiny=False) for metrics in (["a.sum"], []))
    assert "a.sum,launch__registers_per_thread" in some[some.index("--metrics") + 1]
    assert "--section" not in some
    assert none.count("--section") == len(counters.SECTIONS)
    assert "--metrics" not in none


def test_counters_that_are_refused_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = "#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM: no permission to access performance counters'\nexit 1\n"
    (tmp_path / "ncu").write_text(refuses)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    out = tmp_path / "results.jsonl"
    with pytest.raises(SystemExit):
        counters.main(["--out", str(out), "--log", str(tmp_path / "ncu.csv"), "--tiny"])
    (record,) = records.read(out)
    assert "ERR_NVGPUCTRPERM" in record["error"]


def test_counters_without_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (record,) = counters.measured(tmp_path / "log", tiny=True)
    assert record["error"] == "ncu is not on the PATH"


def test_machine(run: Run, stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = run(machine)
    assert record["card"] == "0, 0, 0"
    assert {need["name"] for need in record["needs"]} == {"C compiler", "Python.h", "libcuda.so.1"}
    assert record["tools"] == ["ncu", "compute-sanitizer"]
    assert machine.clocks()["reasons"] == "0x0000000000000000"


def test_a_machine_that_cannot_compile_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "needs", lambda: [machine.Need("C compiler", "", "no gcc")])
    out = str(tmp_path / "results.jsonl")
    assert machine.main(["--out", out]) == 1
    assert machine.main(["--out", out, "--tiny"]) == 0
