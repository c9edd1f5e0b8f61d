"""Writes GGUF files: the format spelt out a second time, number by number, for the reader to be held against."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.models.gguf.blocks import FORMATS

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
CODES = {
    UINT8: "B", INT8: "b", UINT16: "H", INT16: "h", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?", UINT64: "Q",
    INT64: "q", FLOAT64: "d",
}  # fmt: skip
TYPE_NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21,
    "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39,
}  # fmt: skip
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210), "Q2_K": (256, 84), "Q3_K": (256, 110), "IQ4_NL": (32, 18),
    "MXFP4": (32, 17),
}  # fmt: skip
"""Values and bytes of a block."""
GRID_BLOCKS = {
    "IQ4_XS": (256, 136), "IQ3_S": (256, 110), "IQ3_XXS": (256, 98), "IQ2_S": (256, 82), "IQ2_XS": (256, 74),
    "IQ2_XXS": (256, 66), "IQ1_S": (256, 50), "IQ1_M": (256, 56), "TQ1_0": (256, 54), "TQ2_0": (256, 66),
}  # fmt: skip
"""The same of types whose weights are not spelt out here: they are held against those of gguf's own package."""
SCALE_PLACES = {"IQ1_M": None, "TQ1_0": 52, "TQ2_0": 64}
"""Where a block of them has its scale, elsewhere at its first byte; IQ1_M's is in the upper bits of four numbers."""


@dataclass(frozen=True)
class Typed:
    """A metadata value with its type number; for a list, that of its elements."""

    kind: int
    value: Any


@dataclass(frozen=True)
class StoredTensor:
    """shape: outermost first, as in torch."""

    type: int
    shape: Sequence[int]
    data: bytes


