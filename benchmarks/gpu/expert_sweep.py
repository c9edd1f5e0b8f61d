"""Tiles and orders of experts' products: python -m benchmarks.gpu.expert_sweep --out FILE [--seconds S] [--tiny]

The layers of published mixtures in bfloat16, with random routes, at the rows of prompts and of large decode steps:
each product in many ways, the sum of its results, the order of pairs, and all of a layer. The most decisive come first.
Each way is checked against the first, which the engine had before. The last lines are a table with shares of the
limit. `python -m tests.kernels.triton.ahead_of_time 90 experts cache` compiles every kernel before. --tiny: a small
mixture in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import records
from benchmarks.gpu.limits import Ceilings, Work, measure_ceilings
from benchmarks.gpu.records import Record
from benchmarks.gpu.summary import summarize
from benchmarks.gpu.timing import Call, measure
from quire.kernels.arguments import Routing
from quire.kernels.triton.experts import ExpertMatrices, ExpertPlan, ExpertProducts, combined, expert_tiles
from quire.kernels.triton.matmul import ProductTiles
from quire.kernels.triton.routing import ExpertTiles, route, sort_by_expert
from quire.kernels.triton.weight_formats import StoredMatrix

ITEMSIZE = 2
"""Bytes of an element: bfloat16."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer's experts."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int

    def work(self, what: str, rows: int) -> Work:
        """The least that a product, the sum of its results, or all of them (`layer`) cost."""
        pairs, size = rows * self.top_k, self.hidden * self.intermediate
        touched = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** rows)
        x, inner, results = rows * self.hidden, pairs * self.intermediate, pairs * self.hidden
        weights, elements = {
            "gate_up": (2, x + inner),
            "down": (1, inner + results),
            "sum": (0, results + 2 * x),
            "layer": (3, 3 * x),
        }[what]
        return Work(ITEMSIZE * (weights * touched * size + elements), 2.0 * weights * pairs * size)


QWEN3 = Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768)
DEEPSEEK_V2 = Mixture("DeepSeek-V2-Lite", 64, 6, 2048, 1408)
QWEN3_NEXT = Mixture("Qwen3-Next", 512, 10, 2048, 512)
TINY = Mixture("tiny", 3, 2, 32, 16)

Way = tuple[ProductTiles, int, bool]
"""Tiles, `together` and `narrows` of ExpertPlan."""


def way(m: int, n: int, k: int, num_warps: int, num_stages: int, together: int, *, narrows: bool = True) -> Way:
    return ProductTiles(m, n, k, num_warps, num_stages), together, narrows


OLD = way(64, 64, 64, 8, 3, 0, narrows=False), way(64, 64, 64, 4, 3, 0, narrows=False)
"""Of gate and up, and of down, before prompts had tiles of their own."""
GATE_UP = (
    OLD[0],
    way(128, 128, 64, 8, 3, 8),
    way(64, 64, 64, 8, 3, 8),
    way(128, 128, 64, 8, 4, 8),
    way(128, 64, 64, 8, 3, 8),
    way(128, 64, 64, 4, 4, 8),
    way(64, 128, 64, 4, 4, 8),
    way(128, 128, 64, 8, 3, 0),
    way(128, 128, 64, 8, 3, 1),
    way(128, 128, 64, 8, 3, 4),
    way(128, 128, 64, 8, 3, 16),
    way(128, 64, 64, 8, 4, 8),
    way(64, 128, 64, 4, 3, 8),
    way(64, 64, 64, 4, 4, 8),
    way(128, 64, 128, 8, 3, 8),
    way(128, 128, 32, 8, 5, 8),
)
DOWN = (
    OLD[1],
    way(128, 128, 64, 8, 3, 8),
    way(128, 128, 64, 8, 3, 8, narrows=False),
    way(64, 64, 64, 4, 3, 8, narrows=False),
    way(128, 256, 64, 8, 3, 8),
    way(128, 128, 64, 4, 3, 8),
    way(64, 128, 64, 4, 4, 8),
    way(128, 128, 64, 8, 3, 0),
    way(128, 128, 64, 8, 3, 1),
    way(128, 128, 64, 8, 3, 4),
    way(128, 128, 64, 8, 3, 16),
    way(128, 256, 64, 8, 4, 8),
    way(64, 128, 64, 4, 3, 8),
    way(64, 256, 64, 4, 3, 8),
    way(128, 64, 64, 4, 4, 8),
    way(128, 128, 32, 8, 5, 8),
)
SHORT = 7
"""Ways that every mixture and number of rows is tried in."""
FEW = way(16, 64, 128, 4, 3, 0), way(32, 64, 128, 4, 3, 0), way(32, 64, 64, 4, 4, 8)
"""Beside these where an expert has few rows."""
MANY_ROWS, ROWS, FEW_ROWS = 8192, 1024, 256

