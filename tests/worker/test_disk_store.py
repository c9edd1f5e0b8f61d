"""The worker's side of the disk tier: orders in, reports out, whatever happens to the directory meanwhile."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.step import BlockKey, StoreReport
from quire.worker.kv_connector import cache_directory, disk_store
from quire.worker.kv_connector.block_file import BlockFileLayout
from quire.worker.kv_connector.disk_store import NUM_LOADERS, DiskStore
from tests.fakes.panic import Panic

LAYOUT = BlockFileLayout(namespace=b"n" * 32, num_pages=2, page_bytes=64)
BYTES = LAYOUT.num_pages * LAYOUT.page_bytes


def key(number: int, group: int = 0) -> BlockKey:
    return group, number.to_bytes(32, "big")


class Host:
    """Host memory of a few blocks, a store over it, and everything that it reported so far."""

    def __init__(self, directory: Path, limit: int = 2**30, layout: BlockFileLayout = LAYOUT) -> None:
        self.blocks = [[bytearray(layout.page_bytes) for _ in range(layout.num_pages)] for _ in range(200)]
        self.store = DiskStore(directory, limit, layout, self.blocks.__getitem__)
        self.total = StoreReport()
        self.wait(lambda: not self.total.is_scanning, first=True)

    def wait(self, done: Callable[[], bool], *, first: bool = False) -> None:
        self.total.is_scanning |= first
        for _ in range(10_000):
            if done():
                return
            self.store.wait(0.01)
            report = self.store.take_report()
            if report is not None:
                for name in ("found", "gone", "loaded", "failed", "released"):
                    getattr(self.total, name).extend(getattr(report, name))
                self.total.num_stored += report.num_stored
                self.total.num_store_failures += report.num_store_failures
                self.total.num_bytes, self.total.is_scanning = report.num_bytes, report.is_scanning
        raise AssertionError("nothing was reported")

    def fill(self, block: int, content: int) -> None:
        for number, page in enumerate(self.blocks[block]):
            page[:] = bytes([(content + number) % 256]) * len(page)

    def holds(self, block: int, content: int) -> bool:
        return all(
            page == bytes([(content + number) % 256]) * len(page) for number, page in enumerate(self.blocks[block])
        )

    def put(self, number: int, group: int = 0) -> None:
        """Store block `number` and wait for the end."""
        before = len(self.total.released)
        self.fill(1, number)
        self.store.store_block(1, *key(number, group))
        self.wait(lambda: len(self.total.released) > before)

    def get(self, number: int, group: int = 0) -> bool:
        """Load block `number`; whether it came. What came is what was stored."""
        before = len(self.total.loaded), len(self.total.failed)
        self.store.load_block(*key(number, group), 2)
        self.wait(lambda: (len(self.total.loaded), len(self.total.failed)) != before)
        if len(self.total.loaded) == before[0]:
            return False
        assert self.holds(2, number)
        return True


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(**options: object) -> Host:
        made.append(Host(tmp_path / "cache", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for host in made:
        host.store.close(5.0)


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache").rglob("*-*") if path.is_file())


def test_a_stored_block_is_found_by_the_next_engine(make_host, tmp_path: Path) -> None:
    first = make_host()
    assert first.total.found == []
    for number in range(5):
        first.put(number)
    first.put(3, group=1)
    assert first.total.found == [*map(key, range(5)), key(3, 1)]
    assert first.total.num_stored == 6
    first.store.close(5.0)
    second = make_host()
    assert sorted(second.total.found) == sorted(first.total.found)
    assert second.total.num_bytes == 6 * LAYOUT.file_bytes
    assert all(second.get(number) for number in range(5))
    assert second.get(3, group=1)
    assert not second.get(4, group=1)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


def test_a_block_is_written_once(make_host, tmp_path: Path) -> None:
    first, second = make_host(), make_host()
    first.put(7)
    second.put(7)
    assert first.total.num_stored == 1
    assert second.total.num_stored == 0
    assert second.total.found == [key(7)]
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("layout", [BlockFileLayout(b"m" * 32, 2, 64), BlockFileLayout(b"m" * 32, 4, 64)])
def test_another_namespace_is_not_seen(make_host, layout: BlockFileLayout) -> None:
    make_host().put(1)
    other = make_host(layout=layout)
    assert other.total.found == []
    assert not other.get(1)
    other.put(1)
    assert other.get(1)


def test_corrupt_files_are_ignored_with_one_warning_and_replaced(
    make_host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host()
    for number in range(4):
        host.put(number)
    paths = files(tmp_path)
    assert len(paths) == 4
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    damaged = bytearray(paths[1].read_bytes())
    damaged[-1] ^= 1
    paths[1].write_bytes(damaged)
    paths[2].write_bytes(paths[3].read_bytes())  # whole and unharmed, but another one
    paths[2].chmod(0o600)
    assert [host.get(number) for number in range(4)] == [False, False, False, True]
    assert len([record for record in caplog.records if "not used" in record.message]) == 1
    for number in range(3):
        host.put(number)
    assert all(host.get(number) for number in range(4))


def test_foreign_files_are_left_alone_with_one_warning(
    make_host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host()
    host.put(1)
    folder = files(tmp_path)[0].parent
    strangers = [tmp_path / "cache" / "notes.txt", folder / "readme", folder.parent / "x.safetensors"]
    strangers.append(folder / f"{'ab' * 32}-0")  # a block's name, in another block's folder
    for path in strangers:
        path.write_text("not ours")
    (folder / f"{'0' * 64}-9").symlink_to(strangers[0])
    again = make_host(limit=LAYOUT.file_bytes)
    assert again.total.found == [key(1)]
    assert len([record for record in caplog.records if "Quire did not write" in record.message]) == 1
    for number in range(2, 6):
        again.put(number)
    assert all(path.read_text() == "not ours" for path in strangers)


def test_the_directory_stays_within_its_limit_and_forgets_what_was_not_used(make_host, tmp_path: Path) -> None:
    host = make_host(limit=20 * LAYOUT.file_bytes)
    for number in range(15):
        host.put(number)
        _age(tmp_path, number)
    for number in (0, 1):
        assert host.get(number)
    for number in range(15, 60):
        host.put(number)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 21 * LAYOUT.file_bytes
        if number == 25:
            assert host.get(0)
            assert host.get(1)
            assert not host.get(2)
    kept = {int(path.name[:64], 16) for path in files(tmp_path)}
    assert 59 in kept
    assert {key(number) for number in range(60)} - set(host.total.gone) == {key(number) for number in kept}


def test_a_lower_limit_holds_from_the_start(make_host, tmp_path: Path) -> None:
    first = make_host()
    for number in range(20):
        first.put(number)
    first.store.close(5.0)
    file_bytes = LAYOUT.file_bytes
    second = make_host(limit=8 * file_bytes)
    kept = set(second.total.found) - set(second.total.gone)
    assert len(kept) == 7  # nine tenths of the limit
    assert second.total.num_bytes == 7 * file_bytes
    assert sum(path.stat().st_size for path in tmp_path.rglob("*-0")) == 7 * file_bytes


def test_engines_share_the_limit(make_host, tmp_path: Path) -> None:
    """Also with an engine of another model, whose files are not used any more."""
    limit = 40 * LAYOUT.file_bytes
    other = make_host(limit=limit, layout=BlockFileLayout(b"m" * 32, 2, 64))
    for number in range(30):
        other.put(number)
        _age(tmp_path, number)
    hosts = [make_host(limit=limit), make_host(limit=limit)]
    for number in range(100):
        hosts[number % 2].put(number)
        # Each looks again after an eighth of the limit.
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit * 1.25 + 2 * LAYOUT.file_bytes
    assert not [path for path in files(tmp_path) if b"m".hex() * 32 in str(path)]
    for host in hosts:
        present = {key(int(path.name[:64], 16)) for path in files(tmp_path)}
        assert all(host.get(number) == (key(number) in present) for number in range(100))


def test_two_engines_at_once(tmp_path: Path, make_host) -> None:
    """Both store and load the same blocks in a directory that is always too small: what comes is right."""
    hosts = [make_host(limit=12 * LAYOUT.file_bytes) for _ in range(2)]
    failures: list[BaseException] = []

    def work(host: Host, start: int) -> None:
        try:
            for step in range(300):
                number = (start + 7 * step) % 25
                host.put(number)
                host.get((number + step) % 25)  # asserts the content
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(host, 11 * index)) for index, host in enumerate(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert not list((tmp_path / "cache").rglob(".new-*")), "an unfinished file was left"
    assert any(host.total.gone for host in hosts)


def test_a_full_disk_costs_nothing_but_the_cache(
    make_host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host()
    host.put(1)

    def full(_descriptor: int, _buffers: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        host.put(2)
    for number in range(disk_store.MAX_FULL_STORES):
        host.put(100 + number)
    assert host.total.found == [key(1)]
    assert host.total.num_store_failures == 1 + disk_store.MAX_FULL_STORES
    assert len([record for record in caplog.records if "No space" in record.message]) == 1
    assert len(files(tmp_path)) == 1
    host.put(2)
    assert host.get(1)
    assert host.get(2)


def test_a_directory_that_vanishes(make_host, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = make_host()
    host.put(1)
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    assert not host.get(1)
    host.put(2)
    assert host.total.num_store_failures == 1
    (tmp_path / "elsewhere").rename(tmp_path / "cache")
    assert host.get(1)


@pytest.mark.parametrize("obstacle", ["file", "parent", "read-only", "lock"])
def test_a_directory_that_cannot_be_used_is_refused(
    tmp_path: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "cache"
    if obstacle == "file":
        directory.write_text("")
    elif obstacle == "parent":
        (tmp_path / "file").write_text("")
        directory = tmp_path / "file" / "cache"
    elif obstacle == "lock":
        directory.mkdir()
        (directory / "lock").mkdir()
    else:  # an administrator may write anywhere, so a mode alone would not stop this test
        monkeypatch.setattr(Path, "touch", _refuse)
    with pytest.raises(ConfigError, match="kv_offload_dir") as caught:
        DiskStore(directory, 2**20, LAYOUT, lambda _: [])
    assert caught.value.param == "kv_offload_dir"


def test_a_limit_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="less than one block") as caught:
        DiskStore(tmp_path, LAYOUT.file_bytes - 1, LAYOUT, lambda _: [])
    assert caught.value.param == "kv_offload_size"


def test_long_lists_are_reported_in_parts(make_host, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_host()
    for number in range(10):
        first.put(number)
    monkeypatch.setattr(disk_store, "MAX_KEYS_IN_REPORT", 3)
    store = DiskStore(first.store._directory.path, 2**20, LAYOUT, first.blocks.__getitem__)
    sizes, found = [], []
    for _ in range(1000):
        store.wait(0.01)
        report = store.take_report()
        if report is not None:
            sizes.append(len(report.found))
            found += report.found
            if not report.is_scanning:
                break
    store.close(5.0)
    assert max(sizes) <= 3
    assert sorted(found) == [key(number) for number in range(10)]


def test_files_of_a_killed_engine_go_after_a_while(make_host, tmp_path: Path) -> None:
    own = make_host().store._directory.own
    for name, age in (("old", 2 * cache_directory.STALE_SECONDS), ("young", 1.0)):
        (own / f".new-{name}").touch()
        then = time.time() - age
        os.utime(own / f".new-{name}", (then, then))
    make_host()
    assert [path.name for path in own.iterdir()] == [".new-young"]


def test_closing_finishes_what_was_ordered(make_host, tmp_path: Path) -> None:
    host = make_host()
    for number in range(50):
        host.fill(10 + number, number)
        host.store.store_block(10 + number, *key(number))
    host.store.close(10.0)
    assert len(files(tmp_path)) == 50
    host.store.close(10.0)


def test_a_bug_in_one_transfer_ends_it_alone(make_host, caplog: pytest.LogCaptureFixture) -> None:
    host = make_host()
    host.blocks[1] = None  # type: ignore[call-overload]
    host.store.store_block(1, *key(5))
    host.wait(lambda: bool(host.total.released))
    assert host.total.num_store_failures == 1
    host.blocks[1] = [bytearray(64), bytearray(64)]
    host.put(5)
    assert host.get(5)
    assert any(record.exc_info for record in caplog.records)


def _age(tmp_path: Path, number: int) -> None:
    """As if the block had been stored long ago, those of smaller numbers longer."""
    for path in files(tmp_path):
        if path.stat().st_mtime > 1e6 and int(path.name[:64], 16) == number:
            os.utime(path, (1000 + number, 1000 + number))


def _refuse(self: Path, *_arguments: object, **_keywords: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_panic_ends_one_transfer_and_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path)
    host.fill(1, 5)
    host.store.store_block(1, *key(1))
    host.wait(lambda: bool(host.total.num_stored))

    def panic(*_arguments: object) -> None:
        raise Panic("out of bounds")

    num_broken = 2 * NUM_LOADERS
    with monkeypatch.context() as patch:
        patch.setattr(disk_store, "read_block", panic)
        for number in range(num_broken):
            host.store.load_block(*key(1), 10 + number)
        host.wait(lambda: len(host.total.failed) == num_broken)
    host.store.load_block(*key(1), 2)
    host.wait(lambda: host.total.loaded == [2])
    assert host.holds(2, 5)
    host.store.close(60)
