"""Matrices of 8-bit and 4-bit floats as checkpoints store them, written from the formats' definitions, with none of the
reader's code."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]
Pack = Callable[[int, int, int], tuple[Tensors, torch.Tensor]]
"""(rows, columns, seed) -> the parts of a random matrix, and what they mean, [rows, columns] float64."""


def e4m3(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def e2m1(code: int) -> float:
    exponent, fraction = code >> 1 & 3, code & 1
    size = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


E4M3 = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)
"""By code; the two that are not numbers are never drawn."""
E2M1 = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _codes8(rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    """Every exponent from -3 on, so that no few weights outweigh the others; some subnormal numbers."""
    codes = torch.randint(0x20, 0x48, (rows, columns), generator=random)
    codes = torch.where(torch.rand(rows, columns, generator=random) < 0.1, codes % 8, codes)
    return codes + 128 * torch.randint(2, (rows, columns), generator=random)


def _float8(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def _scales(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return (torch.rand(shape, generator=random) + 0.5) * 0.3


def fp8(
    scale: str, *, name: str = "weight_scale", block: tuple[int, int] = (0, 0), activations: str | None = None
) -> Pack:
    """scale: "tensor" ([]), "one" ([1]), "row" ([N, 1]), "flat" ([N]) or "block"."""

    def pack(rows: int, columns: int, seed: int) -> tuple[Tensors, torch.Tensor]:
        random = _generator(seed)
        codes = _codes8(rows, columns, random)
        shapes: dict[str, tuple[int, ...]] = {"tensor": (), "one": (1,), "row": (rows, 1), "flat": (rows,)}
        if scale == "block":
            shapes["block"] = (-(-rows // block[0]), -(-columns // block[1]))
        scales = _scales(shapes[scale], random)
        if scale == "block":
            of_rows = scales[torch.arange(rows) // block[0]]
            meaning = E4M3[codes] * of_rows[:, torch.arange(columns) // block[1]]
        else:
            meaning = E4M3[codes] * scales.reshape(-1, 1)
        tensors = {"weight": _float8(codes), name: scales}
        if activations is not None:
            tensors[activations] = torch.tensor(0.25)
        return tensors, meaning

    return pack


def _fp4(rows: int, columns: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(16, (rows, columns), generator=random)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8), E2M1[codes]


def nvfp4(kind: str) -> Pack:
    """kind: "modelopt" or "compressed-tensors"."""

    def pack(rows: int, columns: int, seed: int) -> tuple[Tensors, torch.Tensor]:
        random = _generator(seed)
        pairs, values = _fp4(rows, columns, random)
        codes = torch.randint(0x60, 0x70, (rows, columns // 16), generator=random)
        whole = 0.001
        meaning = values * E4M3[codes].repeat_interleave(16, 1) * float(torch.tensor(whole))
        if kind == "modelopt":
            tensors = {"weight": pairs, "weight_scale_2": torch.tensor(whole), "input_scale": torch.tensor(0.5)}
        else:
            tensors = {"weight_packed": pairs, "weight_global_scale": torch.tensor([1 / whole])}
        return {**tensors, "weight_scale": _float8(codes)}, meaning

    return pack


def mxfp4(rows: int, columns: int, seed: int) -> tuple[Tensors, torch.Tensor]:
    """As compressed-tensors has them, one matrix at a time."""
    random = _generator(seed)
    pairs, values = _fp4(rows, columns, random)
    exponents = torch.randint(-5, -2, (rows, columns // 32), generator=random)
    meaning = values * 2.0 ** exponents.double().repeat_interleave(32, 1)
    return {"weight_packed": pairs, "weight_scale": (exponents + 127).to(torch.uint8)}, meaning
