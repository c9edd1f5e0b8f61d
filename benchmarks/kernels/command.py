"""`python -m benchmarks.kernels`: the native CPU kernels beside their plain twins and the limits of the machine."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from benchmarks.kernels.cases import KERNELS, QUICK, Selection, select
from benchmarks.kernels.measure import Method
from benchmarks.kernels.results import Result, limits_json, overall_limits, result_json
from benchmarks.kernels.run import Bench, Skipped, load_subjects
from benchmarks.kernels.targets import verdict_json, verdicts
from quire import envs
from quire.cli.bench_mode import Mode, count_flag, json_flag, options_json
from quire.cli.main import run_program
from quire.cli.parser import Parser
from quire.cli.session import interrupts_deferred
from quire.clock import SystemClock
from quire.errors import QuireError

PROGRAM = "python -m benchmarks.kernels"
CASE_SECONDS = 4.0
QUICK_SECONDS = 50.0
SETTLE_SECONDS = 0.01
"""After this long without work the threads of either side are asleep, not spinning on the other's core."""
MEMORY_SHARE = 0.7
"""Of the memory that is available at the start, what a case may take."""


def _flags(parser: Parser) -> None:
    cases = parser.add_argument_group("cases", "Each option takes names with commas between; default: all.")
    for option, text in (
        ("kernels", f"of {', '.join(KERNELS)}"),
        ("models", "whose sizes are taken: 135M, 0.6B, 1.7B, 8B"),
        ("shapes", "matrices (qkv, o, gate_up, down, lm_head), tokens of context of decode (256 to 16384), ..."),
        ("types", "of weights, or of keys and values: f32, bf16, f16, w16a16, int8, w8a8, int4, w4a8"),
    ):
        cases.add_argument(f"--{option}", metavar="LIST", type=_names, help=text)
    cases.add_argument("--rows", metavar="LIST", type=_numbers, help="tokens of a call (of decode: sequences)")
    cases.add_argument("--quick", action="store_true", help="a few cases in less than a minute; other options refine")
    method = parser.add_argument_group("method")
    method.add_argument("--seconds", metavar="S", type=_seconds, help="begin no case after this long (no end)")
    count_flag(method, "--threads", None, "threads of both sides (default: QUIRE_NUM_THREADS, else one a core)")
    method.add_argument(
        "--twins", action=argparse.BooleanOptionalAction, default=True, help="time torch's side too (yes)"
    )
    json_flag(method)


def _run(namespace: argparse.Namespace) -> int:
    from benchmarks.kernels import table
    from quire.cli import report

    report.check_writable(namespace.json)
    cases = select(_selection(namespace))
    seconds = namespace.seconds or (QUICK_SECONDS if namespace.quick else None)
    threads = namespace.threads or envs.num_threads() or envs.affinity_cores()
    bench, machine = _bench(threads, with_twins=namespace.twins)
    results: list[Result] = []
    skipped: list[Skipped] = []
    with report.progress_bar("cases", len(cases)) as tick:
        for outcomes in bench.run(cases, seconds, CASE_SECONDS):
            results += [outcome for outcome in outcomes if isinstance(outcome, Result)]
            skipped += [outcome for outcome in outcomes if isinstance(outcome, Skipped)]
            tick()
    found = verdicts(results)
    if results:
        title = f"kernels, {machine['isa']}, {machine['threads']} threads"
        table.print_run(report.console(), results, found, title)
    for line in map(_skipped_line, skipped):
        print(line)
    report.write_json(
        namespace.json,
        {
            "benchmark": "kernels",
            "options": options_json(namespace),
            "machine": machine,
            "limits": limits_json(overall_limits(results)) if results else None,
            "results": [result_json(result) for result in results],
            "targets": [verdict_json(verdict) for verdict in found],
            "skipped": [_skipped_line(skip) for skip in skipped],
        },
    )
    return 0 if results and all(result.sound for result in results) else 1


def _bench(num_threads: int, *, with_twins: bool) -> tuple[Bench, dict[str, Any]]:
    """What measures, and what a reader must know of the machine."""
    envs.limit_openmp_spinning()
    with interrupts_deferred():
        try:
            from benchmarks.kernels.subjects.machine import Machine
        except ImportError as error:
            raise QuireError(f"the native kernels cannot be loaded: {error}") from None
    from quire.worker.platform.host_memory import available_memory

    machine = Machine(envs.cpu_isa(), num_threads)
    bench = Bench(
        method=Method(clock=SystemClock(), pause=lambda: time.sleep(SETTLE_SECONDS)),
        limits=machine.limits(),
        subject=load_subjects(machine),
        memory=int(available_memory() * MEMORY_SHARE),
        with_twins=with_twins,
    )
    return bench, {"isa": machine.runtime.isa, "threads": num_threads, "cache_bytes": machine.cache_bytes}


def _skipped_line(skip: Skipped) -> str:
    return f"not measured: {skip.case.name} ({', '.join(skip.case.variants)}): {skip.reason}"


def _selection(namespace: argparse.Namespace) -> Selection:
    """What was named; with --quick, its choice for what was not."""
    default = QUICK if namespace.quick else Selection()
    names = [field.name for field in fields(Selection)]
    return replace(default, **{name: given for name in names if (given := getattr(namespace, name)) is not None})


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return seconds


_names.__name__ = "list of names"
_numbers.__name__ = "list of integers"
_seconds.__name__ = "number"

MODE = Mode(
    summary="native CPU kernels beside their plain twins and the machine's limits",
    arguments="[options]",
    description="Time every native CPU kernel beside its plain torch twin and the limits of this machine, in turns.",
    add_flags=_flags,
    run=_run,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and return the exit status, as `quire` does."""
    return run_program(PROGRAM, partial(MODE.main, PROGRAM), sys.argv[1:] if arguments is None else arguments)
