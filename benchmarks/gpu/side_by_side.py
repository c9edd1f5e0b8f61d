"""Quire and vLLM on the same workloads, in turns on one card: python -m benchmarks.gpu.side_by_side [--out DIR]
[--peer-path PATHS] [--seconds 560] [--rounds 2] [--workloads NAMES] [--rehearse]

Both engines are started, one after the other, each with a share of the card's memory, and stay; then every workload
runs on one and at once on the other, so that clocks and temperature are the same for both. Same shape (Qwen3-8B),
random weights, same token ids, greedy, all tokens whatever the model says, no prefix cache. Medians over the rounds; a
ratio above 1: Quire is faster. An engine that does not start or stops answering is left out, and the other one is
measured. --rehearse: tiny shapes in Triton's interpreter, and a stand-in for vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import IO, Any

from benchmarks.gpu.parts import ROOT, adopt_orphans, end_process
from benchmarks.gpu.peer_protocol import request
from benchmarks.gpu.run import STAND_INS, rehearsal_environment
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from benchmarks.gpu.workloads import (
    BATCH_WORK,
    HALF_BATCH_WORK,
    LONG_WORK,
    PEER_WORK,
    RAGGED_WORK,
    SINGLE_WORK,
    TINY_RAGGED,
    TINY_WORK,
    Work,
    Workload,
    fitting,
)

SHARE = 0.45
"""Of the card's memory, for each of the two."""
START_SECONDS = 240.0
ANSWER_SECONDS = 120.0
WARM_TOKENS = 8
"""Generated in the run that compiles and captures."""
WORKLOADS: Mapping[str, Work] = {
    "single": SINGLE_WORK,
    "8 streams": Workload(8, 128, 128),
    "32 streams": Workload(32, 128, 128),
    "128 streams": Workload(128, 128, 128),
    "short answers": PEER_WORK,
    "prompts of 1K": Workload(8, 1024, 1),
    "prompts of 8K": Workload(4, 8192, 1),
    "prompt of 32K": Workload(1, 32768, 1),
    "long contexts": LONG_WORK,
    "256 x 512/512": HALF_BATCH_WORK,
    "ragged": RAGGED_WORK,
    "1K/1K": BATCH_WORK,
}
TINY_WORKLOADS: Mapping[str, Work] = {"single": TINY_WORK, "ragged": TINY_RAGGED}
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    # Greedy sampling does not use it, and it would be compiled at the first start.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
RETRIED_WITH = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Where its engine process does not start."""


class PeerError(Exception):
    """An engine did not start, did not answer in time, or answered with an error."""


class Peer:
    """An engine in a process of its own. Raises PeerError when it does not start in time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> None:
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, **environment},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: IO[str] = self._process.stdin
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        try:
            self.facts = self._next(seconds)
        except PeerError:
            self.close()
            raise

    def run(self, input_lens: Sequence[int], output_lens: Sequence[int], seed: int, seconds: float) -> float:
        """Seconds of one run. Raises PeerError."""
        try:
            self._requests.write(request(input_lens, output_lens, seed))
            self._requests.flush()
        except OSError as error:
            raise PeerError(f"it has ended: {self.last_words()}") from error
        return float(self._next(seconds)["seconds"])

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-1500:]

    def close(self) -> None:
        """End it and its children."""
        end_process(self._process)

    def _read(self, answers: IO[str]) -> None:
        for line in answers:
            self._answers.put(line)
        self._answers.put("")

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(seconds, 0.01))
        except queue.Empty:
            raise PeerError(f"no answer in {seconds:.0f} s: {self.last_words()}") from None
        if not line:
            raise PeerError(f"it has ended: {self.last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer


@dataclass(slots=True)
class Comparison:
    """What is known so far. seconds: workload -> engine -> of each round."""

    is_rehearsal: bool = False
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    works: dict[str, Work] = field(default_factory=dict)
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def ratio(self, name: str) -> float | None:
        """vLLM's time over Quire's; None where one is missing."""
        taken = self.seconds[name]
        if not (taken.get("Quire") and taken.get("vLLM")):
            return None
        return median(taken["vLLM"]) / median(taken["Quire"])

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "workload": name,
                "work": str(self.works[name]),
                "input_tokens": sum(self.works[name].input_lens),
                "output_tokens": sum(self.works[name].output_lens),
                "seconds": {engine: times for engine, times in taken.items() if times},
                "ratio": self.ratio(name),
            }
            for name, taken in self.seconds.items()
        ]

    def table(self) -> str:
        """A line for each workload."""
        lines = [f"{'workload':16}{'work':28}{'Quire':>12}{'vLLM':>12}{'ratio':>8}   (output tokens/s)"]
        for row in self.rows():
            speeds = [
                f"{row['output_tokens'] / median(row['seconds'][engine]):12.1f}"
                if engine in row["seconds"]
                else f"{'-':>12}"
                for engine in ("Quire", "vLLM")
            ]
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
            lines.append(f"{row['workload']:16}{row['work']:28}{''.join(speeds)}{ratio:>8}")
        ratios = [row["ratio"] for row in self.rows() if row["ratio"] is not None]
        if ratios:
            lines.append(
                f"geometric mean of {len(ratios)} ratios: {geometric_mean(ratios):.3f} (above 1: Quire is faster)"
            )
        lines += [f"{engine} FAILED: {why[-700:]}" for engine, why in self.failures.items()]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        result = {
            "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "is_rehearsal": self.is_rehearsal,
            "engines": self.facts,
            "failures": self.failures,
            "workloads": self.rows(),
        }
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare(
    peers: dict[str, Peer], works: Mapping[str, Work], comparison: Comparison, rounds: int, until: float, out: Path
) -> None:
    """Every workload on each engine in turns, `rounds` times, the order turned round by round; until: of
    time.monotonic(), after which no workload begins. out: the file that is written after each."""
    for name, work in works.items():
        if time.monotonic() > until or not peers:
            return
        comparison.works[name] = work
        taken = comparison.seconds[name] = {engine: [] for engine in peers}
        warm = [min(count, WARM_TOKENS) for count in work.output_lens]
        for seed in range(rounds + 1):
            order = list(peers) if seed % 2 else list(reversed(peers))
            for engine in order:
                left = max(1.0, min(ANSWER_SECONDS, until + ANSWER_SECONDS - time.monotonic()))
                counts = work.output_lens if seed else warm
                try:
                    seconds = peers[engine].run(work.input_lens, counts, seed, left)
                except PeerError as failure:
                    comparison.failures[engine] = f"{name}: {failure}"
                    peers.pop(engine).close()
                    continue
                if seed:
                    taken[engine].append(seconds)
        comparison.write(out)
        ratio = comparison.ratio(name)
        print(f"{name}: {'one engine alone' if ratio is None else f'{ratio:.3f}'}", flush=True)


