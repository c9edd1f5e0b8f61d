"""The tensors of a GGUF file, streamed under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from quire.config.families.family import EXPERT
from quire.config.gguf import ROPE_FACTORS, HeadLayout, head_layout, hf_name
from quire.errors import ModelLoadError
from quire.models.gguf.blocks import FORMATS, Bytes
from quire.quantization.float_weight import MX_GROUP, Float4Weight
from quire.quantization.integer_weight import IntegerWeight, WeightTensor
from quire.utils.gguf import BlockType, GGUFFile, TensorEntry, parts_of

_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_BYTES = 2**18
"""Blocks taken apart at once: what that needs besides the result stays in the processor's cache."""


class GGUFWeights:
    """One file, or the files of a split model. directory: where error messages place the weights, here the (first)
    file itself.

    Plain tensors are views of the file, quantised ones are made one at a time; the pages of a tensor are dropped when
    the next one is asked for, so that the file is never in memory as a whole.
    """

    def __init__(self, path: Path) -> None:
        self.directory = path
        self.current: Path | None = path

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of their parts."""
        return parts_of(self.directory)

    def stream(self, report: Callable[[int, int], None]) -> Iterator[tuple[str, WeightTensor]]:
        """All tensors, quantised matrices as integers. report: called with (bytes done, bytes in all). Raises
        ModelLoadError."""
        with GGUFFile(self.directory) as file:
            layout = head_layout(file)
            done, total = 0, sum(entry.num_bytes for entry in file.tensors.values())
            for entry in file.tensors.values():
                if entry.name != ROPE_FACTORS:  # a part of the configuration, read with it
                    name = hf_name(entry.name, layout.names)
                    if name is None:
                        raise ModelLoadError(f"tensor {entry.name!r} does not belong to a LLaMA-like model")
                    self.current = file.paths[entry.part]
                    yield from _named(file, entry, layout, name)
                    file.release(entry)
                done += entry.num_bytes
                report(done, total)


def _named(file: GGUFFile, entry: TensorEntry, layout: HeadLayout, name: str) -> Iterator[tuple[str, WeightTensor]]:
    """A tensor under its name; of a stack of experts' matrices or biases, each under its own."""
    data, shape = file.data(entry), entry.shape
    if len(shape) > 1 and EXPERT in name:
        size = entry.num_bytes // shape[0]
        for expert in range(shape[0]):
            own = replace(entry, shape=shape[1:], num_bytes=size)
            yield name.replace(EXPERT, str(expert)), _weight(data[expert * size : (expert + 1) * size], own, layout)
        return
    if len(shape) > 2:
        raise ModelLoadError(f"tensor {entry.name!r} has {len(shape)} dimensions")
    if entry.name.endswith("ffn_gate_inp_shexp.weight"):  # of one row, which files leave out
        entry = replace(entry, shape=(1, *shape))
    yield name, _weight(data, entry, layout)


def _weight(data: memoryview, entry: TensorEntry, layout: HeadLayout) -> WeightTensor:
    """data: of the entry. [rows, columns] for a matrix, [size] for a norm's weight or a bias."""
    # The elements of a vector may be permuted like the rows of a matrix.
    num_rows = entry.shape[0] if len(entry.shape) == 2 or entry.type.name in _PLAIN_DTYPES else 1
    rows = np.frombuffer(data, dtype=np.uint8).reshape(num_rows, -1)
    num_heads = {"attn_q": layout.num_heads, "attn_k": layout.num_kv_heads}.get(entry.name.split(".")[-2])
    if layout.names.interleaved and num_heads is not None:
        rows = _halves_apart(rows, num_heads, entry.name)
    dtype = _PLAIN_DTYPES.get(entry.type.name)
    if dtype is not None:
        plain = torch.from_numpy(rows).view(dtype).view(entry.shape)
        is_norm = entry.name.endswith("_norm.weight") and layout.names.norm_offset
        return plain.float() - layout.names.norm_offset if is_norm else plain
    try:
        is_float = entry.type.name == "MXFP4"
        weight = _mxfp4_weight(rows, entry.shape[-1]) if is_float else _integer_weight(rows, entry.type)
    except ModelLoadError as error:
        raise ModelLoadError(f"tensor {entry.name!r}: {error.message}") from None
    return weight if len(entry.shape) == 2 else weight.dequantize()[0]


def _mxfp4_weight(rows: Bytes, num_columns: int) -> Float4Weight:
    """The codes as they are, neighbours in a byte: a block has an exponent, and the codes of its second 16 values above
    those of the first. rows: [n, bytes of a row]. Raises ModelLoadError for exponents that are not numbers."""
    blocks = rows.reshape(len(rows), -1, 1 + MX_GROUP // 2)
    codes = np.concatenate((blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4), axis=2)
    pairs = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
    exponents = np.ascontiguousarray(blocks[:, :, 0])
    return Float4Weight(torch.from_numpy(pairs.reshape(len(rows), -1)), torch.from_numpy(exponents), num_columns)


def _halves_apart(rows: Bytes, num_heads: int, name: str) -> Bytes:
    """Of each head the even rows first, then the odd ones: the elements of a rotated pair are neighbours in the file
    and half a head apart in Hugging Face's order. [n, bytes of a row] -> the same, a copy."""
    count = len(rows)
    if count % (2 * num_heads):
        raise ModelLoadError(f"tensor {name!r} has {count} rows, which {num_heads} heads cannot share in pairs")
    return rows.reshape(num_heads, count // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(count, -1)


def _integer_weight(rows: Bytes, block: BlockType) -> IntegerWeight:
    """rows: [n, bytes of a row], whole blocks. Raises ModelLoadError for scales that are not finite."""
    stored = FORMATS[block.name]
    num_rows, row_bytes = rows.shape
    num_columns = row_bytes // block.num_bytes * block.values
    values = np.empty((num_rows, num_columns), dtype=np.int8 if stored.bits == 8 else np.uint8)
    scales = np.empty((num_rows, num_columns // stored.group_size), dtype=np.float32)
    offsets = None
    step = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, num_rows, step):
        some = slice(first, first + step)
        with np.errstate(invalid="ignore"):  # an infinite scale makes NaN weights, without a warning
            part_values, part_scales, part_offsets = stored.unpack(rows[some].reshape(-1, block.num_bytes))
        values[some] = part_values.reshape(-1, num_columns)
        scales[some] = part_scales.reshape(-1, scales.shape[1])
        if part_offsets is not None:
            offsets = np.empty_like(scales) if offsets is None else offsets
            offsets[some] = part_offsets.reshape(-1, scales.shape[1])
    return IntegerWeight(
        values=torch.from_numpy(values),
        bits=stored.bits,
        group_size=stored.group_size,
        scales=torch.from_numpy(scales),
        offsets=None if offsets is None else torch.from_numpy(offsets),
    )
