r"""Quire beside another engine: same machine, same model, same token ids, one run of each in turn.

    python benchmarks/peers/compare.py vllm --model smollm2-135m --workloads single,fixed16 --repeats 3 \
        --quire-options dtype=bfloat16

PEER is vllm, llama.cpp, openvino, transformers, or quire (itself, with other options). It is installed into its own
environment and the model is made and converted if that has not been done. Both engines stay loaded; the one whose turn
it is not is stopped by a signal, so that it cannot spin. The order changes with every repeat. Outputs are greedy and go
past end-of-sequence. Every run shifts all token ids by another number: a prefix cache finds what the prompts of one run
share, and nothing of earlier runs.

A workload is a name in `workloads.json` or NxINPUT/OUTPUT (say 32x128/64), and may end in
  :prefill   one output token for each request
  :decode    the time of the whole less the time of `:prefill`, that is of all output tokens but the first
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPTS = {
    "quire": "run_quire.py",
    "vllm": "run_vllm.py",
    "llama.cpp": "run_llama_cpp.py",
    "openvino": "run_openvino.py",
    "transformers": "run_transformers.py",
}
CONVERTED = {"llama.cpp": ("f16", "{model}-{format}.gguf"), "openvino": ("fp16", "{model}-openvino-{format}")}
"""Peers with a model format of their own: its default, and the file or folder that `convert.py` writes."""

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 3, 15_997
"""Prompts consist of ids in this range, which lies inside every model's vocabulary and holds no special token."""

Request = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """What is run, and which part of it counts. part: "all", "prefill" or "decode"."""

    name: str
    requests: tuple[Request, ...]
    part: str

    @property
    def unit(self) -> str:
        one_token_each = all(request["max_tokens"] == 1 for request in self.requests)
        return "input tok/s" if self.part == "prefill" or one_token_each else "output tok/s"


@dataclass
class Samples:
    """Speeds of both engines at one workload, a pair of each repeat."""

    workload: Workload
    quire: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.quire, self.peer, strict=True)]


def parse_workload(text: str, named: dict[str, list[Request]]) -> Workload:
    """Raises ValueError for what is neither a name nor a shape."""
    name, _, part = text.partition(":")
    if part not in ("", "prefill", "decode"):
        raise ValueError(f"{text}: the part is prefill or decode, not {part}")
    if name in named:
        requests = named[name]
    elif shape := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)/([1-9]\d*)", name):
        requests = random_requests(*map(int, shape.groups()))
    else:
        raise ValueError(f"no workload is called {name}; there are {', '.join(named)}, and NxINPUT/OUTPUT")
    if part == "decode" and all(request["max_tokens"] == 1 for request in requests):
        raise ValueError(f"{text}: one token each leaves nothing to decode")
    return Workload(text, tuple(requests), part or "all")


def random_requests(count: int, input_len: int, output_len: int) -> list[Request]:
    """Prompts that share no prefix; the same at each call."""
    return [
        {
            "prompt_token_ids": [(row * 7_919 + column * 104_729) % NUM_TOKEN_IDS for column in range(input_len)],
            "max_tokens": output_len,
        }
        for row in range(count)
    ]


def shifted(requests: Sequence[Request], run: int, max_tokens: int | None = None) -> list[Request]:
    """The requests of run number `run`: equal ids stay equal, and none is what it was in another run.

    max_tokens: instead of what each request says.
    """
    return [
        {
            "prompt_token_ids": [
                FIRST_TOKEN_ID + (token + run * 31) % NUM_TOKEN_IDS for token in request["prompt_token_ids"]
            ],
            "max_tokens": max_tokens or request["max_tokens"],
        }
        for request in requests
    ]


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE each; a value that is JSON is taken as such, any other as text. Raises ValueError without a "="."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError(f"{text}: expected NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


class Engine:
    """The process of one engine, stopped unless it runs something. `ready_seconds`: from start until loaded."""

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
        self._signal(signal.SIGSTOP)

    def speed(self, workload: Workload) -> float:
        """Run it once; tokens per second of the part that counts."""
        self._signal(signal.SIGCONT)
        try:
            return speed(workload, self._measure)
        finally:
            self._signal(signal.SIGSTOP)

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


def speed(workload: Workload, measure: Callable[[Sequence[Request], int | None], dict[str, float]]) -> float:
    """Tokens per second of the part of `workload` that counts.

    measure: (requests, max_tokens instead of their own) -> seconds, input_tokens and output_tokens.
    """
    if workload.part == "all":
        result = measure(workload.requests, None)
        return result["output_tokens" if workload.unit == "output tok/s" else "input_tokens"] / result["seconds"]
    prefill = measure(workload.requests, 1)
    if workload.part == "prefill":
        return prefill["input_tokens"] / prefill["seconds"]
    whole = measure(workload.requests, None)
    return (whole["output_tokens"] - prefill["output_tokens"]) / (whole["seconds"] - prefill["seconds"])


def alternate(quire: Engine, peer: Engine, workload: Workload, repeats: int) -> Samples:
    """One run of each that does not count, then `repeats` pairs; the engine that is first changes from pair to pair."""
    quire.speed(workload)
    peer.speed(workload)
    samples = Samples(workload)
    for repeat in range(repeats):
        turns = [(quire, samples.quire), (peer, samples.peer)]
        for engine, speeds in turns if repeat % 2 == 0 else reversed(turns):
            speeds.append(engine.speed(workload))
    return samples