def sized(works: Mapping[str, Work], peers: Mapping[str, Peer]) -> Mapping[str, Work]:
    """Batches that the smaller KV cache holds to their end, so that neither engine preempts."""
    known = [slots for peer in peers.values() if (slots := peer.facts["num_slots"])]
    if not known:
        return works
    return {name: fitting(work, min(known), 16) if isinstance(work, Workload) else work for name, work in works.items()}


def start(comparison: Comparison, arguments: argparse.Namespace, folder: Path, until: float) -> dict[str, Peer]:
    """vLLM first, which takes longest and watches the memory while it starts; then Quire."""
    shape = TINY if arguments.rehearse else QWEN3_8B
    model = str(shape.write(folder / "model"))
    sizes = ("64", "4") if arguments.rehearse else ("40960", "256")
    options = ["--vocab-size", str(shape.vocab), "--share", str(arguments.share)]
    options += ["--max-model-len", sizes[0], "--max-num-seqs", sizes[1], *(["--tiny"] if arguments.rehearse else [])]
    path = str(STAND_INS / "peers") if arguments.rehearse else arguments.peer_path
    theirs = {
        **VLLM_ENVIRONMENT,
        "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir()) / "quire-vllm-cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), path))),
    }
    ours = rehearsal_environment() if arguments.rehearse else {"TRITON_INTERPRET": "0"}
    attempts = (
        ("vLLM", "vllm_peer", theirs),
        ("vLLM", "vllm_peer", theirs | RETRIED_WITH),
        ("Quire", "quire_peer", ours),
    )
    peers: dict[str, Peer] = {}
    for engine, module, environment in attempts:
        if engine in peers:
            continue
        command = (sys.executable, "-m", f"benchmarks.gpu.{module}", model, *options)
        try:
            left = min(START_SECONDS, until - time.monotonic())
            peers[engine] = Peer(command, environment, arguments.out / f"{engine}.log", left)
        except PeerError as failure:
            comparison.failures[engine] = f"start: {failure}"
            print(f"{engine} does not start: {failure}", flush=True)
            continue
        comparison.failures.pop(engine, None)
        comparison.facts[engine] = peers[engine].facts
        print(
            f"{engine} {peers[engine].facts['version']}: ready after {peers[engine].facts['seconds']:.0f} s", flush=True
        )
    return peers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--peer-path", default="", help="where vLLM and its packages lie, with colons between")
    parser.add_argument("--seconds", type=float, default=560.0, help="for everything")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--share", type=float, default=SHARE, help="of the memory, for each engine")
    parser.add_argument("--workloads", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    works = TINY_WORKLOADS if arguments.rehearse else WORKLOADS
    if arguments.workloads:
        names = arguments.workloads.split(",")
        if unknown := [name for name in names if name not in works]:
            parser.error(f"no workload {', '.join(unknown)} (workloads: {', '.join(works)})")
        works = {name: works[name] for name in names}
    comparison, results = Comparison(arguments.rehearse), arguments.out / "side_by_side.json"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = start(comparison, arguments, folder, until)
        try:
            compare(peers, sized(works, peers), comparison, arguments.rounds, until - ANSWER_SECONDS / 2, results)
        finally:
            for peer in peers.values():
                peer.close()
            comparison.write(results)
    print(comparison.table())
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    adopt_orphans()
    sys.exit(main())
