"""Constraint services for tests, and what tests ask of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.config.options import EngineOptions
from quire.decoding.masks import ConstraintSpec
from quire.structured_output.grammar import write_grammar
from quire.structured_output.messages import LIMITS, RehearsalLimits
from quire.structured_output.remote_matcher import RemoteMatcher
from quire.structured_output.service import FORK_SERVER, ConstraintService
from quire.structured_outputs_params import StructuredOutputsParams

VOCAB_SIZE = 4096
ENDS = [0, 2]
OPTIONS = EngineOptions.from_keywords({"model": "bundled"})
DEADLINE = 120.0
"""Seconds until a test gives up: a machine may be busy."""
PLAIN = ConstraintSpec()
FAULTY_SERVER = "tests.structured_output.faulty_server"


def make_service(limits: RehearsalLimits = LIMITS, module: str = FORK_SERVER) -> ConstraintService:
    return ConstraintService(OPTIONS, VOCAB_SIZE, ENDS, limits, module)


def text_of(**fields: Any) -> str:
    return write_grammar(StructuredOutputsParams(**fields))


def settle(service: ConstraintService, *matchers: RemoteMatcher) -> None:
    """Wait until all of them are ready."""
    service.flush()
    wait_until(service, lambda: all(matcher.is_ready for matcher in matchers))


def wait_until(service: ConstraintService, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, "it takes too long"
        service.wait_answer(0.05)


def begin(service: ConstraintService, text: str, spec: ConstraintSpec = PLAIN, client: str = "") -> RemoteMatcher:
    """A matcher, asked for and not waited for."""
    matcher = service.constraint(text, client).matcher(spec, [])
    service.flush()
    return matcher


def start(service: ConstraintService, text: str, spec: ConstraintSpec = PLAIN) -> RemoteMatcher:
    """A matcher that is ready."""
    matcher = begin(service, text, spec)
    settle(service, matcher)
    return matcher


def advance(service: ConstraintService, matcher: RemoteMatcher, *token_ids: int, num_forced: int = 0) -> None:
    matcher.advance(token_ids, num_forced)
    settle(service, matcher)


def children(pid: int, name: str) -> list[int]:
    """Processes of this name whose parent is `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(")")
        except OSError:
            continue  # it has ended meanwhile
        if int(tail.split()[1]) == pid and tail.split()[0] != "Z" and head.partition("(")[2] == name:
            found.append(int(path.parent.name))
    return found
