"""Imports almost nothing, because a process is named first."""

from __future__ import annotations

MAX_BYTES = 15
"""Bytes of a name that Linux keeps."""


def name_process(name: str) -> None:
    """Show this process as `name` in `top` and `ps -o comm`, on Linux; elsewhere without effect. Main thread only."""
    try:
        with open("/proc/self/comm", "w", encoding="utf-8") as file:
            file.write(name)
    except OSError:
        return
