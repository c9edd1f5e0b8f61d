"""The interpreter of an engine, from its start to the moment when it is told which engine it is.

Imports next to nothing: a command starts one before its own imports, so that both import side by side.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence

from quire.utils.child_process import kill, start_interpreter, write_line

LOCAL_EXECUTOR = "quire.executors.local"
"""What an engine of one device imports for seconds: torch."""


class EngineProcess:
    """A process that runs `quire.engine.boot`; a context ends one that was told nothing."""

    def __init__(self, name: str = "engine", imports: Sequence[str] = ()) -> None:
        """name: of the process, behind "quire: ". imports: modules that it imports while it waits."""
        self.alive_fd, self.child_fd = os.pipe()
        """Read end of a pipe that closes when the process ends, however it ends; its write end, by its number there."""
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
        """Hand over a LaunchSpec. The process and `alive_fd` are the caller's from here on."""
        self._is_told = True
        write_line(self.popen, spec)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_told:
            kill(self.popen)
            with contextlib.suppress(OSError):
                os.close(self.alive_fd)
