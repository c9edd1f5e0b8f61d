"""Lazily read requests of a trace file: JSON lines, or CSV with a header (columns: docs/simulator.md)."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quire.errors import UserError, nearest_name
from quire.sampling_params import MAX_BEAM_WIDTH, MAX_N


@dataclass(frozen=True, slots=True)
class TraceImage:
    """Picture of a prompt. name: pictures of one name are alike; None: like no other."""

    num_tokens: int
    name: str | None = None

    def __str__(self) -> str:
        return str(self.num_tokens) if self.name is None else f"{self.name}:{self.num_tokens}"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Request of a trace, lengths in tokens. arrival: seconds from the start. n: sequences of parallel sampling.
    beam_width: 0: no beam search. prefix_tokens: leading input tokens that all requests of `prefix_group` share. If
    they share all, each request is a turn of a conversation, and its output belongs to the next turn's input. images:
    placed next."""

    arrival: float
    input_tokens: int
    output_tokens: int
    prefix_group: str | None = None
    prefix_tokens: int = 0
    n: int = 1
    beam_width: int = 0
    priority: int = 0
    images: tuple[TraceImage, ...] = ()
    adapter: str | None = None

    @property
    def num_sequences(self) -> int:
        return self.beam_width or self.n


MAX_IMAGE_TOKENS = 2**16
REQUIRED = ("arrival", "input_tokens", "output_tokens")
OPTIONAL = ("prefix_group", "prefix_tokens", "n", "beam_width", "priority", "images", "adapter")


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Requests of a .jsonl or .csv file, one at a time. Raises UserError with file and line."""
    if path.suffix.lower() not in (".jsonl", ".csv"):
        raise UserError(f"trace {str(path)!r}: expected a .jsonl or .csv file", param="trace")
    try:
        file = path.open(encoding="utf-8-sig", newline="")  # spreadsheets begin with a mark
    except OSError as error:
        raise UserError(f"cannot read trace {str(path)!r}: {error.strerror}", param="trace") from None
    with file:
        entries = _json_lines(file, path) if path.suffix.lower() == ".jsonl" else _csv_lines(file, path)
        last, found = 0.0, False
        try:
            for line, entry in entries:
                request = _request(entry, path, line)
                if request.arrival < last:
                    _fail(path, line, f"arrival {request.arrival:g} comes before the line above ({last:g})")
                last, found = request.arrival, True
                yield request
        except UnicodeDecodeError as error:
            raise UserError(f"trace {str(path)!r} is not UTF-8 text: {error.reason}", param="trace") from None
    if not found:
        raise UserError(f"trace {str(path)!r} holds no requests", param="trace")


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            entry = {name: getattr(request, name) for name in REQUIRED}
            for name in OPTIONAL:
                if getattr(request, name) != TraceRequest.__dataclass_fields__[name].default:
                    entry[name] = getattr(request, name)
            if request.images:
                entry["images"] = [str(image) for image in request.images]
            file.write(json.dumps(entry) + "\n")


def _json_lines(file: Iterable[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            _fail(path, number, f"not valid JSON: {error}")
        if not isinstance(entry, dict):
            _fail(path, number, f"expected an object, not {type(entry).__name__}")
        yield number, entry


def _csv_lines(file: Iterable[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.reader(file)
    try:
        header = [name.strip() for name in next(rows, [])]
        _check_names(header, path, 1)
        for row in rows:
            if not any(row):
                continue
            if len(row) != len(header):
                _fail(path, rows.line_num, f"{len(row)} values for {len(header)} columns")
            yield rows.line_num, {name: value.strip() for name, value in zip(header, row, strict=True) if value.strip()}
    except csv.Error as error:
        _fail(path, rows.line_num, str(error))


def _request(entry: Mapping[str, Any], path: Path, line: int) -> TraceRequest:
    _check_names(entry, path, line)
    arrival = _number(entry["arrival"], "arrival", path, line)
    input_tokens = _integer(entry, "input_tokens", path, line, 1)
    group = entry.get("prefix_group")
    if group is not None and not isinstance(group, str | int):
        _fail(path, line, f"prefix_group must be a name, not {group!r}")
    adapter = entry.get("adapter")
    if adapter is not None and not isinstance(adapter, str | int):
        _fail(path, line, f"adapter must be a name, not {adapter!r}")
    if group is None and entry.get("prefix_tokens") is not None:
        _fail(path, line, "prefix_tokens needs a prefix_group")
    shared = 0 if group is None else _integer(entry, "prefix_tokens", path, line, 0, input_tokens)
    if shared > input_tokens:
        _fail(path, line, f"prefix_tokens ({shared}) exceeds input_tokens ({input_tokens})")
    images = _images(entry.get("images"), path, line)
    if images and shared + sum(image.num_tokens for image in images) >= input_tokens:
        _fail(path, line, f"images and prefix_tokens leave none of the {input_tokens} input_tokens for text")
    n, width = _integer(entry, "n", path, line, 1, 1), _integer(entry, "beam_width", path, line, 0, 0)
    if width and n != 1:
        _fail(path, line, "n and beam_width exclude each other")
    for column, value, most in (("n", n, MAX_N), ("beam_width", width, MAX_BEAM_WIDTH)):
        if value > most:
            _fail(path, line, f"{column} must be at most {most}, not {value}")
    return TraceRequest(
        arrival=arrival,
        input_tokens=input_tokens,
        output_tokens=_integer(entry, "output_tokens", path, line, 1),
        prefix_group=None if group is None else str(group),
        prefix_tokens=shared,
        n=n,
        beam_width=width,
        priority=_integer(entry, "priority", path, line, -100, 0),
        images=images,
        adapter=None if adapter is None else str(adapter),
    )


def _images(given: Any, path: Path, line: int) -> tuple[TraceImage, ...]:
    """Pictures of a list or text."""
    found = []
    for each in given if isinstance(given, list) else [] if given is None else str(given).split():
        name, _, count = str(each).rpartition(":")
        if isinstance(each, bool) or not count.isdecimal() or not 0 < int(count) <= MAX_IMAGE_TOKENS:
            what = f"numbers of tokens, up to {MAX_IMAGE_TOKENS}, or NAME:NUMBER"
            _fail(path, line, f"images must be {what}, not {each!r}")
        found.append(TraceImage(int(count), name or None))
    return tuple(found)


def _check_names(names: Iterable[str], path: Path, line: int) -> None:
    known = (*REQUIRED, *OPTIONAL)
    found = list(names)
    for name in found:
        if found.count(name) > 1:
            _fail(path, line, f"column {name!r} is there twice")
        if name not in known:
            _fail(path, line, f"unknown column {name!r}{nearest_name(name, known)} (known: {', '.join(known)})")
    for name in REQUIRED:
        if name not in found:
            _fail(path, line, f"{name} is missing")


def _number(value: Any, name: str, path: Path, line: int) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        _fail(path, line, f"{name} must be a number of at least 0, not {value!r}")
    return number


def _integer(
    entry: Mapping[str, Any], name: str, path: Path, line: int, minimum: int, default: int | None = None
) -> int:
    value = entry.get(name, default)
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
        _fail(path, line, f"{name} must be a whole number of at least {minimum}, not {value!r}")
    return number


def _fail(path: Path, line: int, message: str) -> NoReturn:
    raise UserError(f"{path}:{line}: {message}", param="trace")
