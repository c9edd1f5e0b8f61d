"""The answers that are being generated, by the ids that their clients know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quire.server.turns import Turns


class Work(NamedTuple):
    """The engine's requests that make one answer, by their ids, and the turns that they take."""

    names: list[str]
    turns: Turns


class RunningAnswers:
    """Id of an answer -> what makes it. Several answers may have one id: proxies repeat a request under its
    X-Request-Id."""

    def __init__(self) -> None:
        self._works: dict[str, list[Work]] = {}

    @contextlib.contextmanager
    def hold(self, answer_ids: Iterable[str], work: Work) -> Iterator[None]:
        """`work` makes the answer with these ids until the end of the context."""
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

    def end_turns(self, answer_ids: Iterable[str]) -> list[str]:
        """End what of these answers waits for its turn, and return the engine's requests of the answers; none of ids
        that are not running. The id of a response or a message is that of the chat completion that makes it, behind
        another prefix."""
        found = []
        for answer_id in answer_ids:
            prefix, _, rest = answer_id.partition("_")
            known = f"chatcmpl-{rest}" if prefix in ("resp", "msg") else answer_id
            for work in self._works.get(known, ()):
                work.turns.end()
                found += work.names
        return found
