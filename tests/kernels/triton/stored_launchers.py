"""Launchers of kernels, compiled into Triton's cache for this Python or another one, without a card.

At a first launch Triton compiles a small module in C for each kind of arguments, a second each, kept under a hash of
its text and of `platform.architecture()`, whose second word is "ELF" only where the program `file` is installed: each
is stored under both. It is linked with an empty library in place of the driver's.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import cache
from triton.runtime.cache import get_cache_manager

DESCRIBE = (
    "import json, sys, sysconfig; print(json.dumps([sysconfig.get_paths()['include'], "
    "sysconfig.get_config_var('EXT_SUFFIX'), '%d.%d' % sys.version_info[:2]]))"
)
LINKAGES = ("ELF", "")
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)), "manylinux2014_x86_64")


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter that kernels are stored for. headers: the folder of Python.h. suffix: the end of the names of its
    extension modules. version: of the language, "3.12"."""

    headers: Path
    suffix: str
    version: str

    @classmethod
    def of(cls, executable: str) -> Python:
        """Ask the interpreter. Raises CalledProcessError."""
        run = subprocess.run((executable, "-c", DESCRIBE), capture_output=True, text=True, check=True)
        headers, suffix, version = json.loads(run.stdout)
        return cls(Path(headers), suffix, version)

    def fetch_libtriton(self, folder: Path) -> Path:
        """The compiled part of Triton's wheel for this Python, of the version installed here: it is part of the key of
        every kernel. Downloaded by pip into `folder`, unless it is there."""
        found = folder / f"libtriton-{triton.__version__}-{self.version}.so"
        if found.exists():
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            wanted = ("--no-deps", "--only-binary=:all:", "--python-version", self.version, "--implementation", "cp")
            platforms = [word for name in PLATFORMS for word in ("--platform", name)]
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
            subprocess.run((*pip, *wanted, *platforms, "-d", place, f"triton=={triton.__version__}"), check=True)
            (wheel,) = Path(place).glob("triton-*.whl")
            shutil.unpack_archive(wheel, place, "zip")
            (Path(place) / "triton" / "_C" / "libtriton.so").rename(found)
        return found


@contextmanager
def keys_of(libtriton: Path) -> Iterator[None]:
    """While this is open, the keys of kernels are those of a Triton whose compiled part is `libtriton`. Before the
    first key is made: Triton keeps what it has read."""

    def opened(file: Any, *mode: Any) -> Any:
        return open(libtriton if os.path.basename(file) == "libtriton.so" else file, *mode)

    cache.triton_key.cache_clear()
    cache.open = opened  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del cache.open  # type: ignore[attr-defined]
        cache.triton_key.cache_clear()


@contextmanager
def stored_for(python: Python) -> Iterator[None]:
    """While this is open, a `CudaLauncher` that is made compiles its module into the cache, for `python`; Triton's own
    module in C is stored first. It cannot be called."""
    theirs = nvidia.compile_module_from_src
    with tempfile.TemporaryDirectory() as place:
        stub = Path(place) / "libcuda.so.1"
        compile_c("", stub, "-Wl,-soname,libcuda.so.1")
        knobs.nvidia.libcuda_path = place

        def compile_module_from_src(src: str, name: str, include_dirs: list[str], **_: Any) -> SimpleNamespace:
            # A linker may leave out a library that gives it nothing, and then the driver's is not loaded either.
            options = [f"-L{place}", "-Wl,--no-as-needed", "-l:libcuda.so.1"]
            options += [f"-I{python.headers}", *(f"-I{each}" for each in include_dirs)]
            store(src, f"{name}{python.suffix}", Path(place) / f"module{python.suffix}", options)
            return SimpleNamespace(launch=None)

        nvidia.compile_module_from_src = compile_module_from_src
        try:
            compile_module_from_src(
                (Path(nvidia.dirname) / "driver.c").read_text(), "cuda_utils", include_dirs=nvidia.include_dirs
            )
            yield
        finally:
            nvidia.compile_module_from_src = theirs
            knobs.nvidia.libcuda_path = None


def store(source: str, name: str, built: Path, options: list[str]) -> None:
    """Compile a module, unless the cache has it under each of its keys."""
    described = ",".join((platform.machine(), platform.system(), "64bit"))
    managers = [
        get_cache_manager(hashlib.sha256(f"{source}{described},{linkage}".encode()).hexdigest()) for linkage in LINKAGES
    ]
    missing = [manager for manager in managers if manager.get_file(name) is None]
    if missing:
        compile_c(source, built, *options)
        for manager in missing:
            manager.put(built.read_bytes(), name, binary=True)


def compile_c(source: str, built: Path, *options: str) -> None:
    """A shared library, as Triton compiles it."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"
    command = (compiler, "-x", "c", "-", "-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", str(built), *options)
    subprocess.run(command, input=source, text=True, check=True)
