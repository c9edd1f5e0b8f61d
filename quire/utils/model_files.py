"""Files of a model from any source: only regular files are opened, and read up to a limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from quire.errors import ModelLoadError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def file_bytes(path: Path) -> int | None:
    """Size of a regular file (links are followed); None if nothing is there. Raises ModelLoadError for anything
    else."""
    try:
        return _regular_size(path, os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ModelLoadError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that holds a NUL
        raise _unreadable(path, error) from None


def read_model_file(path: Path, max_bytes: int) -> bytes:
    """Content of a regular file. Raises ModelLoadError for any other kind, for more than `max_bytes` (before reading),
    and for an unreadable one."""
    try:
        # Without O_NONBLOCK opening a FIFO would wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            size = _regular_size(path, os.fstat(descriptor))
            if size > max_bytes:
                raise ModelLoadError(f"{path} has {size} bytes: such a file may have {max_bytes}")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(size)
        finally:
            os.close(descriptor)
    except ModelLoadError:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _regular_size(path: Path, status: os.stat_result) -> int:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise ModelLoadError(f"{path} is {_KINDS.get(kind, 'no regular file')}, not a file")
    return status.st_size


def _unreadable(path: Path, error: OSError | ValueError) -> ModelLoadError:
    return ModelLoadError(f"cannot read {path}: {error.strerror if isinstance(error, OSError) else error}")
