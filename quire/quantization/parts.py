"""Assembly of quantised matrices from the streamed tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quire.errors import ModelLoadError
from quire.quantization.integer_weight import WeightTensor
from quire.quantization.quantized_weight import QuantizedWeight

FLOATING = (torch.float16, torch.bfloat16, torch.float32)
INTEGRAL = (torch.int32, torch.int64)


@dataclass
class Parts:
    """Parts of one matrix streamed so far from a checkpoint. prefix: start of their names."""

    prefix: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, part: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]) -> torch.Tensor:
        """One part, checked for dtype and shape (None: any size). Raises ModelLoadError naming it."""
        tensor = self.tensors[part]
        fits = len(tensor.shape) == len(shape) and all(
            wanted in (None, size) for size, wanted in zip(tensor.shape, shape, strict=True)
        )
        if not fits or tensor.dtype not in dtypes:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(
                part, f"is {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}, not [{sizes}] of {names}"
            )
        return tensor

    def scales(self, part: str, shape: Sequence[int]) -> torch.Tensor:
        """Scales of any floating dtype, as float32."""
        return self.take(part, FLOATING, shape).float()

    def error(self, part: str, message: str) -> ModelLoadError:
        return ModelLoadError(f"tensor '{self.prefix}{part}' {message}")

    def scalar(self, part: str) -> float:
        """One part that is a number, of shape [] or [1]."""
        tensor = self.tensors[part]
        shape = (1,) if tensor.dim() == 1 else ()
        return float(self.take(part, FLOATING, shape))

    def group_size(self, part: str, columns: int, wanted: int | None) -> int:
        """Features per group; None: all. Raises ModelLoadError if groups do not divide the columns."""
        size = columns if wanted is None else wanted
        if columns % size:
            raise self.error(part, f"has {columns} input features, which are no multiple of the group size {size}")
        return size


@dataclass(frozen=True)
class MatrixFormat:
    """Format of stored matrices in several parts. required: part names. harmless: parts without effect, each with a
    test for that. build: makes the matrix. weight_dtype: dtype of a part called "weight". aliases: further names of
    parts. separator: between the names of matrix and part; with a dot, the matrix is `<name>.weight`."""

    required: frozenset[str]
    build: Callable[[Parts], QuantizedWeight]
    harmless: Mapping[str, Callable[[torch.Tensor], bool]] = field(default_factory=dict)
    weight_dtype: torch.dtype = torch.int8
    aliases: Mapping[str, str] = field(default_factory=dict)
    separator: str = "."

    def split(self, name: str) -> tuple[str, str]:
        """(name of the matrix or module, name of the part)."""
        module, _, part = name.rpartition(self.separator)
        return module, self.aliases.get(part, part)

    def matrix_name(self, module: str) -> str:
        return f"{module}.weight" if self.separator == "." else module

    def owns(self, part: str, tensor: torch.Tensor) -> bool:
        """True if a tensor is a part of a matrix. A plain weight has the same name as a quantised one."""
        if part == "weight":
            return part in self.required and tensor.dtype == self.weight_dtype
        return part in self.required or part in self.harmless


def assemble(
    tensors: Iterable[tuple[str, torch.Tensor]], matrix_format: MatrixFormat
) -> Iterator[tuple[str, WeightTensor]]:
    """Yield each matrix after its last part, other tensors as they come.

    Parts come in any order; only incomplete matrices are held. Raises ModelLoadError, naming the tensor, for missing,
    duplicate or misfit parts.
    """
    pending: dict[str, Parts] = {}
    done: set[str] = set()
    harmless: dict[str, str] = {}
    for name, tensor in tensors:
        module, part = matrix_format.split(name)
        if not matrix_format.owns(part, tensor):
            yield name, tensor
            continue
        if part in matrix_format.harmless:
            if not matrix_format.harmless[part](tensor):
                raise ModelLoadError(f"tensor {name!r} contradicts the quantization_config of config.json")
            harmless[module] = name
            continue
        parts = pending.setdefault(module, Parts(module + matrix_format.separator))
        if module in done or part in parts.tensors:
            raise ModelLoadError(f"tensor {name!r} occurs twice")
        parts.tensors[part] = tensor
        if len(parts.tensors) == len(matrix_format.required):
            del pending[module]
            done.add(module)
            yield matrix_format.matrix_name(module), _build(parts, matrix_format.matrix_name(module), matrix_format)
    for parts in pending.values():
        missing = min(matrix_format.required - parts.tensors.keys())
        raise ModelLoadError(f"tensor '{parts.prefix}{missing}' missing from the checkpoint")
    for module, name in harmless.items():
        if module not in done:
            raise ModelLoadError(f"tensor {name!r} belongs to no quantised matrix")


def _build(parts: Parts, name: str, matrix_format: MatrixFormat) -> QuantizedWeight:
    try:
        return matrix_format.build(parts)
    except ModelLoadError as error:
        if parts.prefix in error.message:
            raise
        raise ModelLoadError(f"tensor '{name}': {error.message}") from None


def by_group(values: torch.Tensor, group_of: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bring columns of the same group side by side. values: [N, K]; group_of: [K], the group of each input feature.
    Returns the values and the column order (None: unchanged). Raises ModelLoadError for groups of unequal size."""
    columns = values.shape[1]
    if torch.equal(group_of, torch.arange(columns) // group_size):
        return values, None
    num_groups = columns // group_size
    in_range = bool(((group_of >= 0) & (group_of < num_groups)).all())
    if not in_range or not bool((torch.bincount(group_of, minlength=num_groups) == group_size).all()):
        raise ModelLoadError(f"its input features do not fall into {num_groups} groups of {group_size}")
    order = torch.argsort(group_of, stable=True)
    return values[:, order], order.int()
