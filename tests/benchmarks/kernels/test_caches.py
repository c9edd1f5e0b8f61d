"""The size of the last-level cache as Linux describes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.kernels.caches import ASSUMED_BYTES, last_level_cache_bytes


def describe(folder: Path, core: int, level: int, size: str, sharers: str) -> None:
    index = folder / f"cpu{core}" / "cache" / f"index{level}"
    index.mkdir(parents=True)
    for name, value in (("level", str(level)), ("size", size), ("shared_cpu_list", sharers)):
        (index / name).write_text(value + "\n")


def test_each_last_level_cache_of_our_cores_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4}, raising=False)
    for core, sharers in ((0, "0-3"), (1, "0-3"), (4, "4-7"), (8, "8-11")):
        describe(tmp_path, core, 2, "1024K", str(core))
        describe(tmp_path, core, 3, "32768K", sharers)
    assert last_level_cache_bytes(tmp_path) == 2 * 32768 * 1024


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert last_level_cache_bytes(tmp_path) == ASSUMED_BYTES
