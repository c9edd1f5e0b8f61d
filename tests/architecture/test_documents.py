"""Documents name files that exist, and link to places that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

README_LINES = 150
SECURITY = ROOT / "SECURITY.md"
COMMAND = re.compile(r"make ([\w-]+)(?: FUZZ=(\w+))?")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "training").glob("*.md")])
QUOTED = re.compile(r"`([^`\n]+)`")
TREE_PATH = re.compile(r"(?:quire|tests|docs|training|benchmarks|csrc|deploy|\.ci)/[\w./*-]*")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
HEADING_LINK = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
DECISION = re.compile(r"\b[Dd]ecisions?\s+(\d{1,3})\b")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


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


def headings(document: Path) -> set[str]:
    """The names by which a page of GitHub's calls the headings of a document."""
    text = FENCED.sub("", document.read_text(encoding="utf-8"))
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_to_headings_lead_somewhere(document: Path) -> None:
    found = HEADING_LINK.findall(document.read_text(encoding="utf-8"))
    links = [(document.parent / path if path else document, name) for path, name in found if "://" not in path]
    assert [(path.name, name) for path, name in links if path.suffix == ".md" and name not in headings(path)] == []


def test_the_table_of_classes_names_what_is_there() -> None:
    """Of "Which class decides": its files and tests, and each class, function or table in one of the row's files."""
    page = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    table = page.partition("## Which class decides")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    wrong = []
    for _, names, files, tests, _ in rows:
        places = [ROOT / "quire" / each for each in QUOTED.findall(files)]
        wrong += [
            each for each in [*places, *(ROOT / "tests" / each for each in QUOTED.findall(tests))] if not each.exists()
        ]
        sources = [path for place in places for path in (place.glob("*.py") if place.is_dir() else [place])]
        text = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.is_file())
        parts = [part for name in QUOTED.findall(names) for part in name.split(".")]
        wrong += [
            part
            for part in parts
            if not re.search(rf"^ *(?:(?:async )?def |class |self\.|){part}\b *[:=(]", text, re.MULTILINE)
        ]
        assert all((places, parts, QUOTED.findall(tests))), names
    assert wrong == []


def records() -> dict[int, Path]:
    return {int(path.name[:4]): path for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}


def test_the_index_of_decisions_has_every_record_under_its_title_with_a_status() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    rows = {
        int(number): (name, title)
        for number, name, title in re.findall(
            r"^\| \[(\d+)\]\(([^)]*)\) \| ([^|]*?) \| stands[^|]* \|$", index, re.MULTILINE
        )
    }
    titles = {number: path.read_text(encoding="utf-8").partition("\n")[0] for number, path in records().items()}
    assert {number: (path.name, titles[number]) for number, path in records().items()} == {
        number: (name, f"# {number}. {title}") for number, (name, title) in rows.items()
    }


def test_a_replaced_record_is_gone_and_named_once() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    found = [int(number) for each in re.findall(r"replaces ([\d, ]+) \|", index) for number in each.split(",")]
    assert len(found) > 50
    assert len(set(found)) == len(found)
    assert set(found) & records().keys() == set()


def test_every_decision_that_is_named_is_a_record() -> None:
    """A number that another record holds now is led there when the records are joined."""
    known = records().keys()
    sources = [
        path
        for folder in ("quire", "csrc", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".h"}
    ]
    pages = [path for path in DOCUMENTS if path.name != "README.md" or path.parent.name != "decisions"]
    named = {
        (name_of(path), int(number))
        for path in [*sources, *pages]
        for number in DECISION.findall(path.read_text(encoding="utf-8"))
    }
    assert [each for each in sorted(named) if each[1] not in known] == []


def test_the_readme_is_read_in_a_few_minutes() -> None:
    """Figures belong to docs/performance, features to docs/features.md."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_every_class_of_advisories_names_tests_and_fuzzers_that_exist() -> None:
    """The last column of the table: files of tests, and commands of the Makefile."""
    text = SECURITY.read_text(encoding="utf-8")
    table = text.partition("## Advisories")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")][2:]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "fuzz").glob("*.py")]
    fuzzers = {name for source in sources for name in re.findall(r'= Fuzzer\("(\w+)"', source)}
    assert len(rows) >= 20
    for row in rows:
        named = QUOTED.findall(row[-1])
        assert any(TREE_PATH.fullmatch(each) and (ROOT / each).is_file() for each in named), row
        commands = [COMMAND.fullmatch(each) for each in named if each.startswith("make")]
        assert all(each and each[1] in targets for each in commands), row
        assert {each[2] for each in commands if each and each[2]} <= fuzzers, row
