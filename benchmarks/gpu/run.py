"""Everything that is checked and measured on a GPU, one part after the other (benchmarks/gpu/run.sh calls this).

    python -m benchmarks.gpu.run [--out DIR] [--seconds 600] [--parts tests,kernels,engine,eager,piecewise,transformers]

A part that fails or runs out of time does not stop the next. Prints a short summary last and writes results.json.
--rehearse tries all of it where there is no card: in Triton's interpreter, with tiny shapes, and without the limits of
the parts. Its times say nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu import records
from benchmarks.gpu.parts import Outcome, Part, choose, python, run_part
from benchmarks.gpu.summary import summarize, verdicts

PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec")
RESERVED_SECONDS = 10.0
"""For the summary."""


def pytest_command(*paths: str) -> tuple[str, ...]:
    """pytest without what only this repository's own environment has (its plugins), results as XML."""
    options = ("-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", "--junitxml={folder}/{name}.xml")
    return python("pytest", *options, *paths)


TRITON_TESTS = "tests/kernels/triton"
SUITES = (
    (f"{TRITON_TESTS}/test_attention.py", f"{TRITON_TESTS}/test_qkv_write.py"),
    (
        TRITON_TESTS,
        *(f"--ignore={TRITON_TESTS}/test_{name}.py" for name in ("ahead_of_time", "attention", "qkv_write")),
    ),
    ("tests/sampling/test_device_draw.py", "tests/sampling/test_device_sampler.py"),
    ("tests/gpu/test_engine.py", "-k", "transformers"),
    ("tests/gpu/test_engine.py", "-k", "not transformers"),
    ("tests/gpu/test_invariance.py",),
    ("tests/gpu/test_synchronising.py", "tests/gpu/test_shapes.py"),
)
"""Side by side: most of their time is the compiler's, on the host."""
ENGINE = ("benchmarks.gpu.engine", "--out", "{out}")
PARTS = (
    Part("tests", tuple(pytest_command(*words) for words in SUITES), seconds=160, rehearsal=("--interpreted",)),
    Part("kernels", (python("benchmarks.gpu.kernels", "--out", "{out}", "--seconds", "110"),), seconds=130),
    Part("engine", (python(*ENGINE, "--mode", "full", "--tasks", "ladder,single,idle,batch"),), seconds=150),
    Part("eager", (python(*ENGINE, "--mode", "eager", "--tasks", "ladder"),), seconds=45),
    Part("piecewise", (python(*ENGINE, "--mode", "piecewise", "--tasks", "ladder"),), seconds=45),
    Part("transformers", (python("benchmarks.gpu.transformers_peer", "--out", "{out}"),), seconds=55),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--seconds", type=float, help="for everything (600; in a rehearsal an hour)")
    parser.add_argument("--rehearse", action="store_true", help="without a card: tiny shapes in the interpreter")
    parser.add_argument("--parts", help=f"of {', '.join(part.name for part in PARTS)} (default: all)")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        parts = choose(PARTS, arguments.parts)
    except ValueError as error:
        parser.error(str(error))
    seconds, environment = arguments.seconds or 600.0, {"TRITON_INTERPRET": "0"}
    if arguments.rehearse:
        seconds, environment = arguments.seconds or 3600.0, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        parts = [part.rehearsed(seconds) for part in parts]
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.jsonl").unlink(missing_ok=True)
    outcomes = []
    for part in parts:
        left = seconds - RESERVED_SECONDS - (time.monotonic() - started)
        print(f"==> {part.name}: at most {min(left, part.seconds):.0f} s", flush=True)
        outcomes.append(run_part(part, out, left, environment))
        print(f"    {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s", flush=True)
        save(out, outcomes, is_rehearsal=arguments.rehearse)
    print(summarize(records.read(out / "results.jsonl"), outcomes, out, is_rehearsal=arguments.rehearse))
    return 0 if all(outcome.status == "done" for outcome in outcomes) else 1


def save(out: Path, outcomes: list[Outcome], *, is_rehearsal: bool) -> None:
    """results.json: machine, what became of the parts, verdicts on the targets (none in a rehearsal), and all records.
    After every part anew."""
    found = records.read(out / "results.jsonl")
    result = {
        "machine": machine(),
        "parts": [outcome.to_json() for outcome in outcomes],
        "is_rehearsal": is_rehearsal,
        "targets": [] if is_rehearsal else [verdict.to_json() for verdict in verdicts(found)],
        "records": found,
    }
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What a reader must know to compare two results."""
    query = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader")
    try:
        card = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        card = ""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "card": card or "none",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
