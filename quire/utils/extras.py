"""Optional parts of the installation, the extras of pyproject.toml, and how to install them."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The commands that add an extra. They name no package index: the distribution `quire-llm` is not published."""
    return f"pip install -e '.[{extra}]' in a clone of Quire, or pip install 'FILE.whl[{extra}]' with its wheel"
