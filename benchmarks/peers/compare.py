r"""Quire beside other engines, each with its fastest setting: same machine, same model, same token ids, in turns.

    python -m benchmarks.peers.compare vllm,openvino --bits 16 --workloads single,fixed16 --minutes 9 --json a.json

PEERS are any of vllm, openvino, llama.cpp, ctranslate2, mistral.rs, transformers, and quire (itself, with other
options). Each is installed into its own environment and the model is made and converted if that has not been done. A
peer that does not install or start is listed with the reason.

For every workload the fastest setting of each peer is searched first, in short runs: precision, precision of its KV
cache, format, flash attention, threads (benchmarks/peers/settings.py has the lists); --peer-options says it instead.
Then all engines stay loaded; those whose turn it is not are stopped by a signal, so that they cannot spin. The order
changes with every round, and the first round does not count. Outputs are greedy and go past end-of-sequence. Every run
shifts all token ids by another number: a prefix cache finds what the prompts of one run share, and nothing of earlier
runs.

A workload is a name in `workloads.json` or NxINPUT/OUTPUT (say 32x128/64), and may end in
  :prefill   one output token for each request
  :decode    the time of the whole less the time of `:prefill`, that is of all output tokens but the first

llama.cpp at 8 and 4 bits is compared on the same file: Q8_0; Q4_K_M, and Q4_0 beside it (--formats names others), one
comparison each. --file takes any GGUF file, and a model that make_gguf.py knows is one. Quire reads a file as it does
by default, unless --quire-options says more. By default decoding is timed apart from prompts.
`python -m benchmarks.peers.report a.json ...` makes tables of what --json wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.engine import HERE, SCRIPTS, Engine, Places, machine, prepare, rooms, start
from benchmarks.peers.make_gguf import FILES
from benchmarks.peers.report import as_text
from benchmarks.peers.settings import (
    BITS,
    FILE_FORMATS,
    QUIRE,
    Settings,
    Trial,
    axes_of,
    fastest,
    search,
    settings_of_file,
)
from benchmarks.peers.workload import Workload, parse_workload
from quire.cli.checkpoint import read_checkpoint

READERS = {"llama.cpp", "quire"}
"""Engines that read GGUF files."""
TRIAL_SHARE = 0.5
"""Of the time that --minutes gives: no more trials are begun after it."""
Chosen = Mapping[str, Mapping[str, Engine]]
"""By the name of an engine and of a workload."""


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


def limits_of_machine(threads: int) -> dict[str, float]:
    """The best of some runs of the loops of `make bench-kernels`, in 10^9 bytes or operations a second."""
    from benchmarks.kernels.run import BF16_PEAK, FLOAT_PEAK, INTEGER_PEAK, READ
    from benchmarks.kernels.subjects.machine import Machine

    names = {
        READ: "read GB/s",
        FLOAT_PEAK: "float32 GFLOP/s",
        BF16_PEAK: "bfloat16 GFLOP/s",
        INTEGER_PEAK: "int8 GOP/s",
    }
    best: dict[str, float] = {}
    for name, run in Machine("auto", threads).limits().items():
        for _ in range(20):
            began = time.perf_counter()
            best[names[name]] = max(best.get(names[name], 0.0), run() / (time.perf_counter() - began) / 1e9)
    return {name: round(rate, 1) for name, rate in best.items()}


class Trials:
    """Starts a peer in one setting after the other. What is the fastest at a workload stays loaded.

    start: (settings, number of the trial) -> the engine. Raises RuntimeError or CalledProcessError.
    """

    def __init__(self, start: Callable[[Settings, int], Engine], workloads: Sequence[Workload]) -> None:
        self._start, self._workloads = start, workloads
        self.trials: list[Trial] = []
        self._engines: list[Engine | None] = []

    def run(self, settings: Settings) -> Trial:
        speeds: dict[str, float] = {}
        error = engine = None
        try:
            engine = self._start(settings, len(self.trials))
            for workload in self._workloads:
                short = workload.trial()
                engine.speed(short)  # kernels are made for a shape when it comes for the first time
                speeds[workload.name] = engine.speed(short)
        except (RuntimeError, subprocess.CalledProcessError) as problem:
            error = str(problem)
            print(f"  {settings}: {error}", file=sys.stderr)
        trial = Trial(settings, speeds, error)
        print(f"  {settings}: { ({name: round(rate, 1) for name, rate in speeds.items()}) } tok/s", file=sys.stderr)
        self.trials.append(trial)
        self._engines.append(engine)
        self._close_slower()
        return trial

    def chosen(self) -> dict[str, tuple[Trial, Engine]]:
        """For each workload that some setting ran. Raises ValueError when none ran any."""
        found = {}
        for workload in self._workloads:
            if any(workload.name in trial.speeds for trial in self.trials):
                trial = fastest(self.trials, workload.name)
                engine = self._engines[self.trials.index(trial)]
                assert engine is not None
                found[workload.name] = (trial, engine)
        if not found:
            raise ValueError("; ".join(trial.error or "" for trial in self.trials))
        return found

    def close(self) -> None:
        for engine in self._engines:
            if engine is not None:
                engine.close()

    def _close_slower(self) -> None:
        names = {name for trial in self.trials for name in trial.speeds}
        best = [fastest(self.trials, name) for name in names]
        for place, (trial, engine) in enumerate(zip(self.trials, self._engines, strict=True)):
            if engine is not None and (trial.error or not any(trial is each for each in best)):
                engine.close()
                self._engines[place] = None


def take_turns(
    chosen: Chosen,
    workloads: Sequence[Workload],
    repeats: int,
    may_go_on: Callable[[], bool] = lambda: True,
    after_each: Callable[[dict[str, dict[str, list[float]]]], None] = lambda _: None,
) -> dict[str, dict[str, list[float]]]:
    """Speeds by workload and engine: one of each engine for each round but the first.

    Engines without a workload are left out of it. The engine that begins changes from round to round. may_go_on: asked
    before each workload of a round, from the first that counts. after_each: is told what is known so far.
    """
    samples: dict[str, dict[str, list[float]]] = {workload.name: {} for workload in workloads}
    for number in range(repeats + 1):
        for workload in workloads:
            if number and not may_go_on():
                return samples
            names = [name for name in chosen if workload.name in chosen[name]]
            first = number % len(names)
            speeds = {name: chosen[name][workload.name].speed(workload) for name in names[first:] + names[:first]}
            if number:
                for name in names:
                    samples[workload.name].setdefault(name, []).append(speeds[name])
                after_each(samples)
    return samples


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = json.loads((HERE / "workloads.json").read_text())
    add = parser.add_argument
    add("peers", metavar="PEER,...", help=", ".join(SCRIPTS))
    add("--model", default="smollm2-135m", help="one that make_models.py or make_gguf.py knows")
    add("--file", type=Path, metavar="F.gguf", help="a GGUF file in the model's place")
    add("--bits", type=int, choices=BITS, default=16, help="of the weights, on both sides")
    add("--formats", metavar="NAME,...", help="of the files for llama.cpp, such as q5_k_m,q6_k (default: by --bits)")
    add("--workloads", default="single:decode,prefill1k,fixed16:decode", metavar="WORKLOAD,...")
    add("--repeats", type=int, default=3, help="rounds that count")
    add("--minutes", type=float, default=60.0, help="for each model: no round begins after it, no trial after half")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine (default: one per core)")
    add("--quire-options", nargs="+", default=[], metavar="NAME=VALUE", help="of quire.LLM, beside what --bits says")
    add("--peer-options", nargs="+", default=[], metavar="NAME=VALUE", help="the peers' setting, instead of a search")
    add("--venvs", type=Path, default=HERE / ".venvs", help="folder of the peers' environments")
    add("--models", type=Path, default=HERE / ".models", help="folder of the models")
    add("--pip-args", default="", help="added to each pip install, such as an index of torch's CPU builds")
    add("--json", type=Path, help="write the result here too, after each round")
    arguments = parser.parse_args()
    try:
        arguments.workloads = [parse_workload(text, named) for text in arguments.workloads.split(",")]
        arguments.quire_options = parse_options(arguments.quire_options)
        arguments.peer_options = parse_options(arguments.peer_options)
    except ValueError as error:
        parser.error(str(error))
    arguments.peers = arguments.peers.split(",")
    if unknown := [peer for peer in arguments.peers if peer not in SCRIPTS]:
        parser.error(f"no peer is called {', '.join(unknown)}; there are {', '.join(SCRIPTS)}")
    if arguments.file is not None and not arguments.file.is_file():
        parser.error(f"--file: {arguments.file} is not a file")
    is_file = arguments.file is not None or arguments.model in FILES
    if is_file and (bad := set(arguments.peers) - READERS):
        parser.error(f"{', '.join(sorted(bad))}: {arguments.file or arguments.model} is a GGUF file, for llama.cpp")
    if is_file and arguments.formats:
        parser.error("--formats is for models that are not a GGUF file yet")
    arguments.formats = arguments.formats.split(",") if arguments.formats else FILE_FORMATS.get(arguments.bits, ())
    return arguments


def subjects(arguments: argparse.Namespace, places: Places) -> Iterator[tuple[Path, list[str]]]:
    """The models that are compared, folders and GGUF files, each with its peers. A file that is not there is made when
    its turn has come."""
    model = make_model(arguments.model, places.models) if arguments.file is None else arguments.file.resolve()
    on_files = "llama.cpp" in arguments.peers and bool(arguments.formats) and not model.is_file()
    others = [peer for peer in arguments.peers if not on_files or peer not in READERS]
    if others:
        yield model, others
    for kind in arguments.formats if on_files else ():
        _, file = prepare("llama.cpp", model, {"format": kind}, places)
        yield file, [peer for peer in arguments.peers if peer in READERS]


def make_model(name: str, models: Path) -> Path:
    """The folder or GGUF file of the model, written unless it is there."""
    is_file = name in FILES
    model = models / (f"{name}.gguf" if is_file else name)
    if not model.exists():
        script = "make_gguf" if is_file else "make_models"
        command = [sys.executable, "-m", f"benchmarks.peers.{script}", name, "--models", str(models)]
        subprocess.run(command, check=True, cwd=HERE.parents[1])
    return model


def types_of(file: Path) -> dict[str, int]:
    """Bytes of a GGUF file's tensors by their types."""
    checkpoint = read_checkpoint(file)
    assert checkpoint is not None, "it is a file"
    return dict(checkpoint.bytes)


