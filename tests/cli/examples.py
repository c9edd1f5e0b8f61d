"""Fenced blocks of README.md and docs/, and their commands: blocks of `sh` hold commands, blocks of `text` output."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from tests.architecture.source import ROOT

README = "README.md"
DOCUMENTS = [README, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
ADDRESS = "http://127.0.0.1:8000"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Language and text of a fenced block."""

    language: str
    text: str

    def commands(self) -> list[str]:
        """Commands with their continuation lines. Lines without a prompt are output where other lines have one."""
        if self.language != "sh":
            return []
        lines = self.text.splitlines()
        prompts = any(line.startswith("$ ") for line in lines)
        found: list[str] = []
        is_open = False
        for line in lines:
            if is_open:
                found[-1] += "\n" + line
            elif line.strip() and (line.startswith("$ ") or not prompts):
                found.append(line.removeprefix("$ "))
            else:
                continue
            is_open = is_unfinished(found[-1])
        return found


def is_unfinished(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:  # an open quote, or a backslash at the end
        return True
    return False


@functools.cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@functools.cache
def blocks(document: str) -> tuple[Block, ...]:
    return tuple(Block(*found) for found in FENCE.findall(text_of(document)))


def shown(predicate: Callable[[str], bool]) -> list[tuple[str, str]]:
    """Documents and their commands of this kind."""
    return [
        (document, command)
        for document in DOCUMENTS
        for block in blocks(document)
        for command in block.commands()
        if predicate(command)
    ]


def is_serve(command: str) -> bool:
    return command.startswith(("quire serve ", "python -m quire.cli.vllm serve "))


NOT_RUN = {
    "make ": "it installs packages, and runs for minutes",
    "quire serve unsloth/": "a file of gigabytes on a hub",
    "python -m benchmarks.peers.": "other engines, of gigabytes",
    "python -m benchmarks.streaming": "minutes",
    "python -m benchmarks.kernels": "minutes",
    "python -m benchmarks.paper --engine": "minutes",
    "python benchmarks/": "minutes",
    "quire simulate --workload sharegpt --model llama-3-70b": "minutes",
    "quire serve MODEL -tp 2 --distributed-executor-backend ray": "Ray is an extra",
    "quire top https://": "a server of the reader's",
    ".venv/bin/python -m pytest": "tests of a family that the reader adds",
}
"""Beginnings of commands that no check runs, and why. tests/cli/test_examples.py bounds how many commands these are."""

PYTHON_NOT_RUN = {
    "docs/adapters.md": "a model and an adapter of the reader's",
    "docs/adding-a-model.md": "parts of files that a reader writes",
    "docs/disk-tier.md": "a model of the reader's",
    "docs/images.md": "a model of gigabytes",
}
"""Documents whose Python blocks tests/cli/test_examples.py does not run with the bundled model, and why."""

PYTHON_NOT_CHECKED = {"docs/adding-a-model.md"}
"""Of these, the documents whose Python blocks `make check-docs` does not run either."""


def why_not_run(command: str) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)
