from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Commands that add an extra of pyproject.toml, for error messages."""
    return f"pip install -e '.[{extra}]' in a clone of Quire, or pip install 'FILE.whl[{extra}]' with its wheel"
