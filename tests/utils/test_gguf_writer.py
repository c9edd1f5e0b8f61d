"""GGUF files that are written: read back they are what was given, and never half there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from quire.errors import UserError
from quire.utils.gguf import BLOCK_TYPES, GGUFFile
from quire.utils.gguf_writer import GGUFWriter, PlannedTensor, Value

TENSORS = [
    PlannedTensor("first.weight", (3, 64), BLOCK_TYPES[8], 8),
    PlannedTensor("second.weight", (5,), BLOCK_TYPES[0], 0),
    PlannedTensor("third.weight", (2, 2, 32), BLOCK_TYPES[2], 2),
]
METADATA: dict[str, Value] = {
    "general.architecture": "any",
    "a.flag": True,
    "a.count": 7,
    "a.long": 2**40,
    "a.share": 0.25,
    "a.texts": ["x", "", "ünï"],
    "a.numbers": [1, -2],
    "a.shares": [0.5, -1.5],
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    contents = {tensor.name: os.urandom(tensor.num_bytes) for tensor in TENSORS}
    with GGUFWriter(path, METADATA, TENSORS) as writer:
        with GGUFFile(writer.partial) as early:  # the header is there at once
            assert early.tensors.keys() == contents.keys()
        for name in reversed(contents):  # in any order, and in parts
            half = len(contents[name]) // 2
            writer.write(name, contents[name][half:], half)
            writer.write(name, contents[name][:half])
        assert not path.exists()
        writer.finish()
    assert list(tmp_path.iterdir()) == [path]
    with GGUFFile(path) as file:
        assert {name: file.metadata[name] for name in list(METADATA)[:5]} == {
            name: METADATA[name] for name in list(METADATA)[:5]
        }
        assert file.strings("a.texts") == METADATA["a.texts"]
        assert file.numbers("a.numbers") == METADATA["a.numbers"]
        assert file.numbers("a.shares") == METADATA["a.shares"]
        for tensor in TENSORS:
            entry = file.tensors[tensor.name]
            assert (entry.shape, entry.type) == (tensor.shape, tensor.type)
            assert bytes(file.data(entry)) == contents[tensor.name]


def test_a_run_that_ends_early_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"before")
    writer = GGUFWriter(path, METADATA, TENSORS)
    writer.write("second.weight", bytes(20))
    assert writer.partial.exists()
    writer.__exit__(KeyboardInterrupt, None, None)
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_bytes() == b"before"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*No such file"):
        GGUFWriter(tmp_path / "none" / "m.gguf", METADATA, TENSORS)


def test_a_full_disk_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int, _start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="the disk has no room for"):
        GGUFWriter(tmp_path / "m.gguf", METADATA, TENSORS)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_keeps_no_room_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_file: int, _start: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuses)
    with GGUFWriter(tmp_path / "m.gguf", METADATA, TENSORS) as writer:
        for tensor in TENSORS:
            writer.write(tensor.name, bytes(tensor.num_bytes))
        writer.finish()
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert len(file.tensors) == 3
