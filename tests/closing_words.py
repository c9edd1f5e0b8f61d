"""What a run of the tests says at its end, whichever process found it out (pytest-xdist's workers have no terminal)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

LINES = pytest.StashKey[dict[str, None]]()


def say(config: pytest.Config, *lines: str) -> None:
    """Each line once, however many processes say it."""
    config.stash.setdefault(LINES, {}).update(dict.fromkeys(lines))


def said(config: pytest.Config) -> list[str]:
    return list(config.stash.get(LINES, {}))


def leave_out(
    config: pytest.Config, items: list[pytest.Item], cannot_run: Callable[[pytest.Item], bool], message: str
) -> None:
    """Deselect tests, and say how many. message: with braces for the number."""
    without = [item for item in items if cannot_run(item)]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
        say(config, message.format(len(without)))
