"""Every script of a GPU run from its first line to its last, in seconds: launches of kernels are recorded instead of
made, so that only what surrounds them runs. `benchmarks/gpu/run.sh --rehearse` interprets the kernels, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import (
    attention_sweep,
    counters,
    delta_sweep,
    drafts,
    engine,
    experiments,
    expert_sweep,
    families,
    images,
    kernels,
    machine,
    records,
    side_by_side,
)
from benchmarks.gpu.parts import Outcome
from benchmarks.gpu.run import STAND_INS
from benchmarks.gpu.summary import summarize
from benchmarks.gpu.workloads import Workload
from quire.kernels.triton.runtime import recorded_launches

Script = Callable[..., list[records.Record]]


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
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    def call(script: Any, *arguments: str) -> list[records.Record]:
        out = tmp_path / "results.jsonl"
        monkeypatch.setattr(sys, "argv", ["script", "--out", str(out), "--tiny", *arguments])
        script.main()
        found = records.read(out)
        assert [record for record in found if "error" in record] == []
        return found

    return call


@pytest.mark.long
def test_all_scripts_and_their_summary(
    run: Script, launches: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The page is that of a run on a card, of what the scripts really write. Their times mean nothing."""
    run(machine)
    run(engine)
    assert {"_split_kernel", "_norm_kernel", "_scan_kernel"} <= set(launches)
    run(engine, "--format", "fp8")
    run(kernels)
    run(attention_sweep)
    tried = {record["matrix"] for record in run(expert_sweep) if record["what"] == "product"}
    assert tried == {"gate_up", "down", "sum", "order", "layer"}
    assert {"_experts_kernel", "_combine_kernel"} <= set(launches)
    run(experiments)
    assert launches.count("_add_kernel") >= experiments.CHAIN
    run(experiments, "--what", "products", "--seconds", "300")
    assert {"_skinny_kernel", "_sum_kernel", "_widen_kernel"} <= set(launches)
    run(side_by_side, "quire", "--part", "quire")
    monkeypatch.syspath_prepend(str(STAND_INS))
    found = run(side_by_side, "vllm", "--part", "vllm")
    assert [r["what"] for r in found if r["part"] == "engine"] == [
        *("limits", "ready", "single", "step", "step", "long", "prompt", "prompt", "breakdown", "breakdown")
    ]
    assert [r["what"] for r in found if r["part"] == "fp8"] == [
        *("limits", "ready", "single", "step", "step", "prompt", "prompt")
    ]
    assert all(record["num_preemptions"] == 0 for record in found if "num_preemptions" in record)
    shares = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
    found += [
        {"part": "machine", "what": "cache", "kernels": (3, 3), "launchers": (2, 3)},
        {"part": "counters", "what": "counters", "kernel": "_split_kernel", shares: 88.0},
        {"part": "kernels", "what": "clocks", "before": {}, "after": {"reasons": "0x0000000000000004"}},
    ]
    ways = [record for record in found if record["what"] == "product"]
    assert "== Ways to multiply" in summarize(ways, [], tmp_path)
    found = [record for record in found if record["what"] != "product"]  # of a run of their own
    text = summarize(found, [Outcome("engine", "done", 1.0)], tmp_path)
    for title in (
        "Parts",
        "Machine",
        "Engine",
        "Side by side",
        "Kernels",
        "A decode step",
        "Variants of attention",
        "Experiments",
        "Throttled",
    ):
        assert f"== {title}" in text, title
    assert "cache: 3 of 3 kernels, 2 of 3 launchers" in text
    assert "geometric mean of 2" in text
    assert len(text.splitlines()) <= 90


@pytest.mark.long
def test_pictures(run: Script) -> None:
    (found,) = run(images)
    assert (found["number"], found["tokens"]) == (1, 4)
    assert found["tower_limit_seconds"] > 0


@pytest.mark.long
def test_families_and_their_summary(run: Script, launches: list[str], tmp_path: Path) -> None:
    """Kernels of experts, latents, chosen keys and states are launched, and each family has lines of its own."""
    found = run(families)
    kinds = {"_rule_kernel", "_choose_kernel", "_latent_kernel", "_experts_kernel"}
    assert {name for name in launches if name in kinds} == kinds, set(launches)
    text = summarize(found, [Outcome("families", "done", 1.0)], tmp_path)
    for family in families.FAMILIES.values():
        assert f"{family.name} ({family.num_layers} of {family.published_layers}): step 1 x" in text


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_family_costs_what_its_weights_weigh(name: str) -> None:
    """A step of many tokens reads every weight but the input embedding and norms; one of a single token only those of
    the experts that it takes."""
    cost = families.cost_of(families.FAMILIES[name])
    shape = cost.shape
    states = 2 * 100000 * shape.matrix_bytes()
    whole = (cost.work(engine.Step(100000, 100000, 1, 0, 0.0, 0.0)).bytes - states) / families.ITEMSIZE
    assert whole == pytest.approx(shape.parameters() - shape.looked_up_parameters, rel=0.001)
    one = cost.work(engine.Step(1, 1, 1, 0, 0.0, 0.0))
    assert one.bytes / families.ITEMSIZE == pytest.approx(shape.active_parameters(), rel=0.02)
    assert one.operations == 2 * shape.active_parameters()


