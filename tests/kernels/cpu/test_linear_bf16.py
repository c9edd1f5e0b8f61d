"""Products in bfloat16: every bit of them, on the hardware that has them and in its emulation."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu._native import Activation, MatmulPrecision, WeightType
from quire.kernels.cpu.packing import PackedMatrix
from tests.kernels.cpu.linear_calls import BF16_ISAS, ISAS, KINDS, TILE_ISAS, WIDENED, pool, random_matrix, run_linear

SMALLEST_NORMAL = 2.0**-126
each_bf16_isa = pytest.mark.parametrize("isa", BF16_ISAS)


def multiply(matrix: PackedMatrix, x: torch.Tensor, isa: str, **options: object) -> torch.Tensor:
    return run_linear(matrix, x, isa=isa, precision=MatmulPrecision.BFLOAT16, **options)  # type: ignore[arg-type]


def flushed(values: np.ndarray) -> np.ndarray:
    """Subnormal values as zeros of their sign."""
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def multiplies_in_tiles(isa: str) -> bool:
    return isa.startswith("amx")


def defined(x: torch.Tensor, weights: torch.Tensor, isa: str) -> torch.Tensor:
    """x [rows, k] times weights [n, k] (bfloat16 values) as the instruction set's manual defines the sum.

    Each product is added with one rounding; subnormal numbers count as zero. Vectors: pair by pair of k, the second
    first. Tiles: of 32 values of k (completed by zeros) those at even places in one chain, those at odd ones in
    another; both are added, then to the sum of the tiles before.
    """
    left = flushed(torch.from_numpy(flushed(x.numpy())).bfloat16().float().numpy()).astype(np.float64)
    right = flushed(weights.numpy()).astype(np.float64)
    padding = -left.shape[1] % (32 if multiplies_in_tiles(isa) else 2)
    left, right = (np.pad(side, ((0, 0), (0, padding))) for side in (left, right))
    sums = np.zeros((len(left), len(right)), np.float32)

    def chain(start: np.ndarray, places: Iterable[int]) -> np.ndarray:
        for k in places:
            # Exact in double, but for sums whose terms are so far apart that rounding twice cannot show.
            products = left[:, None, k] * right[None, :, k] + start.astype(np.float64)
            start = flushed(products.astype(np.float32))
        return start

    with np.errstate(over="ignore", invalid="ignore"):
        if not multiplies_in_tiles(isa):
            places = (k for pair in range(0, left.shape[1], 2) for k in (pair + 1, pair))
            return torch.from_numpy(chain(sums, places))
        for first in range(0, left.shape[1], 32):
            zero = np.zeros_like(sums)
            even, odd = chain(zero, range(first, first + 32, 2)), chain(zero, range(first + 1, first + 32, 2))
            sums = flushed(sums + flushed(even + odd))
    return torch.from_numpy(sums)


def matrix_of(weights: torch.Tensor) -> PackedMatrix:
    matrix = PackedMatrix(WeightType.BF16, weights.shape[1], weights.shape[0])
    matrix.load_dense(weights)
    return matrix


def spread(rows: int, columns: int, exponents: tuple[int, int], seed: int) -> torch.Tensor:
    """Random numbers of many magnitudes."""
    random = torch.Generator().manual_seed(seed)
    powers = torch.randint(*exponents, (rows, columns), generator=random)
    return torch.randn(rows, columns, generator=random) * 2.0**powers


# What sums of one shape meet: rounding at every step, cancellation, results below and operands near the smallest
# normal number, sums near the largest.
RANGES = {
    "ordinary": ((-12, 13), (-12, 13)),
    "subnormal": ((-80, -50), (-80, -50)),
    "tiny operands": ((-135, -120), (-3, 20)),
    "tiny weights": ((-3, 20), (-135, -120)),
    "huge": ((58, 62), (58, 62)),
}


@each_bf16_isa
@pytest.mark.parametrize("name", RANGES)
def test_every_bit_is_as_defined(isa: str, name: str) -> None:
    of_x, of_weights = RANGES[name]
    for seed, (depth, width) in enumerate(((1, 3), (2, 33), (37, 40), (301, 70))):
        x, weights = spread(13, depth, of_x, seed), spread(width, depth, of_weights, seed + 100)
        matrix = matrix_of(weights)
        expected = defined(x, matrix.dequantize(), isa)
        for rows in (1, 2, 5, 13):
            assert torch.equal(multiply(matrix, x[:rows], isa).view(torch.int32), expected[:rows].view(torch.int32))
        assert depth < 30 or bool((expected != 0).any())


@each_bf16_isa
def test_sums_go_past_the_largest_number_to_infinity(isa: str) -> None:
    """A product is rounded with the sum, so that one that is too large alone may still cancel: of vectors with the
    second of its pair, of tiles with the one before in its chain."""
    x = torch.tensor([[2.0**100, 2.0**100, -(2.0**100)]])
    cancels = [-(2.0**27), 0.0, -(2.0**28)] if multiplies_in_tiles(isa) else [2.0**28, -(2.0**27), 0.0]
    weights = torch.tensor([[0.0, 2.0**28, 0.0], [0.0, -(2.0**28), 0.0], cancels, [2.0**27, 0, 1]])
    out = multiply(matrix_of(weights), x, isa)[0].tolist()
    assert out == [float("inf"), -float("inf"), 2.0**127, 2.0**127]


@each_bf16_isa
def test_activations_are_rounded_to_nearest_and_ties_to_even(isa: str) -> None:
    ulp = 2.0**-7
    values = [1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2.0**-23, 1 + ulp / 2 - 2.0**-23, -1 - ulp / 2, 3.4e38, 1e-39]
    rounded = [1.0, 1 + 2 * ulp, 1 + ulp, 1.0, -1.0, float("inf"), 0.0]
    one = matrix_of(torch.ones(1, 1))
    assert multiply(one, torch.tensor(values)[:, None], isa)[:, 0].tolist() == rounded


@each_bf16_isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_stay_where_they_are(isa: str, bad: float) -> None:
    """In the row of x and, for weights, in the column; also next to the padding of an odd depth."""
    for depth in (37, 64):
        weights, x = spread(40, depth, (-2, 3), 1), spread(20, depth, (-2, 3), 2)
        clean = multiply(matrix_of(weights), x, isa)
        x[7, depth - 1] = bad
        out = multiply(matrix_of(weights), x, isa)
        assert not out[7].isfinite().any()
        others = [row for row in range(20) if row != 7]
        assert torch.equal(out[others], clean[others])
        weights[33, depth - 1] = bad
        column = multiply(matrix_of(weights), x, isa)
        assert not column[:, 33].isfinite().any()
        assert torch.equal(column[others][:, :33], clean[others][:, :33])


@each_bf16_isa
def test_instruction_sets_agree(isa: str) -> None:
    """Where nothing but a bias and a residual follows the sums, bit by bit, at any depth and height: those on vectors,
    and those on tiles."""
    emulation = "amx_emulated" if multiplies_in_tiles(isa) else "bf16_emulated"
    for depth, width in ((1, 1), (255, 64), (1031, 99)):
        matrix = random_matrix("bf16", depth, width, bias=True)
        x, residual = torch.randn(70, depth), torch.randn(70, width)
        for rows in (1, 4, 33, 70):
            out = multiply(matrix, x[:rows], isa, threads=2, residual=residual[:rows])
            assert torch.equal(out, multiply(matrix, x[:rows], emulation, residual=residual[:rows]))


@each_bf16_isa
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("bf16")])
def test_other_weights_are_not_concerned(isa: str, kind: str) -> None:
    if f"{kind}_bf16" in WIDENED and (isa in TILE_ISAS or (isa == "avx512_bf16" and kind != "e4m3")):
        pytest.skip("rounded to bfloat16 for tiles, and to two digits for vectors")
    matrix = random_matrix(kind, 70, 40, group_size=32, bias=True)
    x = torch.randn(20, 70)
    exact = run_linear(matrix, x, isa=isa, activation=Activation.SILU)
    assert torch.equal(multiply(matrix, x, isa, activation=Activation.SILU), exact)


@each_bf16_isa
def test_activations_are_really_rounded(isa: str) -> None:
    """The two precisions differ, by about what eight bits explain."""
    matrix, x = random_matrix("bf16", 256, 64), torch.randn(30, 256)
    exact, rounded = run_linear(matrix, x, isa=isa), multiply(matrix, x, isa)
    difference = (exact - rounded).abs().max()
    assert 1e-4 < difference < 2e-2


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa not in BF16_ISAS])
def test_precision_that_an_instruction_set_does_not_have_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match=f"{isa} has no bfloat16 products"):
        _native.Program(isa, _native.Pool(1, False), 1, MatmulPrecision.BFLOAT16)


def test_the_emulation_is_never_chosen_by_itself() -> None:
    assert "bf16_emulated" in BF16_ISAS
    assert "bf16_emulated" not in _native.available_isas()
    assert _native.resolve_isa("auto") in _native.available_isas()


def run_pair(isa: str, rows: int, inner: int, *, feeds_next: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What a gated layer and the one behind it give, and what lies between them."""
    wide = random_matrix("bf16", 40, 2 * inner, gated=True, seed=1)
    down = random_matrix("bf16", inner, 33, seed=2)
    program = _native.Program(isa, pool(2), rows, MatmulPrecision.BFLOAT16)
    areas = [
        torch.randn(rows, 48, generator=torch.Generator().manual_seed(3)),
        *(torch.zeros(rows, n) for n in (inner, 48)),
    ]
    x, between, out = (_native.Ref(area, 0, rows_of.shape[1]) for area, rows_of in enumerate(areas))
    program.linear(wide.as_native(), 0, x, _native.Ref(), between, Activation.SILU, None, feeds_next)
    program.linear(down.as_native(), 0, between, _native.Ref(), out, Activation.NONE)
    scratch = torch.zeros(program.scratch_bytes + 64, dtype=torch.uint8)
    start = scratch.data_ptr() + -scratch.data_ptr() % 64
    program.bind(rows, [], [], [area.data_ptr() for area in areas], start)()
    return areas[2][:, :33].clone(), areas[1]


@each_bf16_isa
@pytest.mark.parametrize("rows", [63, 64, 75])
def test_rows_that_are_handed_over_packed_have_the_same_bits(isa: str, rows: int) -> None:
    apart, rows_between = run_pair(isa, rows, 320, feeds_next=False)
    together, between = run_pair(isa, rows, 320, feeds_next=True)
    assert torch.equal(apart, together)
    assert torch.equal(rows_between, between) == (rows < 64 or multiplies_in_tiles(isa))
