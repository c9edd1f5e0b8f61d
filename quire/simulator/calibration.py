"""Fit of the cost model to logged steps of a real run (docs/calibration.md): the reached share of a device's limits,
and a step's other costs. Numbers that a log does not determine keep their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config.model_shape import ModelShape
from quire.engine.step_log import StepRecord
from quire.errors import UserError
from quire.simulator.cost import CostModel, Precision
from quire.simulator.hardware import CACHED, IDLE_SECONDS, Hardware
from quire.simulator.jitter_fit import fit_jitter
from quire.simulator.regression import not_negative
from quire.simulator.work import StepWork, Windows
from quire.step import HostTransfers, StepPlan

Vector = npt.NDArray[np.float64]

MIN_STEPS = 30
MIN_IDLE = 5
"""Least steps after idle time for a fit of their extra seconds."""
MAX_STEPS = 1500
"""Limit of fitted steps, taken evenly from a longer log."""
FEWEST_ROWS = 3
"""First steps of a run, left out."""
ITERATIONS = 60
DIFFERENCE = 1e-3
PRIOR = 1e-5
"""Weight of a profile's former value relative to a step."""
LEAST_SPREAD = 0.02
USUAL = 1.5
"""Residuals beyond this number of spreads count linearly."""
TRUSTING = 20
"""Iterations in which nearly every step counts fully ..."""
ALL = 10.0
"""... up to a factor of e to this."""
TOLD = 0.01
"""Relative change of predicted times, per that of a number, below which the log does not determine it."""
NO_TIME = 1e-9


@dataclass(frozen=True)
class Parameter:
    """Number of a hardware profile to fit, on a logarithmic scale. start: first value if the profile's is zero."""

    name: str
    lowest: float
    highest: float
    start: float = 0.0


PARAMETERS = (
    Parameter("compute", 0.01, 1.0),
    Parameter("bandwidth", 0.01, CACHED),
    Parameter("attention_compute", 0.005, 1.0),
    Parameter("attention_bandwidth", 0.005, CACHED),
    Parameter("half_rows", 0.01, 256.0, start=1.0),
    Parameter("launch_overhead", NO_TIME, 1e-3, start=1e-6),
    Parameter("token_overhead", NO_TIME, 1e-2, start=1e-5),
    Parameter("sequence_overhead", NO_TIME, 1e-2, start=1e-5),
    Parameter("new_sequence_overhead", NO_TIME, 1e-1, start=1e-4),
)
FACTORS = ("compute", "bandwidth", "attention_compute", "attention_bandwidth")
SCALED_UP = ("launch_overhead", "token_overhead", "sequence_overhead", "new_sequence_overhead")
"""Parameters that grow when everything takes longer; FACTORS fall."""


@dataclass(frozen=True)
class Sample:
    """Logged step for the fit, in seconds. gap: seconds on the host before it; None if they may be idle time. at:
    seconds from the log's first step. follows_idle: no step ran for IDLE_SECONDS before it."""

    work: StepWork
    seconds: float
    gap: float | None
    at: float
    follows_idle: bool = False


@dataclass(frozen=True)
class Errors:
    """Relative errors of predicted step times: median and 95th percentile of their sizes; signed error of the sum."""

    count: int
    median: float
    p95: float
    total: float


@dataclass(frozen=True)
class Fit:
    """Result of `calibrate`. hardware: fitted profile. told: names of the numbers that the log determines."""

    hardware: Hardware
    told: frozenset[str]
    num_logged: int
    all_steps: Errors
    decode_steps: Errors | None
    """Errors of steps in which every sequence computes one token."""
    other_steps: Errors | None


def samples_of(records: Sequence[StepRecord], windows: Windows) -> list[Sample]:
    """Samples of steps that computed something and did not swap, nor followed one that swapped."""
    found = []
    was_swapping = False
    for record in records[FEWEST_ROWS:]:
        swaps = bool(record.num_swapped_in or record.num_swapped_out)
        if record.tokens and not swaps and not was_swapping:
            gap = record.gap if record.num_carried else None
            follows_idle = not record.num_carried and record.gap > IDLE_SECONDS
            found.append(Sample(work_of(record, windows), record.seconds, gap, record.at, follows_idle))
        was_swapping = swaps
    return found


def work_of(record: StepRecord, windows: Windows) -> StepWork:
    work = StepWork.of(plan_of(record), windows)
    work.num_new = len(record.tokens) - record.num_carried
    return work


