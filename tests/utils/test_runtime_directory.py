"""The private directory of an engine's sockets: private, swept when its owners are dead, kept while one lives."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.utils.runtime_directory import PREFIX, RuntimeDirectory, sweep


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: a socket's path may have 107 bytes, and pytest's directories are deep."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


def test_create_and_remove(tmp_path: Path) -> None:
    directory = RuntimeDirectory.create(tmp_path)
    assert directory.path.parent == tmp_path
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.address("messages") == f"ipc://{directory.path}/messages"
    directory.remove()
    directory.remove()
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_only_directories_without_a_live_owner(tmp_path: Path) -> None:
    dead, alive = RuntimeDirectory.create(tmp_path), RuntimeDirectory.create(tmp_path)
    (dead.path / "messages").touch()
    (tmp_path / "unrelated").mkdir()
    dead.close()
    joined = RuntimeDirectory.join(alive.path)
    alive.close()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.path.name, "unrelated"])
    joined.close()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["unrelated"]


def test_create_sweeps(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}old").mkdir()
    directory = RuntimeDirectory.create(tmp_path)
    assert list(tmp_path.iterdir()) == [directory.path]
    directory.remove()


def test_join_of_a_directory_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RuntimeDirectory.join(tmp_path / "gone")


def test_unusable_parents_are_configuration_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot create .* No such file .*QUIRE_RUNTIME_DIR"):
        RuntimeDirectory.create(tmp_path / "missing")
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(ConfigError, match="too long for sockets"):
        RuntimeDirectory.create(long)
    assert list(long.iterdir()) == []


def test_a_socket_made_during_the_removal_does_not_keep_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RuntimeDirectory.create(tmp_path)
    rmdir = os.rmdir
    latecomers = [directory.path / "outputs"]

    def rmdir_too_late(path: object, *args: object, **kwargs: object) -> None:
        if latecomers:
            latecomers.pop().touch()
        rmdir(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rmdir", rmdir_too_late)
    directory.remove()
    assert not latecomers
    assert not directory.path.exists()
