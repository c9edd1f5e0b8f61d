"""Device profiles: data-sheet limits (`hardware.json`), and the share that kernels reach (`Factors`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from quire.errors import UserError, nearest_name
from quire.simulator.jitter import Jitter

PROFILES = Path(__file__).with_name("hardware.json")
_COMPUTED_AS = {"int4": "float16", "mxfp4": "float16"}
"""4-bit type -> type that its products are computed in."""


IDLE_SECONDS = 0.005
"""Seconds without work after which threads sleep and caches hold other data."""
CACHED = 8.0
"""Largest share of a memory's bandwidth, which caches exceed."""


@dataclass(frozen=True)
class Factors:
    """Reached shares of the limits, each above 0 and at most 1 (CACHED for memory bandwidths). compute: matrix
    products, relative to the peak. bandwidth: products that read weights, and element-wise operators.
    attention_compute, attention_bandwidth: in attention. link: all-reduce. pcie: swapping."""

    compute: float = 0.7
    bandwidth: float = 0.8
    attention_compute: float = 0.45
    attention_bandwidth: float = 0.8
    link: float = 0.7
    pcie: float = 0.8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = CACHED if name.endswith("bandwidth") else 1
            if not 0 < value <= most:
                raise UserError(f"the factor {name} must be above 0 and at most {most:g}, not {value:g}", param=name)


@dataclass(frozen=True)
class Hardware:
    """One device of the cost model, in bytes, operations and seconds. bandwidth: the memory's bytes per second. peaks:
    dtype -> dense matrix operations per second. link_bandwidth, link_latency: bytes per second and direction to its
    peers in an all-reduce, and seconds before the first byte. pcie_bandwidth, pcie_latency: the same of copies to host
    memory. launch_overhead: seconds of a kernel in a captured graph. host_overhead: seconds of planning between steps;
    host_overhead_per_...: more for each. wake_overhead: extra seconds of a step after IDLE_SECONDS without work.
    node_size: devices that the link connects. network_bandwidth, network_latency: between nodes, per device and
    direction. half_rows: rows at which a matrix product reaches half of its full rate. token_overhead,
    sequence_overhead, new_sequence_overhead: further device seconds. run_overhead: bytes in whose time a single token's
    attention moves to the next run of contiguous keys or values. source: origin of the numbers; "": data sheets and
    usual factors. kind: "gpu" or "cpu"."""

    name: str
    title: str
    memory: float
    bandwidth: float
    peaks: Mapping[str, float] = field(hash=False)
    link_bandwidth: float
    link_latency: float
    pcie_bandwidth: float
    pcie_latency: float
    launch_overhead: float
    host_overhead: float
    host_overhead_per_sequence: float
    factors: Factors = Factors()
    node_size: int = 8
    network_bandwidth: float = 5e10
    network_latency: float = 1e-5
    half_rows: float = 0.0
    token_overhead: float = 0.0
    sequence_overhead: float = 0.0
    new_sequence_overhead: float = 0.0
    host_overhead_per_new_sequence: float = 0.0
    wake_overhead: float = 0.0
    run_overhead: float = 0.0
    host_overhead_per_request: float = 0.0
    jitter: Jitter = field(default_factory=Jitter)
    source: str = ""
    kind: str = "gpu"

    def peak(self, dtype: str) -> float:
        """Peak matrix operations per second. Raises UserError for a dtype that the device lacks."""
        name = _COMPUTED_AS.get(dtype, dtype)
        if name not in self.peaks:
            raise UserError(f"{self.title} does not multiply {dtype} (it knows {', '.join(self.peaks)})", param="dtype")
        return self.peaks[name]

    def with_factors(self, **changes: float) -> Hardware:
        return replace(self, factors=replace(self.factors, **changes))


def find(name: str) -> Hardware:
    """Profile of a name (case does not matter) or of a JSON file from `quire simulate calibrate`. Raises UserError,
    with the nearest name suggested."""
    known = profiles()
    if name.lower() in known:
        return known[name.lower()]
    path = Path(name).expanduser()
    if path.suffix == ".json" or path.is_file():
        return read_profile(path)
    nearest = nearest_name(name.lower(), known)
    raise UserError(f"unknown device {name!r}{nearest} (known: {', '.join(known)}, or a file *.json)", param="gpu")


@cache
def profiles() -> Mapping[str, Hardware]:
    return {name: from_json(name, entry) for name, entry in json.loads(PROFILES.read_text("utf-8")).items()}


def read_profile(path: Path) -> Hardware:
    """The one profile in a file of `quire simulate calibrate`. Raises UserError with the file's name."""
    try:
        entries = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read hardware profile {str(path)!r}: {error.strerror}", param="gpu") from None
    except ValueError as error:
        raise UserError(f"hardware profile {str(path)!r} is not valid JSON: {error}", param="gpu") from None
    if not isinstance(entries, dict) or len(entries) != 1 or not isinstance(next(iter(entries.values())), dict):
        raise UserError(f"hardware profile {str(path)!r} must hold one profile under its name", param="gpu")
    ((name, entry),) = entries.items()
    return from_json(name, entry)


def from_json(name: str, entry: Mapping[str, Any]) -> Hardware:
    """Profile from its JSON entry. Raises UserError for unknown or missing keys and wrong values."""
    values = dict(entry)
    factors, jitter = values.pop("factors", {}), values.pop("jitter", {})
    try:
        hardware = Hardware(name=name, factors=Factors(**factors), jitter=Jitter.from_json(jitter), **values)
        numbers = [*vars(hardware.factors).values(), *hardware.peaks.values()]
        numbers += [value for key, value in vars(hardware).items() if key not in _NOT_NUMBERS]
        if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
            raise TypeError("every value must be a number, and none less than zero")
        limits = [getattr(hardware, name) for name in _LIMITS] + list(hardware.peaks.values())
        if not all(limits) or not isinstance(hardware.node_size, int):
            raise TypeError(f"{', '.join(_LIMITS)} and peaks must be above zero, node_size a whole number")
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"hardware profile {name!r}: {error}", param="gpu") from None
    return hardware


def to_json(hardware: Hardware) -> dict[str, Any]:
    entry = {key: value for key, value in vars(hardware).items() if key not in ("name", "jitter")}
    entry |= {"peaks": dict(hardware.peaks), "factors": dict(vars(hardware.factors))}
    if hardware.jitter:
        entry["jitter"] = dict(vars(hardware.jitter))
    return {hardware.name: entry}


_LIMITS = ("memory", "bandwidth", "link_bandwidth", "pcie_bandwidth", "network_bandwidth", "node_size")
_NOT_NUMBERS = ("name", "title", "source", "kind", "peaks", "factors", "jitter")
