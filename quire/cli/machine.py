from __future__ import annotations

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from quire import envs
from quire.config.engine import EngineConfig
from quire.server.settings import ServerSettings
from quire.utils.control_groups import ROOT, cpu_quota
from quire.utils.open_files import NUM_RESERVED
from quire.utils.sizes import format_bytes

LEAST_SHARED_MEMORY = 256 * 2**20
"""Bytes needed by the ranks of one model. Docker's default is 64 MiB."""
SLOW_GOVERNORS = ("powersave", "conservative")
OWN_GOVERNORS = ("intel_pstate", "amd-pstate-epp")
"""Linux frequency drivers whose `powersave` governor follows the load: no warning."""


@dataclass(frozen=True)
class Machine:
    """Limits of the machine, container or service for this process; None if unknown. cores: hardware threads of the
    affinity mask. physical_cores: their cores. cpu_quota: cores allowed by control groups. open_files: hard limit, or
    none. shared_memory: bytes of /dev/shm. huge_pages: always, madvise or never. governor: "driver: governor" of the
    first core."""

    cores: int
    cpu_quota: float | None
    open_files: int | None
    shared_memory: int | None
    huge_pages: str | None
    governor: str | None
    physical_cores: int | None = None

    def rows(self) -> list[tuple[str, str]]:
        quota = "" if self.cpu_quota is None else f", a quota of {self.cpu_quota:g}"
        cores = f"{self.cores} cores"
        if self.physical_cores not in (None, self.cores):
            cores = f"{self.cores} hardware threads of {self.physical_cores} cores"
        shared = "none" if self.shared_memory is None else format_bytes(self.shared_memory)
        return [
            ("processor", cores + quota + (f", {self.governor}" if self.governor else "")),
            ("open files", f"up to {'any number' if self.open_files is None else self.open_files}"),
            ("memory pages", f"huge pages {self.huge_pages or 'unknown'}; {shared} in /dev/shm"),
        ]

    def problems(self, config: EngineConfig, memory: int) -> list[str]:
        """Advice of `quire doctor` for this engine. memory: bytes still available."""
        problems = []
        threads, kv_memory = config.device.num_threads, config.cache.memory
        if self.cpu_quota is not None and threads > max(1.0, self.cpu_quota):
            problems.append(
                f"{threads} threads share a quota of {self.cpu_quota:g} cores, and stand still when it is used up: "
                f"raise the container's CPU limit or set --threads {max(1, int(self.cpu_quota))}"
            )
        if threads > self.cores:
            problems.append(f"{threads} threads share {self.cores} cores: set --threads {self.cores}")
        needed = ServerSettings().max_connections + NUM_RESERVED
        if self.open_files is not None and self.open_files < needed:
            problems.append(
                f"at most {self.open_files} open files: the server takes {max(1, self.open_files - NUM_RESERVED)} "
                f"connections; {needed} files allow all (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)"
            )
        if config.device.device == "cpu" and kv_memory is not None and kv_memory > memory:
            problems.append(
                f"a KV cache of {format_bytes(kv_memory)} does not fit into the {format_bytes(memory)} that machine "
                "and control groups leave: the system ends the engine when the cache fills (raise the memory limit)"
            )
        if config.parallel.tp * config.parallel.pcp > 1 and (self.shared_memory or 0) < LEAST_SHARED_MEMORY:
            problems.append(
                "/dev/shm is too small for the ranks of one model: give the container 1 GiB (--shm-size, or a volume "
                "of medium Memory)"
            )
        if config.device.device == "cpu" and self.huge_pages == "never":
            problems.append(
                "transparent huge pages are off, which makes reading weights slower: write madvise to "
                "/sys/kernel/mm/transparent_hugepage/enabled"
            )
        driver, _, governor = (self.governor or "").partition(": ")
        if governor in SLOW_GOVERNORS and driver not in OWN_GOVERNORS:
            problems.append(f"the frequency governor is {governor}: cpupower frequency-set -g performance")
        return problems


def find_machine(root: Path = ROOT) -> Machine:
    """Read this process's limits. root: parent of /proc, /sys and /dev."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared, frequency = root / "dev/shm", root / "sys/devices/system/cpu/cpu0/cpufreq"
    pages = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    driver, governor = _text(frequency / "scaling_driver"), _text(frequency / "scaling_governor")
    return Machine(
        envs.affinity_cores(),
        cpu_quota(root),
        None if hard == resource.RLIM_INFINITY else hard,
        shutil.disk_usage(shared).total if shared.is_dir() else None,
        None if pages is None else pages.partition("[")[2].partition("]")[0],
        None if driver is None or governor is None else f"{driver}: {governor}",
        _physical_cores(root / "sys/devices/system/cpu"),
    )


def _physical_cores(directory: Path) -> int | None:
    texts = {_text(directory / f"cpu{number}/topology/thread_siblings_list") for number in envs.affinity_numbers()}
    return None if None in texts else len(texts)


def _text(path: Path) -> str | None:
    return path.read_text().strip() if path.exists() else None
