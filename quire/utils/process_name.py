"""The name of a process in `top` and `ps -o comm`. Imports next to nothing: a process is named before all else."""

from __future__ import annotations

MAX_BYTES = 15
"""Bytes of a name that Linux keeps."""


def name_process(name: str) -> None:
    """Show the calling process as `name`, on Linux; call it from the main thread. A system without such names, or that
    allows none, shows the interpreter's."""
    try:
        with open("/proc/self/comm", "w", encoding="utf-8") as file:
            file.write(name)
    except OSError:
        return
