"""`python -m benchmarks.paper simulate`: `quire simulate` with one of the paper's baselines as the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from benchmarks.baselines.systems import FASTER_TRANSFORMER, ORCA_MAX, ORCA_ORACLE, ORCA_POW2, PAGED, SYSTEMS
from quire.cli import simulate
from quire.engine.core import EngineCore
from quire.errors import UserError, nearest_name

PROGRAM = "python -m benchmarks.paper simulate"
POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "paged": PAGED,
        "orca-max": ORCA_MAX,
        "orca-pow2": ORCA_POW2,
        "orca-oracle": ORCA_ORACLE,
        "fastertransformer": FASTER_TRANSFORMER,
    }
)


def main(arguments: Sequence[str]) -> int:
    """Parse and run; returns the exit status. Raises UserError for a policy that does not exist."""
    parser = simulate.build_parser()
    parser.prog = PROGRAM
    parser.usage = f"{PROGRAM} --policy NAME (TRACE | --workload NAME --rate R) --model M --gpu NAME [options]"
    parser.add_argument("--policy", metavar="NAME", default="paged", help=f"of memory: {', '.join(POLICIES)} (paged)")
    namespace = parser.parse(arguments)
    if namespace.policy not in POLICIES:
        nearest = nearest_name(namespace.policy, POLICIES)
        raise UserError(f"unknown policy {namespace.policy!r}{nearest} (known: {', '.join(POLICIES)})", param="policy")
    make_scheduler = SYSTEMS[POLICIES[namespace.policy]]
    return simulate.simulate(namespace, partial(EngineCore, make_scheduler=make_scheduler))
