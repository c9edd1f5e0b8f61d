"""How long a card did nothing, from the times of its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

LONG_GAP_SECONDS = 5e-6
"""Shorter gaps are those between the kernels of one graph, which no host has a part in."""


SETTLED_SHARE = 0.75
T = TypeVar("T")


class KernelEvent(NamedTuple):
    """Of a kernel or copy. start, end: seconds."""

    start: float
    end: float
    name: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the time from the first kernel to the last: all gaps, and the long ones alone (between steps)."""

    all_gaps: float
    long_gaps: float
    num_kernels: int


def idle_shares(kernels: Iterable[tuple[float, float]], long_gap: float = LONG_GAP_SECONDS) -> Idle:
    """kernels: (start, end) in seconds, in any order, overlapping or not. Raises ValueError when there are none."""
    ordered = sorted(kernels)
    if not ordered:
        raise ValueError("no kernel was seen")
    first, until = ordered[0]
    gaps = []
    for start, end in ordered[1:]:
        if start > until:
            gaps.append(start - until)
        until = max(until, end)
    window = max(until - first, 1e-12)
    return Idle(sum(gaps) / window, sum(gap for gap in gaps if gap > long_gap) / window, len(ordered))


def settled(kernels: Sequence[T]) -> list[T]:
    """Without the first quarter: a profiler that starts holds the host up for a while, and the card with it."""
    return sorted(kernels)[len(kernels) - round(SETTLED_SHARE * len(kernels)) :]  # type: ignore[type-var]


@contextmanager
def kernel_events(device: torch.device) -> Iterator[list[KernelEvent]]:
    """While it is open, what the card runs (kernels and copies) is noted; the list is filled at its end. On a host
    operators stand for kernels."""
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