def table(samples: Sequence[Samples], ready: tuple[float, float], peer: str) -> str:
    """Medians, the median of the ratios of the pairs, and the least and greatest of those."""
    width = max([len("workload"), *(len(each.workload.name) for each in samples)])
    lines = [f"{'workload':<{width}}  {'':<12} {'Quire':>9} {peer:>12} {'Quire/peer':>11}  least-greatest"]
    for each in samples:
        ratios = each.ratios
        lines.append(
            f"{each.workload.name:<{width}}  {each.workload.unit:<12} {statistics.median(each.quire):>9.1f} "
            f"{statistics.median(each.peer):>12.1f} {statistics.median(ratios):>11.2f}  "
            f"{min(ratios):.2f}-{max(ratios):.2f}"
        )
    ours, theirs = ready
    lines.append(
        f"{'ready':<{width}}  {'s':<12} {ours:>9.1f} {theirs:>12.1f} {theirs / ours:>10.1f}x  sooner (one start)"
    )
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What a reader must know to compare two results."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", info)
    flags = set(info.partition("flags")[2].partition("\n")[0].split())
    sets = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": [name for name in sets if name in flags],
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def start(name: str, model: Path, options: dict[str, Any], arguments: argparse.Namespace, log: Path) -> Engine:
    """Install and convert what is missing, then start the engine and wait until it is ready."""
    environment = dict(os.environ)
    python = sys.executable
    if name == "quire":
        environment["PYTHONPATH"] = str(ROOT)
    else:
        install = [str(HERE / "install.py"), name, "--venvs", str(arguments.venvs), f"--pip-args={arguments.pip_args}"]
        subprocess.run([sys.executable, *install], check=True)
        python = str(arguments.venvs / name / "bin" / "python")
    options = dict(options)
    if name in CONVERTED:
        default, pattern = CONVERTED[name]
        kind = options.pop("format", default)
        converted = model.with_name(pattern.format(model=model.name, format=kind))
        if not converted.exists():
            subprocess.run([python, str(HERE / "convert.py"), name, str(model), str(converted), kind], check=True)
        model = converted
    command = [python, str(HERE / SCRIPTS[name]), "--model", str(model), "--threads", str(arguments.threads)]
    print(f"starting {name} {shlex.join(f'{key}={value}' for key, value in options.items())}", file=sys.stderr)
    return Engine([*command, "--options", json.dumps(options)], environment, log)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = json.loads((HERE / "workloads.json").read_text())
    add = parser.add_argument
    add("peer", choices=SCRIPTS)
    add("--model", default="smollm2-135m", help="one that make_models.py knows")
    add("--workloads", default="single,prefill1k,fixed16,batch32", metavar="WORKLOAD,...")
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine (default: one per core)")
    add("--quire-options", nargs="+", default=[], metavar="NAME=VALUE", help="of quire.LLM")
    add("--peer-options", nargs="+", default=[], metavar="NAME=VALUE", help="see the peer's run_*.py; format=q8_0 ...")
    add("--venvs", type=Path, default=HERE / ".venvs", help="folder of the peers' environments")
    add("--models", type=Path, default=HERE / ".models", help="folder of the models")
    add("--pip-args", default="", help="added to each pip install, such as an index of torch's CPU builds")
    add("--json", type=Path, help="write the samples here too")
    arguments = parser.parse_args()
    try:
        arguments.workloads = [parse_workload(text, named) for text in arguments.workloads.split(",")]
        arguments.quire_options = parse_options(arguments.quire_options)
        arguments.peer_options = parse_options(arguments.peer_options)
    except ValueError as error:
        parser.error(str(error))
    arguments.venvs = arguments.venvs.resolve()
    arguments.models = arguments.models.resolve()
    return arguments


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # so that engines are closed
    model = arguments.models / arguments.model
    if not model.exists():
        script = str(HERE / "make_models.py")
        subprocess.run([sys.executable, script, arguments.model, "--models", str(arguments.models)], check=True)
    facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **machine()}
    logs = arguments.venvs / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        peer = start(arguments.peer, model, arguments.peer_options, arguments, logs / f"{arguments.peer}.log")
        stack.callback(peer.close)
        quire = start("quire", model, arguments.quire_options, arguments, logs / "ours.log")
        stack.callback(quire.close)
        samples = []
        for workload in arguments.workloads:
            print(f"running {workload.name}", file=sys.stderr)
            samples.append(alternate(quire, peer, workload, arguments.repeats))
    print(f"{arguments.model}, {facts['cpu']}, {arguments.threads} threads, Quire {quire.version}", end="")
    print(f" {arguments.quire_options or ''} beside {arguments.peer} {peer.version} {arguments.peer_options or ''}")
    print(table(samples, (quire.ready_seconds, peer.ready_seconds), arguments.peer))
    if arguments.json:
        result = {
            **facts,
            "model": arguments.model,
            "threads": arguments.threads,
            "quire": {"version": quire.version, "options": arguments.quire_options, "ready": quire.ready_seconds},
            "peer": {
                "name": arguments.peer,
                "version": peer.version,
                "options": arguments.peer_options,
                "ready": peer.ready_seconds,
            },
            "workloads": [
                {"name": each.workload.name, "unit": each.workload.unit, "quire": each.quire, "peer": each.peer}
                for each in samples
            ],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
