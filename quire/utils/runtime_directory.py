"""Private directory for one engine process's sockets, removed after any kind of death. Parent and child lock it; the
parent removes it, else the child or the machine's next engine."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from quire.errors import ConfigError

PREFIX = "quire-engine-"
LAST_WORDS_FILE = "last-words"
"""File with the reason why the engine process could not start, if it could not send a message."""
_MAX_SOCKET_PATH = 100
"""Longest directory path for the sockets in it."""

_REMOVE_TRIES = 100
_REMOVE_PAUSE = 0.01


class RuntimeDirectory:
    """`path`: a directory of mode 0700 under `parent`, locked (shared) until this object is closed."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, parent: Path) -> RuntimeDirectory:
        """Remove what dead engines left in `parent`, then make and lock a new directory. Raises ConfigError."""
        sweep(parent)
        while True:
            try:
                path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            except OSError as error:
                raise ConfigError(
                    f"cannot create a directory for sockets in {parent}: {error.strerror} (set QUIRE_RUNTIME_DIR)"
                ) from None
            if len(os.fsencode(path)) > _MAX_SOCKET_PATH - len("/outputs"):
                path.rmdir()
                raise ConfigError(f"the path {parent} is too long for sockets (set QUIRE_RUNTIME_DIR to a shorter one)")
            lock = _lock_shared(path)
            if lock is not None:
                return cls(path, lock)

    @classmethod
    def join(cls, path: Path) -> RuntimeDirectory:
        """Lock another process's directory. Raises FileNotFoundError if it is gone."""
        lock = _lock_shared(path)
        if lock is None:
            raise FileNotFoundError(str(path))
        return cls(path, lock)

    def address(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Release the lock; the directory stays. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Delete the directory with its sockets and release the lock; tries again if another thread makes a socket
        meanwhile. Idempotent."""
        for _ in range(_REMOVE_TRIES):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
            time.sleep(_REMOVE_PAUSE)
        self.close()


def sweep(parent: Path) -> None:
    """Remove directories of dead engines. Those of other users stay."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # of another user, or removed meanwhile
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # its engine lives
        finally:
            os.close(lock)


def _lock_shared(path: Path) -> int | None:
    """Lock `path`; None if a sweep removed it between its creation and the lock."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)
    if os.fstat(lock).st_nlink == 0 or not path.exists():
        os.close(lock)
        return None
    return lock
