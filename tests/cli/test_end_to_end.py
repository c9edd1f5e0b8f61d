"""The commands with the bundled model and the real engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli.main import main
from tests.long import all_but_long

SMALL = ["--max-num-batched-tokens", "256", "--max-num-seqs", "8", "--num-blocks-override", "136", "--num-threads", "1"]
PROMPT = "def fibonacci(n):"
ENDLESS = ["--max-tokens", "none", "--ignore-eos"]


def start(*arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "quire", *arguments, *SMALL],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_streamed_text_is_the_whole_text(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", PROMPT, "--temperature", "0", "--max-tokens", "12", *SMALL]
    assert main(arguments) == 0
    streamed = capsys.readouterr().out
    assert main([*arguments, "--json", "--logprobs", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    (output,) = result["outputs"]
    assert streamed == output["text"] + "\n"
    assert len(output["token_ids"]) == len(output["logprobs"]) <= 12
    # Greedy: the chosen token is the most likely one.
    assert {entry[0]["rank"] for entry in output["logprobs"]} == {1}
    assert result["prompt"] == PROMPT


def test_a_seed_makes_samples_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["run", PROMPT, "--n", "2", "--max-tokens", "16", "--seed", seed, *SMALL]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def said(err: bytes) -> list[str]:
    """Lines of stderr without those of a load that takes seconds, as on a busy machine."""
    return [line for line in err.decode().splitlines() if "loading weights" not in line]


def test_a_conversation_through_a_pipe() -> None:
    process = start("chat", "--max-tokens", "4", "--stats", "--ignore-eos", stdin=subprocess.PIPE)
    out, err = process.communicate(b"sort a list\nbackwards\n/exit\n", timeout=120)
    assert process.returncode == 0
    assert out
    notes = said(err)
    assert "was not trained to chat" in notes[0]
    assert [bool(re.search(r"4 generated", note)) for note in notes[1:]] == [True, True]


def test_ctrl_c_is_quiet_and_leaves_nothing_running() -> None:
    process = start("run", PROMPT, *ENDLESS)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said(err) == []


@pytest.mark.long
def test_a_reader_that_leaves_is_no_error() -> None:
    process = start("run", PROMPT, *ENDLESS)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert said(err) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logit-bias", "999999=1"], "logit_bias"),
        (["--min-tokens", "100000", "--max-tokens", "none"], "min_tokens"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--max-model-len", "1000000"], "max_model_len"),
        (["--tokenizer", "/no/such/tokenizer"], "/no/such/tokenizer"),
    ],
)
def test_what_only_the_engine_knows_is_one_line_too(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", PROMPT, *flags, *SMALL]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_latency_and_throughput(tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    shape = ["--batch-size", "2", "--input-len", "5", "--output-len", "3", "--num-warmups", "0", "--num-repeats", "2"]
    assert main(["bench", "latency", *shape, *SMALL, "--json", str(file)]) == 0
    assert len(json.loads(file.read_text())["seconds"]) == 2
    file = tmp_path / "throughput.json"
    flags = ["--num-prompts", "6", "--input-len", "4:8", "--output-len", "3", "--prefix-len", "16"]
    assert main(["bench", "throughput", *flags, *SMALL, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["num_requests"], result["num_output_tokens"]) == (6, 18)
    assert 6 * 20 <= result["num_prompt_tokens"] <= 6 * 24


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """`quire serve` on a free port; its address. SIGTERM must end it with status 0."""
    process = start("serve", "--port", "0")
    try:
        yield announced_address(process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def announced_address(process: subprocess.Popen[bytes]) -> str:
    """What the server says on standard output once it is ready."""
    assert process.stdout is not None
    found = re.search(rb"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert found is not None, "the first line names the address"
    return found[0].decode()


@pytest.mark.parametrize("endpoint", all_but_long(["completions", "chat"], []))
def test_bench_serve_against_the_server(server: str, endpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    flags = [
        "--num-prompts",
        "4",
        "--input-len",
        "4:6",
        "--output-len",
        "5",
        "--ignore-eos",
        "--goodput",
        "e2el:600000",
    ]
    flags += ["--endpoint", endpoint, "--request-rate", "50", "--json", str(file)]
    assert main(["bench", "serve", "--base-url", server, *flags]) == 0
    result = json.loads(file.read_text())
    assert result["failures"] == {}
    assert (result["num_completed"], result["num_output_tokens"], result["num_good"]) == (4, 20, 4)
    assert result["num_prompt_tokens"] >= 4 * 4
    assert result["ttft_ms"]["count"] == 4
