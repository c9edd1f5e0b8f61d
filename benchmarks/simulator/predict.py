"""Predicted against measured latencies of the engine on this machine.

    python benchmarks/simulator/predict.py [--model bundled|smollm2-135m|DIR] [--seconds 15] [--rounds 10] [--json FILE]

One engine with a step log serves runs of requests that arrive as a Poisson process, through its core and with the
machine's own clock: a run of the calibrated workload, one of the predicted workload, and so on in turns, so that each
predicted run has a calibrated one right before and right after it and both see the same machine. The factors and the
jitter of the cost model are fitted to the steps of all calibrated runs. The very requests of the predicted runs are
simulated with these, REPEATS times with other seeds, and without the jitter. The table compares the mean and the P99 of
the time to the first token (TTFT) and of the time per further token (TPOT) over the requests of all predicted runs, and
says between which values the measured number would lie in 95 % of such samples of requests (bootstrap): the P99 of a
thousand requests is the tenth largest of them. Workloads are NAME:RATE, a name of `quire simulate --workload` and
requests a second; they should differ in lengths and in rate.

The machine must be quiet: what else runs on it, or beside it on the same host, lengthens some steps and not others, and
one run's more than the next one's. So only quiet runs count, of either workload: those in which nine of ten steps with
single tokens took at most QUIET times what they usually take in the quietest run. The others are counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.bench.metrics import percentile
from quire.cli.calibrate import fit_profile as calibrate_run
from quire.clock import Clock, SystemClock
from quire.config.model_shape import ModelShape
from quire.config.options import EngineOptions
from quire.engine.client import DEFAULT_EXECUTOR
from quire.engine.core import EngineCore
from quire.engine.loop import build_core
from quire.engine.messages import AddRequest
from quire.engine.step_log import StepLogHeader, StepRecord, read_step_log
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulator.calibration import work_of
from quire.simulator.cost import CostModel, Precision
from quire.simulator.hardware import Hardware, find, to_json
from quire.simulator.jitter import Jitter
from quire.simulator.replica import EngineSettings, Observer, Record, simulate
from quire.simulator.shape import built_in, find_shape
from quire.simulator.trace import TraceRequest
from quire.simulator.workloads import Arrivals, stream

BASE = "cpu-2-core-avx512"
LIMITS = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 512, "num_blocks_override": 2048}
DEFAULTS = {"bundled": ("sharegpt:2", "alpaca:12"), "smollm2-135m": ("sharegpt:0.6", "alpaca:2.2")}
"""Model -> calibrated workload, predicted workload: about half of what two cores can serve."""
WARM_UP_SECONDS = 5.0
QUANTITIES = ("TTFT mean", "TTFT P99", "TPOT mean", "TPOT P99")
QUIET = 1.5
REPEATS = 8
RESAMPLES = 500


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
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run (15)")
    parser.add_argument("--rounds", type=int, default=10, help="predicted runs (10)")
    parser.add_argument("--gpu", metavar="NAME", default=BASE, help=f"the profile to begin with ({BASE}), or its file")
    parser.add_argument("--num-threads", type=int, help="of the engine (default: one per core)")
    parser.add_argument("--queue-depth", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="write the profile fitted to all calibrated runs there")
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
    base, shape = find(options.gpu), find_shape(options.model)
    result = compare(shape, base, header, records, runs)
    hardware = result.pop("hardware")
    if options.profile:
        write_profile(options.profile, hardware, f"{options.model} ({header.backend})")
    show(options.model, workloads, result)
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
    the simulator: requests that arrived during a step are handed over before the next one."""
    chance = random.Random(0)
    first_step = core.stats().steps_total
    live, waiting = dict[str, TraceRequest](), deque[tuple[TraceRequest, EngineRequest]]()
    for number, request in enumerate(requests):
        waiting.append((request, engine_request(f"{first_step}-{number}", request, chance, vocab_size)))
    began = clock.now()
    first, served = dict[str, float](), list[Served]()
    slept_to = 0.0
    while waiting or live:
        now = max(clock.now() - began, slept_to)
        while waiting and waiting[0][0].arrival <= now:
            request, message = waiting.popleft()
            live[message.request_id] = request
            core.handle(AddRequest(message))
        if not core.has_work:
            slept_to = waiting[0][0].arrival
            sleep(slept_to - now)
            continue
        outputs = core.step()
        now = clock.now() - began
        if outputs.rejections:
            raise SystemExit(f"the engine refused a request: {outputs.rejections[0].message}")
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


def quiet(runs: Sequence[Run], records: Sequence[StepRecord], cost: CostModel) -> list[bool]:
    """For each run, whether nothing else disturbed it. cost: what steps take, up to a factor."""
    usual, long = [], []
    for run in runs:
        singles = [step for step in steps_of(run, records) if max(step.tokens, default=0) == 1]
        ratios = sorted(step.seconds / cost.step_seconds(work_of(step, cost.windows)) for step in singles)
        usual.append(percentile(ratios, 50))
        long.append(percentile(ratios, 90))
    return [each <= QUIET * min(usual) for each in long]


