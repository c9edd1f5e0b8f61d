"""`quire bench paper`: the table and the file, with the real bundled model on very small workloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.paper.figures import rows
from quire.cli import bench_paper
from quire.cli.main import main
from quire.simulator.workloads import ALPACA, SHAREGPT


def test_without_engine_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper"]) == 2
    assert "quire bench paper --engine" in capsys.readouterr().err


def test_table_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_paper, "NUM_REQUESTS_QUICK", {ALPACA.name: 3, SHAREGPT.name: 1})
    monkeypatch.setattr(bench_paper, "rows", lambda: [rows()[0], rows()[1], rows()[5], rows()[6]])
    monkeypatch.setattr(bench_paper, "TEXT_TOKENS", 1024)
    file = tmp_path / "paper.json"
    assert main(["bench", "paper", "--engine", "--quick", "--threads", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "token states, ShareGPT, basic sampling" in printed
    assert "37.6 to 55.2" in printed
    result = json.loads(file.read_text())
    assert [(row["quantity"], row["paper"]) for row in result["rows"]] == [
        ("token states, ShareGPT, basic sampling", 96.3),
        ("blocks saved, Alpaca, parallel sampling of 2", 6.1),
        ("blocks saved, Alpaca, beam search of 6", 55.2),
    ]
    measured = {entry["quantity"]: entry for entry in result["measured"]}
    stored, parallel, beam_four, _ = (entry["ours"] for entry in result["measured"])
    assert 90 < stored < 100
    assert 0 < parallel < beam_four < 75
    assert measured["blocks saved, Alpaca, beam search of 4"]["paper"] is None
    assert all(entry["preemptions"] == 0 and entry["generated_tokens"] > 0 for entry in result["measured"])
