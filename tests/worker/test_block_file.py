"""A block's file: what was written is read back, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from quire.worker.kv_connector.block_file import HEADER_BYTES, BlockFileError, BlockFileLayout, read_block, write_block

LAYOUT = BlockFileLayout(namespace=bytes(range(32)), num_pages=3, page_bytes=40)
HASH = bytes(range(100, 132))


def pages_of(content: bytes) -> list[bytearray]:
    size = LAYOUT.page_bytes
    return [bytearray(content[index * size : (index + 1) * size]) for index in range(LAYOUT.num_pages)]


CONTENT = os.urandom(LAYOUT.num_pages * LAYOUT.page_bytes)


def read(path: Path, layout: BlockFileLayout = LAYOUT, group: int = 1, block_hash: bytes = HASH) -> bytes:
    pages = [bytearray(layout.page_bytes) for _ in range(layout.num_pages)]
    read_block(path, layout, group, block_hash, pages)
    return b"".join(pages)


@pytest.fixture
def block(tmp_path: Path) -> Path:
    path = tmp_path / "block"
    write_block(path, LAYOUT, 1, HASH, pages_of(CONTENT))
    return path


def test_what_was_written_is_read_back(block: Path) -> None:
    assert read(block) == CONTENT
    assert block.stat().st_size == LAYOUT.file_bytes == HEADER_BYTES + len(CONTENT)
    assert block.stat().st_mode & 0o077 == 0, "others may read a prompt's keys and values"


def test_every_byte_counts(block: Path) -> None:
    whole = block.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        block.write_bytes(damaged)
        with pytest.raises(BlockFileError):
            read(block)
    block.write_bytes(whole)
    assert read(block) == CONTENT


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_of_any_kind_is_found(block: Path, data: st.DataObject) -> None:
    whole = block.read_bytes() if block.stat().st_size == LAYOUT.file_bytes else b""
    if not whole or read(block) != CONTENT:
        raise AssertionError("the file of the example before was not put back")
    kind = data.draw(st.sampled_from(["cut", "longer", "overwrite", "swap", "anything"]))
    damaged = bytearray(whole)
    if kind == "cut":
        del damaged[data.draw(st.integers(0, len(whole) - 1)) :]
    elif kind == "longer":
        damaged += data.draw(st.binary(min_size=1, max_size=50))
    elif kind == "overwrite":
        start = data.draw(st.integers(0, len(whole) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=len(whole) - start))
        damaged[start : start + len(piece)] = piece
    elif kind == "swap":
        size = LAYOUT.page_bytes
        first, second = data.draw(st.permutations(range(LAYOUT.num_pages)))[:2]
        for target, source in ((first, second), (second, first)):
            at, origin = HEADER_BYTES + target * size, HEADER_BYTES + source * size
            damaged[at : at + size] = whole[origin : origin + size]
    else:
        damaged = bytearray(data.draw(st.binary(max_size=2 * len(whole))))
    block.write_bytes(damaged)
    try:
        if bytes(damaged) == whole:
            assert read(block) == CONTENT
        else:
            with pytest.raises(BlockFileError):
                read(block)
    finally:
        block.write_bytes(whole)


@pytest.mark.parametrize(
    ("layout", "group", "block_hash"),
    [
        (LAYOUT, 0, HASH),
        (LAYOUT, 1, HASH[::-1]),
        (BlockFileLayout(bytes(32), 3, 40), 1, HASH),
        (BlockFileLayout(LAYOUT.namespace, 4, 30), 1, HASH),  # of the same size, cut in another way
        (BlockFileLayout(LAYOUT.namespace, 3, 41), 1, HASH),
    ],
    ids=["group", "hash", "namespace", "pages", "size"],
)
def test_another_block_is_not_taken_for_it(block: Path, layout: BlockFileLayout, group: int, block_hash: bytes) -> None:
    with pytest.raises(BlockFileError):
        read(block, layout, group, block_hash)


def test_no_file_is_followed_or_waited_for(tmp_path: Path, block: Path) -> None:
    (tmp_path / "link").symlink_to(block)
    with pytest.raises(OSError, match="link"):
        read(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BlockFileError):
        read(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BlockFileError):
        read(tmp_path / "folder")


def test_a_file_is_never_written_over(block: Path) -> None:
    with pytest.raises(FileExistsError):
        write_block(block, LAYOUT, 1, HASH, pages_of(bytes(len(CONTENT))))
    assert read(block) == CONTENT


def test_nothing_is_left_of_a_file_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: real(descriptor, buffers[:2]))
    with pytest.raises(OSError, match="bytes were written"):
        write_block(tmp_path / "block", LAYOUT, 1, HASH, pages_of(CONTENT))
    assert list(tmp_path.iterdir()) == []
