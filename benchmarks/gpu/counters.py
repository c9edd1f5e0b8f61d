"""Hardware counters of the kernels by Nsight Compute: python -m benchmarks.gpu.counters --out FILE --log FILE [--tiny]

Runs benchmarks/gpu/counted.py under `ncu` and writes a record for each launch: the share of the memory's and the tensor
cores' throughput, issue slots, bank conflicts, sectors read, registers, occupancy.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu import records
from benchmarks.gpu.records import Record

METRICS = {
    "gpu__time_duration": ".sum",
    "dram__throughput": ".avg.pct_of_peak_sustained_elapsed",
    "sm__throughput": ".avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor": ".avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active": ".avg.pct_of_peak_sustained_active",
    "smsp__issue_active": ".avg.pct_of_peak_sustained_active",
    "sm__warps_active": ".avg.pct_of_peak_sustained_active",
    "l1tex__data_bank_conflicts_pipe_lsu": ".sum",
    "lts__t_sectors_op_read": ".sum",
}
"""Which of them a card has, the tool is asked: a name that it does not know ends everything."""
OF_THE_LAUNCH = (
    "launch__registers_per_thread",
    "launch__waves_per_multiprocessor",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
)
"""Known on every card."""
SECTIONS = ("SpeedOfLight", "SchedulerStats", "Occupancy", "LaunchStats", "MemoryWorkloadAnalysis_Tables")
"""Where the tool does not say what it has: they take several times as long."""
SCRIPT = (sys.executable, "-m", "benchmarks.gpu.counted")


def available() -> list[str]:
    """Metrics to read; empty where the tool does not say."""
    run = subprocess.run(("ncu", "--query-metrics"), capture_output=True, text=True)
    words = set(run.stdout.split())
    return [name + rollup for name, rollup in METRICS.items() if name in words]


def command(log: Path, metrics: Sequence[str], *, tiny: bool) -> list[str]:
    """Clocks are left alone: throttled ones are what the engine runs with, too."""
    wanted = ["--metrics", ",".join((*metrics, *OF_THE_LAUNCH))] if metrics else []
    if not metrics:
        wanted = [word for section in SECTIONS for word in ("--section", section)]
    options = ("--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all")
    page = ("--page", "raw", "--csv", "--print-units", "base", "--log-file", str(log))
    return ["ncu", *options, *wanted, *page, *SCRIPT, *(["--tiny"] if tiny else [])]


def parsed(text: str) -> Iterator[Record]:
    """Of the raw page as CSV: a line of names, a line of units, and a line for each launch; other lines are the tool's
    own words. A value that is no number is left out."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        return
    rows = csv.DictReader(io.StringIO("\n".join(line for line in lines[first:] if line.startswith('"'))))
    for row in rows:
        if row["ID"]:
            counters = {name: number for name, value in row.items() if (number := _number(name, value)) is not None}
            yield {"what": "counters", "kernel": row["Kernel Name"], "grid": row.get("Grid Size", ""), **counters}


def _number(name: str, value: str | None) -> float | None:
    if not name.startswith((*METRICS, *OF_THE_LAUNCH)) or value is None:
        return None
    try:
        return float(value.replace(",", ""))
    except ValueError:
        return None


def failure(log: str, output: str) -> str:
    """Why there are no counters, in the tool's words."""
    said = [line for line in [*log.splitlines(), *output.splitlines()] if line.startswith("==ERROR==")]
    return " ".join(said)[:500] or f"no counters in ncu's log; it said: {output[-300:]}"


def measured(log: Path, *, tiny: bool) -> Iterator[Record]:
    if shutil.which("ncu") is None:
        yield {"what": "counters failed", "error": "ncu is not on the PATH"}
        return
    run = subprocess.run(command(log, available(), tiny=tiny), capture_output=True, text=True)
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    found = list(parsed(text))
    yield from found
    if not found or run.returncode:
        yield {"what": "counters failed", "error": failure(text, run.stdout + run.stderr)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True, help="ncu's own output")
    parser.add_argument("--tiny", action="store_true")
    namespace = parser.parse_args(arguments)
    emit = records.writer(namespace.out)
    failed = False
    for record in measured(namespace.log, tiny=namespace.tiny):
        failed = failed or "error" in record
        emit({"part": "counters", **record})
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
