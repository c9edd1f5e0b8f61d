"""Search for the request that kills an engine. Requests in the engine at a death become suspects, until they get
`CLEARED_TOKENS` further tokens. After a second death with suspects the engine gets a group at a time, which each
further death halves. One that kills it alone is the culprit."""

from __future__ import annotations

from collections.abc import Mapping

CLEARED_TOKENS = 16
"""Tokens that clear a suspect: more than a death loses."""


class CulpritSearch:
    """Search for the request that kills engine after engine. Its owner's lock guards it. A position is the token count
    of a request's longest sequence."""

    def __init__(self) -> None:
        self._suspects: dict[str, int] = {}
        """Suspect -> position at the last death; during a search, only those of the current group."""
        self._tried: list[str] = []
        """Requests of the current group, cleared ones included; empty if no search runs."""
        self._groups: list[dict[str, int]] = []
        """Groups of suspects to try later, each with every request's position."""

    @property
    def is_searching(self) -> bool:
        """True while requests suspected of ending the engine are kept from its successor."""
        return bool(self._tried)

    @property
    def has_suspects(self) -> bool:
        """True if `note_progress` could clear a suspect; the fleet asks at each update of an engine."""
        return bool(self._suspects)

    def allows(self, request_id: str) -> bool:
        """True if the engine may have this request now."""
        return not self._tried or request_id in self._tried

    def note_death(self, running: Mapping[str, int]) -> str | None:
        """Record a death of the engine. running: id -> position of the requests in it. Returns the culprit, if it was
        alone."""
        suspects = {request_id: running[request_id] for request_id in self._suspects if request_id in running}
        if not suspects:
            self._suspects, self._tried = dict(running), []
            self._try_next()
            return None
        culprit = None
        if len(suspects) > 1:
            items = list(suspects.items())
            middle = len(items) // 2
            self._groups[:0] = [dict(items[:middle]), dict(items[middle:])]
        elif self._tried == list(running) == list(suspects):
            [culprit] = suspects
        else:
            self._groups.insert(0, suspects)  # try them again without the others
        self._suspects, self._tried = {}, []
        self._try_next()
        return culprit

    def note_progress(self, request_id: str, position: float) -> bool:
        """Record new tokens of a request. Returns whether the engine may have more requests now."""
        known = self._suspects.get(request_id)
        return known is not None and position - known >= CLEARED_TOKENS and self.note_end(request_id)

    def note_end(self, request_id: str) -> bool:
        """Record that a request has ended or is cleared. Returns whether the engine may have more requests now."""
        for group in self._groups:
            group.pop(request_id, None)
        if self._suspects.pop(request_id, None) is None or self._suspects or not self._tried:
            return False
        self._tried = []
        self._try_next()
        return True

    def _try_next(self) -> None:
        while self._groups and not self._tried:
            self._suspects = self._groups.pop(0)
            self._tried = list(self._suspects)
