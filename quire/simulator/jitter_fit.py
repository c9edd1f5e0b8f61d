from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from quire.simulator.jitter import Jitter, Pairs
from quire.simulator.regression import not_negative

Vector = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

LEVELS = (
    0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0,
)  # fmt: skip
"""Levels of the fitted distributions."""
FEWEST = 10
"""Least steps between two levels."""
LASTING = (0.01, 0.1, 1.0, 10.0)
"""Seconds over which parts of the scatter fade."""
LEAST_SHARE = 0.01
STALLED = 2.0
"""Ratio of measured to predicted time from which a step of single tokens has stalled."""
NUM_STALLS = 8
"""Distinct stall lengths."""


def fit_jitter(measured: Vector, expected: Vector, begins: Vector, has_chunks: Flags) -> Jitter:
    """Jitter of a device, fitted to logs. measured, expected: seconds of each step, in the log's order. begins: start
    of each in seconds; several logs may follow each other, so steps backwards in time are no pair."""
    is_stalled = (measured > STALLED * expected) & ~has_chunks
    stalls = _stalls((measured - expected)[is_stalled], float(expected[~has_chunks].sum()))
    if stalls:
        measured, expected, begins = (column[~is_stalled] for column in (measured, expected, begins))
        has_chunks = has_chunks[~is_stalled]
    ratios = measured / expected
    scores = np.zeros_like(ratios)
    tables: list[Pairs] = []
    for kind in (~has_chunks, has_chunks):
        tables.append(_distribution(ratios[kind]))
        scores[kind] = _normal_scores(ratios[kind])
    return Jitter(single=tables[0], chunks=tables[1], lasting=_lasting(scores, begins), stalls=stalls)


def _stalls(seconds: Vector, worked: float) -> Pairs:
    """(length in seconds, rate per second) of stalls; empty if they are few. worked: seconds of work on single
    tokens."""
    ordered = np.sort(seconds)
    parts = np.array_split(ordered, min(NUM_STALLS, len(ordered) // FEWEST)) if len(ordered) >= FEWEST else []
    return tuple((float(part.mean()), len(part) / worked) for part in parts)


def _distribution(ratios: Vector) -> Pairs:
    count, ordered = len(ratios), np.sort(ratios)
    if count < FEWEST:
        return ()
    pairs, low = [], 0
    for level in LEVELS:
        high = count if level == 1 else round(level * count)
        if high - low >= FEWEST and (level == 1 or count - high >= FEWEST):
            pairs.append((high / count, float(ordered[low:high].mean())))
            low = high
    return tuple(pairs)


def _normal_scores(values: Vector) -> Vector:
    if not len(values):
        return values
    inverse = NormalDist().inv_cdf
    by_rank = np.array([inverse((rank + 0.5) / len(values)) for rank in range(len(values))])
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: Vector = np.add.reduceat(by_rank, np.concatenate(([0], np.cumsum(counts)[:-1]))) / counts
    return means[places]


def _lasting(scores: Vector, begins: Vector) -> Pairs:
    """(seconds, share) of the scatter of step times that fades over each time in LASTING, by least squares of the
    correlation of steps 1, 2, 4, ... apart. scores: normal scores. begins: seconds."""
    rows, found = [], []
    distance = 1
    while distance <= len(scores) // 8:
        passed = begins[distance:] - begins[:-distance]
        inside = (passed > 0) & (passed < 3 * LASTING[-1])
        if inside.sum() >= FEWEST:
            found.append(float((scores[distance:] * scores[:-distance])[inside].mean()))
            rows.append([float(np.exp(-passed[inside] / seconds).mean()) for seconds in LASTING])
        distance *= 2
    if not rows:
        return ()
    shares = not_negative(np.array(rows), np.array(found))
    shares /= max(1.0, shares.sum())
    return tuple(
        (seconds, math.floor(1e4 * share) / 1e4)  # down: together they must not exceed 1
        for seconds, share in zip(LASTING, shares, strict=True)
        if share >= LEAST_SHARE
    )
