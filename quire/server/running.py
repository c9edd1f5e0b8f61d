from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quire.server.request_share import Turns


class Work(NamedTuple):
    """Work behind an answer: its engine requests, by id, and their turns (request_share.py). is_line: a batch asks for
    it."""

    names: list[str]
    turns: Turns
    is_line: bool


class RunningAnswers:
    """Work of running answers by answer id, for aborts; several answers may share an id (a repeated X-Request-Id)."""

    def __init__(self) -> None:
        self._works: dict[str, list[Work]] = {}

    @contextlib.contextmanager
    def hold(self, answer_ids: Iterable[str], work: Work) -> Iterator[None]:
        """Register `work` under these ids until the context ends. `generate` holds each."""
        held = set(answer_ids)
        for answer_id in held:
            self._works.setdefault(answer_id, []).append(work)
        try:
            yield
        finally:
            for answer_id in held:
                works = self._works[answer_id]
                works.remove(work)
                if not works:
                    del self._works[answer_id]

    def is_line(self, name: str) -> bool:
        """True for an answer or an engine request that a batch asks for again if it is ended early."""
        works = [(answer_id, work) for answer_id, held in self._works.items() for work in held if work.is_line]
        return any(name == answer_id or name in work.names for answer_id, work in works)

    def end_turns(self, answer_ids: Iterable[str]) -> list[str]:
        """End the waiting turns of these answers; return the ids of their engine requests. Ignores unknown ids."""
        found = []
        for answer_id in answer_ids:
            prefix, _, rest = answer_id.partition("_")
            known = f"chatcmpl-{rest}" if prefix in ("resp", "msg") else answer_id
            for work in self._works.get(known, ()):
                work.turns.end()
                found += work.names
        return found
