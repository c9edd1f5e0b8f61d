"""One schema with one engine, in a process of its own under the kernel's limits: a crash is a result."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from benchmarks.json_schema.data import Case, keywords_of

SECONDS = 10
BYTES = 4 * 2**30
NUM_WALKS = 4
SOFT_LENGTH, HARD_LENGTH = 150, 600
"""Bytes of a random text from which on it is to end, and at which it is left."""
BYTES_A_MASK = 8
CLOSING = b'"}]0,:{['


@dataclass
class Result:
    """The outcome of a case. state: followed, refused, slow or crashed. wrong: texts that were taken and do not follow,
    or how one failed; narrow: texts that follow and are masked. Times are seconds of the clock: those of the
    processor are counted in steps of milliseconds."""

    name: str
    group: str
    keywords: list[str]
    state: str = "crashed"
    reason: str = ""
    wrong: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)
    compile_time: float = 0.0
    mask_times: list[float] = field(default_factory=list)


def run(case: Case, start: Callable[[Any], Any], num_walks: int = NUM_WALKS) -> Result:
    """start: from a schema to a matcher over bytes; raises ValueError for what it refuses."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            text = json.dumps(asdict(_tried(case, start, num_walks)))
            with os.fdopen(writing, "w") as pipe:
                pipe.write(text)
        finally:
            os._exit(0)
    os.close(writing)
    found = _read(reading, time.monotonic() + 6 * SECONDS)
    if not found:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if found:
        return Result(**json.loads(found))
    is_slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    return Result(case.name, case.group, keywords_of(case.schema), "slow" if is_slow else "crashed", f"status {status}")


def _read(reading: int, deadline: float) -> str:
    pieces = []
    with os.fdopen(reading, "rb") as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0))
            piece = os.read(pipe.fileno(), 2**16) if ready else b""
            if not piece:
                return b"".join(pieces).decode()
            pieces.append(piece)


def _tried(case: Case, start: Callable[[Any], Any], num_walks: int) -> Result:
    result = Result(case.name, case.group, keywords_of(case.schema))
    started = time.perf_counter_ns()
    try:
        matcher = start(case.schema)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
    except ValueError as error:
        result.state, result.reason = "refused", " ".join(str(error).split())[:200]
        return result
    result.compile_time = (time.perf_counter_ns() - started) / 1e9
    result.state = "followed"
    validator = _validator(case.schema)
    for text, is_valid in case.texts:
        if is_valid and not takes(matcher, text):
            result.narrow.append(text[:200])
        elif not is_valid and takes(matcher, text) and _reason_against(text, validator):  # not by a format alone
            result.wrong.append(text[:200])
    for seed in range(num_walks):
        text, end = walk(matcher, random.Random(seed), result.mask_times)
        if end == "failed":
            result.wrong.append(f"fails behind {text[-100:]}")
        elif end == "whole" and (reason := _reason_against(text, validator)):
            result.wrong.append(f"{text[:200]}: {reason[:100]}")
    return result


def takes(matcher: Any, text: str) -> bool:
    """Whether a text is complete under the matcher. Masks between renew what llguidance allows tokens to take."""
    state = matcher.deep_copy()
    for index, byte in enumerate(text.encode()):
        if index % BYTES_A_MASK == 0:
            state.compute_bitmask()
        if not state.consume_token(byte):
            return False
    return bool(state.is_accepting())


def walk(matcher: Any, rng: random.Random, times: list[float]) -> tuple[str, str]:
    """(a random text, "whole", "cut" or "failed")."""
    state, found = matcher.deep_copy(), bytearray()
    while len(found) < HARD_LENGTH:
        started = time.perf_counter_ns()
        mask = state.compute_bitmask()
        times.append((time.perf_counter_ns() - started) / 1e9)
        if state.is_error():
            return found.decode(errors="replace"), "failed"
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if state.is_accepting() and (not allowed or len(found) > SOFT_LENGTH or rng.random() < 0.3):
            return found.decode(errors="surrogateescape"), "whole"
        if not allowed:
            return found.decode(errors="replace"), "failed"
        closing = [byte for byte in allowed if byte in CLOSING]
        ends = [byte for byte in allowed if byte in b'"}]']
        if ends and len(found) > SOFT_LENGTH:
            byte = rng.choice(ends)
        else:
            byte = rng.choice(closing) if closing and rng.random() < 0.4 else rng.choice(allowed)
        found.append(byte)
        if not state.consume_token(byte):
            return found.decode(errors="replace"), "failed"
    return found.decode(errors="replace"), "cut"


def _validator(schema: Any) -> Any:
    import jsonschema

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return jsonschema.validators.extend(kind, {"multipleOf": _check_multiple})(schema)


def _check_multiple(_: Any, step: Any, value: Any, schema: Any) -> Iterator[Exception]:
    """Digit by digit: the library divides doubles, of which 4.3 is no multiple of 0.1."""
    import jsonschema

    if isinstance(value, int | float) and not isinstance(value, bool) and Fraction(repr(value)) % Fraction(repr(step)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


def _reason_against(text: str, validator: Any) -> str:
    """Why a text does not follow; empty: it does."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    if not text.isascii() and "\\\\" in json.dumps(validator.schema):
        return ""  # the library's `\\w` and `\\d` are Python's, which take more than ASCII
    try:
        error = next(iter(validator.iter_errors(value)), None)
    except Exception:  # the other library's limits: references that it cannot follow, expressions that are not Python's
        return ""
    return "" if error is None else error.message
