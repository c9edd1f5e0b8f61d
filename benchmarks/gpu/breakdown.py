"""Where a decode step's time goes: python -m benchmarks.gpu.breakdown --out FILE [--max-model-lens 40960,4096] [--tiny]

Steps of 1, 32 and 256 sequences with full CUDA graphs under torch's profiler: microseconds and launches of each kernel,
the gaps between kernels, how busy the card was, and the host's part. Once for each length that an engine may be
configured with, because full graphs plan their splits for the longest sequence. --tiny: operators of a tiny shape in
Triton's interpreter stand for kernels.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.gpu import records
from benchmarks.gpu.engine import Engine, engine_setup, host_times
from benchmarks.gpu.idle import SETTLED_SHARE, KernelEvent, idle_shares, kernel_events, settled
from benchmarks.gpu.records import Record
from benchmarks.gpu.step_log import STEPS
from benchmarks.gpu.workloads import Workload

SIZES = (1, 32, 256)
PROMPT = 1024
CHUNK = 7936
"""Tokens of prompts in a step: the budget of 8192 less one for each of 256 sequences that decode."""
NUM_STEPS = 8
"""That are profiled, after as many that are not."""
NUM_SHOWN = 16
"""Kernels and gaps in a record, the longest first."""


@dataclass(frozen=True, slots=True)
class Row:
    """Of one kernel, or of the gaps between two, over all steps."""

    name: str
    seconds: float
    count: int

    def to_json(self, num_steps: float) -> Record:
        return {
            "name": self.name,
            "microseconds_per_step": 1e6 * self.seconds / num_steps,
            "times_per_step": self.count / num_steps,
        }


def by_kernel(events: Sequence[KernelEvent]) -> list[Row]:
    """The longest in total first."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[event.name].append(event.end - event.start)
    return _longest_first(found)


def by_gap(events: Sequence[KernelEvent]) -> list[Row]:
    """Time between the end of a kernel and the start of the next, by the names of both."""
    found: dict[str, list[float]] = defaultdict(list)
    ordered = sorted(events, key=lambda event: event.start)
    for before, after in pairwise(ordered):
        if after.start > before.end:
            found[f"{before.name} -> {after.name}"].append(after.start - before.end)
    return _longest_first(found)


def _longest_first(found: dict[str, list[float]]) -> list[Row]:
    rows = [Row(name, sum(times), len(times)) for name, times in found.items()]
    return sorted(rows, key=lambda row: row.seconds, reverse=True)


def first_profiled(work: Workload, num_steps: int) -> int:
    """The step at which the profile begins: all prompts are computed, and as many decode steps as are profiled."""
    return sum(work.input_lens) // CHUNK + num_steps


def profiled_events(engine: Engine, work: Workload, num_steps: int, device: torch.device) -> list[KernelEvent]:
    """Of `num_steps` steps in the middle of a run."""
    found: list[KernelEvent] = []
    profile = kernel_events(device)
    begin = first_profiled(work, num_steps)

    def on_step(number: int) -> None:
        nonlocal found
        if number == begin:
            found = profile.__enter__()
        elif number == begin + num_steps:
            profile.__exit__(None, None, None)

    engine.run(work, seed=5, on_step=on_step)
    return found


def breakdown(engine: Engine, num_seqs: int, device: torch.device, *, tiny: bool) -> Record:
    """One record. Raises ValueError where the profiler saw nothing."""
    num_steps = 2 if tiny else NUM_STEPS
    prompt = 5 if tiny else PROMPT
    work = Workload(num_seqs, prompt, 0)
    # The first sequence gets a token in each step while the last one's prompt is still computed: it must not end before
    # the profile does.
    work = replace(work, output_len=first_profiled(work, num_steps) + 3 * num_steps)
    engine.run(work, seed=4)
    host = host_times(list(STEPS), num_seqs)
    events = settled(profiled_events(engine, work, num_steps, device))
    idle = idle_shares([(event.start, event.end) for event in events])
    counted = num_steps * SETTLED_SHARE
    return {
        "what": "breakdown",
        "num_seqs": num_seqs,
        "launches_per_step": len(events) / counted,
        "busy": 1 - idle.all_gaps,
        "idle_between_steps": idle.long_gaps,
        "kernels": [row.to_json(counted) for row in by_kernel(events)[:NUM_SHOWN]],
        "gaps": [row.to_json(counted) for row in by_gap(events)[:NUM_SHOWN]],
        **host,
    }


def measured(max_model_len: int, device: torch.device, *, tiny: bool) -> Iterator[Record]:
    sizes = (1, 2) if tiny else SIZES
    shape, options = engine_setup("full", tiny=tiny, max_model_len=max_model_len)
    if not tiny:
        options |= {"cuda_graphs": "full", "cuda_graph_sizes": list(sizes)}
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(shape, options, Path(directory) / "model")
        try:
            for num_seqs in sizes:
                try:
                    yield breakdown(engine, num_seqs, device, tiny=tiny)
                except ValueError as error:
                    yield {"what": "breakdown", "num_seqs": num_seqs, "error": str(error)}
        finally:
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-model-lens", default="40960,4096")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    emit = records.writer(arguments.out)
    device = torch.device("cpu" if arguments.tiny else "cuda")
    for max_model_len in [int(word) for word in arguments.max_model_lens.split(",")]:
        for record in measured(max_model_len, device, tiny=arguments.tiny):
            emit({"part": "breakdown", "max_model_len": max_model_len, **record})
        # The next engine needs the memory of this one.
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
