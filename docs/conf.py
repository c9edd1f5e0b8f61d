"""Sphinx settings of `make docs`: the pages as a site with search, and a reference of the public names."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from docs.code_map import code_map
from quire.cli.main import main
from quire.cli.vllm import flag_tables
from quire.version import __version__

ROOT = Path(__file__).parents[1]

project = "Quire"
author = "the authors of Quire"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "training/**.md"]
exclude_patterns = ["training/runs/**"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
html_theme = "furo"
html_title = f"Quire {version}"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
_PAGES = {".md", ".png", ".svg"}


def _page(app: Any, name: str, source: list[str]) -> None:
    """Write tables that the code holds, and name files that are no pages by their paths."""
    text = source[0]
    folder = (ROOT / name).parent

    def link(match: re.Match[str]) -> str:
        image, words, target, _ = match.groups()
        if image or "://" in target:
            return match[0]
        path = (folder / target).resolve()
        if path.is_dir() and (path / "README.md").is_file() and path != ROOT:
            return f"[{words}]({target.rstrip('/')}/README.md)"
        return match[0] if path.suffix in _PAGES else f"{words} (`{path.relative_to(ROOT)}`)"

    text = _LINK.sub(link, text)
    for mark, table in _TABLES.items():
        if mark in text:
            text = text.replace(mark, table())
    source[0] = text


def _kv_waste() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["plan", "--kv-waste"]) == 0
    return printed.getvalue()


_TABLES = {"<!-- flags -->": flag_tables, "<!-- kv waste -->": _kv_waste, "<!-- code map -->": code_map}


def setup(app: Any) -> None:
    app.connect("source-read", _page)