class Comparison:
    """One model beside its peers. What is known so far is `result`, ready for JSON; write: stores it."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        places: Places,
        model: Path,
        peers: Sequence[str],
        write: Callable[[], None],
    ) -> None:
        self._arguments, self._places, self._model, self._peers = arguments, places, model, peers
        self._write = write
        self._began = time.perf_counter()
        self.result: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **machine(),
            "limits": limits_of_machine(arguments.threads),
            "model": model.stem if model.is_file() else model.name,
            "bits": arguments.bits,
            "types": types_of(model) if model.is_file() else {},
            "threads": arguments.threads,
            "engines": {},
            "units": {workload.name: workload.unit for workload in arguments.workloads},
            "samples": {},
        }

    def run(self, stack: ExitStack) -> None:
        """stack: closes the engines."""
        workloads = self._arguments.workloads
        options = {} if self._model.is_file() else QUIRE[self._arguments.bits]
        options = {**options, **self._arguments.quire_options}
        quire = self._start("quire", options, "-ours")
        stack.callback(quire.close)
        chosen: dict[str, dict[str, Engine]] = {"quire": dict.fromkeys((each.name for each in workloads), quire)}
        settings = dict.fromkeys(chosen["quire"], options)
        self.result["engines"]["quire"] = self._facts([quire]) | {"settings": settings}
        for number, peer in enumerate(self._peers):
            name = "quire, other options" if peer == "quire" else peer
            try:
                chosen[name] = self._search(peer, name, stack, (number + 1) / len(self._peers))
            except (ValueError, RuntimeError, subprocess.CalledProcessError) as error:
                self.result["engines"][name] = {"error": str(error)}
                print(f"{name} is left out: {error}", file=sys.stderr)

        def keep(samples: dict[str, dict[str, list[float]]]) -> None:
            self.result["samples"] = samples
            for name, engines in chosen.items():
                self.result["engines"][name] |= self._facts(list(engines.values()))
            self._write()

        take_turns(chosen, workloads, self._arguments.repeats, lambda: self._within(1.0), keep)

    def _search(self, peer: str, name: str, stack: ExitStack, share: float) -> dict[str, Engine]:
        """The fastest engine of a peer for each workload. share: of the time for trials that may be over after it."""
        trials = Trials(lambda settings, number: self._start(peer, settings, f"-{number}"), self._arguments.workloads)
        stack.callback(trials.close)
        if self._arguments.peer_options:
            trials.run(self._arguments.peer_options)
        else:
            axes = self._axes(peer)
            if not axes:
                raise ValueError(f"{peer} makes no weights of {self._arguments.bits} bits from this model")
            search(axes, trials.run, partial(self._within, share * TRIAL_SHARE))
        chosen = trials.chosen()
        self.result["engines"][name] = self._facts([engine for _, engine in chosen.values()]) | {
            "settings": {workload: trial.settings for workload, (trial, _) in chosen.items()},
            "trials": [
                {"settings": trial.settings, "speeds": trial.speeds, "error": trial.error} for trial in trials.trials
            ],
        }
        return {workload: engine for workload, (_, engine) in chosen.items()}

    def _axes(self, peer: str) -> dict[str, tuple[Any, ...]]:
        arguments, sets = self._arguments, self.result["instruction_sets"]
        if self._model.is_file():
            return settings_of_file(peer, arguments.threads, sets)
        return axes_of(peer, arguments.bits, arguments.threads, sets)

    def _start(self, peer: str, settings: Settings, tag: str) -> Engine:
        began = time.perf_counter()
        prepare(peer, self._model, settings, self._places)
        self._began += time.perf_counter() - began  # installing and converting happens once, and does not count
        options = {**rooms(peer, self._model, self._arguments.workloads), **settings}
        return start(peer, self._model, options, self._places, self._arguments.threads, tag)

    def _facts(self, engines: Sequence[Engine]) -> dict[str, Any]:
        """Of a peer; where it has several settings, the soonest to be ready and the smallest."""
        return {
            "version": engines[0].version,
            "ready_seconds": round(min(engine.ready_seconds for engine in engines), 2),
            "loading_bytes": min(engine.loading_bytes for engine in engines),
            "peak_bytes": min(engine.peak_bytes() for engine in engines),
        }

    def _within(self, share: float) -> bool:
        return time.perf_counter() - self._began < 60 * self._arguments.minutes * share


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # so that engines are closed
    places = Places(arguments.venvs.resolve(), arguments.models.resolve(), arguments.pip_args)
    results: list[dict[str, Any]] = []

    def write() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")

    for model, peers in subjects(arguments, places):
        comparison = Comparison(arguments, places, model, peers, write)
        results.append(comparison.result)
        with ExitStack() as stack:
            comparison.run(stack)
        write()
        print(as_text(comparison.result))


if __name__ == "__main__":
    main()