def plan_of(record: StepRecord) -> StepPlan:
    """StepPlan of a log's record, for its work; it does not say which sequences are new."""
    return StepPlan(
        step_id=record.step,
        seq_ids=list(range(len(record.tokens))),
        start_positions=record.starts,
        num_tokens=record.tokens,
        sample_seq_ids=[0] * record.num_sampled,
        sample_from=[0] * record.num_sampled,
        block_copies=[(0, 0)] * record.num_copies,
        transfers=HostTransfers([(0, 0)] * record.num_swapped_out, [(0, 0)] * record.num_swapped_in),
    )


def calibrate(
    shape: ModelShape, hardware: Hardware, precision: Precision, samples: Sequence[Sample], *, block_tokens: int = 16
) -> Fit:
    """Fit the numbers of PARAMETERS, and the host's overhead. Raises UserError for too few steps."""
    awake = [sample for sample in samples if not sample.follows_idle]
    if len(awake) < MIN_STEPS:
        raise UserError(f"a calibration needs {MIN_STEPS} steps, and the log has {len(awake)} that can be used")

    def predict(values: Vector, works: Sequence[StepWork]) -> Vector:
        cost = CostModel(shape, with_values(hardware, values), precision=precision)
        cost.block_tokens = block_tokens
        return np.array([cost.step_seconds(work) for work in works])

    chosen = _evenly(awake, MAX_STEPS)
    works, measured = [sample.work for sample in chosen], np.array([sample.seconds for sample in chosen])
    logarithms = np.log(measured)
    start = np.log([_start(parameter, hardware) for parameter in PARAMETERS])
    values, jacobian = _least_squares(lambda x: np.log(predict(np.exp(x), works)) - logarithms, start)
    predicted = predict(np.exp(values), works)
    values = _rescaled(values, float(_usual(measured, predicted)))
    every = predict(np.exp(values), [sample.work for sample in samples])
    seconds, follows_idle = (
        np.array(each) for each in zip(*((s.seconds, s.follows_idle) for s in samples), strict=True)
    )
    fitted = _with_host(with_values(hardware, np.exp(values)), chosen)
    if follows_idle.sum() >= MIN_IDLE:
        late = float(np.median((seconds - every)[follows_idle]))
        fitted = replace(fitted, wake_overhead=max(0.0, late))
    every = every + fitted.wake_overhead * follows_idle
    is_decode = np.array([sample.work.num_chunks == 0 for sample in samples])
    jitter = fit_jitter(seconds, every, np.array([sample.at for sample in samples]), ~is_decode)
    told = {
        parameter.name
        for parameter, column in zip(PARAMETERS, jacobian.T, strict=True)
        if float(np.quantile(np.abs(column), 0.95)) > TOLD
    }
    return Fit(
        hardware=replace(fitted, jitter=jitter),
        told=frozenset(told),
        num_logged=len(samples),
        all_steps=_errors(seconds, every),
        decode_steps=_errors(seconds[is_decode], every[is_decode]) if is_decode.any() else None,
        other_steps=_errors(seconds[~is_decode], every[~is_decode]) if not is_decode.all() else None,
    )


def with_values(hardware: Hardware, values: Vector) -> Hardware:
    """Profile with fitted numbers, in the order of PARAMETERS."""
    named = {parameter.name: float(value) for parameter, value in zip(PARAMETERS, values, strict=True)}
    others: dict[str, Any] = {
        name: 0.0 if value <= 2 * NO_TIME else value for name, value in named.items() if name not in FACTORS
    }
    factors = replace(hardware.factors, **{name: named[name] for name in FACTORS})
    return replace(hardware, factors=factors, **others)


def _start(parameter: Parameter, hardware: Hardware) -> float:
    value = getattr(hardware.factors if parameter.name in FACTORS else hardware, parameter.name)
    return float(min(max(value or parameter.start, parameter.lowest), parameter.highest))


def _least_squares(residuals: Callable[[Vector], Vector], start: Vector) -> tuple[Vector, Vector]:
    lowest = np.log([parameter.lowest for parameter in PARAMETERS])
    highest = np.log([parameter.highest for parameter in PARAMETERS])
    x, damping = start, 1e-2
    r = residuals(x)
    jacobian = _jacobian(residuals, x, r)
    for number in range(ITERATIONS):
        bend = USUAL * max(LEAST_SPREAD, 1.4826 * _typical(r))
        is_first = number < TRUSTING
        if number == TRUSTING:
            damping = 1e-2
        if is_first:  # far-off numbers mispredict, which is no disturbance
            bend = max(bend, ALL)
        weights = _weights(r, bend)
        prior = PRIOR * len(r)
        gradient = jacobian.T @ (weights * r) + prior * (x - start)
        curvature = jacobian.T @ (weights[:, None] * jacobian) + prior * np.eye(len(x))
        step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
        tried = np.clip(x + np.clip(step, -1.5, 1.5), lowest, highest)
        tried_r = residuals(tried)
        better = _loss(tried_r, bend, tried - start, prior)
        now = _loss(r, bend, x - start, prior)
        if better < now:
            moved = float(np.abs(tried - x).max())
            x, r, damping = tried, tried_r, max(damping / 3, 1e-9)
            jacobian = _jacobian(residuals, x, r)
            is_still = moved < 1e-4 or now - better < 1e-7 * now
        else:
            damping *= 4
            is_still = damping > 1e9
        if is_still and not is_first:
            break
    return x, jacobian


