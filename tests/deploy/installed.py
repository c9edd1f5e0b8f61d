"""Install the wheel of a folder that fits a Python as deploy/install.sh does, where no compiler can be found, and serve
from there as the image does."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.deploy import files

TOOLS = ("sh", "dirname")
"""All that the script may call besides Python."""
GUARD_SECONDS = 600.0


def try_wheels(wheels: Path, python: str) -> None:
    """wheels: a folder. python: the interpreter, by name or path. Raises CalledProcessError or AssertionError."""
    with tempfile.TemporaryDirectory(prefix="quire-installed-") as name:
        directory = Path(name)
        path = _path_without_compiler(directory / "bin", python)
        environment = _environment(path, directory)
        command = [str(files.INSTALL), str(directory / "quire"), str(wheels.resolve())]
        subprocess.run(command, env=environment, check=True, timeout=GUARD_SECONDS)
        _serve(directory, {**environment, "PATH": str(directory / "quire" / "bin")})


def try_wheel_among_packages(wheels: Path, python: str, packages: Path) -> None:
    """Serve from the wheel that fits, with the packages that it needs taken from another environment of the same
    version. packages: that one's folder."""
    with tempfile.TemporaryDirectory(prefix="quire-installed-") as name:
        directory = Path(name)
        path = _path_without_compiler(directory / "bin", python)
        environment = _environment(path, directory)
        subprocess.run([python, "-m", "venv", str(directory / "quire")], check=True, timeout=GUARD_SECONDS)
        [own] = (directory / "quire" / "lib").glob("python3*/site-packages")
        (own / "others.pth").write_text(f"{packages}\n")
        pip = [str(directory / "quire" / "bin" / "python"), "-m", "pip", "install", "--no-input", "--no-deps"]
        words = [
            *pip,
            "--no-index",
            "--only-binary",
            ":all:",
            "-f",
            str(wheels.resolve()),
            "--ignore-installed",
            "quire-llm",
        ]
        subprocess.run(words, env=environment, check=True, timeout=GUARD_SECONDS)
        _serve(directory, {**environment, "PATH": str(directory / "quire" / "bin")})


def _path_without_compiler(directory: Path, python: str) -> str:
    directory.mkdir()
    for tool in TOOLS:
        found = [Path(part) / tool for part in os.defpath.split(":") if part and (Path(part) / tool).exists()]
        (directory / tool).symlink_to(found[0])
    executable = subprocess.check_output([python, "-c", "import sys; print(sys.executable)"], text=True)
    (directory / "python3").symlink_to(Path(executable.strip()).resolve())
    return str(directory)


def _environment(path: str, directory: Path) -> dict[str, str]:
    """What pip was told where to find packages stays; nothing else of this environment does."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}
    return {**kept, "PATH": path, "HOME": str(directory)}


def _serve(directory: Path, environment: dict[str, str]) -> None:
    """Start the image's command, wait until the image's health check passes, stop it as the image says."""
    check = files.health_check()[1]
    server = subprocess.Popen(files.entrypoint(), env=environment, cwd=directory)
    try:
        end = time.monotonic() + GUARD_SECONDS
        while subprocess.run(check, env=environment, cwd=directory, capture_output=True, check=False).returncode != 0:
            assert server.poll() is None, f"the server ended with {server.returncode}"
            assert time.monotonic() < end, "the server does not get healthy"
            time.sleep(0.5)
        server.send_signal(getattr(signal, files.instruction("STOPSIGNAL")))
        status = server.wait(files.seconds(files.compose()["stop_grace_period"]))
    finally:
        server.kill()
    assert status == 0, f"the server ended with {status}"
    print("==> installed without a compiler, served, healthy, stopped")