@dataclass
class GGUFWriter:
    metadata: dict[str, Typed] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def to_bytes(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))
        for key, typed in self.metadata.items():
            head += string(key) + value(typed)
        data = b""
        for name, tensor in self.tensors.items():
            head += string(name) + struct.pack("<I", len(tensor.shape))
            head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
            head += struct.pack("<IQ", tensor.type, len(data))
            data += padded(tensor.data, self.alignment)
        return padded(head, self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path

    def write_split(self, directory: Path, num_parts: int, stem: str = "model") -> list[Path]:
        """The files of the model split: the metadata in the first, the tensors dealt in runs."""
        paths, names = [], list(self.tensors)
        share = -(-len(names) // num_parts)
        for part in range(num_parts):
            own = {"split.no": part, "split.count": num_parts, "split.tensors.count": len(names)}
            metadata = {**(self.metadata if part == 0 else {}), **{key: typed(number) for key, number in own.items()}}
            tensors = {name: self.tensors[name] for name in names[part * share : (part + 1) * share]}
            path = directory / f"{stem}-{part + 1:05}-of-{num_parts:05}.gguf"
            paths.append(GGUFWriter(metadata, tensors, self.version, self.alignment).write(path))
        return paths


def padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def string(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def value(typed: Typed) -> bytes:
    if isinstance(typed.value, list):
        items = b"".join(
            string(item) if typed.kind == STRING else struct.pack("<" + CODES[typed.kind], item) for item in typed.value
        )
        return struct.pack("<IIQ", ARRAY, typed.kind, len(typed.value)) + items
    if typed.kind == STRING:
        return struct.pack("<I", STRING) + string(typed.value)
    return struct.pack("<I" + CODES[typed.kind], typed.kind, typed.value)


def typed(plain: object) -> Typed:
    """The usual type for a Python value."""
    sample = plain[0] if isinstance(plain, list) else plain
    kinds: dict[type, int] = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}
    return Typed(kinds[type(sample)], plain)


# Single weights, by the definition of each block.


def half(block: bytes, start: int) -> float:
    (number,) = struct.unpack_from("<e", block, start)
    return float(number)


def nibble(byte: int, upper: bool) -> int:
    return byte >> 4 if upper else byte & 15


def q8_0(block: bytes, i: int) -> float:
    (quantum,) = struct.unpack_from("<b", block, 2 + i)
    return half(block, 0) * quantum


def q4_0(block: bytes, i: int) -> float:
    return half(block, 0) * (nibble(block[2 + i % 16], i >= 16) - 8)


def q4_1(block: bytes, i: int) -> float:
    return half(block, 0) * nibble(block[4 + i % 16], i >= 16) + half(block, 2)


def q5_0(block: bytes, i: int) -> float:
    (fifth,) = struct.unpack_from("<I", block, 2)
    return half(block, 0) * (nibble(block[6 + i % 16], i >= 16) + 16 * (fifth >> i & 1) - 16)


def q5_1(block: bytes, i: int) -> float:
    (fifth,) = struct.unpack_from("<I", block, 4)
    return half(block, 0) * (nibble(block[8 + i % 16], i >= 16) + 16 * (fifth >> i & 1)) + half(block, 2)


def six_bit_pair(packed: bytes, group: int) -> tuple[int, int]:
    """Scale and subtrahend of a group, out of the twelve bytes of Q4_K and Q5_K."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low, over_scale, over_subtrahend = packed[group + 4], packed[group - 4] >> 6, packed[group] >> 6
    return (low & 15) + 16 * over_scale, (low >> 4) + 16 * over_subtrahend


def q4_k(block: bytes, i: int) -> float:
    scale, subtrahend = six_bit_pair(block[4:16], i // 32)
    quantum = nibble(block[16 + i // 64 * 32 + i % 32], i % 64 >= 32)
    return half(block, 0) * scale * quantum - half(block, 2) * subtrahend


def q5_k(block: bytes, i: int) -> float:
    scale, subtrahend = six_bit_pair(block[4:16], i // 32)
    quantum = nibble(block[48 + i // 64 * 32 + i % 32], i % 64 >= 32) + 16 * (block[16 + i % 32] >> i // 32 & 1)
    return half(block, 0) * scale * quantum - half(block, 2) * subtrahend


def q6_k(block: bytes, i: int) -> float:
    start, place = i // 128, i % 128
    low = nibble(block[64 * start + place % 64], place >= 64)
    high = block[128 + 32 * start + place % 32] >> 2 * (place // 32) & 3
    (scale,) = struct.unpack_from("<b", block, 192 + i // 16)
    return half(block, 208) * scale * (low + 16 * high - 32)


def two_bits(packed: bytes, i: int) -> int:
    return packed[i // 128 * 32 + i % 32] >> i % 128 // 32 * 2 & 3


def q2_k(block: bytes, i: int) -> float:
    both = block[i // 16]
    return half(block, 80) * (both & 15) * two_bits(block[16:80], i) - half(block, 82) * (both >> 4)


def q3_k(block: bytes, i: int) -> float:
    group, packed = i // 16, block[96:108]
    low = packed[group] & 15 if group < 8 else packed[group - 8] >> 4
    scale = low + 16 * (packed[8 + group % 4] >> group // 4 * 2 & 3) - 32
    quantum = two_bits(block[32:96], i) - (0 if block[i % 32] >> i // 32 & 1 else 4)
    return half(block, 108) * scale * quantum


TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(block: bytes, i: int) -> float:
    return half(block, 0) * TABLE[nibble(block[2 + i % 16], i >= 16)]


def mxfp4(block: bytes, i: int) -> float:
    bits = nibble(block[1 + i % 16], i >= 16)
    exponent, mantissa = bits >> 1 & 3, bits & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return (-size if bits >> 3 else size) * 2.0 ** (block[0] - 127)


WEIGHT: Mapping[str, Callable[[bytes, int], float]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
    "Q2_K": q2_k, "Q3_K": q3_k, "IQ4_NL": iq4_nl, "MXFP4": mxfp4,
}  # fmt: skip


def dequantize(type_name: str, data: bytes, shape: Sequence[int]) -> torch.Tensor:
    """What the stored bytes stand for, [shape] float32."""
    if type_name in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name]
        return torch.frombuffer(bytearray(data), dtype=dtype).float().reshape(tuple(shape))
    if type_name in GRID_BLOCKS:
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, GRID_BLOCKS[type_name][1])
        values, scales, offsets = FORMATS[type_name].unpack(blocks)
        grid = values.reshape(*scales.shape, -1) * scales[..., None]
        grid = grid if offsets is None else grid + offsets[..., None]
        return torch.from_numpy(grid).reshape(tuple(shape))
    values, size = BLOCKS[type_name]
    weight = WEIGHT[type_name]
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    return torch.tensor([weight(block, i) for block in blocks for i in range(values)]).reshape(tuple(shape))


def grid_blocks(type_name: str, seed: bytes, scales: np.ndarray) -> bytes:
    """Blocks of any bytes, the same for the same seed. scales: one for each block, taken in half precision."""
    size = GRID_BLOCKS[type_name][1]
    data = np.frombuffer(hashlib.shake_256(seed).digest(len(scales) * size), dtype=np.uint8).reshape(-1, size).copy()
    halves = scales.astype("<f2")
    place = SCALE_PLACES.get(type_name, 0)
    if place is not None:
        data[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
        return data.tobytes()
    for part in range(4):
        data[:, 49 + 2 * part] &= 15
        data[:, 49 + 2 * part] |= (halves.view("<u2") >> 4 * part & 15).astype(np.uint8) << 4
    return data.tobytes()


# Quantisers: any that fill the blocks sensibly will do.


def quantize(type_name: str, weight: torch.Tensor) -> bytes:
    """[..., K] float32 with K a multiple of the block's values."""
    if type_name == "F32":
        return weight.numpy().astype("<f4").tobytes()
    if type_name == "F16":
        return weight.numpy().astype("<f2").tobytes()
    if type_name == "BF16":
        return weight.bfloat16().contiguous().view(torch.int16).numpy().astype("<i2").tobytes()
    if type_name in GRID_BLOCKS:  # other weights of about the same size: models are random
        size = float(weight.std()) / GRID_SPREAD[type_name]
        return grid_blocks(type_name, weight.numpy().tobytes(), np.full(weight.numel() // 256, size))
    quantizer = {"Q8_0": to_q8_0, "Q4_0": to_q4_0, "Q4_K": to_q4_k, "Q6_K": to_q6_k, "MXFP4": to_mxfp4}[type_name]
    rows = weight.numpy().reshape(-1, BLOCKS[type_name][0])
    return b"".join(quantizer(row) for row in rows)


def to_q8_0(row: np.ndarray) -> bytes:
    scale = np.float16(np.abs(row).max() / 127)
    quanta = np.clip(np.rint(row / max(float(scale), 1e-9)), -128, 127).astype(np.int8)
    return scale.tobytes() + quanta.tobytes()


def to_q4_0(row: np.ndarray) -> bytes:
    scale = np.float16(np.abs(row).max() / 7)
    quanta = np.clip(np.rint(row / max(float(scale), 1e-9)) + 8, 0, 15).astype(np.uint8)
    return scale.tobytes() + bytes(int(quanta[i]) | int(quanta[i + 16]) << 4 for i in range(16))


GRID_SPREAD = {
    "IQ4_XS": 1200, "IQ3_S": 150, "IQ3_XXS": 150, "IQ2_S": 60, "IQ2_XS": 60, "IQ2_XXS": 60, "IQ1_S": 8, "IQ1_M": 8,
    "TQ1_0": 1, "TQ2_0": 1,
}  # fmt: skip
"""About the standard deviation of weights in random blocks with a scale of 1."""
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def to_mxfp4(row: np.ndarray) -> bytes:
    exponent = int(np.ceil(np.log2(max(np.abs(row).max() / 6, 2.0**-100))))
    codes = np.abs(row[:, None] / 2.0**exponent - FLOAT4).argmin(axis=1)
    return bytes([exponent + 127, *(int(codes[i]) | int(codes[i + 16]) << 4 for i in range(16))])


def to_q4_k(row: np.ndarray) -> bytes:
    groups = row.reshape(8, 32)
    lows = np.maximum(-groups.min(axis=1), 0)
    steps = (groups.max(axis=1) + lows) / 15
    scale, subtrahend = np.float16(steps.max() / 63), np.float16(lows.max() / 63)
    scales = np.rint(steps / max(float(scale), 1e-9)).astype(int).clip(0, 63)
    subtrahends = np.rint(lows / max(float(subtrahend), 1e-9)).astype(int).clip(0, 63)
    packed = bytearray(12)
    for group in range(4):
        packed[group] = scales[group] | scales[group + 4] >> 4 << 6
        packed[group + 4] = subtrahends[group] | subtrahends[group + 4] >> 4 << 6
        packed[group + 8] = scales[group + 4] & 15 | (subtrahends[group + 4] & 15) << 4
    quanta = np.zeros(256, dtype=np.uint8)
    for group in range(8):
        step = max(float(scale) * scales[group], 1e-9)
        shifted = groups[group] + float(subtrahend) * subtrahends[group]
        quanta[32 * group : 32 * group + 32] = np.rint(shifted / step).clip(0, 15)
    values = bytearray(128)
    for i in range(256):
        values[i // 64 * 32 + i % 32] |= int(quanta[i]) << (4 if i % 64 >= 32 else 0)
    return scale.tobytes() + subtrahend.tobytes() + bytes(packed) + bytes(values)


def to_q6_k(row: np.ndarray) -> bytes:
    groups = row.reshape(16, 16)
    steps = np.abs(groups).max(axis=1) / 31
    scale = np.float16(steps.max() / 127)
    scales = np.rint(steps / max(float(scale), 1e-9)).astype(int).clip(-128, 127)
    lower, upper = bytearray(128), bytearray(64)
    for i in range(256):
        step = max(float(scale) * scales[i // 16], 1e-9)
        quantum = int(np.rint(row[i] / step).clip(-32, 31)) + 32
        start, place = i // 128, i % 128
        lower[64 * start + place % 64] |= (quantum & 15) << (4 if place >= 64 else 0)
        upper[32 * start + place % 32] |= quantum >> 4 << 2 * (place // 32)
    return bytes(lower) + bytes(upper) + scales.astype(np.int8).tobytes() + scale.tobytes()