CASES: Sequence[tuple[Mixture, int, str]] = [
    *(
        (each, MANY_ROWS, what)
        for each in (QWEN3, DEEPSEEK_V2)
        for what in ("gate_up", "down", "sum", "order", "layer")
    ),
    *((QWEN3, rows, what) for rows in (ROWS, FEW_ROWS) for what in ("gate_up", "down", "layer")),
    *((QWEN3_NEXT, MANY_ROWS, what) for what in ("gate_up", "down", "order", "layer")),
    *((DEEPSEEK_V2, rows, what) for rows in (ROWS, FEW_ROWS) for what in ("gate_up", "down", "layer")),
    *((QWEN3_NEXT, rows, what) for rows in (ROWS, FEW_ROWS) for what in ("gate_up", "down", "layer")),
]


def ways_of(mixture: Mixture, rows: int, what: str) -> Sequence[Way]:
    ways = GATE_UP if what == "gate_up" else DOWN
    chosen = ways if mixture is QWEN3 and rows == MANY_ROWS else ways[:SHORT]
    return (*chosen, *FEW) if rows < MANY_ROWS else chosen


@dataclass(frozen=True, slots=True)
class Operands:
    """A layer and what its products read. inner: [pairs, intermediate]. results: [pairs, hidden] in float32."""

    mixture: Mixture
    matrices: ExpertMatrices
    x: torch.Tensor
    routing: torch.Tensor
    inner: torch.Tensor
    results: torch.Tensor

    @classmethod
    def build(cls, mixture: Mixture, rows: int, device: torch.device, *, is_dry: bool = False) -> Operands:
        """is_dry: to compile, not to run: of any content."""
        count, size, width = mixture.num_experts, mixture.hidden, mixture.intermediate
        new = partial(torch.empty if is_dry else torch.randn, dtype=torch.bfloat16, device=device)
        gate_up, down = new(count, 2 * width, size), new(count, size, width)
        pairs = rows * mixture.top_k
        if is_dry:
            routing = torch.zeros(rows, 2 * mixture.top_k)
        else:
            gate_up.mul_(size**-0.5)
            down.mul_(width**-0.5)
            routing = route(Routing(count, mixture.top_k), torch.randn(rows, count, device=device))
        return cls(
            mixture,
            ExpertMatrices(StoredMatrix.plain(gate_up), StoredMatrix.plain(down), None, None),
            new(rows, size),
            routing,
            new(pairs, width),
            new(pairs, size, dtype=torch.float32),
        )

    def calls(self, rows: int, what: str) -> Iterator[tuple[str, Call]]:
        """Name and call of each way; a call returns what is compared."""
        if what in ("gate_up", "down"):
            for each in ways_of(self.mixture, rows, what):
                yield name_of(each), self.product(each, is_first=what == "gate_up")
        elif what == "sum":
            for dtype in (torch.float32, torch.bfloat16):
                yield f"of {dtype}", partial(combined, self.results.to(dtype), self.x, self.x, self.mixture.top_k)
        elif what == "order":
            for block_m in (64, 128):
                yield f"tiles of {block_m}", partial(self.pairs, block_m)
        else:
            ways = OLD if rows * self.mixture.top_k > 16 * self.mixture.num_experts else (FEW[0], FEW[0])
            old = ExpertPlan(ways[0][0], ways[1][0])
            present = expert_tiles(
                self.matrices,
                self.x.dtype,
                rows * self.mixture.top_k / self.mixture.num_experts,
                self.x.device,
                batch_invariant=False,
            )
            for name, plan in (("as before", old), ("present", present)):
                yield name, partial(self.layer, plan)

    def product(self, chosen: Way, *, is_first: bool) -> Call:
        tiles, together, narrows = chosen
        order = sort_by_expert(self.routing, self.mixture.num_experts, tiles.block_m)
        plan = ExpertPlan(tiles, tiles, together, narrows)
        source = self.x if is_first else self.inner
        width = self.mixture.intermediate if is_first else self.mixture.hidden
        dtype = source.dtype if is_first or narrows else torch.float32
        out = torch.empty(len(self.inner), width, dtype=dtype, device=source.device)
        return partial(self._multiply, source, order, out, plan, is_first)

    def _multiply(
        self, x: torch.Tensor, order: ExpertTiles, out: torch.Tensor, plan: ExpertPlan, is_first: bool
    ) -> torch.Tensor:
        shares = self.routing[:, self.mixture.top_k :]
        self._in(plan).multiply(x, order, shares, out, is_first=is_first)
        return out

    def pairs(self, block_m: int) -> torch.Tensor:
        return sort_by_expert(self.routing, self.mixture.num_experts, block_m).pairs

    def layer(self, plan: ExpertPlan) -> torch.Tensor:
        return self._in(plan).apply(self.x, self.routing, self.x)

    def _in(self, plan: ExpertPlan) -> ExpertProducts:
        return ExpertProducts(self.matrices, plan, "silu", None, False)


