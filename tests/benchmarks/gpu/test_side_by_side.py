"""Two engines in turns: an engine that fails is left out, sizes fit both, ratios are of medians."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import peer_arguments, peer_protocol, quire_peer, side_by_side
from benchmarks.gpu.peer_protocol import EngineFacts, request, serve
from benchmarks.gpu.run import STAND_INS
from benchmarks.gpu.shapes import TINY
from benchmarks.gpu.side_by_side import Comparison, Peer, PeerError, compare, sized
from benchmarks.gpu.workloads import BATCH_WORK, RAGGED_WORK, RaggedWorkload, Workload, fitting, num_tokens
from quire.kernels.triton.runtime import recorded_launches
from tests.architecture.source import ROOT
from tests.benchmarks.gpu.test_short_rehearsal import Counting
from tests.processes import has_pid_ended

FAR = float("inf")
OPTIONS = ["--vocab-size", "97", "--share", "0.45", "--max-model-len", "64", "--max-num-seqs", "4"]
ECHO = """
import json, sys
print(json.dumps({"ready": "x", "version": "1", "num_slots": None, "seconds": 0.5}), flush=True)
for number, line in enumerate(sys.stdin):
    if number == int(sys.argv[1]):
        MISBEHAVE
    print(json.dumps({"seconds": float(sys.argv[2]) + number, "output_tokens": 1}), flush=True)
