"""Runs one native linear layer over buffers with guards around them, and packs random weights for it."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NamedTuple

import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu._native import Activation, MatmulPrecision, WeightType
from quire.kernels.cpu.packing import PackedMatrix


def _emulated() -> list[str]:
    """Kernels for instructions that this machine may lack, where the build has them and the rest runs here."""
    found = []
    for isa in ("amx_emulated", "bf16_emulated"):
        with suppress(ValueError):
            found.append(_native.resolve_isa(isa))
    return found


ISAS = [*_native.available_isas(), *_emulated()]
BF16_ISAS = [isa for isa in ISAS if _native.has_bf16_products(isa)]
"""Instruction sets that multiply bfloat16."""
TILE_ISAS = [isa for isa in ISAS if isa.startswith("amx")]
"""Those that multiply integers and small floats by activations in bfloat16."""
KINDS = ("f32", "bf16", "f16", "i8", "i4", "e4m3", "mxfp4", "nvfp4", "i8_rounded", "i4_rounded", "bf16_rounded")
DIGITS = ("i8_digits", "mxfp4_digits")
WIDENED = ("i8_bf16", "i4_bf16", "e4m3_bf16", "mxfp4_bf16", "nvfp4_bf16")
"""Types of weights, and what is done with activations: "rounded" to integers of 8 bits, or bfloat16 as the weights are;
"bf16" to bfloat16 for weights that are not, "digits" to whole numbers in two digits."""
CASES = [
    *((kind, isa) for kind in KINDS for isa in (BF16_ISAS if kind == "bf16_rounded" else ISAS)),
    *((kind, isa) for kind in DIGITS for isa in ISAS if isa == "avx512_bf16"),
    *((kind, isa) for kind in WIDENED for isa in TILE_ISAS[:1]),  # the emulation is slow, and has the same bits
]
_TYPES = {
    "f32": WeightType.F32,
    "bf16": WeightType.BF16,
    "f16": WeightType.F16,
    "i8": WeightType.I8,
    "i4": WeightType.I4,
    "e4m3": WeightType.E4M3,
    "mxfp4": WeightType.MXFP4,
    "nvfp4": WeightType.NVFP4,
}
_GUARD = -12345.678
_POOLS: dict[int, _native.Pool] = {}


def precision_of(kind: str) -> MatmulPrecision:
    return MatmulPrecision.BFLOAT16 if kind in ("bf16_rounded", *DIGITS, *WIDENED) else MatmulPrecision.FLOAT32


def pool(threads: int) -> _native.Pool:
    """One pool for each number of threads: starting threads is what costs time."""
    if threads not in _POOLS:
        _POOLS[threads] = _native.Pool(threads, pin=False, whole=True)
    return _POOLS[threads]


class GuardedRows:
    """float32 rows with memory before, after and beside them that no kernel may change."""

    def __init__(self, rows: int, width: int, values: torch.Tensor | None = None) -> None:
        self.stride = (width + 15) // 16 * 16 + 16
        self.memory = torch.full(((rows + 4) * self.stride + 16,), _GUARD)
        skip = -self.memory.data_ptr() % 64 // 4
        whole = self.memory[skip : skip + (rows + 4) * self.stride].view(rows + 4, self.stride)
        self.values = whole[2 : rows + 2, :width]
        self.values.copy_(torch.full((rows, width), float("nan")) if values is None else values)

    def address(self) -> int:
        return self.values.data_ptr()

    def check(self) -> None:
        """Fails when something outside the rows was written."""
        inside = self.values.clone()
        self.values.fill_(_GUARD)
        assert bool((self.memory == _GUARD).all()), "a kernel wrote outside its rows"
        self.values.copy_(inside)


def random_matrix(
    kind: str,
    in_features: int,
    out_features: int,
    *,
    group_size: int | None = None,
    gated: bool = False,
    offsets: bool = False,
    bias: bool = False,
    seed: int = 0,
) -> PackedMatrix:
    """A packed matrix of random weights with values of about 1 / sqrt(in_features)."""
    random = torch.Generator().manual_seed(seed)
    rounded = kind.endswith("_rounded")
    type_name = kind.removesuffix("_rounded").removesuffix("_bf16").removesuffix("_digits")
    size = in_features**-0.5
    if type_name in ("f32", "bf16", "f16"):
        matrix = PackedMatrix(_TYPES[type_name], in_features, out_features, gated=gated)
        matrix.load_dense(torch.randn(out_features, in_features, generator=random) * size)
    elif type_name in ("mxfp4", "nvfp4"):
        matrix = PackedMatrix(_TYPES[type_name], in_features, out_features, gated=gated)
        pairs = torch.randint(256, (out_features, -(-in_features // 2)), generator=random, dtype=torch.uint8)
        middle = (127 - round(math.log2(1 / size)) if type_name == "mxfp4" else 0x38) - 2
        codes = torch.randint(middle, middle + 3, (out_features, matrix.num_groups), generator=random)
        row_scales = (torch.rand(out_features, generator=random) + 0.5) * (size / 3) if type_name == "nvfp4" else None
        matrix.load_float4(pairs, codes.to(torch.uint8), row_scales)
    elif type_name == "e4m3":
        matrix = PackedMatrix(WeightType.E4M3, in_features, out_features, group_size=group_size, gated=gated)
        values = torch.randn(out_features, in_features, generator=random).to(torch.float8_e4m3fn)
        scales = (torch.rand(out_features, matrix.num_groups, generator=random) + 0.5) * (size / 2)
        matrix.load_float8(values, scales)
    else:
        matrix = PackedMatrix(
            _TYPES[type_name],
            in_features,
            out_features,
            group_size=group_size,
            gated=gated,
            integer_activations=rounded,
            with_offsets=offsets,
        )
        low, high, dtype = (-128, 128, torch.int8) if type_name == "i8" else (0, 16, torch.uint8)
        values = torch.randint(low, high, (out_features, in_features), generator=random, dtype=dtype)
        scales = (torch.rand(out_features, matrix.num_groups, generator=random) + 0.5) * (size / high)
        shifts = torch.randn(out_features, matrix.num_groups, generator=random) * size if offsets else None
        matrix.load_integer(values, scales, shifts)
    if bias:
        matrix.load_bias(torch.randn(out_features, generator=random))
    return matrix


class Normed(NamedTuple):
    """Rows whose norm a layer multiplies."""

    x: torch.Tensor
    norm: _native.RowNorm


def run_linear(
    matrix: PackedMatrix,
    x: torch.Tensor | Normed,
    *,
    isa: str,
    threads: int = 1,
    activation: Activation = Activation.NONE,
    residual: torch.Tensor | None = None,
    in_place: bool = False,
    precision: MatmulPrecision = MatmulPrecision.FLOAT32,
) -> torch.Tensor:
    """x: [rows, in_features], which may be `Normed`. in_place: the residual lies where the output goes. Two programs of
    three allow more rows than these."""
    x, norm = x if isinstance(x, Normed) else (x, None)
    rows = x.shape[0]
    width = matrix.out_features // 2 if matrix.gated else matrix.out_features
    program = _native.Program(isa, pool(threads), max(rows, 1) + rows % 3 * 20, precision)
    given, out = GuardedRows(rows, matrix.in_features, x), GuardedRows(rows, width)
    beside = GuardedRows(rows, width, residual)
    if in_place:
        out.values.copy_(beside.values)
    places = (_native.Ref(0, 0, given.stride), _native.Ref(1, 0, out.stride), _native.Ref(2, 0, beside.stride))
    no_residual = _native.Ref()
    program.linear(
        matrix.as_native(),
        0 if matrix.bias is None else matrix.bias.data_ptr(),
        places[0],
        no_residual if residual is None else places[1] if in_place else places[2],
        places[1],
        activation,
        norm,
    )
    scratch = torch.full((program.scratch_bytes + 128,), 99, dtype=torch.uint8)
    start = -scratch.data_ptr() % 64
    program.bind(rows, [], [], [given.address(), out.address(), beside.address()], scratch.data_ptr() + start)()
    for guarded in (given, out, beside):
        guarded.check()
    assert bool((scratch[:start] == 99).all())
    assert bool((scratch[start + program.scratch_bytes :] == 99).all())
    assert torch.equal(given.values, x) or bool(x.isnan().any())
    return out.values.clone()


def row_norm(
    x: torch.Tensor, isa: str, weight: torch.Tensor, bias: torch.Tensor | None, *, centred: bool
) -> torch.Tensor:
    """The norm of each row as a layer of its own, with an epsilon of 1e-5."""
    rows, width = x.shape
    program = _native.Program(isa, pool(1), rows, MatmulPrecision.FLOAT32)
    given, out = GuardedRows(rows, width, x), GuardedRows(rows, width)
    places = (_native.Ref(0, 0, given.stride), _native.Ref(1, 0, out.stride))
    program.norm(weight.data_ptr(), 0 if bias is None else bias.data_ptr(), 1e-5, centred, width, *places)
    program.bind(rows, [], [], [given.address(), out.address()], 0)()
    return out.values.clone()
