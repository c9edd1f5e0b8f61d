"""Anchors of regular expressions. A constraint matches the whole text, so anchors at its ends are redundant. All
functions take linear time."""

from __future__ import annotations

from collections.abc import Iterator

FIRST = ("^", r"\A")
LAST = ("$", r"\Z", r"\z")


def without_anchors(pattern: str) -> str:
    """Client's `regex` without anchors at the ends of its alternatives. Raises ValueError for anchors elsewhere."""
    return "|".join(_without_ends(alternative) for alternative in _alternatives(pattern))


def _without_ends(parts: list[str]) -> str:
    start, end = 0, len(parts)
    while start < end and parts[start] in FIRST:
        start += 1
    while end > start and parts[end - 1] in LAST:
        end -= 1
    inner = parts[start:end]
    for part in inner:
        if part in FIRST or part in LAST:
            raise ValueError(f"the anchor {part} is supported at the ends of a regular expression only")
    return "".join(inner)


def _alternatives(pattern: str) -> list[list[str]]:
    found, depth = [list[str]()], 0
    for part in _parts(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            found.append([])
        else:
            found[-1].append(part)
    return found


def _parts(pattern: str) -> Iterator[str]:
    start = 0
    while start < len(pattern):
        end = start + 1
        if pattern[start] == "\\":
            end = start + 2
        elif pattern[start] == "[":
            end = _class_end(pattern, start)
        yield pattern[start:end]
        start = end


def _class_end(pattern: str, start: int) -> int:
    index = start + 1
    if pattern[index : index + 1] == "^":
        index += 1
    if pattern[index : index + 1] == "]":
        index += 1  # as the first character it stands for itself
    depth = 1
    while index < len(pattern) and depth:
        if pattern[index] == "\\":
            index += 2
            continue
        depth += (pattern[index : index + 1] == "[") - (pattern[index : index + 1] == "]")
        index += 1
    return index
