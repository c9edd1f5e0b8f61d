"""All environment variables that Quire reads, each parsed once, strictly. No other module reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def log_level() -> str:
    """`QUIRE_LOG_LEVEL`: DEBUG, INFO, WARNING (default) or ERROR."""
    value = os.environ.get("QUIRE_LOG_LEVEL", "WARNING").upper()
    if value not in LOG_LEVELS:
        raise ConfigError(f"QUIRE_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, not {value!r}")
    return value


def num_threads() -> int | None:
    """`QUIRE_NUM_THREADS`: compute threads of the CPU backend; unset means one per core of the affinity mask."""
    value = os.environ.get("QUIRE_NUM_THREADS")
    if value is None:
        return None
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"QUIRE_NUM_THREADS must be a positive integer, not {value!r}")
    return int(value)


def api_key() -> str | None:
    """`QUIRE_API_KEY`: the key that `quire serve` asks for when `--api-key` is not given."""
    return os.environ.get("QUIRE_API_KEY") or None


def runtime_directory() -> Path:
    """`QUIRE_RUNTIME_DIR`: where ipc sockets live; default the system's temporary directory."""
    import tempfile

    return Path(os.environ.get("QUIRE_RUNTIME_DIR") or tempfile.gettempdir())


def affinity_cores() -> int:
    """Cores that this process may run on (honours taskset and cgroup cpusets)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def let_openmp_sleep() -> None:
    """Ask torch's OpenMP runtime (by `OMP_WAIT_POLICY`, unless the user set it) to sleep where threads wait for one
    another, not to spin. Takes effect only before torch is loaded.

    A server's HTTP process and its engine share the cores: spinning threads then wait for a core that a spinning
    thread holds, and a start on a busy machine took 32 s that takes 4 s without it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
