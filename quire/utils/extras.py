from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Commands, for errors, that add an extra of pyproject.toml."""
    return f"pip install -e '.[{extra}]' in a clone of Quire, or pip install 'FILE.whl[{extra}]' with its wheel"
