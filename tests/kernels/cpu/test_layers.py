"""Native embedding, norms and rotary tables: the values of float64, and a row's bits in any company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.layers.test_norm import build

_native = pytest.importorskip("quire.kernels.cpu._native")

from quire.layers.norm import LayerNorm, RMSNorm  # noqa: E402

PANEL = 32
ISAS = _native.available_isas()
WIDTHS = [1, 15, 16, 33, 64, 127, 576]

each_isa = pytest.mark.parametrize("isa", ISAS)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def strided(rows: torch.Tensor) -> torch.Tensor:
    """A copy whose rows begin at multiples of 16 elements, with NaN between them."""
    stride = -(-rows.shape[1] // 16) * 16
    memory = torch.full((max(1, len(rows)), stride), torch.nan)
    memory[: len(rows), : rows.shape[1]] = rows
    return memory[: len(rows), : rows.shape[1]]


def run(
    isa: str,
    threads: int,
    record: Callable[[Any, list[Any]], None],
    matrices: list[torch.Tensor],
    columns: Sequence[torch.Tensor | None] = (),
    encoder: Any = None,
    precision: str = "FLOAT32",
) -> None:
    """Run the kernel that `record` adds to a program (given a Ref of each matrix) over all rows of the matrices."""
    num_rows = len(matrices[0])
    program = _native.Program(
        isa, _native.Pool(threads, pin=False, whole=True), num_rows, getattr(_native.MatmulPrecision, precision)
    )
    record(program, [_native.Ref(area, 0, matrix.stride(0)) for area, matrix in enumerate(matrices)])
    program.bind(
        num_rows,
        [0 if column is None else column.data_ptr() for column in columns],
        [],
        [matrix.data_ptr() for matrix in matrices],
        0,
        encoder=encoder,
    )()


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.int32), second.contiguous().view(torch.int32))


# -- element by element -----------------------------------------------------------------------------------------------


@each_isa
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("kind", "factor", "reference"),
    [
        ("ADD", 1.0, lambda x, y: x + y),
        ("MULTIPLY", 1.0, lambda x, y: x * y),
        ("SCALE", 0.375, lambda x, _: 0.375 * x),
        ("SOFT_CAP", 30.0, lambda x, _: 30 * torch.tanh(x / 30)),
    ],
)
def test_elementwise_kernels_are_those_of_float64(
    isa: str, width: int, kind: str, factor: float, reference: Callable[..., torch.Tensor]
) -> None:
    x, y = (strided(20 * randn(37, width, seed=seed)) for seed in range(2))
    out = strided(torch.zeros(37, width))

    def record(program: Any, refs: list[Any]) -> None:
        second = refs[1] if kind in ("ADD", "MULTIPLY") else _native.Ref()
        program.elementwise(_native.Elementwise[kind], factor, width, refs[0], second, refs[2])

    run(isa, 2, record, [x, y, out])
    torch.testing.assert_close(out.double(), reference(x.double(), y.double()), rtol=1e-6, atol=1e-5)
    alone = strided(torch.zeros(1, width))
    run(isa, 1, record, [strided(x[5:6]), strided(y[5:6]), alone])
    assert same_bits(alone, out[5:6])


# -- norms ------------------------------------------------------------------------------------------------------------


def norm(
    isa: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    subtract_mean: bool,
    threads: int = 2,
    in_place: bool = False,
) -> torch.Tensor:
    x = strided(x)
    out = x if in_place else strided(torch.zeros(x.shape))

    def record(program: Any, refs: list[Any]) -> None:
        addresses = [0 if part is None else part.data_ptr() for part in (weight, bias)]
        program.norm(*addresses, 1e-5, subtract_mean, x.shape[1], refs[0], refs[-1])

    run(isa, threads, record, [x] if in_place else [x, out])
    return out


@each_isa
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("affine", [False, True])
def test_norms_are_those_of_float64(isa: str, width: int, affine: bool) -> None:
    x = randn(37, width) * torch.logspace(-3, 3, 37)[:, None] + 2
    weight, bias = (randn(width, seed=1), randn(width, seed=2)) if affine else (None, None)
    wide = x.double()
    for subtract_mean in (False, True):
        centred = wide - wide.mean(-1, keepdim=True) if subtract_mean else wide
        expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        if weight is not None and bias is not None:
            expected = expected * weight + bias
        actual = norm(isa, x, weight, bias, subtract_mean=subtract_mean)
        # Where little of a row is left without its mean, that carries the mean's rounding.
        deviation = wide.std(-1, correction=0).clamp(min=1e-5**0.5)
        tolerance = 2e-6 * float((wide.abs().amax(-1) / deviation).max()) if subtract_mean else 0.0
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=max(tolerance, 1e-5))


@each_isa
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_are_those_of_the_layers(isa: str, kind: type[RMSNorm | LayerNorm]) -> None:
    x = randn(20, 200)
    layer = build(kind, 200)
    weight, bias = randn(200, seed=0), randn(200, seed=1) if kind is LayerNorm else None
    actual = norm(isa, x, weight, bias, subtract_mean=kind is LayerNorm)
    torch.testing.assert_close(actual, layer(x), rtol=1e-5, atol=1e-6)


@each_isa
@pytest.mark.parametrize("width", [1, 33, 576])
def test_a_normed_row_has_the_same_bits_everywhere(isa: str, width: int) -> None:
    x = randn(301, width)
    weight, bias = randn(width, seed=1), randn(width, seed=2)
    for subtract_mean in (False, True):
        whole = norm(isa, x, weight, bias, subtract_mean=subtract_mean, threads=1)
        for threads in (1, 2, 3):
            for first, last in ((0, 1), (7, 9), (100, 301), (0, 301)):
                part = norm(
                    isa,
                    x[first:last],
                    weight,
                    bias,
                    subtract_mean=subtract_mean,
                    threads=threads,
                    in_place=threads == 3,
                )
                assert same_bits(part, whole[first:last])


@each_isa
def test_norms_of_no_rows_and_of_nonfinite_rows(isa: str) -> None:
    assert norm(isa, torch.zeros(0, 8), None, None, subtract_mean=True).shape == (0, 8)
    x = randn(5, 40)
    whole = norm(isa, x, None, None, subtract_mean=False)
    x[1, 3], x[3, 39] = torch.nan, torch.inf
    actual = norm(isa, x, None, None, subtract_mean=False)
    assert actual[1].isnan().all()
    assert actual[3].isnan().any()
    assert same_bits(actual[[0, 2, 4]], whole[[0, 2, 4]])


# -- embedding --------------------------------------------------------------------------------------------------------


def pack_floats(table: torch.Tensor) -> torch.Tensor:
    """[rows, width] -> [panels, width, 32]; bfloat16: [panels, width / 2, 32, 2]."""
    depth = 2 if table.dtype == torch.bfloat16 else 1
    padded = torch.nn.functional.pad(table, (0, -table.shape[1] % depth, 0, -len(table) % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // depth, depth).transpose(1, 2).contiguous()


def pack_integers(values: torch.Tensor, group: int, bits: int) -> torch.Tensor:
    """values: [rows, width] int -> bytes in panels of 32 rows, as csrc/kernels.h says."""
    rows, width = values.shape
    values = torch.nn.functional.pad(values, (0, 0, 0, -rows % PANEL)).view(-1, PANEL, width // group, group)
    values = torch.nn.functional.pad(values, (0, -group % 4)).permute(0, 2, 3, 1)  # [panel, group, k, column]
    panels, groups, depth, _ = values.shape
    if bits == 8:
        return values.reshape(panels, groups, depth // 4, 4, PANEL).transpose(3, 4).to(torch.int8).contiguous()
    octets = values.reshape(panels, groups, depth // 8, 2, 4, PANEL)
    return (octets[:, :, :, 0] | octets[:, :, :, 1] << 4).transpose(3, 4).to(torch.uint8).contiguous()


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """[rows, groups] -> [panels, groups, 32]."""
    return pack_floats(scales)


class Table:
    """A packed table, and the values that it stands for."""

    def __init__(self, kind: str, rows: int, width: int, *, group: int = 0, ordered: bool = False) -> None:
        self.width, self.kind = width, kind
        scales = offsets = None
        if kind in ("I8", "I4"):
            group = group or width
            low, high = (-127, 128) if kind == "I8" else (0, 16)
            integers = torch.randint(low, high, (rows, width), generator=torch.Generator().manual_seed(3))
            scales = randn(rows, width // group, seed=4) * 0.1
            offsets = randn(rows, width // group, seed=5) if kind == "I4" else torch.zeros(rows, width // group)
            self.values = (
                integers.double() * scales.double().repeat_interleave(group, 1)
                + offsets.double().repeat_interleave(group, 1)
            ).float()
            self._data = pack_integers(integers, group, 8 if kind == "I8" else 4)
            self._scales = pack_scales(scales)
            self._offsets = pack_scales(offsets) if kind == "I4" else None
        else:
            dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[kind]
            stored = randn(rows, width).to(dtype)
            if kind == "F16":
                stored[0, 0], stored[1, 0], stored[2, 0] = 6e-8, -65504.0, torch.inf
            self.values = stored.float()
            self._data = pack_floats(stored)
            self._scales = self._offsets = None
        self._order = None
        if ordered:
            self._order = torch.randperm(width, generator=torch.Generator().manual_seed(6)).to(torch.int32)
            self.values = torch.empty_like(self.values).index_copy_(1, self._order.long(), self.values)
        self.weight = _native.PackedWeight(
            getattr(_native.WeightType, kind),
            width,
            rows,
            group or width,
            False,
            False,
            self._data.data_ptr(),
            0 if self._scales is None else self._scales.data_ptr(),
            0 if self._offsets is None else self._offsets.data_ptr(),
            0,
            0 if self._order is None else self._order.data_ptr(),
        )


FLOATS = [(kind, width, 0, False) for kind in ("F32", "BF16", "F16") for width in (1, 33, 200)]
BYTES = [("I8", width, group, False) for width, group in ((33, 33), (200, 200), (96, 6), (384, 128))]
NIBBLES = [("I4", width, group, False) for width, group in ((200, 200), (96, 32), (384, 128), (240, 24))]
REORDERED = [("BF16", 96, 0, True), ("I4", 96, 32, True)]


def embed(
    isa: str,
    table: Table,
    ids: torch.Tensor,
    *,
    threads: int = 2,
    shift: int = 0,
    onto: torch.Tensor | None = None,
    column: int = _native.TOKEN_IDS,
) -> torch.Tensor:
    out = strided(torch.full((len(ids), table.width), torch.nan) if onto is None else onto)

    def record(program: Any, refs: list[Any]) -> None:
        program.embed(table.weight, table.width, shift, column, onto is not None, refs[0])

    other = torch.full_like(ids, 10**9)
    run(isa, threads, record, [out], [ids if number == column else other for number in range(_native.MAX_COLUMNS)])
    return out


@each_isa
@pytest.mark.parametrize(("kind", "width", "group", "ordered"), [*FLOATS, *BYTES, *NIBBLES, *REORDERED])
def test_embedding(isa: str, kind: str, width: int, group: int, ordered: bool) -> None:
    table = Table(kind, 70, width, group=group, ordered=ordered)
    ids = torch.randint(0, 70, (41,), generator=torch.Generator().manual_seed(7))
    ids[:4] = torch.tensor([0, 69, 31, 32])
    exact = table.kind not in ("I8", "I4")
    tolerance = 0 if exact else 1e-6
    expected = table.values[ids]
    actual = embed(isa, table, ids)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for threads in (1, 2, 3):
        assert same_bits(embed(isa, table, ids[5:6], threads=threads), actual[5:6])
        assert same_bits(embed(isa, table, ids, threads=threads), actual)
    before = randn(41, table.width, seed=8)
    # A position's vector is added to the token's, two rows further on in the table.
    added = embed(isa, table, (ids - 2).clamp(min=0), shift=2, onto=before, column=_native.SLOT_POSITIONS)
    assert same_bits(added, before + embed(isa, table, (ids - 2).clamp(min=0) + 2))
    assert same_bits(embed(isa, table, ids, column=_native.MAX_COLUMNS - 1), actual)


@each_isa
def test_embedding_of_no_tokens(isa: str) -> None:
    assert embed(isa, Table("F32", 3, 1), torch.zeros(0, dtype=torch.int64)).shape == (0, 1)


# -- rotary tables ----------------------------------------------------------------------------------------------------


def rotation(
    isa: str, positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float, threads: int
) -> torch.Tensor:
    out = strided(torch.full((len(positions), 2 * len(frequencies)), torch.nan))

    def record(program: Any, refs: list[Any]) -> None:
        program.rotation(frequencies.data_ptr(), 2 * len(frequencies), magnitude, 2, refs[0])

    run(isa, threads, record, [out], [None, None, positions])
    return out


@each_isa
@pytest.mark.parametrize("half", [1, 16, 33])
def test_rotation(isa: str, half: int) -> None:
    frequencies = 10000.0 ** -(torch.arange(half) / half)
    positions = torch.cat((torch.arange(300), torch.tensor([8191, 131071])))
    # The angle is rounded to float32, as the plain rotary embedding does; its cosine and sine are exact to an ulp.
    angles = (positions[:, None].float() * frequencies).double()
    expected = torch.cat((angles.cos(), angles.sin()), 1) * 1.25
    whole = rotation(isa, positions, frequencies, 1.25, 1)
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=3e-7)
    for threads in (1, 2, 3):
        for first, last in ((0, 1), (299, 302), (3, 150), (0, 302)):
            assert same_bits(rotation(isa, positions[first:last], frequencies, 1.25, threads), whole[first:last])
    assert rotation(isa, positions[:0], frequencies, 1.0, 2).shape == (0, 2 * half)


OUTSIDE = [70, -1, 2**31, -(2**31), 2**63 - 1, -(2**63)]


@each_isa
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("column", [_native.TOKEN_IDS, _native.SLOT_POSITIONS, 2])
def test_an_id_outside_the_table_is_refused(isa: str, outside: int, column: int) -> None:
    """A run with one such row computes nothing: the memory beside the table is not read."""
    table, ids = Table("F32", 70, 16), torch.arange(20)
    ids[13] = outside
    out = strided(torch.full((20, 16), 3.0))

    def record(program: Any, refs: list[Any]) -> None:
        program.embed(table.weight, 16, 0, column, False, refs[0])

    with pytest.raises(ValueError, match=r"lies outside the (embedding|table of positions|column's table)"):
        run(isa, 2, record, [out], [*[None] * column, ids])
    assert (out == 3.0).all()


def test_a_column_that_no_step_has_is_refused() -> None:
    program, table = _native.Program(ISAS[0], _native.Pool(1, False), 1), Table("F32", 70, 16)
    ref, no_rotation = _native.Ref(0, 0, 16), (torch.ones(1).data_ptr(), 2, 1.0)
    for column in (-1, _native.MAX_COLUMNS):
        with pytest.raises(ValueError, match="a column of a number"):
            program.embed(table.weight, 16, 0, column, False, ref)
        with pytest.raises(ValueError, match="a column of a number"):
            program.rotation(*no_rotation, column, ref)
    with pytest.raises(ValueError, match="too many columns"):
        program.bind(1, [0] * (_native.MAX_COLUMNS + 1), [], [], 0)
    frequencies = torch.ones(1)
    program.rotation(frequencies.data_ptr(), 2, 1.0, 2, ref)
    with pytest.raises(ValueError, match="rotations are of positions"):
        program.bind(1, [0, 0], [], [torch.zeros(16).data_ptr()], 0)()


def test_the_shift_counts_when_ids_are_checked() -> None:
    table, ids = Table("F32", 70, 16), torch.tensor([66, 67])
    expected = embed(ISAS[0], table, ids + 2)
    assert same_bits(embed(ISAS[0], table, ids, shift=2), expected)
    with pytest.raises(ValueError, match="outside the embedding"):
        embed(ISAS[0], table, ids + 1, shift=2)
    with pytest.raises(ValueError, match="outside the embedding"):
        embed(ISAS[0], table, ids - 100, shift=2)
