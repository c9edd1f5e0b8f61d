"""Predicted against measured latencies of the engine on this machine.

    python benchmarks/simulator/predict.py [--model bundled|smollm2-135m|DIR] [--seconds 120] [--rounds 3] [--json FILE]

One engine with a step log serves runs of requests that arrive as a Poisson process, through its core and with the
machine's own clock: a run of the calibrated workload, one of the predicted workload, and so on in turns, so that each
predicted run has a calibrated one right before and right after it. A round fits the factors of the cost model to the
steps of those two, simulates the very requests of the run between them, and compares the mean and the P99 of the time
to the first token (TTFT) and of the time per further token (TPOT). The last rows are medians over the rounds. Workloads
are NAME:RATE, a name of `quire simulate --workload` and requests a second; they should differ in lengths and in rate.

The machine must be quiet: what else runs on it lengthens some steps and not others.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.bench.metrics import percentile
from quire.clock import Clock, SystemClock
from quire.config.options import EngineOptions
from quire.engine.client import DEFAULT_EXECUTOR
from quire.engine.core import EngineCore
from quire.engine.loop import build_core
from quire.engine.messages import AddRequest
from quire.executors.step_log import StepLogHeader, StepRecord, read_step_log
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulator.calibration import Fit, calibrate, samples_of
from quire.simulator.cost import CostModel, Precision
from quire.simulator.hardware import Hardware, find
from quire.simulator.replica import EngineSettings, Observer, Record, simulate
from quire.simulator.shape import ModelShape, built_in, find_shape
from quire.simulator.trace import TraceRequest
from quire.simulator.workloads import Arrivals, stream

BASE = "cpu-2-core-avx512"
LIMITS = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 512, "num_blocks_override": 2048}
DEFAULTS = {"bundled": ("sharegpt:4", "alpaca:20"), "smollm2-135m": ("sharegpt:0.5", "alpaca:3")}
"""Model -> calibrated workload, predicted workload: somewhat above and below half of what two cores can serve."""
WARM_UP_SECONDS = 5.0
QUANTITIES = ("TTFT mean", "TTFT P99", "TPOT mean", "TPOT P99")


@dataclass(frozen=True)
class Served:
    """One request. Seconds; tpot: None for a single token."""

    ttft: float
    tpot: float | None


@dataclass(frozen=True)
class Run:
    """What a run of requests took, and which steps of the log are its."""

    requests: list[TraceRequest]
    served: list[Served]
    first_step: int
    last_step: int


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="bundled, smollm2-135m (random weights), or a directory")
    parser.add_argument("--calibrate-on", metavar="NAME:RATE", help="default: sharegpt, at a rate for the model")
    parser.add_argument("--predict", metavar="NAME:RATE", help="default: alpaca, at a rate for the model")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run (120)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, help="of the engine (default: one per core)")
    parser.add_argument("--queue-depth", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser


def main() -> int:
    options = build_parser().parse_args()
    usual = DEFAULTS.get(options.model, DEFAULTS["smollm2-135m"])
    workloads = (options.calibrate_on or usual[0], options.predict or usual[1])
    with tempfile.TemporaryDirectory(prefix="quire-predict-") as name:
        log = Path(name) / "steps.jsonl"
        engine = engine_options(options.model, Path(name), options.num_threads, options.queue_depth, log)
        runs = serve_in_turns(engine, workloads, options.seconds, options.rounds)
        header, records = read_step_log(log)
    base, shape = find(BASE), find_shape(options.model)
    rounds = []
    for number in range(options.rounds):
        before, between, after = runs[2 * number : 2 * number + 3]
        steps = [*steps_of(before, records), *steps_of(after, records)]
        rounds.append(compare(shape, base, header, steps, between))
        show(number, rounds[-1])
    result = summary(rounds)
    show_summary(options.model, workloads, result)
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, "workloads": workloads, **result}, indent=2))
    return 0


def engine_options(model: str, directory: Path, num_threads: int | None, depth: int, log: Path) -> EngineOptions:
    """Of the engine to measure. A built-in shape gets random weights."""
    keywords: dict[str, Any] = {**LIMITS, "step_log": str(log), "num_threads": num_threads, "queue_depth": depth}
    if model in built_in():
        (directory / "config.json").write_text(json.dumps(built_in()[model]))
        keywords |= {"model": str(directory), "load_format": "dummy"}
    else:
        keywords["model"] = model
    return EngineOptions.from_keywords(keywords)


def serve_in_turns(options: EngineOptions, workloads: tuple[str, str], seconds: float, rounds: int) -> list[Run]:
    """Runs of the first and the second workload in turns, beginning and ending with the first."""
    clock = SystemClock()
    core = build_core(options, DEFAULT_EXECUTOR)
    vocab_size = read_step_log(Path(str(options.step_log)))[0].vocab_size
    try:
        drive(core, requests_of(workloads[0], WARM_UP_SECONDS, seed=-1), clock, time.sleep, vocab_size)
        runs = []
        for number in range(2 * rounds + 1):
            workload = workloads[number % 2]
            print(f"run {number + 1} of {2 * rounds + 1}: {workload}, {seconds:g} s", file=sys.stderr)
            runs.append(drive(core, requests_of(workload, seconds, seed=number), clock, time.sleep, vocab_size))
    finally:
        core.shutdown()
    return runs


def requests_of(workload: str, seconds: float, seed: int) -> list[TraceRequest]:
    """The requests of NAME:RATE."""
    name, _, rate = workload.partition(":")
    return list(stream(name, Arrivals(float(rate), duration=seconds), seed))


def drive(
    core: EngineCore, requests: Sequence[TraceRequest], clock: Clock, sleep: Callable[[float], None], vocab_size: int
) -> Run:
    """Serve a trace as its requests arrive, by the clock, until all have ended. The same order of doing things as in
    the simulator: whoever arrived during a step is handed over before the next one."""
    chance = random.Random(0)
    first_step = core.stats().steps_total
    began = clock.now()
    waiting, live = list(reversed(requests)), dict[str, TraceRequest]()
    first, served = dict[str, float](), list[Served]()
    slept_to = 0.0
    while waiting or live:
        now = max(clock.now() - began, slept_to)
        while waiting and waiting[-1].arrival <= now:
            request = waiting.pop()
            name = f"{first_step}-{len(waiting)}"
            live[name] = request
            core.handle(AddRequest(engine_request(name, request, chance, vocab_size)))
        if not core.has_work:
            slept_to = waiting[-1].arrival
            sleep(slept_to - now)
            continue
        outputs = core.step()
        now = clock.now() - began
        if outputs.refusals:
            raise SystemExit(f"the engine refused a request: {outputs.refusals[0].message}")
        for update in outputs.updates:
            first.setdefault(update.request_id, now)
            if update.finish_reason is not None:
                request = live.pop(update.request_id)
                started, further = first.pop(update.request_id), request.output_tokens - 1
                tpot = (now - started) / further if further else None
                served.append(Served(started - request.arrival, tpot))
    return Run(list(requests), served, first_step, core.stats().steps_total)


def engine_request(name: str, request: TraceRequest, chance: random.Random, vocab_size: int) -> EngineRequest:
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
    token_ids = [chance.randrange(vocab_size) for _ in range(request.input_tokens)]
    return EngineRequest(
        request_id=name, prompt_token_ids=token_ids, params=params, max_tokens=request.output_tokens, seed=0
    )


def steps_of(run: Run, records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    return [record for record in records if run.first_step <= record.step < run.last_step]


def compare(
    shape: ModelShape, base: Hardware, header: StepLogHeader, steps: Sequence[StepRecord], run: Run
) -> dict[str, Any]:
    """Fit to the steps, simulate the run's requests, and set both side by side."""
    precision = Precision.of(shape, header.weights, header.kv_cache_dtype)
    windows = tuple(dict.fromkeys(shape.windows))
    fit = calibrate(shape, base, precision, samples_of(steps, windows), block_tokens=header.block_size)
    predicted = predict(shape, fit, precision, run.requests, header.queue_depth)
    rows = {}
    for name, expected, found in zip(QUANTITIES, quantities(predicted), quantities(run.served), strict=True):
        rows[name] = {"predicted": expected, "measured": found, "ratio": expected / found}
    errors = {"median": fit.all_steps.median, "p95": fit.all_steps.p95}
    return {"num_requests": len(run.served), "num_steps": fit.num_logged, "step_errors": errors, "rows": rows}


