"""Quantised checkpoints written number by number from the formats' definitions, with none of the reader's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


@dataclass
class Matrix:
    """w[n][k] = scales[n][g] * (values[n][k] - zeros[n][g]) with g = group_of[k]; integers are 0 to 2 ** bits - 1."""

    bits: int
    values: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_of: list[int]

    @property
    def size(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    def definition(self) -> torch.Tensor:
        """[N, K] float64."""
        return self.scales.double()[:, self.group_of] * (self.values - self.zeros[:, self.group_of])


def random_matrix(
    rows: int,
    columns: int,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    reordered: bool = False,
    seed: int = 0,
) -> Matrix:
    """Scales are what float16 can hold. symmetric: zero points in the middle of the range."""
    generator = torch.Generator().manual_seed(seed)
    groups = columns // group_size
    limit = 2**bits
    zeros = torch.full((rows, groups), limit // 2)
    if not symmetric:
        zeros = torch.randint(0, limit, (rows, groups), generator=generator)
    group_of = [column // group_size for column in range(columns)]
    if reordered:
        group_of = [group_of[place] for place in torch.randperm(columns, generator=generator).tolist()]
    scales = (0.5 + torch.rand(rows, groups, generator=generator)) * 3 / limit / columns**0.5
    return Matrix(
        bits,
        torch.randint(0, limit, (rows, columns), generator=generator),
        zeros,
        scales.half().float(),
        group_of,
    )


def words(shape: tuple[int, int], bits: int, field: Callable[[int, int, int], int]) -> torch.Tensor:
    """A matrix of 32-bit words; field(i, j, f) is number f of word [i, j], 0 standing in the lowest bits."""
    packed = np.zeros(shape, np.int32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            word = 0
            for f in range(32 // bits):
                number = int(field(i, j, f))
                assert 0 <= number < 2**bits
                word |= number << (bits * f)
            packed[i, j] = word - 2**32 if word >= 2**31 else word
    return torch.from_numpy(packed)


def gptq(matrix: Matrix, *, version: int = 1) -> Tensors:
    (rows, columns), bits = matrix.size, matrix.bits
    values, zeros = matrix.values.numpy(), matrix.zeros.numpy()
    count, groups = 32 // bits, matrix.num_groups
    less = 1 if version == 1 else 0
    return {
        "qweight": words((columns // count, rows), bits, lambda r, n, f: values[n, r * count + f]),
        "qzeros": words((groups, rows // count), bits, lambda g, c, f: (int(zeros[c * count + f, g]) - less) % 2**bits),
        "scales": matrix.scales.t().contiguous().half(),
        "g_idx": torch.tensor(matrix.group_of, dtype=torch.int32),
    }


def awq(matrix: Matrix) -> Tensors:
    rows, columns = matrix.size
    values, zeros = matrix.values.numpy(), matrix.zeros.numpy()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": words((columns, rows // 8), 4, lambda k, c, f: values[c * 8 + order[f], k]),
        "qzeros": words((matrix.num_groups, rows // 8), 4, lambda g, c, f: zeros[c * 8 + order[f], g]),
        "scales": matrix.scales.t().contiguous().half(),
    }


def pack_quantized(matrix: Matrix, *, zero_points: bool, group_index: bool = False) -> Tensors:
    """What is stored is the signed number with half the range added again: the unsigned number of `Matrix`."""
    (rows, columns), bits = matrix.size, matrix.bits
    count = 32 // bits
    values, zeros = matrix.values.numpy(), matrix.zeros.numpy()

    def inside(limit: int, place: int, number: Callable[[], object]) -> int:
        return int(number()) if place < limit else 0

    tensors = {
        "weight_packed": words(
            (rows, -(-columns // count)),
            bits,
            lambda n, c, f: inside(columns, c * count + f, lambda: values[n, c * count + f]),
        ),
        "weight_scale": matrix.scales.half(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zero_points:
        tensors["weight_zero_point"] = words(
            (-(-rows // count), matrix.num_groups),
            bits,
            lambda r, g, f: inside(rows, r * count + f, lambda: zeros[r * count + f, g]),
        )
    if group_index:
        tensors["weight_g_idx"] = torch.tensor(matrix.group_of, dtype=torch.int32)
    return tensors


def int_quantized(matrix: Matrix, *, zero_points: bool) -> Tensors:
    tensors = {"weight": (matrix.values - 128).to(torch.int8), "weight_scale": matrix.scales.half()}
    if zero_points:
        tensors["weight_zero_point"] = (matrix.zeros - 128).to(torch.int8)
    return tensors


def named(module: str, tensors: Tensors, order: Sequence[str] | None = None) -> list[tuple[str, torch.Tensor]]:
    """As a stream, in the order of a safetensors file (by name) unless another is given."""
    return [(f"{module}.{part}", tensors[part]) for part in (order or sorted(tensors))]
