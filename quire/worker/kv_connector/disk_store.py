"""Files of OffloadConnector: transfers between host memory and files, on separate threads. A StoreReport in a step's
result tells which transfers ended."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.errors import ConfigError
from quire.logging import get_logger
from quire.step import BlockKey, StoreReport
from quire.utils.sizes import format_bytes
from quire.worker.kv_connector.block_file import BlockFileError, BlockFileLayout, Buffer, read_block, write_block
from quire.worker.kv_connector.cache_directory import CacheDirectory

logger = get_logger(__name__)

NUM_LOADERS = 2
MAX_KEYS_IN_REPORT = 16384
"""Maximum keys per report; later reports carry the rest."""
SMOOTHING = 0.1
MAX_FULL_STORES = 64
"""Stores skipped after the disk was full."""

HostPages = Callable[[int], Sequence[Buffer]]
"""Host block -> its writable pages."""


class DiskStore:
    """Store with asynchronous transfers, used by one thread (`store_block`, `load_block`, `take_report`, `wait`,
    `close`); reports come in any order. The caller must not use a host block from its order until the report that names
    it."""

    def __init__(self, directory: Path, limit: int, layout: BlockFileLayout, host_pages: HostPages) -> None:
        """limit: bytes of all files. Raises ConfigError if nothing can be stored in `directory`, or `limit` is below
        one block."""
        if limit < layout.file_bytes:
            raise ConfigError(
                f"kv_offload_size ({format_bytes(limit)}) is less than one block ({format_bytes(layout.file_bytes)})",
                param="kv_offload_size",
            )
        self._directory = CacheDirectory(directory, limit, layout.namespace)
        self._layout = layout
        self._host_pages = host_pages
        self._warnings = _Warnings(directory)
        self._damaged: set[BlockKey] = set()
        """Keys with unreadable files; storing the block again replaces the file."""
        self._stores_to_skip = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._report = StoreReport(is_scanning=True)
        self._has_news = False
        self._num_loading = 0
        self._stores = _WorkerThreads("quire-disk-store", 1)
        self._loads = _WorkerThreads("quire-disk-load", NUM_LOADERS)
        self._stores.submit(self._scan)

    def store_block(self, host_block: int, group: int, block_hash: bytes) -> None:
        self._stores.submit(lambda: self._store(host_block, (group, block_hash)))

    def load_block(self, group: int, block_hash: bytes, host_block: int) -> None:
        with self._changed:
            self._num_loading += 1
        self._loads.submit(lambda: self._load((group, block_hash), host_block))

    def take_report(self) -> StoreReport | None:
        """Report of the loads and stores that ended since the last call, for a step's result; None if none."""
        with self._changed:
            if not self._has_news:
                return None
            report = self._report
            rest = StoreReport(
                found=report.found[MAX_KEYS_IN_REPORT:],
                gone=report.gone[MAX_KEYS_IN_REPORT:],
                num_bytes=report.num_bytes,
                load_seconds=report.load_seconds,
                is_scanning=report.is_scanning,
            )
            del report.found[MAX_KEYS_IN_REPORT:], report.gone[MAX_KEYS_IN_REPORT:]
            self._report, self._has_news = rest, bool(rest.found or rest.gone)
            report.is_scanning |= self._has_news
        return report

    def wait(self, timeout: float) -> None:
        """Wait until there is a report and all loads have ended, or for `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news and not self._num_loading, timeout)

    def close(self, timeout: float) -> None:
        """Finish ordered stores, within `timeout` seconds. Loads that have not started are dropped. Idempotent."""
        self._is_closing = True
        self._loads.close(0.0)
        if not self._stores.close(timeout):
            logger.warning("some KV blocks were not stored in %s: closing took too long", self._directory.path)

    # -- on the threads ---------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        found: list[BlockKey] = []
        gone: list[BlockKey] = []

        def tell(report: StoreReport) -> None:
            report.found.extend(found)
            found.clear()
            report.gone.extend(gone)

        def finish(report: StoreReport) -> None:
            report.num_bytes = self._directory.num_bytes
            report.is_scanning = False

        try:
            for key in self._directory.scan():
                found.append(key)
                if len(found) == MAX_KEYS_IN_REPORT:
                    self._tell(tell)
            if not self._directory.has_room():  # the limit was higher when these files were written
                gone += self._directory.make_room()
            if self._directory.num_foreign:
                num = self._directory.num_foreign
                self._warnings.once(
                    "foreign", f"holds {num} files or folders that Quire did not write; it leaves them alone"
                )
        except OSError as error:
            self._warnings.once("scan", f"cannot be looked through: {error}")
        finally:
            self._tell(tell)
            self._tell(finish)

    def _store(self, host_block: int, key: BlockKey) -> None:
        gone: list[BlockKey] = []
        is_stored = is_new = False

        def tell(report: StoreReport) -> None:
            report.released.append(host_block)
            report.gone.extend(gone)
            report.num_bytes = self._directory.num_bytes
            report.num_stored += is_new
            report.num_store_failures += not is_stored
            if is_stored:
                report.found.append(key)

        try:
            if self._stores_to_skip:
                self._stores_to_skip -= 1
                return
            if not self._directory.has_room():
                gone += self._directory.make_room()
            if self._directory.has_room():
                is_new = self._write(host_block, key)
                is_stored = True
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._stores_to_skip = MAX_FULL_STORES
            self._warnings.once("store", f"takes no block now ({error.strerror or error}); going on without")
        finally:
            self._tell(tell)

    def _write(self, host_block: int, key: BlockKey) -> bool:
        path = self._directory.path_of(key)
        if key not in self._damaged:
            try:
                os.utime(path)
                return False
            except FileNotFoundError:
                pass
        new = self._directory.new_path()
        write_block(new, self._layout, *key, self._host_pages(host_block))
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        self._damaged.discard(key)
        self._directory.count_stored(self._layout.file_bytes)
        return True

    def _load(self, key: BlockKey, host_block: int) -> None:
        path = self._directory.path_of(key)
        is_loaded = False
        started = time.perf_counter()

        def tell(report: StoreReport) -> None:
            self._num_loading -= 1
            (report.loaded if is_loaded else report.failed).append(host_block)
            if is_loaded:
                seconds = (time.perf_counter() - started) / NUM_LOADERS
                report.load_seconds = smoothed(report.load_seconds, seconds)

        try:
            if not self._is_closing:
                read_block(path, self._layout, *key, self._host_pages(host_block))
                is_loaded = True
                os.utime(path)  # mark the file as most recently used
        except FileNotFoundError:
            pass  # evicted, maybe by another engine
        except BlockFileError as error:
            self._damaged.add(key)
            self._warnings.once("damaged", f"holds a file that is not used: {path.name}: {error}")
        except OSError as error:
            self._damaged.add(key)
            self._warnings.once("load", f"holds a file that cannot be read: {path.name}: {error.strerror or error}")
        finally:
            self._tell(tell)

    def _tell(self, add: Callable[[StoreReport], None]) -> None:
        with self._changed:
            add(self._report)
            self._has_news = True
            self._changed.notify_all()


def smoothed(mean: float, value: float) -> float:
    """Exponential mean with `value` added; mean 0: `value` is the first."""
    return value if mean == 0.0 else mean + SMOOTHING * (value - mean)


class _WorkerThreads:
    """Daemon threads that run calls in order; a hanging disk cannot block process exit."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def close(self, timeout: float) -> bool:
        """End the threads after the submitted calls. Returns whether each ended within `timeout` seconds."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)


def _run(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException:
            # The transfer has reported its failure. The thread goes on, since later transfers may succeed.
            logger.exception("a transfer of the disk tier failed")
        del call


class _Warnings:
    """Logs each kind of disk failure once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def once(self, kind: str, message: str) -> None:
        with self._lock:
            if kind in self._told:
                return
            self._told.add(kind)
        logger.warning("kv_offload_dir: %s %s", self._directory, message)