def name_of(chosen: Way) -> str:
    t, together, narrows = chosen
    size = f"{t.block_m} x {t.block_n} x {t.block_k}, {t.num_warps} warps, {t.num_stages} stages"
    return f"{size}, {together or 'all'} together{'' if narrows else ', float32 results'}"


def measured(
    calls: Iterator[tuple[str, Call]], base: Record, limit: Callable[[float], float] | None, device: torch.device
) -> Iterator[Record]:
    """A record for each way, which is checked against the first. limit: share of it by seconds."""
    expected = None
    for variant, call in calls:
        record = {**base, "variant": variant}
        try:
            found = call()
            assert isinstance(found, torch.Tensor)
            expected = found.clone() if expected is None else expected
            error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
            record |= {"error of all": error, "nan": int(found.isnan().sum())}
            del found
            timing = measure([call], device)
            record |= {"seconds": timing.median, "spread": timing.spread}
            yield record if limit is None else {**record, "share": limit(timing.median)}
        except Exception as error:
            yield {**record, "error": f"{type(error).__name__}: {str(error)[:300]}"}


def sweep(device: torch.device, ceilings: Ceilings, seconds: float, *, tiny: bool) -> Iterator[Record]:
    """One record for each way, while `seconds` have not passed."""
    started, kept = time.perf_counter(), None
    for mixture, count, what in CASES:
        if tiny and mixture is not QWEN3:
            continue
        chosen, rows = (TINY, min(count // 64, 20)) if tiny else (mixture, count)
        if kept is None or kept.mixture is not chosen or len(kept.x) != rows:
            kept = None
            kept = Operands.build(chosen, rows, device)
        base = {"part": "experts", "what": "product", "format": chosen.name, "matrix": what, "m": rows}
        limit = None if what == "order" else partial(ceilings.share, chosen.work(what, rows))
        calls = kept.calls(rows, what)
        for record in measured(calls, base, limit, device):
            yield record
            if time.perf_counter() - started > seconds:
                yield {**base, "variant": "rest", "left out": f"{seconds:g} s have gone"}
                return


def dry_calls() -> Iterator[Call]:
    """Each kernel of the sweep once, over memory of the host that is not there, to compile it ahead."""
    for mixture, rows, what in CASES:
        operands = Operands.build(mixture, rows, torch.device("cpu"), is_dry=True)
        for _, call in operands.calls(rows, what):
            yield call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    emit, device = records.writer(arguments.out), torch.device("cpu" if arguments.tiny else "cuda")
    with torch.inference_mode():
        ceilings, _ = measure_ceilings(device, **({"num_bytes": 1 << 16, "size": 64} if arguments.tiny else {}))
        found = []
        for record in sweep(device, ceilings, arguments.seconds, tiny=arguments.tiny):
            emit(record)
            found.append(record)
    print(summarize(found, [], arguments.out.parent))


if __name__ == "__main__":
    main()
