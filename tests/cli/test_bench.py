"""`quire bench latency` and `throughput` with a fake engine; `serve` is in tests/bench/test_serving.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.cli import bench
from quire.cli.main import main
from quire.config.options import EngineOptions
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams

Calls = list[tuple[list[dict[str, Any]], list[SamplingParams]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found: Calls = []

    def generate(prompts: list[dict[str, Any]], params: list[SamplingParams]) -> list[RequestOutput]:
        found.append((prompts, params))
        return [
            RequestOutput(
                str(i), None, p["prompt_token_ids"], [CompletionOutput(0, "", [1] * (s.max_tokens or 0))], finished=True
            )
            for i, (p, s) in enumerate(zip(prompts, params, strict=True))
        ]

    @contextmanager
    def generator(options: EngineOptions, *, show_progress: bool) -> Iterator[Any]:
        yield generate

    monkeypatch.setattr(bench, "_generator", generator)
    return found


def test_latency(calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    shape = ["--batch-size", "3", "--input-len", "7", "--output-len", "5", "--num-warmups", "1", "--num-repeats", "4"]
    assert main(["bench", "latency", *shape, "--json", str(file)]) == 0
    assert len(calls) == 5
    assert {len(prompts) for prompts, _ in calls} == {3}
    assert {len(prompt["prompt_token_ids"]) for prompts, _ in calls for prompt in prompts} == {7}
    result = json.loads(file.read_text())
    assert len(result["seconds"]) == result["latency_seconds"]["count"] == 4
    assert result["output_throughput"] == pytest.approx(15 / result["latency_seconds"]["mean"])
    assert {"p50", "p90", "p99", "mean"} <= set(result["latency_seconds"])
    assert result["environment"]["quire"]
    assert result["options"]["batch_size"] == 3
    printed = capsys.readouterr().out
    assert "latency of 3 x 7 in, 5 out (bundled)" in printed
    assert "time per step" in printed


def test_throughput_with_random_prompts(calls: Calls, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    flags = ["--num-prompts", "9", "--input-len", "3:6", "--output-len", "2:4", "--prefix-len", "5", "--seed", "1"]
    assert main(["bench", "throughput", *flags, "--json", str(file)]) == 0
    ((prompts, params),) = calls
    ids = [prompt["prompt_token_ids"] for prompt in prompts]
    assert len({tuple(one[:5]) for one in ids}) == 1
    assert {8 <= len(one) <= 11 for one in ids} == {True}
    assert {2 <= (one.max_tokens or 0) <= 4 for one in params} == {True}
    assert {one.ignore_eos for one in params} == {True}
    result = json.loads(file.read_text())
    assert result["num_requests"] == 9
    assert result["num_prompt_tokens"] == sum(map(len, ids))
    assert result["num_output_tokens"] == sum(one.max_tokens or 0 for one in params)
    assert result["output_throughput"] == pytest.approx(result["num_output_tokens"] / result["duration"])


def test_throughput_with_a_workload(calls: Calls, tmp_path: Path) -> None:
    file = tmp_path / "workloads.json"
    requests = [{"prompt_token_ids": [1, 2, 3], "max_tokens": 4}, {"prompt_token_ids": [5], "max_tokens": 1}]
    file.write_text(json.dumps({"small": requests, "other": []}))
    flags = ["--dataset", str(file), "--workload", "small", "--no-ignore-eos"]
    assert main(["bench", "throughput", *flags]) == 0
    ((prompts, params),) = calls
    assert prompts == [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [5]}]
    assert [(one.max_tokens, one.ignore_eos) for one in params] == [(4, False), (1, False)]


def test_throughput_with_an_oracle(calls: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A run without drafts, whose outputs the second one predicts."""
    file, shape = tmp_path / "result.json", ["--num-prompts", "2", "--input-len", "3", "--output-len", "5"]
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
    flags = [*shape, "--oracle", "0.7", "--speculative-config", drafts, "--json", str(file)]
    assert main(["bench", "throughput", *flags]) == 0
    (plain, _), (predicted, _) = calls
    assert [set(prompt) for prompt in plain] == [{"prompt_token_ids"}] * 2
    assert [prompt["prediction"] for prompt in predicted] == [[1] * 5] * 2
    assert "times that without drafts" in capsys.readouterr().out
    assert json.loads(file.read_text())["duration_without_drafts"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "--batch-size", "0"], "must be at least 1"),
        (["latency", "--num-repeats", "0"], "must be at least 1"),
        (["latency", "--block-size", "7"], "power of two"),
        (["latency", "/no/such/model"], "/no/such/model"),
        (["throughput", "--oracle", "0.7"], "--oracle needs --speculative-config"),
        (["throughput", "--input-len", "5:2"], "--input-len must be a length"),
        (["throughput", "--dataset", "/no/such/file.json"], "cannot read data set"),
        (["throughput", "--json", "/no/such/dir/x.json"], "cannot write"),
        (["latencyy"], "did you mean 'latency'"),
    ],
)
def test_wrong_use_runs_nothing(
    calls: Calls, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert calls == []
