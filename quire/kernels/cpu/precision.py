"""Faster precision of products with bfloat16 weights, if the user leaves it open. Unlisted processors are measured
once, so every start gives the same bits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from quire import envs
from quire.kernels.cpu import _native
from quire.logging import get_logger

logger = get_logger(__name__)

KNOWN: dict[tuple[str, int, int | None], str] = {
    ("AuthenticAMD", 25, None): "bfloat16",  # Zen 4: 233 GFLOP/s a core, 117 in float32
    ("AuthenticAMD", 26, None): "bfloat16",  # Zen 5
    ("GenuineIntel", 6, 143): "float32",  # Sapphire Rapids; as the next
    ("GenuineIntel", 6, 207): "float32",  # Emerald Rapids: 88 GFLOP/s a core, 174 in float32
}
"""Faster precision by vendor, family and model (None: whole family)."""
MARGIN = 1.2
"""Minimum speed-up for which bfloat16, which rounds activations, is chosen."""
NUM_TRIALS, NUM_UNITS = 5, 16
"""Number of runs (0.1 ms each), of which the best counts."""
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class PrecisionChoice:
    """Precision of bfloat16 products on this processor. precision: "float32" or "bfloat16". reason: text for people
    (log, `doctor`)."""

    precision: str
    reason: str


def choose_precision(
    isa: str, *, memory: Path | None = None, cpu_info: Path = CPU_INFO, measure: Callable[[str], float] | None = None
) -> PrecisionChoice:
    """Choose the precision for an instruction set of this machine. memory: file of measured choices; default
    `processors.json` in the cache directory. measure: returns the rate of bfloat16 products relative to float32."""
    if not _native.has_bf16_products(isa):
        return PrecisionChoice("float32", f"{isa} cannot multiply bfloat16")
    if isa not in _native.available_isas():
        return PrecisionChoice("bfloat16", f"{isa} is an emulation, for tests")
    if isa == "amx":
        return PrecisionChoice("bfloat16", "AMX multiplies it in tiles, many times as fast as vectors of float32")
    processor = _processor(cpu_info)
    if processor is not None:
        for key in (processor, (*processor[:2], None)):
            if key in KNOWN:
                return PrecisionChoice(KNOWN[key], "known to be the faster one on this processor")
    memory = envs.cache_directory() / "processors.json" if memory is None else memory
    name = " ".join(map(str, (*(processor or ("unknown",)), isa)))
    remembered = _read(memory)
    if remembered.get(name) in ("float32", "bfloat16"):
        return PrecisionChoice(remembered[name], f"measured earlier ({memory})")
    ratio = (measure or measure_rates)(isa)
    precision = "bfloat16" if ratio >= MARGIN else "float32"
    _write(memory, remembered | {name: precision})
    return PrecisionChoice(precision, f"measured: products in bfloat16 run at {ratio:.2f} times the rate of float32")


def measure_rates(isa: str) -> float:
    """Rate of bfloat16 products relative to float32, on one thread in registers; takes milliseconds."""
    pool = _native.Pool(1, pin=False)
    best = {_native.float_limit: 0.0, _native.bf16_limit: 0.0}
    for _ in range(NUM_TRIALS):
        for limit in best:
            start = perf_counter()
            num_operations = limit(isa, pool, NUM_UNITS)
            best[limit] = max(best[limit], num_operations / (perf_counter() - start))
    return best[_native.bf16_limit] / best[_native.float_limit]


def _processor(cpu_info: Path) -> tuple[str, int, int] | None:
    """(vendor, family, model) of the first core; None if unknown."""
    try:
        first = cpu_info.read_text(errors="replace").partition("\n\n")[0]
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
        return facts["vendor_id"], int(facts["cpu family"]), int(facts["model"])
    except (OSError, KeyError, ValueError):
        return None


def _read(memory: Path) -> dict[str, str]:
    try:
        found = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(memory: Path, choices: dict[str, str]) -> None:
    part = memory.with_name(f"{memory.name}.{os.getpid()}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(choices, indent=2, sort_keys=True) + "\n")
        part.replace(memory)
    except OSError as error:
        logger.info("the measured precision is not remembered: %s", error)
