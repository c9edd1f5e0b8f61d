"""Everything that is checked and measured on a GPU, one part after the other (benchmarks/gpu/run.sh calls this).

    python -m benchmarks.gpu.run [--out DIR] [--seconds 600] [--parts gate,tests,kernels,...]

A part that fails or runs out of its time does not stop the next, nor take of its time. After every part results.json
and summary.txt are written anew; at the end the logs become one archive. --rehearse tries all of it where there is no
card: in Triton's interpreter, with tiny shapes, and stand-ins for the tools of others. Its times say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import machine, records
from benchmarks.gpu.archive import pack
from benchmarks.gpu.parts import ROOT, Outcome, Part, adopt_orphans, choose, python, run_part
from benchmarks.gpu.summary import summarize
from benchmarks.gpu.targets import verdicts

STAND_INS = Path(__file__).parent / "stand_ins"
RESERVED_SECONDS = 15.0
"""For the archive and the summary."""
NUM_TEST_PROCESSES = 14
GATE = ("test_shapes", "test_bits")
"""Of tests/gpu: the shapes that the engine launches, which the interpreter never saw. Nothing else counts before."""
LEFT_TO_A_HOST = ("tests/kernels/triton/test_ahead_of_time.py",)
"""It compiles for a card that is not there."""
TESTS = (
    "tests/kernels/triton",
    "tests/sampling/test_device_draw.py",
    "tests/sampling/test_device_sampler.py",
    "tests/gpu",
)
REHEARSED_TESTS = ("tests/kernels/triton/test_norm.py", "tests/gpu/test_synchronising.py")
"""`make test` interprets the kernels' tests: a rehearsal collects them all, and runs a few by the same command."""


SIDE_BY_SIDE = Part(
    "side-by-side",
    (python("benchmarks.gpu.side_by_side", "--out", "{folder}"),),
    580,
    ("--rehearse", "--rounds", "1"),
)
"""A command of its own on a card, where it takes ten minutes; part of a rehearsal."""


def pytest_command(*paths: str) -> tuple[str, ...]:
    """pytest without what only this repository's own environment has (its plugins), results as XML."""
    options = ("-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", "--junitxml={folder}/{name}.xml")
    return python("pytest", *options, *paths)


def gate_files() -> tuple[list[str], list[str]]:
    """Those of the gate's test files that exist, and the names of those that do not."""
    paths = {name: f"tests/gpu/{name}.py" for name in GATE}
    there = [path for path in paths.values() if (ROOT / path).exists()]
    return there, [name for name, path in paths.items() if path not in there]


def spread_out(num_processes: int) -> tuple[str, ...]:
    """pytest-xdist's options; none where it is not installed."""
    return ("-n", str(num_processes), "--dist", "worksteal") if find_spec("xdist") is not None else ()


def all_parts() -> tuple[Part, ...]:
    """In the order in which their answers are needed. Their times sum to less than ten minutes."""
    there, _ = gate_files()
    ignored = tuple(f"--ignore={path}" for path in (*LEFT_TO_A_HOST, *there))
    tests = (*TESTS, *ignored)
    out = ("--out", "{out}")
    engine_tasks = "single,ladder,idle,long,ragged,batch"
    return (
        Part("machine", (python("benchmarks.gpu.machine", *out),), 20, rehearsal_seconds=30),
        Part("gate", tuple(pytest_command(path) for path in there), 70, ("--interpreted",), rehearsal_seconds=150),
        Part(
            "tests",
            (pytest_command(*spread_out(NUM_TEST_PROCESSES), *tests),),
            95,
            ("--interpreted",),
            (pytest_command("--collect-only", *tests), pytest_command(*spread_out(2), *REHEARSED_TESTS)),
        ),
        Part("kernels", (python("benchmarks.gpu.kernels", *out, "--seconds", "105"),), 120),
        Part("engine", (python("benchmarks.gpu.engine", *out, "--tasks", engine_tasks),), 150),
        Part("breakdown", (python("benchmarks.gpu.breakdown", *out),), 50),
        Part("counters", (python("benchmarks.gpu.counters", *out, "--log", "{folder}/ncu.csv"),), 45),
        Part("experiments", (python("benchmarks.gpu.experiments", *out),), 35),
    )