def _jacobian(residuals: Callable[[Vector], Vector], x: Vector, r: Vector) -> Vector:
    columns = []
    for index in range(len(x)):
        moved = x.copy()
        moved[index] -= DIFFERENCE  # downwards: the upper bounds are limits that a profile may not pass
        columns.append((r - residuals(moved)) / DIFFERENCE)
    return np.stack(columns, axis=1)


def _typical(r: Vector) -> float:
    sides = [np.abs(r[r > 0]), np.abs(r[r < 0])]
    return min((float(np.median(side)) for side in sides if len(side)), default=0.0)


def _weights(r: Vector, bend: float) -> Vector:
    """Weights of residuals: Huber's for too long predictions, a faster decay for steps that took too long."""
    share = np.minimum(1.0, bend / np.maximum(np.abs(r), 1e-12))
    return np.where(r > 0, share, share**2)


def _loss(r: Vector, bend: float, moved: Vector, prior: float) -> float:
    size = np.maximum(np.abs(r), 1e-12)
    tail = np.where(r > 0, bend * (size - 0.5 * bend), bend**2 * (0.5 + np.log(size / bend)))
    each = np.where(size < bend, 0.5 * size**2, tail)
    return float(each.sum() + 0.5 * prior * (moved**2).sum())


def _usual(measured: Vector, predicted: Vector) -> float:
    ratio = measured / predicted
    low, high = np.quantile(ratio, (0.005, 0.99))
    inside = (ratio >= low) & (ratio <= high)
    return float(measured[inside].sum() / predicted[inside].sum())


def _rescaled(values: Vector, scale: float) -> Vector:
    moved = values.copy()
    for index, parameter in enumerate(PARAMETERS):
        if parameter.name in FACTORS:
            moved[index] -= np.log(scale)
        elif parameter.name in SCALED_UP:
            moved[index] += np.log(scale)
        moved[index] = np.clip(moved[index], np.log(parameter.lowest), np.log(parameter.highest))
    return moved


def _with_host(hardware: Hardware, samples: Sequence[Sample]) -> Hardware:
    """Profile with the host's overhead fitted to the gaps before steps; unchanged where no step waited for the
    host."""
    rows = [(s.work.num_sequences, s.work.num_new, s.gap) for s in samples if s.gap is not None]
    if len(rows) < MIN_STEPS or sum(gap for _, _, gap in rows) <= 0:
        return hardware
    sequences, new, gaps = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    columns = np.stack([np.ones_like(gaps), sequences, new], axis=1)
    inside = gaps <= max(np.quantile(gaps, 0.99), np.quantile(gaps[new > 0], 0.9) if (new > 0).any() else 0.0)
    columns, gaps = columns[inside], gaps[inside]
    weights = np.ones_like(gaps)
    found = np.zeros(3)
    for _ in range(20):
        found = not_negative(columns * weights[:, None], gaps * weights)
        off = np.abs(gaps - columns @ found)
        bend = USUAL * 1.4826 * max(float(np.median(off)), 1e-7)
        weights = np.sqrt(np.minimum(1.0, bend / np.maximum(off, 1e-12)))
    fixed, each, beginning = found * gaps.sum() / max(NO_TIME, float((columns @ found).sum()))
    return replace(
        hardware,
        host_overhead=float(fixed),
        host_overhead_per_sequence=float(each),
        host_overhead_per_new_sequence=float(beginning),
    )


def _errors(measured: Vector, predicted: Vector) -> Errors:
    off = np.abs(predicted / measured - 1)
    return Errors(
        count=len(off),
        median=float(np.median(off)),
        p95=float(np.quantile(off, 0.95)),
        total=float(predicted.sum() / measured.sum() - 1),
    )


def _evenly(samples: Sequence[Sample], count: int) -> list[Sample]:
    chunks = [sample for sample in samples if sample.work.num_chunks]
    rest = [sample for sample in samples if not sample.work.num_chunks]
    most = max(count // 2, count - len(rest))
    return _every(chunks, most) + _every(rest, count - min(len(chunks), most))


def _every(samples: Sequence[Sample], count: int) -> list[Sample]:
    if len(samples) <= count:
        return list(samples)
    return [samples[index * len(samples) // count] for index in range(count)]
