"""Quotas of the processor, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import envs
from quire.utils.control_groups import cpu_quota, usable_cores


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/pod/app\n"}
V1 = {"proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/docker/abc\n0::/\n"}
PERIOD = {"sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2, None),
        (V2 | {"sys/fs/cgroup/pod/app/cpu.max": "max 100000\n"}, None),
        (V2 | {"sys/fs/cgroup/pod/app/cpu.max": "400000 100000\n"}, 4.0),
        (V2 | {"sys/fs/cgroup/pod/cpu.max": "150000 100000\n", "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/../../host\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (V1 | PERIOD | {"sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "-1\n"}, None),
        (V1 | PERIOD | {"sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "250000\n"}, 2.5),
    ],
)
def test_the_tightest_quota_counts(
    tmp_path: Path, files: dict[str, str], quota: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, files)
    assert cpu_quota(root) == quota
    monkeypatch.setattr(envs, "affinity_cores", lambda: 3)
    assert usable_cores(root) == (3 if quota is None else max(1, min(3, int(quota))))
