"""Documents name files that exist, and link to places that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "training").glob("*.md")])
QUOTED = re.compile(r"`([^`\n]+)`")
TREE_PATH = re.compile(r"(?:quire|tests|docs|training|benchmarks|csrc|deploy|\.ci)/[\w./*-]*")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def tree_paths(document: Path) -> list[str]:
    """What stands in backquotes and reads as a path of this tree; `*` matches as in a shell."""
    quoted = QUOTED.findall(document.read_text(encoding="utf-8"))
    return [text for text in quoted if TREE_PATH.fullmatch(text) and not text.startswith("training/runs")]


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_named_files_exist(document: Path) -> None:
    assert [path for path in tree_paths(document) if not any(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []
