"""All environment variables that Quire reads. No other module reads the environment."""

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


LOG_FORMATS = ("text", "json")


def log_format() -> str:
    """`QUIRE_LOG_FORMAT`: text (default) or json, one object a line."""
    value = os.environ.get("QUIRE_LOG_FORMAT", "text").lower()
    if value not in LOG_FORMATS:
        raise ConfigError(f"QUIRE_LOG_FORMAT must be one of {', '.join(LOG_FORMATS)}, not {value!r}")
    return value


def keep_log_format(name: str) -> None:
    """Set the log format, one of LOG_FORMATS, of this process and its later children."""
    os.environ["QUIRE_LOG_FORMAT"] = name


def num_threads() -> int | None:
    """`QUIRE_NUM_THREADS`: compute threads of the CPU backend. Default: one per core of the affinity mask, limited by a
    CPU quota."""
    value = os.environ.get("QUIRE_NUM_THREADS")
    if value is None:
        return None
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"QUIRE_NUM_THREADS must be a positive integer, not {value!r}")
    return int(value)


def cpu_isa() -> str:
    """`QUIRE_CPU_ISA`: highest instruction set for the native CPU kernels (portable, avx2, avx512, ...). Default: the
    machine's best."""
    return os.environ.get("QUIRE_CPU_ISA") or "auto"


def triton_interpret() -> bool:
    """`TRITON_INTERPRET` (Triton's): 1 runs Triton kernels in its interpreter, on host tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def triton_ptxas() -> str | None:
    """`TRITON_PTXAS_PATH` (Triton's): an assembler that replaces Triton's own."""
    return os.environ.get("TRITON_PTXAS_PATH") or None


def triton_libcuda() -> str | None:
    """`TRITON_LIBCUDA_PATH` (Triton's): path of the driver's library."""
    return os.environ.get("TRITON_LIBCUDA_PATH") or None


def c_compiler() -> str | None:
    """`CC`: C compiler that Triton uses."""
    return os.environ.get("CC") or None


def library_path() -> list[Path]:
    return [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]


def keep_triton_cache() -> None:
    """Make Triton keep kernels compiled from now on in `triton_cache()`, unless the user has set `TRITON_CACHE_DIR` and
    not `QUIRE_TRITON_CACHE`."""
    if os.environ.get("QUIRE_TRITON_CACHE") or not os.environ.get("TRITON_CACHE_DIR"):
        os.environ["TRITON_CACHE_DIR"] = str(triton_cache())


def triton_cache() -> Path:
    """`QUIRE_TRITON_CACHE`: directory of compiled kernels, for all processes and later runs. Default: `quire/triton` in
    the user's cache directory."""
    named = os.environ.get("QUIRE_TRITON_CACHE")
    if named:
        return Path(named).expanduser()
    return cache_directory() / "triton"


def cache_directory() -> Path:
    """`quire` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def state_directory() -> Path:
    """`quire` in the user's state directory (`XDG_STATE_HOME`)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "quire"


def api_key() -> str | None:
    """`QUIRE_API_KEY`: key of `quire serve` without `--api-key` and `--api-key-file`."""
    return os.environ.get("QUIRE_API_KEY") or None


def vllm_api_key() -> str | None:
    """`VLLM_API_KEY` (vLLM's), read for `python -m quire.cli.vllm` alone."""
    return os.environ.get("VLLM_API_KEY") or None


def use_hub_token(token: str) -> None:
    """Set the hub library's `HF_TOKEN` for this process and its later children."""
    os.environ["HF_TOKEN"] = token


def runtime_directory() -> Path:
    """`QUIRE_RUNTIME_DIR`: directory of ipc sockets. Default: the system's temporary directory."""
    import tempfile

    return Path(os.environ.get("QUIRE_RUNTIME_DIR") or tempfile.gettempdir())


def notify_socket() -> str | None:
    """`NOTIFY_SOCKET` (systemd's): socket on which a service of `Type=notify` reports that it is ready. A leading `@`
    stands for the NUL of an abstract address."""
    path = os.environ.get("NOTIFY_SOCKET")
    return path.replace("@", "\0", 1) if path and path.startswith("@") else path or None


def take_passed_sockets() -> int:
    """Remove systemd's `LISTEN_PID`, `LISTEN_FDS` and `LISTEN_FDNAMES`, so no child takes the sockets; return the
    number of sockets passed to this process, from descriptor 3 on."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    return int(count) if pid == str(os.getpid()) and count.isdecimal() else 0


def affinity_cores() -> int:
    """Cores that this process may run on (honours taskset and cgroup cpusets)."""
    return len(affinity_numbers())


def affinity_numbers() -> list[int]:
    """Ids of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


OPENMP_SPIN_COUNT = "100000"


def limit_openmp_spinning() -> None:
    """Let waiting threads of torch's OpenMP runtime (GNU's) spin for less time, unless `GOMP_SPINCOUNT` or
    `OMP_WAIT_POLICY` is set. Only effective before torch is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)


def prepare_for_forks(stack_bytes: int) -> None:
    """Prepare libraries for forks: the tokenizers library makes no thread pool, and Rust's threads get `stack_bytes` of
    stack."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RUST_MIN_STACK"] = str(stack_bytes)


def keep_ray_to_itself() -> None:
    """Turn Ray's usage reports off unless `RAY_USAGE_STATS_ENABLED` is set. Only effective before Ray is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def launcher_address() -> str:
    """`MASTER_ADDR`: address of the store of a launcher such as torchrun."""
    return os.environ["MASTER_ADDR"]
