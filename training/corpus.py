"""The training text: the sources of Python's own standard library, split by whole files.

Whether a file is held out is decided by a hash of its path relative to the library's root, so the split
needs no list, is the same on every machine, and does not move when other files come or go.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PER_MILLE = 25
SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__"})
SKIPPED_PREFIXES = ("_sysconfigdata",)  # generated when Python is built; holds paths of the build machine


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its path relative to the library's root, and its text."""

    name: str
    text: str

    @property
    def size(self) -> int:
        """Length of the text in UTF-8 bytes."""
        return len(self.text.encode("utf-8"))


def standard_library_root() -> Path:
    """The directory of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(name: str) -> bool:
    """Whether the file with this relative path belongs to the held-out set."""
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def _is_wanted(relative: Path) -> bool:
    in_skipped_directory = any(part in SKIPPED_DIRECTORIES for part in relative.parts)
    return not in_skipped_directory and not relative.name.startswith(SKIPPED_PREFIXES)


def read_corpus(root: Path | None = None) -> list[SourceFile]:
    """All distinct, non-empty UTF-8 ``*.py`` files under ``root``, sorted by relative path."""
    root = root or standard_library_root()
    seen: set[bytes] = set()
    files = []
    for path in sorted(root.rglob("*.py"), key=lambda found: found.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if not _is_wanted(relative) or not path.is_file():
            continue
        data = path.read_bytes()
        digest = hashlib.sha256(data).digest()
        if not data or digest in seen:
            continue
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        seen.add(digest)
        files.append(SourceFile(relative.as_posix(), text))
    return files


def split_corpus(root: Path | None = None) -> tuple[list[SourceFile], list[SourceFile]]:
    """The corpus as ``(training files, held-out files)``."""
    training: list[SourceFile] = []
    held_out: list[SourceFile] = []
    for file in read_corpus(root):
        (held_out if is_held_out(file.name) else training).append(file)
    return training, held_out


def main() -> None:
    """Print what the corpus holds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--root", type=Path, help="library to read (default: the running interpreter's)")
    parser.add_argument("--list-held-out", action="store_true", help="also name the held-out files")
    arguments = parser.parse_args()
    for label, files in zip(("training", "held out"), split_corpus(arguments.root), strict=True):
        print(f"{label}: {len(files)} files, {sum(file.size for file in files)} bytes")
        if label == "held out" and arguments.list_held_out:
            for file in files:
                print(f"  {file.size:8d} {file.name}")


if __name__ == "__main__":
    main()
