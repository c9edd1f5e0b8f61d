"""The processes of the engines that are compared: installed, started, measured, stopped between their turns."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.settings import Settings
from benchmarks.peers.workload import Request, Workload, shifted, speed
from quire.config.gguf import read_gguf

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPTS = {
    "quire": "run_quire.py",
    "vllm": "run_vllm.py",
    "llama.cpp": "run_llama_cpp.py",
    "openvino": "run_openvino.py",
    "ctranslate2": "run_ctranslate2.py",
    "mistral.rs": "run_mistral_rs.py",
    "transformers": "run_transformers.py",
}
CONVERTED = {
    "llama.cpp": ("f16", "{model}-{format}.gguf"),
    "openvino": ("fp16", "{model}-openvino-{format}"),
    "ctranslate2": ("float32", "{model}-ctranslate2-{format}"),
}
"""Peers with a model format of their own: its default, and the file or folder that `convert.py` writes."""
LONGEST = 8_192
"""Tokens that a request may have at least, so that peers which compile for it find what an earlier run compiled."""


@dataclass(frozen=True)
class Places:
    """venvs, models: folders. pip_args: added to each `pip install`."""

    venvs: Path
    models: Path
    pip_args: str = ""


class Engine:
    """The process of one engine, stopped unless it runs something. `ready_seconds`: from start until loaded.
    `loading_bytes`: the most memory that it had until then."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        self._runs = 0
        started = time.perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                start_new_session=True,
            )
        try:
            self.version = self._answer()["version"]
        except BaseException:
            self.close()
            raise
        self.ready_seconds = time.perf_counter() - started
        self.loading_bytes = self.peak_bytes()
        self._signal(signal.SIGSTOP)

    def speed(self, workload: Workload) -> float:
        """Run it once; tokens per second of the part that counts."""
        self._signal(signal.SIGCONT)
        try:
            return speed(workload, self._measure)
        finally:
            self._signal(signal.SIGSTOP)

    def peak_bytes(self) -> int:
        """The most memory that the engine has had until now: the peaks of its processes, added up. Pages of mapped
        files count, as the system counts them."""
        group = os.getpgid(self._process.pid)
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):  # of processes that ended meanwhile
                if os.getpgid(int(folder.name)) == group:
                    total += peak_of((folder / "status").read_text())
        return total

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _measure(self, requests: Sequence[Request], max_tokens: int | None) -> dict[str, float]:
        self._runs += 1
        assert self._process.stdin is not None
        line = json.dumps({"requests": shifted(requests, self._runs, max_tokens)})
        with suppress(BrokenPipeError):  # the missing answer says more
            print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"the engine ended; the last lines of {self._log}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        """To the process and to what it has started; nothing when they are gone."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def peak_of(status: str) -> int:
    """Bytes, of the text of /proc/PID/status; 0 for a process without memory."""
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def machine() -> dict[str, Any]:
    """What a reader must know to compare two results."""
    info = Path("/proc/cpuinfo").read_text()
    facts = dict(re.findall(r"^(model name|cpu family|model|vendor_id)\s*: (.*)$", info, re.MULTILINE))
    flags = set(info.partition("flags")[2].partition("\n")[0].split())
    sets = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_int8", "amx_bf16")
    return {
        "cpu": facts.get("model name", platform.machine()),
        "cpu_model": " ".join(facts[name] for name in ("vendor_id", "cpu family", "model") if name in facts),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": [name for name in sets if name in flags],
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def rooms(peer: str, model: Path, workloads: Sequence[Workload]) -> Settings:
    """What the peer must be told so that all requests of a workload fit in at once.

    model: folder with config.json, or a GGUF file.
    """
    longest = max(workload.longest for workload in workloads)
    num_tokens = max(workload.num_tokens + 128 * len(workload.requests) for workload in workloads)
    config = read_gguf(model).config if model.is_file() else json.loads((model / "config.json").read_text())
    longest = min(max(LONGEST, longest), config["max_position_embeddings"])
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    token_bytes = 2 * 4 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * size
    gib = max(1, math.ceil(1.1 * num_tokens * token_bytes / (1 << 30)))
    return {
        "quire": {"max_model_len": longest, "kv_cache_memory": f"{gib}GiB"},
        "vllm": {"max_model_len": longest, "kv_cache_gib": gib},
        "openvino": {"cache_size": gib},
    }.get(peer, {})


def prepare(peer: str, model: Path, settings: Settings, places: Places) -> tuple[Path, Path]:
    """The Python of the peer's environment and the model in its format, both made unless they are there.

    Raises CalledProcessError when that does not work.
    """
    if peer == "quire":
        return Path(sys.executable), model
    command = [sys.executable, str(HERE / "install.py"), peer, "--venvs", str(places.venvs)]
    subprocess.run([*command, f"--pip-args={places.pip_args}"], check=True)
    python = places.venvs / peer / "bin" / "python"
    if peer not in CONVERTED or model.is_file():
        return python, model
    default, pattern = CONVERTED[peer]
    kind = settings.get("format", default)
    converted = model.with_name(pattern.format(model=model.name, format=kind))
    if not converted.exists():
        subprocess.run([python, str(HERE / "convert.py"), peer, str(model), str(converted), kind], check=True)
    return python, converted


def start(peer: str, model: Path, settings: Settings, places: Places, threads: int, tag: str = "") -> Engine:
    """Prepare and start the engine, and wait until it is ready.

    tag: makes the name of the log its own. Raises CalledProcessError or RuntimeError with the reason.
    """
    python, converted = prepare(peer, model, settings, places)
    environment = dict(os.environ)
    if peer == "quire":
        environment["PYTHONPATH"] = str(ROOT)
    own = {"n_threads"} | ({"format"} if peer in CONVERTED else set())
    options = {name: value for name, value in settings.items() if name not in own}
    command = [str(python), str(HERE / SCRIPTS[peer]), "--model", str(converted)]
    command += ["--threads", str(settings.get("n_threads", threads)), "--options", json.dumps(options)]
    print(f"starting {peer} {shlex.join(f'{key}={value}' for key, value in settings.items())}", file=sys.stderr)
    logs = places.venvs / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return Engine(command, environment, logs / f"{peer}{tag}.log")
