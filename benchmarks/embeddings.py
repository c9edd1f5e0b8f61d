"""Texts to vectors beside other engines: python -m benchmarks.embeddings MODEL [--python PEERS_PYTHON] ...

256 texts of 4 to 200 words, through sentence-transformers (torch) and ONNX Runtime in float32 and through Quire in
float32, int8 and w8a8, in turns, with the same threads, tokenisation included. Prints the seconds, the ratio to
Quire's and how far the vectors lie from sentence-transformers'. The peers run in an environment of their own:
`python benchmarks/peers/install.py embedders` makes it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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


class Peer:
    """One engine in a process of its own."""

    def __init__(self, python: str, engine: str, model: str, threads: int, texts: Path) -> None:
        command = [python, str(PEERS / "run_embedders.py"), "--engine", engine, "--model", model]
        command += ["--threads", str(threads), "--texts", str(texts)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["version"]

    def run(self) -> tuple[float, list[list[float]]]:
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer.get("vectors", [])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> dict:  # type: ignore[type-arg]  # of JSON
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a peer has ended; its output above says why")
        return json.loads(line)


def quire_run(llm: LLM, texts: list[str]) -> Callable[[], tuple[float, list[list[float]]]]:
    def run() -> tuple[float, list[list[float]]]:
        started = time.perf_counter()
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        return time.perf_counter() - started, [output.outputs.embedding for output in outputs]

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
        vectors = {name: np.array(run()[1]) for name, run in runs.items()}  # also warms up
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(arguments.rounds):
            for name, run in runs.items():
                seconds[name].append(run()[0])
        for peer in peers.values():
            peer.close()
        for llm in llms.values():
            llm.shutdown()
    reference, ours = next(iter(vectors.values())), min(seconds["quire"])
    for name, times in seconds.items():
        error, cosine = np.abs(vectors[name] - reference).max(), (vectors[name] * reference).sum(1).min()
        print(
            f"{name:<30} {min(times):7.3f} s (median {statistics.median(times):.3f}) {min(times) / ours:5.2f} x, "
            f"largest difference {error:.1e}  least cosine {cosine:.5f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
