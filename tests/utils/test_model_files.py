from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import ModelLoadError
from quire.utils.model_files import file_bytes, read_model_file

OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "is a FIFO, not a file"),
    "directory": (lambda path: path.mkdir(), "is a directory, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
    "loop": (lambda path: path.symlink_to(path.name), "cannot read .*: Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", list(OTHERS))
def test_what_is_no_regular_file_is_refused(kind: str, tmp_path: Path) -> None:
    make, message = OTHERS[kind]
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(ModelLoadError, match=message):
        file_bytes(path)
    with pytest.raises(ModelLoadError, match=message):
        read_model_file(path, 100)


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelLoadError, match="has 1099511627776 bytes: such a file may have 100"):
        read_model_file(path, 100)


def test_a_file_a_link_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("blob")
    assert read_model_file(tmp_path / "link", 5) == b"12345"
    assert file_bytes(tmp_path / "link") == 5
    assert file_bytes(tmp_path / "none") is None
    assert file_bytes(tmp_path / "blob" / "below") is None
    with pytest.raises(ModelLoadError, match="No such file"):
        read_model_file(tmp_path / "none", 5)
    with pytest.raises(ModelLoadError, match="cannot read"):
        file_bytes(tmp_path / "a\0b")
