"""`.ci/kept_objects.py`: one object for equal texts and options, whatever folder they lie in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

COMPILER = """#!/bin/sh
for word; do
  case $word in --version) echo one; exit ;; -E) what=text ;; -c) what=object ;; -o) ;; *) last=$word ;; esac
done
[ "$what" = object ] || { cat "$last" "$(dirname "$last")/header.h"; exit; }
while [ "$1" != -o ]; do shift; done
cat "$last" >"$2"
echo made >>"$0.log"
"""
"""A compiler that writes down how often it makes an object."""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "compiler"
    path.write_text(COMPILER)
    path.chmod(0o755)
    return path


def compile_in(directory: Path, compiler: Path, *options: str, header: str = "int x;") -> int:
    """The status of a compilation there, and an object that has the text of its source."""
    directory.mkdir(exist_ok=True)
    source, target = directory / "source.cpp", directory / "source.o"
    source.write_text("text")
    (directory / "header.h").write_text(header)
    target.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / ".ci" / "kept_objects.py"), str(compiler.parent / "kept"), str(compiler)]
    done = subprocess.run([*command, *options, "-o", str(target), "-c", str(source)], check=False)
    assert done.returncode or target.read_text() == "text"
    return done.returncode


def num_made(compiler: Path) -> int:
    return len(compiler.with_name("compiler.log").read_text().splitlines())


def test_equal_texts_and_options_are_compiled_once(tmp_path: Path, compiler: Path) -> None:
    for number, (options, header) in enumerate([((), "int x;"), (("-O3",), "int x;"), (("-O3",), "int y;")]):
        for folder in ("a", "b"):
            include = ("-I", str(tmp_path / folder), f"-D{folder}", "-MF", str(tmp_path / folder / "source.d"))
            assert compile_in(tmp_path / folder, compiler, *options, *include, header=header) == 0
            assert num_made(compiler) == number + 1


def test_a_header_that_is_missing_fails_although_the_object_is_kept(tmp_path: Path, compiler: Path) -> None:
    assert compile_in(tmp_path / "a", compiler) == 0
    compiler.write_text(COMPILER.replace('cat "$last" "$(dirname', 'exit 3; cat "$last" "$(dirname'))
    assert compile_in(tmp_path / "a", compiler) == 3
    assert num_made(compiler) == 1
