"""The cores of ranks that share a host."""

from __future__ import annotations

import os

import pytest

from quire import envs
from quire.worker.platform.cpu import keep_to_own_cores


def test_ranks_share_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with fewer cores than ranks they keep what they have."""
    kept: list[list[int]] = []
    monkeypatch.setattr(envs, "affinity_numbers", lambda: [2, 3, 5, 7, 9])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: kept.append(list(cores)), raising=False)
    for rank in range(2):
        keep_to_own_cores(rank, 2)
    keep_to_own_cores(0, 6)
    assert kept == [[2, 3], [5, 7]]
