"""`python -m benchmarks.paper`: the table and the file, with the real bundled model on very small workloads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.paper import command, gain
from benchmarks.paper.command import main
from benchmarks.paper.figures import rows
from quire.simulator.workloads import ALPACA, SHAREGPT
from tests.architecture.source import ROOT

SMALL = {
    "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64,
}  # fmt: skip


def test_simulated_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "paper.json"
    arguments = [
        "--quick",
        "--figures",
        "table1,fig1,fig11,slides",
        "--plots",
        str(tmp_path / "plots"),
    ]
    assert main([*arguments, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "OPT-13B: KV slots in 12 GiB, thousands" in printed
    rows = json.loads(file.read_text())["rows"]
    assert {"figure": "§3", "quantity": "OPT-13B: KV of a token, KB", "ours": 800.0, "paper": 800.0} in rows
    assert len(rows) == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figures", "fig3"], "unknown figure 'fig3'"),
        (["--seed", "1"], "--seed is for the real engine: add --engine"),
        (["--engine", "--plots", "x"], "--plots is for the simulated figures: leave out --engine"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments]) == 2
    assert message in capsys.readouterr().err


def test_table_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "NUM_REQUESTS_QUICK", {ALPACA.name: 3, SHAREGPT.name: 1})
    monkeypatch.setattr(command, "rows", lambda: [rows()[0], rows()[1], rows()[5], rows()[6]])
    monkeypatch.setattr(command, "TEXT_TOKENS", 1024)
    monkeypatch.setattr(command, "GAIN_REQUESTS_QUICK", 3)
    monkeypatch.setattr(gain, "OPT_125M", gain.OPT_125M | SMALL)
    file = tmp_path / "paper.json"
    assert main(["--engine", "--quick", "--threads", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "token states, ShareGPT, basic sampling" in printed
    assert "37.6 to 55.2" in printed
    assert "Throughput on the engine" in printed
    result = json.loads(file.read_text())
    assert [each["system"] for each in result["gain"]] == ["Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "Quire"]
    assert len({each["num_tokens"] for each in result["gain"]}) == 1
    assert all(each["throughput"] > 0 for each in result["gain"])
    assert [(row["quantity"], row["paper"]) for row in result["rows"][:3]] == [
        ("token states, ShareGPT, basic sampling", 96.3),
        ("blocks saved, Alpaca, parallel sampling of 2", 6.1),
        ("blocks saved, Alpaca, beam search of 6", 55.2),
    ]
    by_system = {each["system"]: each for each in result["gain"]}
    gained = by_system["Quire"]["throughput"] / by_system["Orca (Max)"]["throughput"]
    ours = {row["quantity"].split(": ")[1]: (row["ours"], row["paper"]) for row in result["rows"][3:]}
    assert len(ours) == 6
    assert ours["tokens/s over those of Orca (Max)"] == (pytest.approx(gained), 2.7)
    assert ours["requests in the batch, Quire"] == (by_system["Quire"]["mean_running"], 30.4)
    measured = {entry["quantity"]: entry for entry in result["measured"]}
    stored, parallel, beam_four, _ = (entry["ours"] for entry in result["measured"])
    assert 90 < stored < 100
    assert 0 < parallel < beam_four < 75
    assert measured["blocks saved, Alpaca, beam search of 4"]["paper"] is None
    assert all(entry["preemptions"] == 0 and entry["generated_tokens"] > 0 for entry in result["measured"])


def test_policy_replaces_the_scheduler_of_a_simulation(tmp_path: Path) -> None:
    """What `quire simulate` answers, with regions of the longest length instead of blocks."""
    found = {}
    workload = ["--workload", "alpaca", "--num-requests", "30", "--rate", "2000", "--max-model-len", "512"]
    for policy in ("paged", "orca-max"):
        file = tmp_path / f"{policy}.json"
        flags = ["--policy", policy, "--model", "opt-13b", "--num-blocks-override", "200", "--json", str(file)]
        assert main(["simulate", *workload, *flags]) == 0
        found[policy] = json.loads(file.read_text())["result"]
        assert found[policy]["num_finished"] == 30
    assert found["orca-max"]["mean_batched_requests"] < found["paged"]["mean_batched_requests"]


def test_an_unknown_policy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "opt-13b", "--workload", "alpaca", "--rate", "1", "--policy", "orca-ma"]
    assert main(["simulate", *arguments]) == 2
    assert "did you mean 'orca-max'" in capsys.readouterr().err


def test_help_and_module() -> None:
    run = subprocess.run([sys.executable, "-m", "benchmarks.paper", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0
    assert "usage: python -m benchmarks.paper [simulate] [--engine]" in run.stdout
