"""Everything that is checked and measured on a GPU, part after part (benchmarks/gpu/run.sh calls this).

    python -m benchmarks.gpu.run [--out DIR] [--seconds 315] [--parts gate,engine,...] [--rehearse]
    python -m benchmarks.gpu.run --side-by-side --peer-path PATHS [--seconds 290]

A part that fails or runs out of its time does not stop the next. DIR holds four files, written anew after each part:
summary.txt, results.json, logs.tar.xz and triton-cache.tar.xz, with which the next call can begin (run.sh
--triton-cache). --rehearse tries all of it without a card: in Triton's interpreter, with tiny shapes, whose times say
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import machine, records
from benchmarks.gpu.parts import Outcome, Part, adopt_orphans, python, run_part
from benchmarks.gpu.summary import summarize

STAND_INS = Path(__file__).parent / "stand_ins"
FIRST_SECONDS, SIDE_BY_SIDE_SECONDS = 315.0, 290.0
RESERVED_SECONDS = 5.0
"""For the files behind the last part."""
REHEARSAL_SECONDS = 180.0
"""Of a part, at most."""
NUM_TEST_PROCESSES = 14
GATE = (
    "tests/gpu/test_shapes.py",
    "tests/gpu/test_bits.py",
    "tests/gpu/test_engine.py::test_greedy_tokens_like_transformers[qwen3]",
    "--deselect=tests/gpu/test_bits.py::test_launches_stay_inside_their_memory",
)
"""Production shapes, bits over many launches, one engine against Transformers on the CPU: the interpreter never saw
them. No figure counts before."""
TESTS = (
    "tests/gpu",
    "tests/kernels/triton",
    "tests/sampling/test_device_draw.py",
    "tests/sampling/test_device_sampler.py",
    "--ignore=tests/kernels/triton/test_ahead_of_time.py",
)
"""The rest, in the time that is left."""
DRAFT_TESTS = "tests/kernels/triton/test_drafts.py", "tests/gpu/test_drafts.py"
MODEL_DRAFTS = "model,parallel,head"
REHEARSED_TESTS = ("tests/kernels/triton/test_norm.py", "tests/gpu/test_synchronising.py")
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    # Greedy sampling does not use it, and it would be compiled at the first start.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir()) / "quire-vllm-cache"),
}


def pytest_command(*words: str) -> tuple[str, ...]:
    """pytest without what only this repository's own environment has (its plugins)."""
    return python("pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", *words)


def first_parts() -> list[Part]:
    """In the order in which their answers are needed; the tests at the end take what is left."""
    out, spread = ("--out", "{out}"), ()
    if find_spec("xdist") is not None:
        spread = ("-n", str(NUM_TEST_PROCESSES), "--dist", "worksteal")
    engine, narrow = python("benchmarks.gpu.engine", *out), python("benchmarks.gpu.engine", *out, "--format", "fp8")
    return [
        Part("machine", python("benchmarks.gpu.machine", *out), 20),
        Part("gate", pytest_command(*GATE), 60, ("--interpreted",)),
        Part("engine", engine, 75),
        Part("kernels", python("benchmarks.gpu.kernels", *out), 30),
        Part("fp8", narrow, 60),
        Part("experiments", python("benchmarks.gpu.experiments", *out), 20),
        Part("counters", python("benchmarks.gpu.counters", *out, "--log", "{folder}/ncu.csv"), 25),
        Part("tests", pytest_command(*spread, *TESTS), 600, ("--interpreted",), pytest_command(*REHEARSED_TESTS)),
    ]


def sweep_parts() -> list[Part]:
    """Only what --parts names. Ways to make kernels, one beside the other, which decide what the engine launches; and
    drafts: their kernels against plain twins, and an engine with and without."""
    products = python("benchmarks.gpu.experiments", "--out", "{out}", "--what", "products", "--seconds", "45")
    return [
        Part("products", products, 60),
        Part("experts", python("benchmarks.gpu.expert_sweep", "--out", "{out}"), 75),
        Part("attention", python("benchmarks.gpu.attention_sweep", "--out", "{out}"), 60),
        Part("delta", python("benchmarks.gpu.delta_sweep", "--out", "{out}"), 60),
        Part("families", python("benchmarks.gpu.families", "--out", "{out}"), 200),
        Part("images", python("benchmarks.gpu.images", "--out", "{out}"), 60),
        Part("draft-kernels", pytest_command(*DRAFT_TESTS), 150, ("--interpreted",)),
        Part("drafts", python("benchmarks.gpu.drafts", "--out", "{out}"), 180),
        Part(
            "model-drafts", python("benchmarks.gpu.drafts", "--out", "{out}", "--methods", "model,parallel,head"), 180
        ),
    ]


def _engine_part(peer_path: str, name: str, engine: str, seconds: float, *words: str, least: float = 10.0) -> Part:
    theirs = {**VLLM_ENVIRONMENT, "PYTHONPATH": os.pathsep.join((os.environ.get("PYTHONPATH", ""), peer_path))}
    command = python("benchmarks.gpu.side_by_side", engine, "--out", "{out}", "--part", name, *words)
    return Part(name, command, seconds, least=least, environment=theirs if engine == "vllm" else {})


def side_by_side_parts(peer_path: str) -> list[Part]:
    """Quire, then vLLM, each alone on the card; then both with weights of 8 bits, and one stream of Quire again: the
    card's clocks may have changed."""
    part = partial(_engine_part, peer_path)
    return [
        Part("machine", python("benchmarks.gpu.machine", "--out", "{out}"), 20),
        part("quire", "quire", 60),
        part("vllm", "vllm", 140),
        part("quire-fp8", "quire", 45, "--format", "fp8"),
        part("quire-again", "quire", 20, "--workloads", "single"),
        part("vllm-fp8", "vllm", 140, "--format", "fp8", least=100.0),
    ]


