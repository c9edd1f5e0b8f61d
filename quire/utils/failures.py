"""Exceptions in one line, for users."""

from __future__ import annotations

import errno
import resource

MAX_LINE = 1000
"""Longest line in characters."""

_NO_MEMORY = ("cannot allocate memory", "can't allocate memory", "failed to map segment", "bad_alloc", "out of memory")
_NO_THREAD = ("can't start new thread", "resource temporarily unavailable")


def explain(error: BaseException) -> str:
    """Cause if it is a system limit; else the exception's class and message."""
    text = str(error)
    number = getattr(error, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in text.lower():
        return f"too many open files (the limit, `ulimit -n`, is {_limit(resource.RLIMIT_NOFILE)})"
    if isinstance(error, RuntimeError | OSError) and any(sign in text.lower() for sign in _NO_THREAD):
        return f"no more threads can be started (limits of processes, `ulimit -u`, or of memory): {one_line(text)}"
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(sign in text.lower() for sign in _NO_MEMORY):
        limit = _limit(resource.RLIMIT_AS)
        return f"out of memory (the limit of address space, `ulimit -v`, is {limit}){text and ': ' + one_line(text)}"
    return one_line(f"{type(error).__name__}: {text}" if text.strip() else type(error).__name__)


def one_line(text: str) -> str:
    """Text on one line, cut, with control characters escaped."""
    words = " ".join(text[: 2 * MAX_LINE].split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
    return line if len(line) <= MAX_LINE and len(text) <= 2 * MAX_LINE else line[:MAX_LINE] + " ..."


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
