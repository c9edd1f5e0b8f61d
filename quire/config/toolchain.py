from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from quire import envs
from quire.config.cuda import DRIVER

COMPILERS = ("gcc", "clang")
LDCONFIG = "/sbin/ldconfig"
FENCED_TRITON = (3, 7, 1)
"""First Triton with a proxy fence between asynchronous copies and products that read them."""
UNTRUSTED_PTXAS = 13
"""First major version of the assembler with which kernels without that fence vary."""


@dataclass(frozen=True)
class Toolchain:
    """Host tools that Triton needs, found for `quire doctor` without importing it. compiler: path. headers: directory
    of Python.h. driver_library: directory of libcuda.so.1. ptxas: version of the assembler in TRITON_PTXAS_PATH."""

    compiler: str | None
    headers: str | None
    driver_library: str | None
    ptxas: str | None

    def problems(self) -> list[str]:
        """Lines of `quire doctor`: reasons why Triton cannot start kernels, or why their results are doubtful."""
        problems = []
        if self.compiler is None:
            problems.append("no C compiler (gcc or clang, or CC): Triton compiles a launcher for every kernel with it")
        if self.headers is None:
            problems.append(
                "Python's headers (Python.h) are not installed: Triton's launchers are compiled against them"
            )
        if self.driver_library is None:
            problems.append(f"{DRIVER} is not found by {LDCONFIG} -p or in LD_LIBRARY_PATH: Triton links against it")
        if self.ptxas is not None and int(self.ptxas.partition(".")[0]) >= UNTRUSTED_PTXAS:
            problems.append(
                f"TRITON_PTXAS_PATH names ptxas {self.ptxas}: with 13.x, kernels of this Triton gave other bits from "
                "run to run; unset it, Triton brings its own"
            )
        return problems


def find_toolchain() -> Toolchain:
    return Toolchain(_compiler(), _headers(), _driver_library(), _ptxas())


def triton_version() -> tuple[int, ...] | None:
    """(major, minor, patch) of the installed Triton; None: not installed."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _compiler() -> str | None:
    named = envs.c_compiler()
    return next(filter(None, map(shutil.which, (named,) if named else COMPILERS)), None)


def _headers() -> str | None:
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does, for Debian
    directory = sysconfig.get_paths(scheme)["include"]
    return directory if Path(directory, "Python.h").exists() else None


def _driver_library() -> str | None:
    if (named := envs.triton_libcuda()) is not None:
        return named
    try:
        cached = subprocess.run([LDCONFIG, "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        cached = ""
    found = [Path(line.split()[-1]).parent for line in cached.splitlines() if DRIVER in line]
    return next((str(path) for path in found or envs.library_path() if (path / DRIVER).exists()), None)


def _ptxas() -> str | None:
    """Version of TRITON_PTXAS_PATH's assembler, such as "13.1"; "0" if it reports none; None: unset."""
    path = envs.triton_ptxas()
    if path is None:
        return None
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return "0"
    release = re.search(r"release (\d+\.\d+)", answer)
    return release[1] if release else "0"
