"""`make serve` before it installs anything."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment that `make` takes for one that it has created, in which nothing is installed."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / ".created").touch()
    return venv


def make(target: str, venv: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", target, f"VENV={venv}", *variables]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_an_occupied_port_is_refused_before_the_install(environment: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = make("serve", environment, f"PORT={port}")
        assert refused.returncode != 0
        assert f"make: cannot serve on port {port} of 127.0.0.1: Address already in use" in refused.stderr
        assert "install" not in refused.stdout
        # A server on a Unix socket does not listen there.
        assert make("free-port", environment, f"PORT={port}", "ARGS=--uds quire.sock").returncode == 0
    assert make("free-port", environment, "PORT=0").returncode == 0
    assert "cannot serve on port 70000" in make("free-port", environment, "PORT=70000").stderr


def test_the_first_command_of_the_reading_guide_is_a_target() -> None:
    """`make` alone prints help."""
    text = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    [target] = re.findall(r"`make ([\w-]+)` builds a `.venv`", text)
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_number_of_examples_reaches_the_machines() -> None:
    [variable] = re.findall(r"@(\w+)=\$\(EXAMPLES\) ", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert f'"{variable}"' in (ROOT / "tests" / "machines.py").read_text(encoding="utf-8")
    assert not variable.startswith("QUIRE_"), "tests/conftest.py removes these"


def test_documents_agree_on_platforms() -> None:
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        assert "Linux on x86-64" in text
        assert "macOS" not in text.replace("no macOS", "")