"""


def script(misbehave: str, at: int, seconds: float) -> list[str]:
    return [sys.executable, "-c", ECHO.replace("MISBEHAVE", misbehave), str(at), str(seconds)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    peers: list[Peer] = []

    def start(command: list[str], seconds: float = 60, environment: Mapping[str, str] | None = None) -> Peer:
        peers.append(Peer(command, environment or {}, tmp_path / f"{len(peers)}.log", seconds))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


def test_engines_run_in_turns_and_ratios_are_of_medians(make: Any, tmp_path: Path) -> None:
    peers = {"vLLM": make(script("pass", 99, 20.0)), "Quire": make(script("pass", 99, 10.0))}
    comparison, out = Comparison(), tmp_path / "out.json"
    compare(peers, {"small": Workload(2, 5, 4)}, comparison, 2, FAR, out)
    assert comparison.seconds == {"small": {"vLLM": [21.0, 22.0], "Quire": [11.0, 12.0]}}
    assert comparison.ratio("small") == pytest.approx(21.5 / 11.5)
    (row,) = json.loads(out.read_text())["workloads"]
    assert (row["input_tokens"], row["output_tokens"]) == (10, 8)
    assert "1.870" in comparison.table()
    assert "geometric mean of 1 ratios: 1.870" in comparison.table()


@pytest.mark.parametrize(
    ("misbehave", "why"),
    [
        ("sys.exit('out of memory')", "it has ended: out of memory"),
        ("print(json.dumps({'error': 'ValueError: no'}), flush=True); continue", "ValueError: no"),
    ],
)
def test_an_engine_that_fails_is_left_out_and_the_other_measured(
    make: Any, tmp_path: Path, misbehave: str, why: str
) -> None:
    peers = {"vLLM": make(script(misbehave, 1, 1.0)), "Quire": make(script("pass", 99, 1.0))}
    comparison = Comparison()
    works = {"first": Workload(1, 5, 4), "second": Workload(1, 5, 4)}
    compare(peers, works, comparison, 2, FAR, tmp_path / "out.json")
    assert list(peers) == ["Quire"]
    assert why in comparison.failures["vLLM"]
    assert {name: len(taken["Quire"]) for name, taken in comparison.seconds.items()} == {"first": 2, "second": 2}
    assert comparison.ratio("first") is comparison.ratio("second") is None
    assert "vLLM FAILED: first" in comparison.table()


def test_an_engine_that_hangs_is_given_up_with_its_children(make: Any) -> None:
    child = "import subprocess, sys, time\np = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    command = script("time.sleep(600)", 0, 1.0)
    command[2] = f"{child}print(p.pid, file=sys.stderr, flush=True)\n{command[2]}"
    peer = make(command)
    with pytest.raises(PeerError, match="no answer in 1 s"):
        peer.run([5], [4], 0, 1.0)
    pid = int(peer.last_words())
    peer.close()
    assert has_pid_ended(pid)


def test_an_engine_that_does_not_start(make: Any) -> None:
    with pytest.raises(PeerError, match="no module of that name"):
        make([sys.executable, "-c", "raise SystemExit('no module of that name')"])


def test_nothing_begins_after_the_end(tmp_path: Path) -> None:
    comparison = Comparison()
    compare({"Quire": SimpleNamespace()}, {"a": Workload(1, 1, 1)}, comparison, 1, 0.0, tmp_path / "x")  # type: ignore[dict-item]
    assert comparison.seconds == {}


def test_the_peer_of_vllm_with_a_stand_in(make: Any, tmp_path: Path) -> None:
    """It prints on its standard output, as the real one does, and is understood all the same."""
    path = os.pathsep.join((str(ROOT), str(STAND_INS / "peers")))
    command = [sys.executable, "-m", "benchmarks.gpu.vllm_peer", str(tmp_path), *OPTIONS]
    peer = make(command, environment={"PYTHONPATH": path})
    assert (peer.facts["ready"], peer.facts["version"]) == ("vLLM", "stand-in")
    assert peer.run([5, 3], [4, 2], 1, 60) >= 0
    assert "words on the standard output" in peer.last_words()


def test_the_peer_of_quire(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = io.StringIO()
    monkeypatch.setattr(torch, "empty", torch.ones)
    monkeypatch.setattr(torch, "empty_like", torch.ones_like)
    monkeypatch.setattr(quire_peer, "private_output", lambda: answers)
    monkeypatch.setattr(sys, "stdin", io.StringIO(request([5, 3], [4, 2], 1)))
    monkeypatch.setattr(sys, "argv", ["quire_peer", str(TINY.write(tmp_path)), *OPTIONS, "--tiny"])
    with recorded_launches(Counting()):
        quire_peer.main()
    ready, answer = map(json.loads, answers.getvalue().splitlines())
    assert (ready["ready"], ready["num_slots"]) == ("Quire", 40 * 16)
    assert answer["output_tokens"] == 6


def test_an_engine_that_gives_too_few_tokens_is_no_result() -> None:
    answers = io.StringIO()
    facts = EngineFacts("x", "1", None)
    serve(facts, 97, lambda prompts, counts: [1], io.StringIO(request([5], [4], 1)), answers, 0.0)
    assert json.loads(answers.getvalue().splitlines()[1])["error"] == "RuntimeError: 1 tokens came out instead of 4"


def test_both_sides_get_the_same_tokens() -> None:
    seen: list[Any] = []

    def generate(prompts: list[list[int]], counts: list[int]) -> list[int]:
        seen.append(prompts)
        return counts

    for _ in range(2):
        serve(EngineFacts("x", "1", None), 97, generate, io.StringIO(request([5, 3], [4, 2], 1)), io.StringIO(), 0.0)
    assert seen[0] == seen[1] == [*peer_protocol.random_prompts([5, 3], 97, 1)]
    assert [len(prompt) for prompt in seen[0]] == [5, 3]


def test_batches_fit_the_smaller_cache() -> None:
    slots = {"vLLM": 100_000, "Quire": 120_000}
    peers = {name: SimpleNamespace(facts={"num_slots": count}) for name, count in slots.items()}
    works = sized({"1K/1K": BATCH_WORK, "ragged": RAGGED_WORK}, peers)  # type: ignore[arg-type]
    assert works["1K/1K"] == Workload(48, 1024, 1024)
    assert works["ragged"] is RAGGED_WORK
    assert num_tokens(works["1K/1K"]) <= 100_000
    unknown = {"vLLM": SimpleNamespace(facts={"num_slots": None})}
    assert sized({"1K/1K": BATCH_WORK}, unknown) == {"1K/1K": BATCH_WORK}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slots", "expected"),
    [(2048 * 256, 256), (2048 * 256 - 1, 248), (394_000, 192), (2048 * 3, 3), (100, 1), (10**9, 256)],
)
def test_a_batch_is_as_large_as_the_cache(slots: int, expected: int) -> None:
    assert fitting(BATCH_WORK, slots, 16).num_requests == expected


def test_blocks_are_whole() -> None:
    assert fitting(Workload(100, 9, 8), 32 * 10, 16).num_requests == 8
    assert fitting(Workload(100, 9, 7), 32 * 10, 16).num_requests == 16


def test_ragged_requests_are_the_same_each_time() -> None:
    work = RaggedWorkload(256)
    assert work.input_lens == RAGGED_WORK.input_lens
    assert (min(work.input_lens), max(work.input_lens)) == (16, 8000)
    assert max(work.output_lens) <= 1500
    assert [len(prompt) for prompt in RaggedWorkload(3).prompts(97, 0)] == RaggedWorkload(3).input_lens


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "model", *OPTIONS])
    assert peer_arguments.parse().share == 0.45
    assert set(side_by_side.WORKLOADS) >= {"single", "ragged", "1K/1K", "prompt of 32K"}
