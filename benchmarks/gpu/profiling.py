"""What a card ran and when, by torch's profiler: kernels, the gaps between them, how busy it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.records import Record

LONG_GAP_SECONDS = 5e-6
"""Shorter gaps are those between the kernels of one graph, which no host has a part in."""
SETTLED_SHARE = 0.75
NUM_SHOWN = 16
"""Kernels and gaps in a record, the longest first."""


class KernelEvent(NamedTuple):
    """A kernel or copy. start, end: seconds."""

    start: float
    end: float
    name: str


@contextmanager
def kernel_events(device: torch.device) -> Iterator[list[KernelEvent]]:
    """While it is open, what the card runs is noted; the list is filled at its end. On a host operators stand for
    kernels."""
    found: list[KernelEvent] = []
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device.type == "cuda" else activity.CPU]) as profiler:
        yield found
        if device.type == "cuda":
            torch.cuda.synchronize()
    found += _on_device(profiler.profiler.kineto_results.events(), device)


def _on_device(events: Sequence[Any], device: torch.device) -> list[KernelEvent]:
    kind = torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    return [
        KernelEvent(event.start_ns() * 1e-9, (event.start_ns() + event.duration_ns()) * 1e-9, event.name())
        for event in events
        if event.device_type() == kind
    ]


def breakdown(events: Sequence[KernelEvent], num_steps: int) -> Record:
    """Where the time of `num_steps` steps went, without the first quarter of the kernels: a profiler that starts holds
    the host up for a while, and the card with it. Raises ValueError where the profiler saw nothing."""
    ordered = sorted(events)[len(events) - round(SETTLED_SHARE * len(events)) :]
    if not ordered:
        raise ValueError("no kernel was seen")
    counted = num_steps * SETTLED_SHARE
    kernels: dict[str, list[float]] = defaultdict(list)
    gaps: dict[str, list[float]] = defaultdict(list)
    until = ordered[0].end
    for event in ordered:
        kernels[event.name].append(event.end - event.start)
    for before, after in pairwise(ordered):
        until = max(until, before.end)
        if after.start > until:
            gaps[f"{before.name} -> {after.name}"].append(after.start - until)
    window = max(max(event.end for event in ordered) - ordered[0].start, 1e-12)
    idle = [seconds for times in gaps.values() for seconds in times]
    return {
        "launches_per_step": len(ordered) / counted,
        "busy": 1 - sum(idle) / window,
        "idle_between_steps": sum(seconds for seconds in idle if seconds > LONG_GAP_SECONDS) / window,
        "kernels": _longest_first(kernels, counted),
        "gaps": _longest_first(gaps, counted),
    }


def _longest_first(found: dict[str, list[float]], num_steps: float) -> list[Record]:
    ordered = sorted(found.items(), key=lambda item: sum(item[1]), reverse=True)[:NUM_SHOWN]
    return [
        {"name": name, "microseconds_per_step": 1e6 * sum(times) / num_steps, "times_per_step": len(times) / num_steps}
        for name, times in ordered
    ]
