"""The machine that a run is on: python -m benchmarks.gpu.machine --out FILE

What compiling and launching kernels needs, with reasons where it is missing (then exits 1); libraries to compare with;
versions; how many of some kernels and launchers that every engine needs the cache of compiled kernels has.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu import records
from benchmarks.gpu.records import Record

PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "pytest-xdist")
PEERS = ("flash_attn_interface", "vllm")
TOOLS = ("ncu", "compute-sanitizer")
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Why the card does not run at its highest clocks, by the name of newer drivers and of older ones."""
SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Need:
    """What kernels cannot do without: where it was found, or why not."""

    name: str
    found: str
    missing: str = ""

    def to_json(self) -> Record:
        return {"name": self.name, "found": self.found, "missing": self.missing}


def said(*command: str) -> str:
    """What a command printed; empty where there is none, or it failed or hung."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def needs() -> list[Need]:
    """Triton compiles a launcher in C for each kernel signature: a compiler, Python's headers and the driver's library
    to link with."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    libraries = [line.strip() for line in said("ldconfig", "-p").splitlines() if "libcuda.so.1" in line]
    return [
        Need("C compiler", compiler, "" if compiler else "neither gcc nor clang is on the PATH"),
        Need("Python.h", str(headers) if headers.exists() else "", "" if headers.exists() else f"no {headers}"),
        Need("libcuda.so.1", "".join(libraries[:1]), "" if libraries else "ldconfig -p does not list it"),
    ]


def assembler() -> str:
    """The version of the ptxas that Triton runs: its own, or that of TRITON_PTXAS_PATH."""
    spec = find_spec("triton")
    own = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas" if spec and spec.origin else Path("ptxas")
    lines = said(os.environ.get("TRITON_PTXAS_PATH") or str(own), "--version").splitlines()
    return next((line for line in lines if "release" in line), "not found")


def clocks() -> Mapping[str, str]:
    """Of the card now, and `reasons`: a bit mask whose first bit means idle; others spoil what was measured."""
    for name in REASONS:
        answer = said("nvidia-smi", f"--query-gpu={','.join((*CLOCKS, name))}", "--format=csv,noheader,nounits")
        values = [word.strip() for word in answer.partition("\n")[0].split(",")]
        if len(values) == len(CLOCKS) + 1:
            return dict(zip((*CLOCKS, "reasons"), values, strict=True))
    return {}


def describe() -> Record:
    query = "--query-gpu=name,memory.total,driver_version"
    cache = Path(os.environ.get("TRITON_CACHE_DIR", ""))
    return {
        "what": "machine",
        "card": said("nvidia-smi", query, "--format=csv,noheader") or "none",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "peers": [name for name in PEERS if find_spec(name) is not None],
        "tools": [name for name in TOOLS if shutil.which(name) is not None],
        "ptxas": assembler(),
        "libtriton": hash_of_libtriton(),
        "cached_kernels": sum(1 for _ in cache.glob("*/*.cubin")) if cache.name else 0,
        "needs": [need.to_json() for need in needs()],
    }


def hash_of_libtriton() -> str:
    """The start of its SHA-256; empty without Triton. It is part of the key of every kernel: a cache that was filled
    for another one is never hit."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    with (Path(spec.origin).parent / "_C" / "libtriton.so").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def cache_hits() -> Record:
    """Compile the two smallest kernels of a step, as an engine launches them, and launch nothing. kernels, launchers:
    (found in the cache, of how many); a launcher that is not found takes the C compiler a second."""
    from triton import knobs
    from triton.runtime import build

    from quire.kernels.triton.runtime import recorded_launches
    from tests.kernels.triton.ahead_of_time import word_calls

    found: list[bool] = []
    loaded: list[str] = []
    built: list[str] = []

    class Loading:
        def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
            loaded.append(str(kernel.warmup(*args, grid=grid, **constants).run))

    own_build = build._build

    def noted(name: str, *args: Any, **options: Any) -> str:
        built.append(name)
        return str(own_build(name, *args, **options))

    knobs.compilation.listener = lambda cache_hit, **_: found.append(cache_hit)
    build._build = noted
    try:
        with recorded_launches(Loading()):
            for call in word_calls():
                call()
    finally:
        knobs.compilation.listener, build._build = None, own_build
    launchers = [name for name in built if name == "__triton_launcher"]
    return {
        "part": "machine",
        "what": "cache",
        "kernels": (sum(found), len(found)),
        "launchers": (len(loaded) - len(launchers), len(loaded)),
    }


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: nothing that a card needs is missed")
    namespace = parser.parse_args(arguments)
    record = {"part": "machine", **describe()}
    records.writer(namespace.out)(record)
    print(said("nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE"))
    if not namespace.tiny:
        records.writer(namespace.out)(cache_hits())
    return 0 if namespace.tiny or not any(need["missing"] for need in record["needs"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