def experts_parts(peer_path: str) -> list[Part]:
    """Only what --parts names: both engines on a model with experts."""
    part, words = partial(_engine_part, peer_path), ("--model", "qwen3-30b-a3b")
    return [part("quire-experts", "quire", 70, *words), part("vllm-experts", "vllm", 220, *words, least=100.0)]


def choose(parts: Sequence[Part], names: str | None, sweeps: Sequence[Part] = ()) -> list[Part]:
    """The parts that are named, with commas between, in their own order, of `parts` and `sweeps`; for None all of
    `parts`. Raises ValueError for a name that is none."""
    if names is None:
        return list(parts)
    known, wanted = [*parts, *sweeps], names.split(",")
    if unknown := sorted(set(wanted) - {part.name for part in known}):
        raise ValueError(f"no part {', '.join(unknown)} (parts: {', '.join(part.name for part in known)})")
    return [part for part in known if part.name in wanted]


class Run:
    """The four files of a run, in a folder. cache: Triton's, packed as one of them."""

    def __init__(self, out: Path, cache: Path, *, is_rehearsal: bool) -> None:
        self.outcomes: list[Outcome] = []
        self.summary = ""
        self._out, self._cache, self._is_rehearsal = out, cache, is_rehearsal
        self._logs = Path(tempfile.mkdtemp(prefix="quire-gpu-logs-"))
        self._records = self._logs / "results.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        self.save()

    def take(self, part: Part, seconds: float, environment: dict[str, str]) -> Outcome:
        """Run a part, and write what is known then."""
        before = machine.clocks()
        outcome = run_part(part, self._logs, self._records, seconds, environment)
        clocks = {"part": part.name, "what": "clocks", "before": before, "after": machine.clocks()}
        records.writer(self._records, quiet=True)(clocks)
        self.outcomes.append(outcome)
        self.save()
        return outcome

    def save(self) -> None:
        """Write the four files, each whole or as it was before."""
        found = records.read(self._records)
        try:
            self.summary = summarize(found, self.outcomes, self._logs, is_rehearsal=self._is_rehearsal)
        except Exception:  # a mistake here must not cost the parts that follow
            self.summary = f"The summary failed; results.json has everything.\n{traceback.format_exc()}"
        result = {
            "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "is_rehearsal": self._is_rehearsal,
            "parts": [asdict(outcome) for outcome in self.outcomes],
            "records": found,
        }
        self._write("summary.txt", lambda path: path.write_text(self.summary + "\n", encoding="utf-8"))
        self._write("results.json", lambda path: path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8"))
        self._write("logs.tar.xz", lambda path: pack(self._logs, path, "logs"))
        self._write("triton-cache.tar.xz", lambda path: pack(self._cache, path, "."))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        """A run may be killed at any moment: the new file takes the place of the old one at once."""
        unfinished = self._out / f".{name}"
        write(unfinished)
        unfinished.replace(self._out / name)


def relocate(cache: Path) -> None:
    """Make the groups of Triton's cache name the files beside them. Triton stores absolute paths, so in a cache that
    was filled in another folder it would find no kernel."""
    for group in cache.glob("*/__grp__*.json"):
        paths = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
        beside = {name: str(group.parent / Path(path).name) for name, path in paths.items()}
        if beside != paths:
            group.write_text(json.dumps({"child_paths": beside}), encoding="utf-8")


def pack(folder: Path, archive: Path, name: str) -> None:
    """Pack what lies in `folder`, as the folder `name`."""
    with tarfile.open(archive, "w:xz", preset=1) as file:
        file.add(folder, arcname=name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--side-by-side", action="store_true", help="Quire and vLLM on the same workloads")
    parser.add_argument("--peer-path", default="", help="where vLLM and its packages lie, with colons between")
    parser.add_argument("--seconds", type=float, help=f"for all ({FIRST_SECONDS:.0f}; {SIDE_BY_SIDE_SECONDS:.0f})")
    parser.add_argument("--parts", help="only these, with commas between", metavar="NAMES")
    parser.add_argument("--rehearse", action="store_true", help="both calls without a card: tiny, in the interpreter")
    arguments = parser.parse_args()
    started = time.monotonic()
    is_rehearsal, environment = arguments.rehearse, {"TRITON_INTERPRET": "0"}
    beside = side_by_side_parts(str(STAND_INS) if is_rehearsal else arguments.peer_path)
    usual = beside if arguments.side_by_side else first_parts() + (beside[1:] if is_rehearsal else [])
    try:
        parts = choose(usual, arguments.parts, sweep_parts() + experts_parts(arguments.peer_path))
    except ValueError as error:
        parser.error(str(error))
    seconds = arguments.seconds or (SIDE_BY_SIDE_SECONDS if arguments.side_by_side else FIRST_SECONDS)
    if is_rehearsal:
        environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        parts = [part.for_rehearsal(REHEARSAL_SECONDS) for part in parts]
        seconds = arguments.seconds or REHEARSAL_SECONDS * len(parts)
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or tempfile.mkdtemp(prefix="quire-triton-"))
    relocate(cache)
    run = Run(arguments.out.resolve(), cache, is_rehearsal=is_rehearsal)
    for part in parts:
        left = seconds - RESERVED_SECONDS - (time.monotonic() - started)
        print(f"==> {part.name}: at most {max(0, min(left, part.seconds)):.0f} s", flush=True)
        outcome = run.take(part, left, environment)
        print(f"    {outcome.status} after {outcome.seconds:.0f} s", flush=True)
    print(run.summary)
    return 0 if all(outcome.status == "done" for outcome in run.outcomes) else 1


if __name__ == "__main__":
    adopt_orphans()
    sys.exit(main())
