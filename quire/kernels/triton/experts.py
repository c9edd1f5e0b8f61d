"""Mixtures of experts: products of rows with their chosen experts' matrices. The device sorts pairs by expert,
so the host never waits. Additions run in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from quire.kernels.triton.activation import KINDS, activate
from quire.kernels.triton.adapters import AdapterMatrices, SlotTiles, add_adapted
from quire.kernels.triton.matmul import GROUP_M, ProductTiles, grouped, stored_tiles
from quire.kernels.triton.quantize_rows import round_rows
from quire.kernels.triton.routing import ExpertTiles, sort_by_expert
from quire.kernels.triton.runtime import blocks_of, has_hopper_memory, launch, narrow
from quire.kernels.triton.weight_formats import PLAIN, StoredMatrix, product

COLUMNS = 1024
"""Elements of a row per program of `combine`."""
EXPERT_COLUMNS = 64
"""Columns of a result tile; gate and up have twice as many."""
FEW_ROWS = 16
"""Pairs of a tile where an expert has few."""
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _gated(gate, up, limit, HAS_LIMIT: tl.constexpr, KIND: tl.constexpr):
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    return activate(gate, KIND) * up


@triton.jit(do_not_specialize=["together"])
def _experts_kernel(
    x,
    x_scales,
    codes,
    scales,
    offsets,
    row_scales,
    bias,
    out,
    pairs,
    tiles,
    shares,
    n,
    x_stride,
    x_scale_stride,
    shares_stride,
    limit,
    together,
    DTYPE: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    TOP_K: tl.constexpr,
    FIRST: tl.constexpr,
    WEIGHS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    KIND: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """FIRST: activation(gate) * up of x's rows, to the pair's row of out; else down of the pair's row of x. WEIGHS: the
    pair's weight multiplies input (FIRST) or output."""
    num_tiles = tl.num_programs(0)
    program = tl.program_id(1) * num_tiles + tl.program_id(0)
    tile, block = grouped(program, num_tiles, tl.num_programs(1), together)
    expert = tl.load(tiles + 3 * tile).to(tl.int64)
    if expert >= 0:
        places = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
        end = tl.load(tiles + 3 * tile + 2)
        row_inside = places < end
        # Rows and columns beyond the end repeat the last: nothing out of range is read, and they are not stored.
        pair = tl.load(pairs + tl.minimum(places, end - 1)).to(tl.int64)
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        column_inside = columns < n
        column = tl.minimum(columns, n - 1).to(tl.int64)
        share = tl.load(shares + (pair // TOP_K) * shares_stride + pair % TOP_K)
        row = (pair // TOP_K) if FIRST else pair
        PARTS: tl.constexpr = 2 if FIRST else 1
        rows = expert * PARTS * n + column
        if FIRST:
            both = tl.arange(0, 2 * BLOCK_N)
            of_part = tl.minimum(block * BLOCK_N + both // 2, n - 1) + both % 2 * n
            rows = expert * PARTS * n + of_part
        first = product(
            x + row * x_stride, x_scales + row * x_scale_stride if ROUNDED else row, share, codes, scales, offsets,
            row_scales, rows, DTYPE, K, FORMAT, GROUP, HAS_OFFSETS, ROUNDED, FIRST and WEIGHS, BLOCK_M,
            PARTS * BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if FIRST:
            first, second = tl.split(tl.reshape(first, (BLOCK_M, BLOCK_N, 2)))
            if HAS_BIAS:
                second += tl.load(bias + expert * PARTS * n + n + column).to(tl.float32)[None, :]
        if HAS_BIAS:
            first += tl.load(bias + expert * PARTS * n + column).to(tl.float32)[None, :]
        to = out + pair[:, None] * n + columns[None, :]
        mask = row_inside[:, None] & column_inside[None, :]
        if APART:
            to += pair[:, None] * n
            tl.store(to + n, second, mask=mask)
        elif FIRST:
            first = _gated(first, second, limit, HAS_LIMIT, KIND)
        elif WEIGHS:
            first = first * share[:, None]
        tl.store(to, narrow(first, out.dtype.element_ty), mask=mask)


@triton.jit
def _gate_kernel(wide, out, width, limit, HAS_LIMIT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = wide + pair * 2 * width + columns
    gate, up = tl.load(at, mask=inside, other=0.0), tl.load(at + width, mask=inside, other=0.0)
    result = _gated(gate, up, limit, HAS_LIMIT, KIND)
    tl.store(out + pair * width + columns, narrow(result, out.dtype.element_ty), mask=inside)


@triton.jit
def _combine_kernel(
    results, residual, out, width, residual_stride, TOP_K: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    """out[row] = residual[row] + the row's results, added in order of experts."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.load(results + (row * TOP_K + place) * width + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, narrow(total, out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class ExpertAdapterMatrices:
    """Adapters by (slot, expert); wide: gate's and up's. slots: rows', [T] int64."""

    wide: AdapterMatrices | None
    down: AdapterMatrices | None
    slots: torch.Tensor
    num_slots: int

    def order(self, routing: torch.Tensor, num_experts: int) -> SlotTiles:
        top_k = routing.shape[1] // 2
        chosen = routing[:, :top_k].long().clamp(0, num_experts - 1)  # of a row of NaN they are any number
        groups = (self.slots[:, None] - 1) * num_experts + chosen + 1
        return SlotTiles.of(torch.where(self.slots[:, None] > 0, groups, 0).flatten(), self.num_slots * num_experts)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Matrices of all experts, stacked (see ExpertWeights). Biases: [E, rows of a matrix] in the activations' dtype, or
    None. rounds_activations: see `matmul`."""

    gate_up: StoredMatrix
    down: StoredMatrix
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    rounds_activations: bool = False
    adapters: ExpertAdapterMatrices | None = None

    def rounds(self, matrix: StoredMatrix) -> bool:
        return self.rounds_activations and matrix.multiplies_bytes


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Tiles of both products, of equal `block_m`. together: rows of tiles that run side by side, to share
    operands in the L2 cache; 0: all. narrows: down's results have x's dtype, not float32."""

    gate_up: ProductTiles
    down: ProductTiles
    together: int = 0
    narrows: bool = False


MANY_TILES = (
    (64, ExpertPlan(ProductTiles(128, 128, 64, 8, 3), ProductTiles(128, 256, 64, 8, 4), together=8, narrows=True)),
)
"""Least rows per expert, and tiles from there on, of 16-bit matrices on Hopper."""


def expert_tiles(
    matrices: ExpertMatrices, dtype: torch.dtype, pairs: float, device: torch.device, *, batch_invariant: bool
) -> ExpertPlan:
    """Tiles of a step. dtype: x's. pairs: rows per expert. batch_invariant: a row's bits do not depend on
    the number of rows."""
    is_narrow = dtype != torch.float32
    if not batch_invariant and is_narrow and matrices.gate_up.kind == matrices.down.kind == PLAIN.value:
        for least, plan in MANY_TILES if has_hopper_memory(device) else ():
            if pairs >= least:
                return plan
    few = not batch_invariant and pairs <= FEW_ROWS
    tiles = []
    for matrix, is_first in ((matrices.gate_up, True), (matrices.down, False)):
        usual = stored_tiles(matrix, dtype, rounds_activations=matrices.rounds(matrix))
        usual = replace(usual, block_n=EXPERT_COLUMNS, num_warps=8 if is_first else usual.num_warps, num_stages=3)
        # Of nine ways tried on an H100, the fastest at 1, 32 and 256 rows of Qwen3-30B-A3B, by 5 to 9 %.
        block_k = 2 * usual.block_k if matrix.kind == PLAIN.value and is_narrow else usual.block_k
        tiles.append(replace(usual, block_m=FEW_ROWS, block_k=block_k, num_warps=4) if few else usual)
    gate_up, down = tiles
    return ExpertPlan(gate_up, down, together=0 if few else GROUP_M)


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """Products of a mixture in a plan's tiles."""

    matrices: ExpertMatrices
    plan: ExpertPlan
    activation: str
    limit: float | None
    weighs_input: bool

    def apply(self, x: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        adapters = self.matrices.adapters
        num_rows, size = x.shape
        num_experts, _, intermediate = self.matrices.down.shape
        top_k = routing.shape[1] // 2
        order = sort_by_expert(routing, num_experts, self.plan.gate_up.block_m)
        inner = torch.empty(num_rows * top_k, intermediate, dtype=x.dtype, device=x.device)
        dtype = x.dtype if self.plan.narrows else torch.float32
        results = torch.empty(num_rows * top_k, size, dtype=dtype, device=x.device)
        shares = routing[:, top_k:]
        if adapters is None:
            self.multiply(x, order, shares, inner, is_first=True)
            self.multiply(inner, order, shares, results, is_first=False)
            return combined(results, residual, x, top_k)
        pairs, factors = adapters.order(routing, num_experts), shares.flatten().contiguous()
        wide = torch.empty(num_rows * top_k, 2 * intermediate, dtype=torch.float32, device=x.device)
        self.multiply(x, order, shares, wide, is_first=True, apart=True)
        if adapters.wide is not None:
            add_adapted(adapters.wide, x, wide, pairs, factors if self.weighs_input else None, repeats=top_k)
        self._gate(wide, inner)
        self.multiply(inner, order, shares, results, is_first=False)
        if adapters.down is not None:
            add_adapted(adapters.down, inner, results, pairs, None if self.weighs_input else factors)
        return combined(results, residual, x, top_k)

    def _gate(self, wide: torch.Tensor, out: torch.Tensor) -> None:
        launch(
            _gate_kernel,
            (len(out), blocks_of(out.shape[1], COLUMNS)),
            wide,
            out,
            out.shape[1],
            self.limit or 0.0,
            HAS_LIMIT=self.limit is not None,
            KIND=KINDS[self.activation],
            BLOCK=COLUMNS,
            num_warps=4,
        )

    def multiply(
        self,
        x: torch.Tensor,
        order: ExpertTiles,
        shares: torch.Tensor,
        out: torch.Tensor,
        *,
        is_first: bool,
        apart: bool = False,
    ) -> None:
        """Gate and up with the activation, or down. out: [pairs, n]. apart: no activation, [pairs, 2 n] float32."""
        matrices, plan = self.matrices, self.plan
        matrix, bias, tiles = (
            (matrices.gate_up, matrices.gate_up_bias, plan.gate_up)
            if is_first
            else (matrices.down, matrices.down_bias, plan.down)
        )
        rounds = matrices.rounds(matrix)
        assert plan.gate_up.block_m == plan.down.block_m, "rows are sorted into tiles once"
        assert x.stride(1) == 1, "the elements of a row lie side by side"
        rounded = round_rows(x, matrix) if rounds else None
        rows, width = x if rounded is None else rounded.codes, out.shape[1] // 2 if apart else out.shape[1]
        launch(
            _experts_kernel,
            (len(order.tiles), blocks_of(width, tiles.block_n)),
            rows,
            None if rounded is None else rounded.scales,
            *matrix.tensors,
            bias,
            out,
            order.pairs,
            order.tiles,
            shares,
            width,
            rows.stride(0),
            0 if rounded is None else rounded.scales.stride(0),
            shares.stride(0),
            self.limit or 0.0,
            plan.together or len(order.tiles),
            DTYPE=TRITON_DTYPES[x.dtype],
            **matrix.constants(rounds_activations=rounds),
            TOP_K=shares.shape[1],
            FIRST=is_first,
            WEIGHS=self.weighs_input == is_first,
            HAS_BIAS=bias is not None,
            HAS_LIMIT=self.limit is not None,
            KIND=KINDS[self.activation],
            APART=apart,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


def apply_experts(
    matrices: ExpertMatrices,
    x: torch.Tensor,
    routing: torch.Tensor,
    residual: torch.Tensor | None,
    activation: str,
    limit: float | None,
    weighs_input: bool,
    *,
    batch_invariant: bool = True,
) -> torch.Tensor:
    """residual + the weighted sum of the experts' results. x, residual: [T, size] of one dtype, plain matrices' too.
    routing: [T, 2 * top_k] float32. activation, limit, weighs_input: see Gating and ExpertWeights. batch_invariant:
    see `expert_tiles`."""
    if len(x) == 0:
        return torch.empty_like(x)
    pairs = len(x) * (routing.shape[1] // 2) / matrices.down.shape[0]
    plan = expert_tiles(matrices, x.dtype, pairs, x.device, batch_invariant=batch_invariant)
    return ExpertProducts(matrices, plan, activation, limit, weighs_input).apply(x, routing, residual)


def combined(results: torch.Tensor, residual: torch.Tensor | None, x: torch.Tensor, top_k: int) -> torch.Tensor:
    num_rows, size = x.shape
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    launch(
        _combine_kernel,
        (num_rows, blocks_of(size, COLUMNS)),
        results,
        residual,
        out,
        size,
        0 if residual is None else residual.stride(0),
        TOP_K=top_k,
        HAS_RESIDUAL=residual is not None,
        BLOCK=COLUMNS,
        num_warps=4,
    )
    return out
