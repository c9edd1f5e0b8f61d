"""Speed in `quire plan`: the simulator's cost of a step at lengths and batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from quire.cli.memory_plan import MemoryPlan
from quire.config.model_shape import DTYPE_BYTES
from quire.simulator.cost import CostModel
from quire.simulator.hardware import Factors, Hardware
from quire.simulator.work import StepWork
from quire.step import StepPlan

BATCH_STEP = 8
"""Factor between the batch sizes that `quire plan` reports: 1, 8, 64 ... and the largest that fits."""


@dataclass(frozen=True)
class Decoding:
    """Decoding of sequences of `num_tokens`, one token per step. step_seconds: time between a sequence's tokens, with
    the host's overhead. tokens_per_second: total of the batch. limit: "memory", "compute" or "overhead", the largest
    part of a step."""

    batch_size: int
    num_tokens: int
    step_seconds: float
    tokens_per_second: float
    limit: str


@dataclass(frozen=True)
class Speed:
    """Speed at one length: seconds to a prompt's first token on an idle engine, if known, and decoding."""

    num_tokens: int
    ttft_seconds: float | None
    decoding: tuple[Decoding, ...]


def predict(plan: MemoryPlan, cost: CostModel) -> tuple[Speed, ...]:
    return tuple(
        Speed(
            num_tokens=entry.num_tokens,
            ttft_seconds=_time_to_first_token(plan, cost, entry.num_tokens),
            decoding=tuple(_decoding(plan, cost, size, entry.num_tokens) for size in _batch_sizes(entry.batch_size)),
        )
        for entry in plan.lengths
    )


def bounds(plan: MemoryPlan, cost: CostModel) -> tuple[Speed, ...]:
    """Upper bounds of plain decoding: each step only reads the needed weights and every sequence's keys and values
    once, at the full bandwidth of all devices."""
    shape, bandwidth = cost.shape, cost.hardware.bandwidth * cost.layout.devices_per_replica
    per_parameter = (plan.weight_bytes - plan.draft_weight_bytes) / shape.parameters()

    def decoding(batch_size: int, num_tokens: int) -> Decoding:
        missed = 0.0
        if shape.experts is not None:
            missed = (1 - shape.experts.num_active / shape.experts.num_experts) ** batch_size
        read = shape.parameters() - shape.looked_up_parameters - missed * shape.routed_parameters
        kept = shape.matrix_bytes() + DTYPE_BYTES[cost.precision.kv] * sum(
            count * each.read_elements(num_tokens) for each, count in shape.attention_counts.items()
        )
        seconds = (read * per_parameter + batch_size * kept) / bandwidth
        return Decoding(batch_size, num_tokens, seconds, batch_size / seconds, "memory")

    return tuple(
        Speed(
            num_tokens=entry.num_tokens,
            ttft_seconds=None,
            decoding=tuple(decoding(size, entry.num_tokens) for size in _batch_sizes(entry.batch_size)),
        )
        for entry in plan.lengths
    )


def bandwidth_alone(memory: int, bandwidth: float) -> Hardware:
    anything = dict.fromkeys(("float32", "bfloat16", "float16", "float8", "int8"), math.inf)
    every = Factors(compute=1, bandwidth=1, attention_compute=1, attention_bandwidth=1, link=1, pcie=1)
    return Hardware(
        name="given",
        title="bandwidth as given",
        memory=memory,
        bandwidth=bandwidth,
        peaks=anything,
        link_bandwidth=math.inf,
        link_latency=0.0,
        pcie_bandwidth=math.inf,
        pcie_latency=0.0,
        launch_overhead=0.0,
        host_overhead=0.0,
        host_overhead_per_sequence=0.0,
        factors=every,
    )


def _batch_sizes(largest: int) -> Iterator[int]:
    size = 1
    while size < largest:
        yield size
        size *= BATCH_STEP
    if largest:
        yield largest


def _decoding(plan: MemoryPlan, cost: CostModel, batch_size: int, num_tokens: int) -> Decoding:
    work = _work(cost, [num_tokens - 1] * batch_size, [1] * batch_size, batch_size)
    seconds = _with_host(plan, cost, cost.step_seconds(work, overlapped=_is_overlapped(plan)), batch_size)
    return Decoding(
        batch_size=batch_size,
        num_tokens=num_tokens,
        step_seconds=seconds,
        tokens_per_second=batch_size / seconds,
        limit=_limit(cost, work),
    )


def _time_to_first_token(plan: MemoryPlan, cost: CostModel, num_tokens: int) -> float:
    scheduler = plan.config.scheduler
    chunk = min(scheduler.max_num_batched_tokens, scheduler.max_prefill_chunk or num_tokens)
    hardware = cost.hardware
    total = hardware.wake_overhead + hardware.host_overhead_per_new_sequence
    for start in range(0, num_tokens, chunk):
        count = min(chunk, num_tokens - start)
        is_last = start + count == num_tokens
        work = _work(cost, [start], [count], int(is_last))
        work.num_new = int(start == 0)
        seconds = cost.step_seconds(work)
        total += seconds + hardware.host_overhead + hardware.host_overhead_per_sequence
    return total


def _work(cost: CostModel, starts: list[int], counts: list[int], num_sampled: int) -> StepWork:
    sequences = list(range(len(starts)))
    return StepWork.of(StepPlan(0, sequences, starts, counts, sequences[:num_sampled], []), cost.windows)


def _is_overlapped(plan: MemoryPlan) -> bool:
    return plan.config.scheduler.queue_depth > 1


def _with_host(plan: MemoryPlan, cost: CostModel, seconds: float, batch_size: int) -> float:
    host = cost.hardware.host_overhead + batch_size * cost.hardware.host_overhead_per_sequence
    return max(seconds, host) if _is_overlapped(plan) else seconds + host


def _limit(cost: CostModel, work: StepWork) -> str:
    quiet = replace(
        cost.hardware,
        launch_overhead=0.0,
        token_overhead=0.0,
        sequence_overhead=0.0,
        new_sequence_overhead=0.0,
        link_latency=0.0,
        link_bandwidth=math.inf,
    )
    unlimited = replace(quiet, peaks=dict.fromkeys(quiet.peaks, math.inf))
    fast = replace(quiet, bandwidth=math.inf)

    def seconds(variant: Hardware) -> float:
        return CostModel(
            cost.shape, variant, cost.layout, cost.precision, expands_prompts=cost.expands_prompts
        ).step_seconds(work)

    memory, compute, total = seconds(unlimited), seconds(fast), cost.step_seconds(work)
    if max(memory, compute) < total / 2:
        return "overhead"
    return "memory" if memory >= compute else "compute"
