"""Build the wheels of all supported versions of Python that can be had, then install each and serve from it.

    python -m tests.deploy.wheels TOOLS [PYTHON ...]

TOOLS: the folder of an environment's commands, with `build` and `auditwheel`. PYTHON: interpreters by name or path,
which must run, and each of which installs its wheel; without any, those that PATH has of python3.11 to python3.14, and
the one that runs this: of a wheel's interpreters the oldest builds it, and the newest installs it. One wheel is
for 3.11 alone, one for 3.12 and all later ones: nanobind's stable interface begins there. Where another Python shows
that a wheel installs with all that it needs, the Python that runs this lends its packages to its own wheel. The last
lines say which versions were tried, which could not be had, and the seconds of each step.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.source import ROOT
from tests.deploy import installed

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
OWN_WHEEL = ("3.11",)
"""Versions before the stable interface."""
STABLE = "cp312-abi3"
REQUIRED = ("quire/py.typed", "quire/__init__.py", "quire/server/app.py")
BUILT = (".so", ".pyc")
"""Ends of names of files that a source distribution must not hold."""
BUILD_SECONDS = 2400.0
PROBE = """import sys, ensurepip, venv
print(sys.implementation.name, "%d.%d" % sys.version_info[:2], "%d.%d.%d" % sys.version_info[:3])"""


@dataclass(frozen=True)
class Interpreter:
    """version: "3.12"; release: "3.12.1"."""

    command: str
    version: str
    release: str

    @property
    def tag(self) -> str:
        """The tag of the wheel that this interpreter installs."""
        own = f"cp{self.version.replace('.', '')}"
        return f"{own}-{own}" if self.version in OWN_WHEEL else STABLE


def main(arguments: Sequence[str]) -> int:
    tools, *names = arguments
    found, lines = find(names, sys.executable)
    scratch, target = ROOT / "build" / "wheel", ROOT / "dist"
    for directory in (scratch, target):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    source = make_source(Path(tools), target)
    for tag, builder in builders(found).items():
        started = time.monotonic()
        wheel = make_wheel(Path(tools), source, builder, scratch / tag, target)
        lines.append(f"{wheel.name}: built with CPython {builder.release} in {time.monotonic() - started:.0f} s")
    chosen, others = (found, []) if names else newest(found)
    lines += others
    for interpreter in chosen:
        started = time.monotonic()
        if not names and interpreter in chosen[:-1] and interpreter.version == sysconfig.get_python_version():
            say(f"CPython {interpreter.release}: install among the packages of this environment, serve")
            installed.try_wheel_among_packages(target, interpreter.command, Path(sysconfig.get_path("purelib")))
        else:
            say(f"CPython {interpreter.release}: install without a compiler, serve")
            installed.try_wheels(target, interpreter.command)
        taken = time.monotonic() - started
        lines.append(f"CPython {interpreter.release}: {interpreter.tag} installed, served and stopped in {taken:.0f} s")
    print("==> wheels:", *lines, sep="\n      ", flush=True)
    return 0


def find(names: Sequence[str], own: str) -> tuple[list[Interpreter], list[str]]:
    """One interpreter of each version, and a line for each version that could not be had. names: of those that must
    run; none: the usual names, and `own` where its version has none. Exits with one line where a named one does not run
    or is not supported."""
    found: dict[str, Interpreter] = {}
    if names:
        for name in names:
            interpreter = probe(name)
            if isinstance(interpreter, str):
                raise SystemExit(f"make: {name}: {interpreter}")
            if interpreter.version not in SUPPORTED:
                known = ", ".join(SUPPORTED)
                raise SystemExit(f"make: {name} is CPython {interpreter.release}; wheels are for {known}")
            found.setdefault(interpreter.version, interpreter)
        return list(found.values()), missing(found, dict.fromkeys(SUPPORTED, "PYTHONS does not name it"))
    reasons, other = {}, probe(own)
    for version in SUPPORTED:
        interpreter = probe(f"python{version}")
        if isinstance(interpreter, Interpreter) and interpreter.version == version:
            found[version] = interpreter
        elif isinstance(other, Interpreter) and other.version == version:
            found[version] = other
        else:
            reason = interpreter if isinstance(interpreter, str) else f"is CPython {interpreter.release}"
            reasons[version] = f"python{version} {reason}"
    return list(found.values()), missing(found, reasons)


def missing(found: Mapping[str, Interpreter], reasons: Mapping[str, str]) -> list[str]:
    """A line for each version without an interpreter, and for each wheel that is not built for want of any."""
    lines = [f"CPython {version}: not tried: {reasons[version]}" for version in SUPPORTED if version not in found]
    tags = {Interpreter("", version, "").tag for version in SUPPORTED}
    lines += [f"{tag}: NOT BUILT: no Python for it" for tag in sorted(tags - {each.tag for each in found.values()})]
    return lines


def probe(name: str) -> Interpreter | str:
    """The interpreter, or why it cannot be used."""
    if shutil.which(name) is None:
        return "is not on PATH"
    asked = subprocess.run([name, "-c", PROBE], capture_output=True, text=True, check=False, timeout=60)
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or ["no output"]
        is_bare = "ModuleNotFoundError" in lines[-1]
        return "lacks the module ensurepip or venv" if is_bare else f"does not run ({lines[0]})"
    implementation, version, release = asked.stdout.split()
    return Interpreter(name, version, release) if implementation == "cpython" else f"is {implementation}, not CPython"


def builders(found: Sequence[Interpreter]) -> dict[str, Interpreter]:
    """The tag of each wheel, and the interpreter that builds it: the oldest."""
    made: dict[str, Interpreter] = {}
    for interpreter in sorted(found, key=lambda each: SUPPORTED.index(each.version)):
        made.setdefault(interpreter.tag, interpreter)
    return made


def newest(found: Sequence[Interpreter]) -> tuple[list[Interpreter], list[str]]:
    """The newest interpreter of each wheel, and a line for each other one."""
    of_tag = {each.tag: each for each in sorted(found, key=lambda each: SUPPORTED.index(each.version))}
    chosen = list(of_tag.values())
    return chosen, [
        f"CPython {each.release}: not tried: {of_tag[each.tag].release} has the same wheel (PYTHONS names more)"
        for each in found
        if each not in chosen
    ]


def make_source(tools: Path, target: Path) -> Path:
    """The source distribution, which holds no built files."""
    say("source distribution")
    quietly([tools / "python", "-m", "build", "--sdist", "--outdir", target, ROOT])
    [source] = target.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        surplus = [name for name in archive.getnames() if name.endswith(BUILT)]
    if surplus:
        raise SystemExit(f"make: the source distribution holds built files: {', '.join(surplus)}")
    return source


def make_wheel(tools: Path, source: Path, builder: Interpreter, scratch: Path, target: Path) -> Path:
    """The wheel of one tag, built from the source distribution, which shows that that is complete, and repaired: its
    name says which C library it needs at least."""
    say(f"{builder.tag}: build with CPython {builder.release}")
    quietly([builder.command, "-m", "venv", scratch / "python"])
    pip = [scratch / "python" / "bin" / "python", "-m", "pip", "wheel", "--no-input", "--disable-pip-version-check"]
    options = ["--no-deps", "--wheel-dir", scratch, *shlex.split(os.environ.get("PIP_ARGS", ""))]
    quietly([*pip, *options, source])
    [built] = scratch.glob("*.whl")
    path = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    quietly([tools / "auditwheel", "repair", "--wheel-dir", target, built], path)
    [wheel] = target.glob(f"*-{builder.tag}-*.whl")
    check_contents(wheel)
    return wheel


def check_contents(wheel: Path) -> None:
    """Raises SystemExit for a wheel that lacks what installers and type checkers look for."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    lacking = [name for name in REQUIRED if name not in names]
    if not any(name.startswith("quire/kernels/cpu/_native.") and name.endswith(".so") for name in names):
        lacking.append("the native module")
    if lacking:
        raise SystemExit(f"make: {wheel.name} lacks {', '.join(lacking)}")


def quietly(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
    """Run a command, and show what it says only when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=BUILD_SECONDS,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nmake: {shlex.join(words)} ended with {done.returncode}")


def say(line: str) -> None:
    print(f"==> wheel: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