def test_variants_of_the_delta_rule(run: Script, launches: list[str]) -> None:
    """A step of the engine, a batch-invariant one, and two steps, the second from a state and kept rows."""
    found = run(delta_sweep)
    assert [record["variant"] for record in found] == ["engine", "batch-invariant", "engine, in two steps"]
    assert {"_chunk_kernel", "_states_kernel", "_rule_kernel"} <= set(launches)


def test_drafts_and_their_summary(run: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs stand in for those of the engines. The records are there even where a check fails."""
    step = records.Record(num_sampled=2, launching=1e-3, waiting=2e-3)
    steps = [SimpleNamespace(**step, launched=each / 10, finished=each / 10 + 0.05) for each in range(4)]
    runs = {0: ([[1, 2], [3, 4]], 0, 0), 3: ([[1, 2], [3, 5]], 9, 4)}

    def run_all(shape: Any, options: Any, *, tiny: bool, **_: Any) -> Any:
        tokens, num_drafts, num_accepted = runs[drafts.NUM_DRAFTS if "speculative_config" in options else 0]
        return {"2 greedy": engine.Run(steps, tokens, 1.0, 0, num_drafts, num_accepted)}, 2.0

    monkeypatch.setattr(drafts, "run_all", run_all)
    with pytest.raises(RuntimeError, match="other tokens than without drafts: 2 greedy"):
        run(drafts)
    found = records.read(tmp_path / "results.jsonl")
    assert "error" in found.pop()
    text = summarize([*found, {"part": "drafts", "what": "clocks", "after": {}}], [], tmp_path)
    assert "4 of 9 accepted, 100.00 ms a step (100.00 without), 1.00 x the tokens/s OTHER TOKENS in 1 of 2" in text
    runs[3] = ([[1, 2], [3, 4]], 9, 9)
    with pytest.raises(RuntimeError, match="9 of 9 drafts were accepted"):
        run(drafts)


def test_launches_that_are_counted(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["counters", "--tiny"])
    counters.main()
    assert {"_split_kernel", "_varlen_kernel", "_matmul_kernel"} <= set(launches)


def test_counters_come_from_the_tools_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that does not know a name is asked again without it."""
    page = '==PROF== words\n"ID","Kernel Name","Grid Size","{0}","other"\n"","","","ns",""\n'
    page += '"0","_a","(1, 1)","1,087.5","x"\n'
    refuses = f"case \"$*\" in *{counters.TENSOR_PIPE}*) echo '==ERROR== no such name'; exit 1 ;; esac\n"
    (tmp_path / "ncu").write_text(
        f"#!/bin/sh\n{refuses}cat > {tmp_path}/log <<'E'\n{page.format(counters.METRICS[0])}E\n"
    )
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (record,) = counters.measured(tmp_path / "log")
    assert record == {"what": "counters", "kernel": "_a", "grid": "(1, 1)", counters.METRICS[0]: 1087.5}
    (tmp_path / "ncu").write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM: no permission'\nexit 1\n")
    (tmp_path / "log").unlink()
    (record,) = counters.measured(tmp_path / "log")
    assert "ERR_NVGPUCTRPERM" in record["error"]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert "ncu" in next(counters.measured(tmp_path / "log"))["error"]


def test_a_machine_that_cannot_compile_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "needs", lambda: [machine.Need("C compiler", "", "no gcc")])
    monkeypatch.setattr(machine, "cache_hits", lambda: {"part": "machine", "what": "cache"})
    out = str(tmp_path / "results.jsonl")
    assert machine.main(["--out", out]) == 1
    assert machine.main(["--out", out, "--tiny"]) == 0


def test_an_engine_that_gives_too_few_tokens_is_no_result() -> None:
    calls: list[int] = []

    def generate(prompts: list[list[int]], counts: list[int]) -> list[int]:
        calls.append(sum(map(len, prompts)))
        return counts if len(calls) < 3 else [1 for _ in counts]

    with pytest.raises(RuntimeError, match="2 tokens came out instead of 40"):
        side_by_side.timed(generate, Workload(2, 5, 20), 97)
    assert calls == [10, 10, 10], "a warm run and two rounds"


def test_vllm_starts_again_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(**options: Any) -> None:
        raise RuntimeError("no engine process")

    again: list[Any] = []

    def execv(path: str, words: list[str]) -> None:
        again.append(words)
        raise SystemExit

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=refuses, SamplingParams=None))
    monkeypatch.setattr("os.execv", execv)
    monkeypatch.setattr(sys, "argv", ["side_by_side", "vllm", "--out", "x"])
    monkeypatch.setenv(side_by_side.IN_PROCESS, "1")
    with pytest.raises(SystemExit), side_by_side.open_vllm("model", "bf16", tiny=False):
        pass
    assert again == [[sys.executable, "-m", "benchmarks.gpu.side_by_side", "vllm", "--out", "x"]]
    with pytest.raises(RuntimeError, match="no engine process"), side_by_side.open_vllm("m", "bf16", tiny=False):
        pass
