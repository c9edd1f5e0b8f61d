#!/usr/bin/env python3
"""A compiler launcher for CMake: an object file that was made once from the same text is copied, not made again.

    CMAKE_CXX_COMPILER_LAUNCHER="python3;.ci/kept_objects.py;DIRECTORY" make install

Continuous integration compiles the native module for the tests, and again in each wheel, and most of its files name no
Python. DIRECTORY keeps the objects. Each is known by the preprocessed text, the compiler's version and the options that
count behind the preprocessor. A text is preprocessed each time, so that a source distribution without a header fails.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

OF_THE_PREPROCESSOR = ("-I", "-D", "-isystem", "-o", "-MT", "-MF", "-MQ")
"""Options that the text or the name of the result shows; some are one word with their value, some two."""


def main(directory: str, compiler: str, *options: str) -> int:
    if "-c" not in options or "-o" not in options:
        return subprocess.call([compiler, *options])
    target = Path(options[options.index("-o") + 1])
    kept = Path(directory) / f"{name_of(compiler, options)}.o"
    if not kept.exists():
        status = subprocess.call([compiler, *options])
        if status == 0:
            put(target, kept)
        return status
    shutil.copyfile(kept, target)
    return 0


def name_of(compiler: str, options: tuple[str, ...]) -> str:
    """The hash of all that decides what an object holds. Exits as the preprocessor does when it fails; it also writes
    the list of headers that CMake asked for."""
    words = list(options)
    del words[words.index("-o") : words.index("-o") + 2]
    words[words.index("-c")] = "-E"
    text = subprocess.run([compiler, "-P", *words], stdout=subprocess.PIPE, check=False)
    if text.returncode:
        sys.exit(text.returncode)
    version = subprocess.check_output([compiler, "--version"])
    return hashlib.sha256(b"\0".join([version, *map(os.fsencode, counted(words)), text.stdout])).hexdigest()


def counted(words: list[str]) -> list[str]:
    """The options that are not the preprocessor's, without the name of the source."""
    found, after = [], False
    for word in words[:-1]:
        if not after and not word.startswith(OF_THE_PREPROCESSOR):
            found.append(word)
        after = word in OF_THE_PREPROCESSOR
    return found


def put(made: Path, kept: Path) -> None:
    """Copy under another name first: compilations run side by side."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    copy = kept.with_suffix(f".{os.getpid()}")
    shutil.copyfile(made, copy)
    copy.replace(kept)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