def more_parts() -> tuple[Part, ...]:
    """Asked for by name: graphs one kind at a time, and Transformers. Not among the ten minutes."""
    out = ("--out", "{out}")
    engine = ("benchmarks.gpu.engine", *out, "--tasks", "ladder", "--mode")
    return (
        Part("eager", (python(*engine, "eager"),), 60),
        Part("piecewise", (python(*engine, "piecewise"),), 60),
        Part("transformers", (python("benchmarks.gpu.transformers_peer", *out),), 60),
        SIDE_BY_SIDE,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything (600)")
    parser.add_argument("--rehearse", action="store_true", help="without a card: tiny shapes in the interpreter")
    usual, more = all_parts(), more_parts()
    names = ", ".join(part.name for part in usual)
    parser.add_argument(
        "--parts", help=f"of {names} (default: these), {', '.join(part.name for part in more)}", metavar="NAMES"
    )
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        rehearsed = (SIDE_BY_SIDE,) if arguments.rehearse else ()
        parts = choose((*usual, *more), arguments.parts) if arguments.parts else [*usual, *rehearsed]
    except ValueError as error:
        parser.error(str(error))
    environment = {"TRITON_INTERPRET": "0"}
    if arguments.rehearse:
        environment = rehearsal_environment()
        os.environ["PATH"] = environment["PATH"]
        parts = [part.rehearsed() for part in parts]
    run = Run(arguments.out.resolve(), is_rehearsal=arguments.rehearse)
    for part in parts:
        left = arguments.seconds - RESERVED_SECONDS - (time.monotonic() - started)
        print(f"==> {part.name}: at most {min(left, part.seconds):.0f} s", flush=True)
        outcome = run.take(part, left, environment)
        print(f"    {outcome.status} after {outcome.seconds:.0f} s", flush=True)
    print(run.close())
    is_done = all(outcome.status == "done" for outcome in run.outcomes)
    return 0 if is_done and not run.has_failed else 1


def rehearsal_environment() -> dict[str, str]:
    """Triton's interpreter, one thread, and the stand-ins before any real tool."""
    path = f"{STAND_INS / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PATH": path}


class Run:
    """Results of the parts so far, in a folder: results.json, summary.txt, and what the parts wrote in logs/."""

    def __init__(self, out: Path, *, is_rehearsal: bool) -> None:
        self.outcomes: list[Outcome] = []
        self.has_failed = False
        self._out = out
        self._logs = out / "logs"
        self._is_rehearsal = is_rehearsal
        shutil.rmtree(self._logs, ignore_errors=True)
        self._logs.mkdir(parents=True)
        self._records = self._logs / "results.jsonl"
        for name in gate_files()[1]:
            records.writer(self._records)({"part": "gate", "what": "missing", "name": f"tests/gpu/{name}.py"})

    def take(self, part: Part, seconds: float, environment: dict[str, str]) -> Outcome:
        """Run a part, and write what is known then."""
        before = machine.clocks()
        outcome = run_part(part, self._logs, seconds, environment, self._records)
        record = {"part": part.name, "what": "clocks", "before": before, "after": machine.clocks()}
        records.writer(self._records, quiet=True)(record)
        self.outcomes.append(outcome)
        self._save()
        return outcome

    def close(self) -> str:
        """Pack the logs; returns the summary."""
        summary = self._save()
        for path in pack(self._logs, self._out / "logs.tar.xz"):
            print(path)
        shutil.rmtree(self._logs)
        return summary

    def _save(self) -> str:
        found = records.read(self._records)
        result = {
            "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "parts": [outcome.to_json() for outcome in self.outcomes],
            "is_rehearsal": self._is_rehearsal,
            "targets": [] if self._is_rehearsal else [verdict.to_json() for verdict in verdicts(found)],
            "records": found,
        }
        (self._out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        try:
            summary = summarize(found, self.outcomes, self._logs, is_rehearsal=self._is_rehearsal)
        except Exception:  # a mistake here must not cost the parts that follow
            self.has_failed = True
            summary = f"The summary failed; results.json has everything.\n{traceback.format_exc()}"
        (self._out / "summary.txt").write_text(summary + "\n", encoding="utf-8")
        return summary


if __name__ == "__main__":
    adopt_orphans()
    sys.exit(main())
