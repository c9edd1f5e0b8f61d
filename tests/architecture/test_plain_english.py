"""Code and documents name the actor: a request, a block, a client, where a pronoun would leave it to the reader.

A line fails that says who does something with a pronoun (a "no-body", a "who-ever"), or counts without a number. Say
"no request", "the caller", "a sequence that waits", "0 to 64 tokens".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, modules

GAP = r"[\s_#/*]+"
"""Between two words: a space, an underscore, or the end of a line of prose and the start of the next comment line."""
PRONOUNS = ("no" + "body", "who" + "ever", "some" + "body")
PHRASES = (
    ("in", "vain"),
    ("so", "many"),
    ("gives?", "way"),
    ("gave", "way"),
    ("who", "(?:computes|owns|waits|passes|comes)"),
)
HIDES_THE_ACTOR = re.compile(
    rf"(?<![a-z])(?:{'|'.join((*PRONOUNS, *(GAP.join(words) for words in PHRASES)))})(?![a-z])", re.IGNORECASE
)

FOLDERS = ("quire", "csrc", "tests", "benchmarks", "docs", "training", "deploy")
SUFFIXES = (".py", ".md", ".cpp", ".h", ".html", ".css", ".js", ".sh", ".yaml", ".service")


@dataclass(frozen=True)
class Allowed:
    path: str
    line: str
    """Part of the line that is allowed."""
    reason: str


ALLOWED: tuple[Allowed, ...] = ()
"""Data that a program compares or sends, such as the name of a system's user. Prose is rewritten instead."""


def documents() -> list[Path]:
    """Every file of ours that a reader opens."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    ours = [path for path in files if "runs" not in path.parts]
    return sorted([*ours, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"])


def findings(text: str) -> Iterator[tuple[int, str]]:
    """Number and content of each line at which a phrase begins."""
    lines = text.splitlines()
    for match in HIDES_THE_ACTOR.finditer(text):
        number = text.count("\n", 0, match.start())
        yield number + 1, lines[number]


def is_allowed(where: str, line: str) -> bool:
    return any(entry.path == where and entry.line in line for entry in ALLOWED)


@pytest.mark.parametrize("room", sorted({path.relative_to(ROOT).parts[0] for path in documents()}))
def test_prose_names_the_actor(room: str) -> None:
    found = []
    for path in documents():
        where = path.relative_to(ROOT)
        if where.parts[0] == room:
            found += [
                f"{where}:{number}: {line.strip()}"
                for number, line in findings(path.read_text(encoding="utf-8"))
                if not is_allowed(str(where), line)
            ]
    assert found == []


def test_allowed_lines_are_there() -> None:
    """An entry whose line is gone goes, too."""
    stale = [entry for entry in ALLOWED if entry.line not in (ROOT / entry.path).read_text(encoding="utf-8")]
    assert stale == []


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("No request waits.\nA body of 8 MiB, some bodies, whoso, invain, somany", []),
        (f"one\n# {PRONOUNS[0].title()} waits.", [2]),
        (f"def test_{PRONOUNS[0]}_waits() -> None:", [1]),
        ("def test_who_" + "waits() -> None:", [1]),
        ("// as so\n// " + "many do", [1]),
        ("it gave\n    " + "way", [1]),
    ],
)
def test_what_is_found(text: str, numbers: list[int]) -> None:
    """Also in the name of a test, and across the end of a comment line."""
    assert [number for number, _ in findings(text)] == numbers


WITHOUT_SUBJECT = re.compile(
    r"\s*(?:Of|What|Whether|As|Those|Where|Without|Behind|Whose?|That of"
    r"|How|Which|For|By|In|From|Per|When|Nothing|Most)\b"
)
"""First words of a docstring whose noun stands elsewhere."""
PARAMETER_WITHOUT_SUBJECT = re.compile(
    r"(?m)(?:^|[.;] )\s*[a-z_]+(?:, [a-z_]+)*: (?:of|what|whether|as|those|where|without|behind|whose?)\b"
)
"""The same of what stands behind the name of a parameter."""
MOST_FRAGMENTS = 10


def docstrings() -> Iterator[tuple[str, str]]:
    """Place and text of each docstring of the package, of attributes too."""
    for module in modules():
        for node in module.nodes:
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for item in node.body:
                value = item.value if isinstance(item, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield f"{module.where}:{item.lineno}", value.value


def test_docstrings_name_their_subject() -> None:
    """ "Of a token: -1 asks for ..." is "Token id; -1 asks for ..."."""
    found = [place for place, text in docstrings() if WITHOUT_SUBJECT.match(text)]
    parameters = [place for place, text in docstrings() for _ in PARAMETER_WITHOUT_SUBJECT.findall(text)]
    assert len(found) <= MOST_FRAGMENTS, found
    assert len(parameters) <= MOST_FRAGMENTS, parameters
