"""`quire simulate`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.cli.simulate import engine_settings, parse_objectives
from quire.errors import ConfigError, UserError
from quire.simulator.replica import EngineSettings
from quire.simulator.trace import TraceRequest, write_trace
from tests.simulator.making import LLAMA

BASE = ["--gpu", "a100-40g", "--num-blocks-override", "200", "--max-num-seqs", "16", "--queue-depth", "1"]
WORKLOAD = ["--workload", "alpaca", "--num-requests", "30"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def run(model: str, *arguments: str, file: Path | None = None) -> Any:
    """Run the command; the JSON that it wrote."""
    extra = [] if file is None else ["--json", str(file)]
    assert main(["simulate", "--model", model, *BASE, *arguments, *extra]) == 0
    return None if file is None else json.loads(file.read_text())


def test_a_workload(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = run(
        model, *WORKLOAD, "--rate", "50", "--slo", "ttft=1s,tpot=50ms", "--plot", str(tmp_path / "plots"),
        file=tmp_path / "out.json",
    )  # fmt: skip
    printed = capsys.readouterr().out
    for text in ("30 of 30", "normalised latency", "time to first token", "preemptions", "KV use, mean", "p99"):
        assert text in printed
    result = written["result"]
    assert written["simulated"]["gpu"] == "a100-40g"
    assert (result["num_finished"], result["holds"], result["num_slo_met"]) == (30, True, 30)
    assert result["ttft"]["p50"] <= result["ttft"]["p99"] <= result["latency"]["max"]
    assert sum(row["output_tokens_per_second"] for row in result["series"]) == result["output_tokens"]
    assert (tmp_path / "plots" / "memory.png").stat().st_size > 5000


def test_a_trace(model: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,input_tokens,output_tokens,prefix_group\n0,40,10,\n0.5,64,5,a\n1,64,5,a\n")
    result = run(model, str(path), file=tmp_path / "out.json")["result"]
    assert (result["num_finished"], result["output_tokens"]) == (3, 20)
    assert result["prefix_cache_hit_rate"] == pytest.approx(48 / 168)


def test_rates(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = run(model, *WORKLOAD, "--rates", "10,1000", "--plot", str(tmp_path), file=tmp_path / "out.json")
    slow, fast = written["rates"]
    assert (slow["rate"], fast["rate"]) == (10, 1000)
    assert slow["normalized_latency"]["mean"] < fast["normalized_latency"]["mean"]
    assert "requests/s" in capsys.readouterr().out
    assert (tmp_path / "latency.png").exists()


def test_the_highest_rate_that_holds(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = run(
        model, *WORKLOAD, "--find-rate", "--slo", "ttft=20ms", "--slo-percentile", "90", "--rate", "100",
        file=tmp_path / "out.json",
    )  # fmt: skip
    held = [trial for trial in written["trials"] if trial["holds"]]
    assert max(trial["rate"] for trial in held) == written["rate"]
    assert all(trial["ttft"]["p90"] <= 0.02 for trial in held)
    assert any(trial["ttft"]["p90"] > 0.02 for trial in written["trials"])
    assert f"highest rate that holds: {written['rate']:.3g}" in capsys.readouterr().out


def test_a_sweep(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = run(
        model, "--workload", "alpaca", "--num-requests", "8", "--sweep", "--gpus", "2", "--slo", "ttft=1ms",
        "--plot", str(tmp_path), file=tmp_path / "out.json",
    )  # fmt: skip
    found = [tuple(each["layout"][name] for name in ("tp", "pp", "dp", "pcp")) for each in written["layouts"]]
    assert found == [(1, 1, 2, 1), (1, 1, 1, 2), (1, 2, 1, 1), (2, 1, 1, 1)]
    sent = [each["exchanged_bytes_per_token"] for each in written["layouts"]]
    assert [[name for name, size in each.items() if size] for each in sent] == [[], ["prompt"], ["between"], ["within"]]
    assert all(each["rate"] > 0 for each in written["layouts"])
    assert any(point["on_front"] for each in written["layouts"] for point in each["points"])
    assert "tp=2 pp=1 dp=1" in capsys.readouterr().out
    assert (tmp_path / "pareto.png").exists()


def test_layout_and_router_change_what_comes_out(model: str, tmp_path: Path) -> None:
    found = {}
    for name, flags in {
        "plain": [],
        "tp": ["--tp", "2"],
        "pp": ["--pp", "2"],
        "dp": ["--dp", "2", "--router", "least-loaded"],
        "swap": ["--preemption-mode", "swap", "--num-blocks-override", "44"],
        "recompute": ["--num-blocks-override", "44"],
        "beams": ["--beam-width", "2"],
        "samples": ["--n", "2"],
    }.items():
        found[name] = run(model, *WORKLOAD, "--rate", "2000", *flags, file=tmp_path / "out.json")["result"]
        assert found[name]["num_finished"] == 30, name
    assert len({json.dumps(result["latency"]) for result in found.values()}) == len(found)
    assert found["dp"]["num_blocks"] == 400
    assert found["swap"]["swap_preemptions"] > 0 == found["recompute"]["swap_preemptions"]
    assert found["samples"]["output_tokens"] == found["beams"]["output_tokens"] == 2 * found["plain"]["output_tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a TRACE or a --workload"),
        (["t.csv", "--workload", "alpaca"], "give a TRACE or a --workload"),
        (["--workload", "alpaca"], "needs --rate"),
        (["t.csv", "--n", "2"], "--n shapes a workload"),
        (["t.csv", "--duration", "2"], "--duration shapes a workload"),
        (["--workload", "alpaca", "--rate", "0"], "--rate must be above 0"),
        (["--workload", "alpaca", "--rate", "1", "--find-rate"], "needs objectives"),
        (["--workload", "alpaca", "--rate", "1", "--sweep"], "leave --rate out"),
        (["--workload", "alpaca", "--sweep", "--find-rate", "--slo", "ttft=1s"], "two questions"),
        (["--workload", "alpaca", "--rate", "1", "--gpus", "4"], "--gpus is for --sweep"),
        (["--workload", "alpaca", "--rates", "1,x"], "--rates: expected numbers"),
        (["--workload", "alpaca", "--rate", "1", "--slo", "ttf=1s"], "did you mean 'ttft'"),
        (["--workload", "alpaca", "--rate", "1", "--slo", "ttft=1"], "a time with its unit"),
        (["--workload", "alpaca", "--rate", "1", "--slo-percentile", "101"], "--slo-percentile"),
        (["--workload", "alpaca", "--rate", "1", "--tp", "3"], "tp=3 does not divide the 8 heads"),
        (["--workload", "alpaca", "--rate", "1", "--dp", "0"], "dp must be at least 1"),
        (["--workload", "alpaca", "--rate", "1", "--router", "x"], "unknown router"),
        (["--workload", "alpaca", "--rate", "1", "--policy", "orca-max"], "unknown option '--policy'"),
        (["--workload", "alpaca", "--rate", "1", "--gpu", "h101"], "did you mean 'h100'"),
        (["--workload", "alpaca", "--rate", "1", "--dtype", "float7"], "dtype must be one of"),
        (["--workload", "alpaca", "--rate", "1", "--block-size", "3"], "block_size must be a power of two"),
        (["--workload", "alpaca", "--rate", "1", "--swap-space", "1GiB"], "swap_space is for preemption_mode"),
        (["--workload", "alpaca", "--rate", "1", "--max-model-len", "1"], "max_model_len must be at least 2"),
        (["--workload", "alpaca", "--rate", "1", "--n", "2", "--beam-width", "2"], "one of them only"),
        (["--workload", "alpaca", "--rate", "1", "--processes", "0"], "--processes"),
        (["t.csv", "--burstiness", "2"], "--burstiness shapes a workload"),
        (["t.csv", "--seed", "1"], "--seed shapes a workload"),
        (["--workload", "alpaca", "--rate", "1", "--slo-percentile", "50"], "--slo-percentile needs objectives"),
        (["--workload", "alpaca", "--rate", "1", "--beam-width", "2", "--slo", "tpot=1s"], "not for beams"),
        (["--workload", "alpaca", "--find-rate", "--num-requests", "5", "--rate", "inf", "--slo", "ttft=1s"], "finite"),
        (["--workload", "alpaca", "--sweep", "--gpus", "0"], "at least 1 device"),
        (["--workload", "alpaca", "--sweep", "--ep", "2", "--dp", "2"], "leave --ep out"),
        (["--workload", "alpaca", "--sweep", "--pcp", "2"], "leave --pcp out"),
        (["--workload", "alpaca", "--sweep", "--duration", "1e-6"], "no request arrives"),
        (["--workload", "alpaca", "--rate", "1", "--max-model-len", "4097"], "exceeds the 4096 positions"),
        (["--workload", "alpaca", "--rate", "1", "--kv-cache-dtype", "int4"], "kv_cache_dtype must be one of"),
        (["--workload", "alpaca", "--rate", "1", "--attention-backend", "torch"], "unknown option"),
        (["absent.csv"], "cannot read trace"),
    ],
)
def test_wrong_use_is_one_clear_line(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--model", model, "--gpu", "a100-40g", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_objective_that_cannot_be_met_or_missed(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRequest(0.0, 5, 1), TraceRequest(1.0, 5, 9, beam_width=2)])
    assert main(["simulate", str(path), "--model", model, *BASE, "--slo", "tpot=1s"]) == 2
    assert "--slo tpot: no request has one" in capsys.readouterr().err


def test_a_run_without_requests_is_told_and_written(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    flags = ["--workload", "alpaca", "--rate", "1", "--duration", "1e-6", "--json", str(path)]
    assert main(["simulate", "--model", model, *BASE, *flags]) == 1
    assert "0 of 0" in capsys.readouterr().out
    result = json.loads(path.read_text(), parse_constant=pytest.fail)["result"]
    assert (result["num_finished"], result["request_throughput"], result["ttft"]) == (0, 0, {})


def test_rates_side_by_side_are_those_one_after_the_other(model: str, tmp_path: Path) -> None:
    one, two = (
        run(model, *WORKLOAD, "--rates", "10,20", "--processes", count, file=tmp_path / "out.json")["rates"]
        for count in ("1", "2")
    )
    assert one == two


def test_auto_is_what_is_stored(model: str, tmp_path: Path) -> None:
    flags = (*WORKLOAD, "--rate", "10")
    plain = run(model, *flags, file=tmp_path / "out.json")["result"]
    auto = run(model, *flags, "--dtype", "auto", "--kv-cache-dtype", "auto", file=tmp_path / "out.json")["result"]
    assert plain == auto
    assert run(model, *flags, "--dtype", "int8", file=tmp_path / "out.json")["result"]["ttft"] != plain["ttft"]


def test_a_sweep_whose_objectives_do_not_bind(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--workload", "alpaca", "--num-requests", "3", "--sweep", "--slo", "latency=9999s")
    (layout,) = run(model, *flags, file=tmp_path / "out.json")["layouts"]
    assert (layout["rate"], layout["every_rate_holds"]) == (None, True)
    assert " all " in capsys.readouterr().out


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *WORKLOAD, "--rate", "1", "--model", "llama-3-8"]) == 2
    assert "did you mean 'llama-3-8b'" in capsys.readouterr().err


def test_a_trace_error_names_the_line(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRequest(0.0, 5, 5)])
    with path.open("a") as file:
        file.write("{}\n")
    assert main(["simulate", str(path), "--model", model, *BASE]) == 2
    assert f"{path}:2: arrival is missing" in capsys.readouterr().err


def test_options_are_the_engines_with_a_gpus_defaults() -> None:
    assert engine_settings({}) == EngineSettings()
    chosen = engine_settings({"kv_cache_memory": "1GiB", "max_num_seqs": 9000, "preemption_mode": "swap"})
    assert (chosen.kv_cache_memory, chosen.max_num_batched_tokens) == (2**30, 9000)
    assert chosen.swap_space == EngineSettings().swap_space
    small = engine_settings({"max_num_batched_tokens": 10})
    assert (small.max_num_seqs, small.max_num_batched_tokens) == (10, 10)
    with pytest.raises(ConfigError, match="must be at least max_num_seqs"):
        engine_settings({"max_num_seqs": 20, "max_num_batched_tokens": 10})


def test_objectives_have_units() -> None:
    assert parse_objectives("ttft=1s,tpot=50ms,latency=250us") == {"ttft": 1.0, "tpot": 0.05, "latency": 2.5e-4}
    assert parse_objectives(None) == {}
    for text in ("tpot=ms", "tpot=-1s", "tpot", "tpot=infs", "tpot=1m"):
        with pytest.raises(UserError, match="a time with its unit"):
            parse_objectives(text)
