"""Weights in the panel layout of the native linear kernels (csrc/kernels.h). A matrix is allocated whole and filled by
rows as the checkpoint is read."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.envs import affinity_cores
from quire.kernels.cpu import _native
from quire.kernels.cpu._native import WeightType
from quire.kernels.cpu.memory import ALIGNMENT, allocate, give_back, reserve, touch

_FLOAT_TYPES = {torch.float32: WeightType.F32, torch.bfloat16: WeightType.BF16, torch.float16: WeightType.F16}
_VALUE_DTYPES = {WeightType.I8: torch.int8, WeightType.I4: torch.uint8, WeightType.E4M3: torch.float8_e4m3fn}
"""Value dtype of quantised types with float32 scales."""
_FP4_GROUPS = {WeightType.MXFP4: 32, WeightType.NVFP4: 16}
"""Input features that share a scale, by 4-bit format."""
_PANEL = 32
_MOST_FEATURES = 2**31 - 1
_MOST_TOUCHED = 32 << 20
_MOST_THREADS = 8
_BYTES_OF_A_THREAD = 1 << 18
"""Bytes per packing thread from which its start pays."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """GGUF block format: `values` values in `num_bytes` bytes, and per `group_size` values a scale, or scale code in
    super-blocks. centre: value that stands for zero, if scales have no offsets."""

    type: WeightType
    num_bytes: int
    values: int = 32
    group_size: int = 32
    has_offsets: bool = False
    centre: float = 0.0

    @property
    def is_super(self) -> bool:
        """True if a group's scale is the block's scale times a code."""
        return self.values != self.group_size


BLOCK_LAYOUTS = {
    "Q4_0": BlockLayout(WeightType.I4, 18, centre=8.0),
    "Q4_1": BlockLayout(WeightType.I4, 20, has_offsets=True),
    "Q5_0": BlockLayout(WeightType.I5, 22),
    "Q5_1": BlockLayout(WeightType.I5, 24, has_offsets=True),
    "Q8_0": BlockLayout(WeightType.I8, 34),
    "Q2_K": BlockLayout(WeightType.I2, 84, 256, 16, has_offsets=True),
    "Q3_K": BlockLayout(WeightType.I3, 110, 256, 16),
    "Q4_K": BlockLayout(WeightType.I4, 144, 256, has_offsets=True),
    "Q5_K": BlockLayout(WeightType.I5, 176, 256, has_offsets=True),
    "Q6_K": BlockLayout(WeightType.I6, 210, 256, 16),
    "IQ4_NL": BlockLayout(WeightType.NL4, 18),
    "IQ4_XS": BlockLayout(WeightType.NL4, 136, 256),
    "MXFP4": BlockLayout(WeightType.MXFP4, 17),
}


class PackedMatrix:
    """Weight [out_features, in_features] in panels of 32 rows; unloaded parts are zero. gated: gate rows come first,
    then as many up rows. group_size (integers and 8-bit floats): inputs that share a scale; None: all.
    integer_activations: kernels round activations to 8 bits and multiply integers. with_offsets (integers): weight =
    scale * value + offset. memory: source of zeroed memory, such as a model's `Arena`."""

    scale_dtype = torch.float32
    blocks: BlockLayout | None = None
    """Block format, if the file's blocks are kept."""
    activation_bits = 0
    """Minimum bits of activations in products of integers and 4-bit floats: 8 (integers with a scale per group), 16 or
    32; 0: by the program's precision."""

    def __init__(
        self,
        type: WeightType,
        in_features: int,
        out_features: int,
        *,
        group_size: int | None = None,
        gated: bool = False,
        integer_activations: bool = False,
        with_offsets: bool = False,
        memory: Callable[[int], torch.Tensor] = allocate,
    ) -> None:
        if not 1 <= in_features <= _MOST_FEATURES or not 1 <= out_features <= _MOST_FEATURES:
            raise ValueError(f"a matrix of {out_features} x {in_features} cannot be packed")
        if gated and out_features % 2:
            raise ValueError(f"a gated matrix has as many gate rows as up rows, not {out_features} in all")
        if type not in (WeightType.I8, WeightType.I4) and (integer_activations or (with_offsets and not self.blocks)):
            raise ValueError("only integer weights have offsets or integer activations")
        if self.blocks is None and type not in _VALUE_DTYPES and group_size is not None:
            raise ValueError("only integers and 8-bit floats have groups of any size")
        if group_size is not None and group_size < 1:
            raise ValueError(f"a group of {group_size} inputs is not possible")
        self.type = type
        self._memory = memory
        self.in_features = in_features
        self.out_features = out_features
        self.group_size = _FP4_GROUPS.get(type) or min(group_size or in_features, in_features)
        self.gated = gated
        self.integer_activations = integer_activations
        panels, panel_bytes, self.num_groups = _native.packed_sizes(self._describe(out_features, gated))
        self.padded_columns = panels * _PANEL
        self.data = self._zeros(panels * panel_bytes, torch.uint8)
        count = num_codes = panels * self.num_groups * _PANEL
        is_super = self.blocks is not None and self.blocks.is_super
        if is_super and self.blocks is not None:
            count //= self.blocks.values // self.blocks.group_size
            num_codes = count * _native.code_rows(type)
        self.scales: torch.Tensor | None = None
        if type not in _FLOAT_TYPES.values() and type != WeightType.MXFP4:
            self.scales = self._zeros(self.padded_columns if type == WeightType.NVFP4 else count, self.scale_dtype)
        self.scale_codes = self._zeros(num_codes, torch.uint8) if is_super or type in _FP4_GROUPS else None
        self.offsets = self._zeros(count, self.scale_dtype) if with_offsets else None
        sums = type == WeightType.I8 and integer_activations
        self.column_sums = self._zeros(count, torch.int32) if sums else None
        self.column_order: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (*self._stored(), self.bias) if tensor is not None]

    def load_dense(self, rows: torch.Tensor, first_row: int = 0) -> None:
        """Load rows [n, in_features] of any float dtype from first_row on."""
        if self.type not in _FLOAT_TYPES.values():
            raise ValueError("a quantised matrix is loaded from values and scales")
        self._check_rows(rows, first_row)
        if rows.dtype not in _FLOAT_TYPES:
            raise TypeError(f"weights of {rows.dtype} cannot be packed")
        rows = _with_contiguous_rows(rows)
        _native.pack_rows(
            self.as_native(), rows.data_ptr(), _FLOAT_TYPES[rows.dtype], rows.stride(0), first_row, rows.shape[0]
        )

    def load_integer(
        self, values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None, first_row: int = 0
    ) -> None:
        """Load rows: values [n, in_features] (int8 for I8; uint8, 0 to 15, for I4), scales and offsets [n, groups]
        float32, all in column order if one is set."""
        if self.type not in (WeightType.I8, WeightType.I4):
            raise ValueError("the matrix does not hold integers")
        self._load_values(values, scales, offsets, first_row)

    def load_float8(self, values: torch.Tensor, scales: torch.Tensor, first_row: int = 0) -> None:
        """Load rows into an E4M3 matrix: values [n, in_features] float8_e4m3fn, scales [n, groups] float32."""
        if self.type != WeightType.E4M3:
            raise ValueError("the matrix does not hold 8-bit floats")
        self._load_values(values, scales, None, first_row)

    def load_float4(
        self, pairs: torch.Tensor, scale_codes: torch.Tensor, row_scales: torch.Tensor | None = None, first_row: int = 0
    ) -> None:
        """Load rows: e2m1 codes [n, in_features / 2 rounded up] uint8, first of a pair in the low nibble, and scale
        codes [n, groups] uint8. row_scales: [n] float32, factors of NVFP4's scales."""
        if self.scale_codes is None:
            raise ValueError("the matrix does not hold 4-bit floats")
        rows = pairs.shape[0]
        for name, tensor, columns in (
            ("pairs", pairs, -(-self.in_features // 2)),
            ("scale codes", scale_codes, self.num_groups),
        ):
            if tensor.dtype != torch.uint8 or tensor.shape != (rows, columns):
                raise ValueError(f"{name} are {tensor.dtype} {list(tensor.shape)}, not uint8 {[rows, columns]}")
        if (row_scales is None) != (self.scales is None) or (row_scales is not None and len(row_scales) != rows):
            raise ValueError("NVFP4 alone has a float32 scale for each row")
        self._check_place(rows, first_row)
        pairs, scale_codes = _with_contiguous_rows(pairs), scale_codes.contiguous()
        row_scales = None if row_scales is None else row_scales.to(torch.float32).contiguous()
        _native.pack_fp4(
            self.as_native(),
            pairs.data_ptr(),
            pairs.stride(0),
            scale_codes.data_ptr(),
            self.num_groups,
            0 if row_scales is None else row_scales.data_ptr(),
            first_row,
            rows,
        )

    def _load_values(
        self, values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, first_row: int
    ) -> None:
        wanted = _VALUE_DTYPES[self.type]
        if values.dtype != wanted:
            raise TypeError(f"values are {values.dtype}, not {wanted}")
        self._check_rows(values, first_row)
        if offsets is not None and self.offsets is None:
            raise ValueError("the matrix was made without offsets")
        for name, tensor in (("scales", scales), ("offsets", offsets)):
            if tensor is not None and (tensor.dtype != torch.float32 or tensor.shape != (len(values), self.num_groups)):
                raise ValueError(
                    f"{name} are {tensor.dtype} {list(tensor.shape)}, not float32 {[len(values), self.num_groups]}"
                )
        values, scales = _with_contiguous_rows(values), scales.contiguous()
        offsets = None if offsets is None else offsets.contiguous()
        _native.pack_integers(
            self.as_native(),
            values.data_ptr(),
            values.stride(0),
            scales.data_ptr(),
            0 if offsets is None else offsets.data_ptr(),
            self.num_groups,
            first_row,
            values.shape[0],
        )

    def load_bias(self, bias: torch.Tensor, first_row: int = 0) -> None:
        """Load biases [n] from first_row on; unloaded ones are zero."""
        if bias.ndim != 1 or first_row < 0 or first_row + len(bias) > self.out_features:
            raise ValueError(f"a bias {list(bias.shape)} does not fit rows {first_row} to {self.out_features}")
        if self.bias is None:
            self.bias = self._zeros(self.padded_columns, torch.float32)
        self.bias[self._columns(first_row, len(bias))] = bias.to(torch.float32)

    def set_column_order(self, order: torch.Tensor) -> None:
        """Set the column order (GPTQ's act-order): packed column k multiplies input order[k]. order: [in_features], a
        permutation."""
        if order.shape != (self.in_features,):
            raise ValueError(f"an order of {list(order.shape)} for {self.in_features} inputs")
        order = order.to(torch.int32).contiguous().clone()
        if not torch.equal(order.sort().values, torch.arange(self.in_features, dtype=torch.int32)):
            raise ValueError("the column order is not a permutation")
        self.column_order = order

    def dequantize(self) -> torch.Tensor:
        """Matrix as float32 [out_features, in_features], columns in input order."""
        rows = torch.empty(self.out_features, self.in_features)
        _native.unpack_rows(self.as_native(), rows.data_ptr(), self.in_features, 0, self.out_features)
        return rows

    def as_native(self, *, interleaved: bool = False) -> _native.PackedWeight:
        """Matrix for kernels, which hold its addresses: it must outlive them. interleaved: gate and up rows
        alternate by 16, in `padded_columns` rows."""
        if not interleaved:
            return self._describe(self.out_features, self.gated, *self._stored())
        return self._describe(self.padded_columns, False, *self._stored())

    def _stored(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors that kernels read, in the order of `PackedWeight`."""
        others, numbers = (self.column_sums, self.column_order, self.scale_codes), (self.scales, self.offsets)
        is_wide = self.scale_dtype == torch.float32
        return (self.data, *numbers, *others, None, None) if is_wide else (self.data, None, None, *others, *numbers)

    def _describe(self, out_features: int, gated: bool, *tensors: torch.Tensor | None) -> _native.PackedWeight:
        return _native.PackedWeight(
            self.type,
            self.in_features,
            out_features,
            self.group_size,
            gated,
            self.integer_activations,
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors or (None,)),
            centre=self.blocks.centre if self.blocks else 0.0,
            super_blocks=self.blocks is not None and self.blocks.is_super,
            activation_bits=self.activation_bits,
        )

    def _zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory(count * dtype.itemsize).view(dtype)

    def _check_rows(self, rows: torch.Tensor, first_row: int) -> None:
        if rows.ndim != 2 or rows.shape[1] != self.in_features:
            raise ValueError(f"rows {list(rows.shape)} do not fit a matrix with {self.in_features} inputs")
        self._check_place(rows.shape[0], first_row)

    def _check_place(self, num_rows: int, first_row: int) -> None:
        if first_row < 0 or first_row + num_rows > self.out_features:
            raise ValueError(f"{num_rows} rows from {first_row} on do not fit {self.out_features}")

    def _columns(self, first_row: int, count: int) -> torch.Tensor:
        rows = torch.arange(first_row, first_row + count)
        if not self.gated:
            return rows
        half, width = self.out_features // 2, _PANEL // 2
        side, inside = rows // half, rows % half
        return inside // width * _PANEL + side * width + inside % width


class HalfScaleMatrix(PackedMatrix):
    """Integers with scales and offsets in float16; loaded ones are rounded."""

    scale_dtype = torch.float16


class BlockMatrix(HalfScaleMatrix):
    """Matrix with GGUF's blocks unchanged, in panel order. format: key of BLOCK_LAYOUTS."""

    def __init__(
        self,
        format: str,
        in_features: int,
        out_features: int,
        *,
        gated: bool = False,
        memory: Callable[[int], torch.Tensor] = allocate,
    ) -> None:
        self.blocks = blocks = BLOCK_LAYOUTS[format]
        if in_features % blocks.values:
            raise ValueError(f"no blocks of {blocks.values} values make up {in_features} inputs of {format}")
        super().__init__(
            blocks.type,
            in_features,
            out_features,
            group_size=blocks.group_size,
            gated=gated,
            with_offsets=blocks.has_offsets,
            memory=memory,
        )

    def load_blocks(self, rows: torch.Tensor, first_row: int = 0) -> None:
        """Load rows of whole blocks [n, bytes of a row], uint8, from the file, on all cores."""
        assert self.blocks is not None, "a matrix of blocks has a layout"
        wanted = self.in_features // self.blocks.values * self.blocks.num_bytes
        if rows.dtype != torch.uint8 or rows.ndim != 2 or rows.shape[1] != wanted:
            raise ValueError(f"rows of {rows.dtype} {list(rows.shape)} do not fit {wanted} bytes of blocks")
        self._check_place(len(rows), first_row)
        rows = _with_contiguous_rows(rows)
        threads = min(affinity_cores(), _MOST_THREADS, rows.nbytes // _BYTES_OF_A_THREAD) or 1
        _native.pack_blocks(self.as_native(), rows.data_ptr(), rows.stride(0), first_row, len(rows), threads)


def _with_contiguous_rows(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) >= 0 else matrix.contiguous()


class Arena:
    """Memory for many tensors in large mappings of huge pages, touched ahead of the packing on all cores. A mapping
    lives as long as its tensors."""

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._mapping: mmap.mmap | None = None
        self._chunk = allocate(0)
        self._used = self._touched = self._total = 0
        self._most_ahead = _MOST_TOUCHED

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, zero, aligned to ALIGNMENT. Raises InsufficientMemoryError."""
        if num_bytes >= self._chunk_bytes:
            return _touched(allocate(num_bytes))
        if self._used + num_bytes > len(self._chunk):
            self._give_back()
            self._mapping = reserve(self._chunk_bytes)
            self._chunk, self._used, self._touched = torch.frombuffer(self._mapping, dtype=torch.uint8), 0, 0
        start, end = self._used, self._used + num_bytes
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        self._total += num_bytes
        if end > self._touched:
            first, self._touched = self._touched, end + min(self._total // 8, self._most_ahead)
            _touched(self._chunk[first : self._touched])
        return self._chunk[start:end]

    def trim(self) -> None:
        """Return unused memory, and touch none ahead any more."""
        self._give_back()
        self._most_ahead = 0

    def _give_back(self) -> None:
        if self._mapping is not None:
            give_back(self._mapping, self._used, min(self._touched, self._chunk_bytes))
            self._touched = self._used


def _touched(memory: torch.Tensor) -> torch.Tensor:
    touch([memory], min(affinity_cores(), _MOST_THREADS))
    return memory
