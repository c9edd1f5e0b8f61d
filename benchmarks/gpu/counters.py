"""Hardware counters of five kernels by Nsight Compute: python -m benchmarks.gpu.counters --out FILE --log FILE [--tiny]

Runs itself under `ncu` with --launch-only, and writes a record for each launch. --tiny: only launches, where there is
no `ncu`.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.gpu import records
from benchmarks.gpu.attention_subjects import DECODES, PROMPTS, AttentionSubjects
from benchmarks.gpu.records import Record
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from benchmarks.gpu.subjects import Products
from benchmarks.gpu.timing import Call
from quire.kernels.triton.weight_formats import E4M3, I4

METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "lts__t_sectors_op_read.sum",
    "launch__registers_per_thread",
    "launch__waves_per_multiprocessor",
)
"""A fixed list: asking the tool what a card has costs it seconds."""
TENSOR_PIPE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
"""Asked for first, and left out where the tool does not know it, which ends everything."""
TINY_SCALE = 512


def calls(device: torch.device, *, tiny: bool) -> list[Call]:
    """A decode of bfloat16 pages and one of FP8, a prompt, an FP8 and a 4-bit product of one row."""
    shape, scale = (TINY, TINY_SCALE) if tiny else (QWEN3_8B, 1)
    attention, products = AttentionSubjects(shape, device, scale), Products(shape, device, scale)
    decode, prompt = attention.scaled(DECODES[0]), attention.scaled(PROMPTS[0])
    n, k = 2 * shape.intermediate, shape.hidden
    return [
        attention.paged(decode),
        attention.paged(decode, page_dtype=torch.float8_e4m3fn),
        attention.paged(prompt),
        products.stored(1, n, k, E4M3.value),
        products.stored(1, n, k, I4.value),
    ]


def launch_only(device: torch.device, *, tiny: bool) -> None:
    """Each call before the profiler starts, so that nothing is compiled where counters are read, and once after."""
    with torch.inference_mode():
        found = calls(device, tiny=tiny)
        for call in found:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        for call in found:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def command(log: Path, metrics: Sequence[str]) -> list[str]:
    """Clocks are left alone: throttled ones are what the engine runs with, too."""
    options = ("--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all")
    page = ("--page", "raw", "--csv", "--print-units", "base", "--log-file", str(log))
    script = (sys.executable, "-m", "benchmarks.gpu.counters", "--launch-only")
    return ["ncu", *options, "--metrics", ",".join(metrics), *page, *script]


def parsed(text: str) -> Iterator[Record]:
    """Records of the raw page as CSV: a line of names, a line of units, and a line for each launch; other lines are the
    tool's own words. A value that is no number is left out."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        if row.get("ID"):
            counters = {
                name: number for name in (*METRICS, TENSOR_PIPE) if (number := _number(row.get(name))) is not None
            }
            yield {"what": "counters", "kernel": row["Kernel Name"], "grid": row.get("Grid Size", ""), **counters}


def _number(value: str | None) -> float | None:
    try:
        return float((value or "").replace(",", ""))
    except ValueError:
        return None


def measured(log: Path) -> Iterator[Record]:
    """What the tool says; why it says nothing, in its own words."""
    for metrics in ((*METRICS, TENSOR_PIPE), METRICS):
        try:
            run = subprocess.run(command(log, metrics), capture_output=True, text=True)
        except OSError as error:
            yield {"what": "counters", "error": str(error)}
            return
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if (found := list(parsed(text))) and run.returncode == 0:
            yield from found
            return
    said = (line for line in (text + run.stdout + run.stderr).splitlines() if line.startswith("==ERROR=="))
    yield {"what": "counters", "error": " ".join(said)[:500] or f"ncu gave none: {run.stdout[-300:]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--log", type=Path, help="ncu's own output")
    parser.add_argument("--launch-only", action="store_true", help="without ncu around it")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.launch_only or arguments.tiny:
        launch_only(torch.device("cpu" if arguments.tiny else "cuda"), tiny=arguments.tiny)
        return
    emit, failed = records.writer(arguments.out), False
    for record in measured(arguments.log):
        failed = failed or "error" in record
        emit({"part": "counters", **record})
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
