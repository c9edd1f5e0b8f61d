"""Interpreter of an engine process before its LaunchSpec. A command starts it before its own imports: both import in
parallel."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence

from quire.utils.child_process import kill, start_interpreter, write_line

LOCAL_EXECUTOR = "quire.executors.local"
"""Module of the single-device executor, whose import of torch takes seconds."""


class EngineProcess:
    """Process that runs `quire.engine.boot`; leaving its context kills it unless it got a LaunchSpec."""

    def __init__(self, name: str = "engine", imports: Sequence[str] = ()) -> None:
        """Start a process that waits for its engine. name: process title after "quire: ". imports: modules that it
        imports meanwhile."""
        self.alive_fd, self.child_fd = os.pipe()
        """Read end of a pipe that closes when the process ends."""
        self._is_told = False
        try:
            line = json.dumps(list(imports)).encode()
            self.popen = start_interpreter("quire.engine.boot", f"quire: {name}", line, [self.child_fd])
        except BaseException:
            os.close(self.alive_fd)
            raise
        finally:
            os.close(self.child_fd)

    def tell(self, spec: bytes) -> None:
        """Send a LaunchSpec. Then ending the process and closing `alive_fd` are the caller's."""
        self._is_told = True
        write_line(self.popen, spec)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_told:
            kill(self.popen)
            with contextlib.suppress(OSError):
                os.close(self.alive_fd)
