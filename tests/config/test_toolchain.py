"""What Triton needs of a machine, looked for in directories of the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire import envs
from quire.config import toolchain
from quire.config.toolchain import Toolchain, find_toolchain, triton_version


def executable(path: Path, answer: str) -> Path:
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{answer}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which nothing is installed; the directory in which programs are looked for."""
    for name in ("CC", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "LDCONFIG", str(tmp_path / "ldconfig"))
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / "include")})
    return tmp_path


def test_a_bare_machine(bare: Path) -> None:
    found = find_toolchain()
    assert found == Toolchain(None, None, None, None)
    assert len(found.problems()) == 3


def test_all_is_found(bare: Path) -> None:
    compiler = executable(bare / "gcc", "")
    (bare / "include").mkdir()
    (bare / "include" / "Python.h").touch()
    (bare / "libcuda.so.1").touch()
    executable(bare / "ldconfig", f"    libcuda.so.1 (libc6,x86-64) => {bare}/libcuda.so.1")
    found = find_toolchain()
    assert found == Toolchain(str(compiler), str(bare / "include"), str(bare), None)
    assert found.problems() == []


def test_the_environment_counts(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = executable(bare / "mycc", "")
    monkeypatch.setenv("CC", "mycc")
    (bare / "libcuda.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{bare}")
    found = find_toolchain()
    assert (found.compiler, found.driver_library) == (str(compiler), str(bare))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/elsewhere")
    assert find_toolchain().driver_library == "/elsewhere"


@pytest.mark.parametrize(
    ("answer", "version", "warned"),
    [
        ("Cuda compilation tools, release 12.8, V12.8.93", "12.8", False),
        ("Cuda compilation tools, release 13.1, V13.1.80", "13.1", True),
        ("?", "0", False),
    ],
)
def test_an_assembler_in_place_of_tritons(
    answer: str, version: str, warned: bool, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(executable(bare / "ptxas", answer)))
    found = find_toolchain()
    assert found.ptxas == version
    assert any("TRITON_PTXAS_PATH" in problem for problem in found.problems()) == warned


def test_the_installed_triton() -> None:
    version = triton_version()
    assert version is not None
    assert version >= (3, 6, 0)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HOME": "/h"}, "/h/.cache/quire/triton"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/quire/triton"),
        ({"HOME": "/h", "QUIRE_TRITON_CACHE": "~/kernels"}, "/h/kernels"),
        ({"TRITON_CACHE_DIR": "/theirs"}, "/theirs"),
        ({"TRITON_CACHE_DIR": "/theirs", "QUIRE_TRITON_CACHE": "/ours"}, "/ours"),
    ],
    ids=str,
)
def test_where_compiled_kernels_are_kept(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "QUIRE_TRITON_CACHE", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.environ", os.environ.copy())
    envs.keep_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == expected
