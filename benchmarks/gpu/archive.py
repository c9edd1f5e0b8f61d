"""Logs of a run in a few files that can be carried: one archive, cut where it is too large for a file."""

from __future__ import annotations

import tarfile
from pathlib import Path

MAX_FILE_BYTES = 16 << 20


def pack(folder: Path, archive: Path, max_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """Write what lies in `folder` to `archive` (.tar.xz); returns the files. One that would be larger than `max_bytes`
    is cut into `NAME.0`, `NAME.1`, ... : `cat NAME.* > NAME` puts it together."""
    for old in archive.parent.glob(f"{archive.name}*"):
        old.unlink()
    with tarfile.open(archive, "w:xz", preset=1) as file:
        file.add(folder, arcname=folder.name)
    if archive.stat().st_size <= max_bytes:
        return [archive]
    pieces = []
    with archive.open("rb") as file:
        while piece := file.read(max_bytes):
            pieces.append(archive.with_name(f"{archive.name}.{len(pieces)}"))
            pieces[-1].write_bytes(piece)
    archive.unlink()
    return pieces
