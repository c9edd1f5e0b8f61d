"""Times of kernels: many calls in one CUDA graph, so that launching costs nothing, over rotating operands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.kernels.measure import Timing

NUM_SAMPLES = 7
SAMPLE_SECONDS = 4e-3
"""A sample is at least this long: events are half a microsecond coarse."""
MAX_CALLS = 512
MAX_COPIES = 48
CACHE_BYTES = 60 << 20
"""Second-level cache of an H200. Operands come in copies enough to exceed it four times."""

Call = Callable[[], object]


def num_copies(operand_bytes: float, cache_bytes: int = CACHE_BYTES) -> int:
    """How many copies of the operands exceed the cache four times, up to MAX_COPIES: what is that small is found in the
    cache by the engine, too."""
    return min(MAX_COPIES, max(1, -(-4 * cache_bytes // max(1, int(operand_bytes)))))


def measure(calls: Sequence[Call], device: torch.device) -> Timing:
    """The time of one call. calls: do the same over different memory, and are made in turns."""
    return _measure_on_gpu(calls) if device.type == "cuda" else _measure_on_host(calls)


def repetitions(seconds: float, num_calls: int) -> int:
    """How often a round of `num_calls`, each taking `seconds`, is repeated in a sample."""
    rounds = round(SAMPLE_SECONDS / max(seconds * num_calls, 1e-9))
    return max(1, min(rounds, MAX_CALLS // num_calls))


def _measure_on_gpu(calls: Sequence[Call]) -> Timing:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiled, and workspaces made
            call()
        stream.synchronize()
        started = time.perf_counter()
        calls[0]()
        stream.synchronize()
        rounds = repetitions(time.perf_counter() - started, len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        samples = []
        for _ in range(NUM_SAMPLES):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / 1e3 / (rounds * len(calls)))
    return Timing(tuple(samples))


def _measure_on_host(calls: Sequence[Call]) -> Timing:
    """For trying things out in Triton's interpreter: what it gives says nothing of a card."""
    samples = []
    for _ in range(3):
        started = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - started) / len(calls))
    return Timing(tuple(samples))
