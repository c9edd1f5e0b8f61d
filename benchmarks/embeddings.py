"""Texts to vectors beside other engines: python -m benchmarks.embeddings MODEL [--python PEERS_PYTHON] ...

256 texts of 4 to 200 words, through sentence-transformers (torch) and ONNX Runtime in float32 and through Quire in
float32, int8 and w8a8, in turns, with the same threads, tokenisation included. Prints the seconds, and those of the
processor (all threads', waiting ones' included: with one thread other processes disturb them least), their ratios to
Quire's in float32 and how far the vectors lie from sentence-transformers'. The peers run in an environment of their
own: `python benchmarks/peers/install.py embedders` makes it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire import LLM

PEERS = Path(__file__).parent / "peers"
NUM_TEXTS, SHORTEST, LONGEST = 256, 4, 200
NUM_WORDS = 400
"""Different ones: names of numbers, which a tokenizer takes apart."""
KINDS = {"quire": None, "quire int8": "int8", "quire w8a8": "w8a8"}


def make_texts(seed: int = 0) -> list[str]:
    """Lengths are spread evenly over their logarithms: many short texts and some long ones."""
    draw = random.Random(seed)
    lengths = [round(SHORTEST * (LONGEST / SHORTEST) ** draw.random()) for _ in range(NUM_TEXTS)]
    return [" ".join(f"w{draw.randrange(NUM_WORDS)}" for _ in range(length)) for length in lengths]


class Run(NamedTuple):
    """cpu_seconds: of all threads of the engine's process."""

    seconds: float
    cpu_seconds: float
    vectors: list[list[float]]


class Peer:
    """One engine in a process of its own."""

    def __init__(self, python: str, engine: str, model: str, threads: int, texts: Path) -> None:
        command = [python, str(PEERS / "run_embedders.py"), "--engine", engine, "--model", model]
        command += ["--threads", str(threads), "--texts", str(texts)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["version"]

    def run(self) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        answer = self._answer()
        seconds, cpu_seconds = answer["seconds"]
        return Run(seconds, cpu_seconds, answer.get("vectors", []))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> dict:  # type: ignore[type-arg]  # of JSON
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a peer has ended; its output above says why")
        return json.loads(line)


def quire_run(llm: LLM, texts: list[str]) -> Callable[[], Run]:
    def run() -> Run:
        started, used = time.perf_counter(), time.process_time()
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        taken = time.perf_counter() - started, time.process_time() - used
        return Run(*taken, [output.outputs.embedding for output in outputs])

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--python", default=str(PEERS / ".venvs" / "embedders" / "bin" / "python"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    texts = make_texts()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(texts))
        names = ("sentence-transformers", "onnxruntime")
        peers = {name: Peer(arguments.python, name, arguments.model, arguments.threads, file) for name in names}
        llms = {
            name: LLM(arguments.model, quantization=kind, num_threads=arguments.threads) for name, kind in KINDS.items()
        }
        runs = {f"{name} {peer.version}": peer.run for name, peer in peers.items()}
        runs |= {name: quire_run(llm, texts) for name, llm in llms.items()}
        vectors = {name: np.array(run().vectors) for name, run in runs.items()}  # also warms up
        taken: dict[str, list[Run]] = {name: [] for name in runs}
        for _ in range(arguments.rounds):
            for name, run in runs.items():
                taken[name].append(run())
        for peer in peers.values():
            peer.close()
        for llm in llms.values():
            llm.shutdown()
    reference = next(iter(vectors.values()))
    least = {
        name: [min(column) for column in zip(*((run.seconds, run.cpu_seconds) for run in done), strict=True)]
        for name, done in taken.items()
    }
    for name, (seconds, cpu_seconds) in least.items():
        error, cosine = np.abs(vectors[name] - reference).max(), (vectors[name] * reference).sum(1).min()
        ratios = [own / ours for own, ours in zip(least[name], least["quire"], strict=True)]
        print(
            f"{name:<30} {seconds:7.3f} s {ratios[0]:5.2f} x, of the processor {cpu_seconds:.3f} s {ratios[1]:5.2f} x, "
            f"largest difference {error:.1e}  least cosine {cosine:.5f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
