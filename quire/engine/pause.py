"""Pause: the engine computes nothing new until it is resumed, and what it has computed stays.

`new` holds requests that have not started, while running ones go on to their end; `all` also stops the running ones,
which keep their blocks. The tokens are the same as without a pause: each depends on its own request alone.
"""

from __future__ import annotations

from typing import Protocol

from quire.errors import UserError

SCOPES = ("new", "all")


class Requests(Protocol):
    def hold_new(self, is_held: bool) -> None: ...


class Pause:
    """scope: "new", "all", or "" while the engine is not paused. stops_all: whether no step may be planned."""

    def __init__(self, scheduler: Requests) -> None:
        self.scope = ""
        self.stops_all = False
        self._scheduler = scheduler

    @property
    def level(self) -> int:
        """0 while the engine is not paused, 1 for the scope "new", 2 for "all"."""
        return SCOPES.index(self.scope) + 1 if self.scope else 0

    def begin(self, scope: str) -> None:
        """Pause, or change the scope of a pause. Raises UserError for another scope than SCOPES."""
        if scope not in SCOPES:
            raise UserError(f"the scope of a pause must be one of {', '.join(SCOPES)}, not {scope!r}", param="scope")
        self.scope, self.stops_all = scope, scope == "all"
        self._scheduler.hold_new(True)

    def end(self) -> None:
        """Go on. Idempotent."""
        self.scope, self.stops_all = "", False
        self._scheduler.hold_new(False)
