"""A tiny model, results made of numbers, and runners that only move a clock."""

from __future__ import annotations

from benchmarks.kernels.cases import Case, ModelShape, Work
from benchmarks.kernels.measure import Runner, Timing
from benchmarks.kernels.results import Limits, Result
from quire.clock import VirtualClock

TINY = ModelShape(
    "tiny", hidden=96, intermediate=160, num_heads=4, num_kv_heads=2, head_dim=16, vocab=200, num_layers=2
)
LIMITS = Limits(read=10e9, float_peak=100e9, integer_peak=400e9, bf16_peak=200e9)


def case(kernel: str = "linear", shape: str = "qkv", rows: int = 1, **variants: Work) -> Case:
    return Case(kernel, TINY, shape, rows, variants or {"bf16": Work(1000, 2000)})


def result(of: Case, type_: str, seconds: float, **changes: object) -> Result:
    fields: dict[str, object] = {
        "case": of,
        "type": type_,
        "timing": Timing((seconds,)),
        "twins": {},
        "limits": LIMITS,
        "error": 0.0,
        "sound": True,
    }
    return Result(**{**fields, **changes})  # type: ignore[arg-type]


def taking(clock: VirtualClock, seconds: float, units: int = 1) -> Runner:
    """A run of `units` that takes this long."""

    def run() -> int:
        clock.advance(seconds)
        return units

    return run