def compare(
    shape: ModelShape, base: Hardware, header: StepLogHeader, records: Sequence[StepRecord], runs: Sequence[Run]
) -> dict[str, Any]:
    """Fit to the steps of every other run, beginning with the first, simulate the requests of those between, and set
    both side by side. Raises SystemExit when no run of one of them was quiet."""
    precision = Precision.of(shape, header.weights, header.kv_cache_dtype)
    everything = calibrate_run(shape, base, header, [step for run in runs[::2] for step in steps_of(run, records)])
    good = quiet(runs, records, CostModel(shape, everything.hardware, precision=precision))
    calibrated = [run for run, is_good in zip(runs[::2], good[::2], strict=True) if is_good]
    measured = [run for run, is_good in zip(runs[1::2], good[1::2], strict=True) if is_good]
    if not calibrated or not measured:
        raise SystemExit("something else held the cores in every run of a workload")
    fit = calibrate_run(shape, base, header, [step for run in calibrated for step in steps_of(run, records)])
    usual = replace(fit.hardware, jitter=Jitter())
    served = [each for run in measured for each in run.served]
    predicted: list[Served] = []
    expected: list[Served] = []
    for number, run in enumerate(measured):
        expected += predict(shape, usual, precision, run.requests, header.queue_depth)
        for repeat in range(REPEATS):
            seed = number * REPEATS + repeat
            predicted += predict(shape, fit.hardware, precision, run.requests, header.queue_depth, seed)
    columns = zip(quantities(predicted), quantities(expected), quantities(served), intervals(served), strict=True)
    rows = {
        name: {"predicted": with_jitter, "without_jitter": without, "measured": found, "low": low, "high": high}
        for name, (with_jitter, without, found, (low, high)) in zip(QUANTITIES, columns, strict=True)
    }
    return {
        "num_requests": len(served),
        "num_left_out": good.count(False),
        "num_steps": fit.num_logged,
        "step_errors": {"median": fit.all_steps.median, "p95": fit.all_steps.p95},
        "rows": rows,
        "hardware": fit.hardware,
    }


def predict(
    shape: ModelShape,
    hardware: Hardware,
    precision: Precision,
    requests: Sequence[TraceRequest],
    queue_depth: int,
    seed: int = 0,
) -> list[Served]:
    """The same requests through the simulator."""
    served: list[Served] = []

    def take(record: Record) -> None:
        served.append(Served(record.ttft, record.tpot))

    settings = EngineSettings(**LIMITS, queue_depth=queue_depth, seed=seed)
    shape = replace(shape, max_model_len=max(shape.max_model_len, settings.max_model_len or 0))
    cost = CostModel(shape, hardware, precision=precision)
    simulate(iter(requests), cost, settings, observer=Observer(on_record=take))
    return served


def quantities(served: Sequence[Served]) -> tuple[float, float, float, float]:
    """QUANTITIES, in seconds."""
    first = sorted(each.ttft for each in served)
    further = sorted(each.tpot for each in served if each.tpot is not None)
    return statistics.fmean(first), percentile(first, 99), statistics.fmean(further), percentile(further, 99)


def intervals(served: Sequence[Served]) -> list[tuple[float, float]]:
    """Of QUANTITIES, what 95 % of samples of that number of requests, drawn from these, have."""
    chance = random.Random(0)
    drawn = [quantities(chance.choices(served, k=len(served))) for _ in range(RESAMPLES)]
    columns = [sorted(column) for column in zip(*drawn, strict=True)]
    return [(percentile(column, 2.5), percentile(column, 97.5)) for column in columns]


def write_profile(path: Path, hardware: Hardware, source: str) -> None:
    path.write_text(json.dumps(to_json(replace(hardware, source=f"fitted to steps of {source}")), indent=2) + "\n")


def show(model: str, workloads: tuple[str, str], result: dict[str, Any]) -> None:
    errors, left_out = result["step_errors"], result["num_left_out"]
    print(
        f"{model}: fitted to {result['num_steps']:,} steps of {workloads[0]} (median error {errors['median']:.1%}, P95 "
        f"{errors['p95']:.1%}), predicted {result['num_requests']:,} requests of {workloads[1]}; {left_out} runs "
        "disturbed and left out"
    )
    print(f"{'ms':<12}{'predicted':>10}{'measured':>10}{'95 % of samples':>20}{'off':>9}{'without jitter':>16}")
    for name, row in result["rows"].items():
        interval = f"{1e3 * row['low']:.2f} - {1e3 * row['high']:.2f}"
        print(
            f"{name:<12}{1e3 * row['predicted']:>10.2f}{1e3 * row['measured']:>10.2f}{interval:>20}"
            f"{row['predicted'] / row['measured'] - 1:>+9.1%}{row['without_jitter'] / row['measured'] - 1:>+16.1%}"
        )


if __name__ == "__main__":
    sys.exit(main())