def predict(
    shape: ModelShape, fit: Fit, precision: Precision, requests: Sequence[TraceRequest], queue_depth: int
) -> list[Served]:
    """The same requests through the simulator."""
    served: list[Served] = []

    def take(record: Record) -> None:
        served.append(Served(record.ttft, record.tpot))

    settings = EngineSettings(**LIMITS, queue_depth=queue_depth)
    shape = replace(shape, max_model_len=max(shape.max_model_len, settings.max_model_len or 0))
    cost = CostModel(shape, fit.hardware, precision=precision)
    simulate(iter(requests), cost, settings, observer=Observer(on_record=take))
    return served


def quantities(served: Sequence[Served]) -> tuple[float, float, float, float]:
    """QUANTITIES, in seconds."""
    first = sorted(each.ttft for each in served)
    further = sorted(each.tpot for each in served if each.tpot is not None)
    return statistics.fmean(first), percentile(first, 99), statistics.fmean(further), percentile(further, 99)


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and the rounds themselves."""
    rows = {
        name: {key: statistics.median(each["rows"][name][key] for each in rounds) for key in rounds[0]["rows"][name]}
        for name in QUANTITIES
    }
    return {"median": rows, "rounds": list(rounds)}


def show(number: int, result: dict[str, Any]) -> None:
    errors = result["step_errors"]
    print(
        f"round {number + 1}: {result['num_requests']} requests; fitted to {result['num_steps']:,} steps, median error "
        f"{errors['median']:.1%}, P95 {errors['p95']:.1%}"
    )
    show_rows(result["rows"])


def show_rows(rows: dict[str, dict[str, float]]) -> None:
    for name, row in rows.items():
        print(
            f"  {name:<10} predicted {1e3 * row['predicted']:>9.2f} ms   measured {1e3 * row['measured']:>9.2f} ms   "
            f"{row['ratio'] - 1:>+7.1%}"
        )


def show_summary(model: str, workloads: tuple[str, str], result: dict[str, Any]) -> None:
    print(f"{model}, fitted on {workloads[0]}, predicted {workloads[1]}: medians of {len(result['rounds'])} rounds")
    show_rows(result["median"])


if __name__ == "__main__":
    sys.exit(main())
