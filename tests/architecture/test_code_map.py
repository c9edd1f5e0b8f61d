"""docs/code-map.md is made from the docstrings (docs/code_map.py)."""

from __future__ import annotations

import re
from pathlib import Path

from docs.code_map import code_map, search
from tests.architecture.source import ROOT


def test_the_map_has_every_class() -> None:
    found = code_map()
    listed = set(re.findall(r"\*\*`(\w+)`\*\*", found))
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "quire").rglob("*.py"))
    classes = {name for source in sources for name in re.findall(r"^class ([A-Z]\w*)", source, re.MULTILINE)}
    assert len(classes) > 500
    assert classes - listed == set()
    assert "## quire/scheduler" in found.splitlines()


def test_the_site_has_the_map_where_the_page_says() -> None:
    assert "\n<!-- code map -->\n" in (ROOT / "docs" / "code-map.md").read_text(encoding="utf-8")
    assert '"<!-- code map -->": code_map' in (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")


def test_a_row_shows_signs_as_they_are(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    doing = '    def do(self) -> None:\n        """Do it."""\n'
    text = f'class Thing:\n    """Values [T, 2] of `a|b` | c_d. More."""\n\n{doing}'
    (package / "one.py").write_text(text)
    assert code_map(package).splitlines()[-1] == r"| `one.py` | **`Thing`** Values \[T, 2\] of `a\|b` \| c\_d. |"
    assert search(["DO", "thing"], package) == ["package/one.py: Thing.do: Do it."]


def test_a_word_finds_what_has_it() -> None:
    (line,) = search(["smuggling"])
    assert line.startswith("quire/server/connection.py: BoundedHttpProtocol._check_head: ")
