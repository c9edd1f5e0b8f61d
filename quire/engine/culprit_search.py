"""Which requests an engine gets after it has died: all of them, until a request is under suspicion of ending it.

A request is a suspect when it was in the engine at a death and has not got `CLEARED_TOKENS` further tokens since. When
suspects are in the engine at a second death, they go on in halves: the engine gets one group at a time and nothing
else, until the group is cleared or the engine dies again, which halves the group. A request that ends the engine alone
is the culprit.
"""

from __future__ import annotations

from collections.abc import Mapping

CLEARED_TOKENS = 16
"""More than the tokens that a death takes along: those of the steps in flight, their drafts included."""


class CulpritSearch:
    """Positions are the tokens that the longest sequence of a request has got. Used under its owner's lock."""

    def __init__(self) -> None:
        self._suspects: dict[str, int] = {}
        """Suspect -> its position at the last death; while a search goes on, only those of the group that is tried."""
        self._tried: list[str] = []
        """The group that is tried, cleared requests included; empty: no search goes on."""
        self._groups: list[dict[str, int]] = []
        """The groups that are tried later, with positions."""

    @property
    def is_searching(self) -> bool:
        """Whether requests are held back."""
        return bool(self._tried)

    @property
    def has_suspects(self) -> bool:
        """Whether `note_progress` may find anything."""
        return bool(self._suspects)

    def allows(self, request_id: str) -> bool:
        """Whether the engine may have a request now: any, when no search goes on."""
        return not self._tried or request_id in self._tried

    def note_death(self, running: Mapping[str, int]) -> str | None:
        """The engine died with these requests in it (id -> position). Returns the culprit, which is to go on no more,
        when it was there alone."""
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
            self._groups.insert(0, suspects)  # once more, alone
        self._suspects, self._tried = {}, []
        self._try_next()
        return culprit

    def note_progress(self, request_id: str, position: float) -> bool:
        """A request has got tokens. Returns whether the engine may have more requests now."""
        known = self._suspects.get(request_id)
        return known is not None and position - known >= CLEARED_TOKENS and self.note_end(request_id)

    def note_end(self, request_id: str) -> bool:
        """A request is over, or under suspicion no longer. Returns whether the engine may have more requests now."""
        for group in self._groups:
            group.pop(request_id, None)
        if self._suspects.pop(request_id, None) is None or self._suspects or not self._tried:
            return False
        self._tried = []
        self._try_next()
        return True

    def _try_next(self) -> None:
        """Try the next group, if there is one. Without one, no search goes on."""
        while self._groups and not self._tried:
            self._suspects = self._groups.pop(0)
            self._tried = list(self._suspects)
