"""Which wheels are built, by which Python; what is said of those that could not be had; what a wheel must hold."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.deploy import files, wheels
from tests.deploy.wheels import REQUIRED, Interpreter

NATIVE = "quire/kernels/cpu/_native.abi3.so"


def stand_in(directory: Path, name: str, script: str) -> str:
    """A command that prints what a Python answers, or fails as one."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is all of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_every_version_is_tried_or_named(path: Path) -> None:
    stand_in(path, "python3.11", "echo 'pyenv: python3.11: command not found' >&2; exit 127")
    stand_in(path, "python3.12", "echo cpython 3.12 3.12.4")
    stand_in(path, "python3.13", "echo \"ModuleNotFoundError: No module named 'ensurepip'\" >&2; exit 1")
    stand_in(path, "python3.14", "echo graalpy 3.14 3.14.0")
    found, lines = wheels.find([], "python")
    assert [(each.release, each.tag) for each in found] == [("3.12.4", "cp312-abi3")]
    assert lines == [
        "CPython 3.11: not tried: python3.11 does not run (pyenv: python3.11: command not found)",
        "CPython 3.13: not tried: python3.13 lacks the module ensurepip or venv",
        "CPython 3.14: not tried: python3.14 is graalpy, not CPython",
        "cp311-cp311: NOT BUILT: no Python for it",
    ]


def test_the_python_that_runs_this_stands_in_for_its_version(path: Path) -> None:
    own = stand_in(path, "python", "echo cpython 3.13 3.13.5")
    stand_in(path, "python3.12", "echo cpython 3.12 3.12.4")
    assert [each.command for each in wheels.find([], own)[0]] == ["python3.12", own]
    stand_in(path, "python3.13", "echo cpython 3.13 3.13.1")
    assert [each.release for each in wheels.find([], own)[0]] == ["3.12.4", "3.13.1"]


def test_named_interpreters_must_run(path: Path) -> None:
    old = stand_in(path, "python3.10", "echo cpython 3.10 3.10.2")
    new = stand_in(path, "newest", "echo cpython 3.14 3.14.1")
    found, lines = wheels.find([new], "python")
    assert [each.version for each in found] == ["3.14"]
    assert "CPython 3.11: not tried: PYTHONS does not name it" in lines
    for name, reason in ((old, "wheels are for 3.11, 3.12, 3.13, 3.14"), ("python3.99", "is not on PATH")):
        with pytest.raises(SystemExit, match=reason):
            wheels.find([new, name], "python")


def test_a_wheel_is_built_by_the_oldest_python_that_installs_it() -> None:
    found = [Interpreter(f"python{version}", version, f"{version}.0") for version in ("3.14", "3.12", "3.11", "3.13")]
    assert {tag: each.version for tag, each in wheels.builders(found).items()} == {
        "cp311-cp311": "3.11",
        "cp312-abi3": "3.12",
    }


def test_a_wheel_is_installed_by_the_newest_python_that_takes_it() -> None:
    found = [Interpreter("", version, f"{version}.1") for version in ("3.11", "3.12", "3.13")]
    chosen, lines = wheels.newest(found)
    assert [each.version for each in chosen] == ["3.11", "3.13"]
    assert lines == ["CPython 3.12.1: not tried: 3.13.1 has the same wheel (PYTHONS names more)"]


def test_the_build_makes_the_wheels_that_are_looked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["scikit-build"]["wheel"]["py-api"] == wheels.STABLE.partition("-")[0]
    assert project["project"]["requires-python"] == f">={wheels.SUPPORTED[0]}"
    assert "STABLE_ABI" in (ROOT / "CMakeLists.txt").read_text()
    assert all((ROOT / name).is_file() for name in REQUIRED)


@pytest.mark.parametrize("lacking", [*REQUIRED, NATIVE])
def test_a_wheel_without_what_others_look_for_is_refused(lacking: str, tmp_path: Path) -> None:
    wheel = tmp_path / "quire_llm-1-cp312-abi3-linux.whl"
    for name in (None, lacking):
        with zipfile.ZipFile(wheel, "w") as archive:
            for each in {*REQUIRED, NATIVE} - {name}:
                archive.writestr(each, "")
        if name is None:
            wheels.check_contents(wheel)
    with pytest.raises(SystemExit, match=r"lacks (quire/|the native module)"):
        wheels.check_contents(wheel)


@pytest.mark.long
def test_the_script_installs_the_wheel_that_fits(tmp_path: Path) -> None:
    """Of a folder of wheels for several versions."""
    for tag in ("cp27-cp27m-linux_x86_64", "py3-none-any"):
        make_wheel(tmp_path / "both", tag)
    command = [str(files.INSTALL), str(tmp_path / "one"), str(tmp_path / "both")]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "chosen py3-none-any" in done.stdout
    assert not (tmp_path / "one" / "wheel").exists()


def make_wheel(directory: Path, tag: str) -> None:
    """A wheel whose command `quire` prints its tag."""
    directory.mkdir(exist_ok=True)
    info = "quire_llm-0.1.dist-info"
    with zipfile.ZipFile(directory / f"quire_llm-0.1-{tag}.whl", "w") as archive:
        archive.writestr("chosen.py", f"def main():\n    print('chosen {tag}')\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: quire-llm\nVersion: 0.1\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/entry_points.txt", "[console_scripts]\nquire = chosen:main\n")
        archive.writestr(f"{info}/RECORD", "")
