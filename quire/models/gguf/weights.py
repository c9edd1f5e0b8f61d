"""Streaming of a GGUF file's tensors under Hugging Face's names."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from quire.config.families.family import EXPERT, HEAD
from quire.config.gguf import ROPE_FACTORS, HeadLayout, StateHeads, head_layout
from quire.config.gguf_adapter import read_gguf_adapter
from quire.config.gguf_tensors import GATE_EXPERTS, JOINED_EXPERTS, UP_EXPERTS, hf_name, layer_of
from quire.errors import ModelLoadError
from quire.models.gguf.block_format import Bytes
from quire.models.gguf.blocks import FORMATS, WHOLE_BLOCKS
from quire.quantization.block_weight import BlockFormatName, BlockWeight
from quire.quantization.float_weight import MX_GROUP, Float4Weight
from quire.quantization.integer_weight import IntegerWeight, WeightTensor
from quire.utils.gguf import BlockType, GGUFFile, TensorEntry, parts_of

T = TypeVar("T")
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BEHIND_KEYS = ("attn_qkv", "ssm_conv1d")
"""Tensors of delta nets with rows of queries and keys before those of values."""
_OF_ELEMENTS = (*_BEHIND_KEYS, "attn_gate")
"""Tensors with a row per element of a value head."""
_VALUE_ROWS = (*_OF_ELEMENTS, "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
_WHOLE_BLOCKS: Mapping[str, BlockFormatName] = {name: name for name in WHOLE_BLOCKS}
_MOST_HALF, _NAN_EXPONENT = 0x7C00, 0xFF
"""Exponent bits of a non-finite half-precision number, and the code of an invalid exponent."""
_CHUNK_BYTES = 2**18
"""Bytes of blocks unpacked at once."""


class GGUFWeights:
    """Weights of one GGUF file or split model. directory: the (first) file, for error messages. Plain tensors and
    blocks packed unchanged are views of the file, whose pages are dropped after use; others are unpacked."""

    def __init__(self, path: Path) -> None:
        self.directory = path
        self.current: Path | None = path
        self.header: GGUFFile | None = None
        """File as it was read last, closed."""
        self._reading = path

    @property
    def paths(self) -> list[Path]:
        return parts_of(self.directory)

    def stream(
        self, report: Callable[[int, int], None], elsewhere: Collection[str] = ()
    ) -> Iterator[tuple[str, WeightTensor]]:
        """All tensors; the next is unpacked while the last is stored. report: called with (bytes done, bytes in all).
        elsewhere: names of other ranks' tensors, which are skipped. Raises ModelLoadError."""
        try:
            for each in read_ahead(self._read(elsewhere), 2):
                if isinstance(each, _Done):
                    report(each.done, each.total)
                else:
                    self.current, name, weight = each
                    yield name, weight
        except ModelLoadError:
            self.current = self._reading
            raise

    def _read(self, elsewhere: Collection[str]) -> Generator[tuple[Path, str, WeightTensor] | _Done, None, None]:
        with GGUFFile(self.directory) as file:
            self.header, layout = file, head_layout(file)
            done, total = 0, sum(entry.num_bytes for entry in file.tensors.values())
            for entry in file.tensors.values():
                # Skip rotation factors (read with the configuration) and the prediction layers after the last.
                if entry.name != ROPE_FACTORS and (layer_of(entry.name) or 0) < layout.num_layers:
                    name = hf_name(entry.name.replace(JOINED_EXPERTS, GATE_EXPERTS), layout.names)
                    if name is None:
                        raise ModelLoadError(f"tensor {entry.name!r} does not belong to a LLaMA-like model")
                    self._reading = file.paths[entry.part]
                    is_held = False
                    for own, weight in _named(file, entry, layout, name, elsewhere):
                        is_held = isinstance(weight, BlockWeight)
                        yield self._reading, own, weight
                    if not is_held:
                        file.release(entry)
                done += entry.num_bytes
                yield _Done(done, total)


@dataclass(frozen=True, slots=True)
class _Done:
    done: int
    total: int


def _named(
    file: GGUFFile, entry: TensorEntry, layout: HeadLayout, name: str, elsewhere: Collection[str]
) -> Iterator[tuple[str, WeightTensor]]:
    """Tensors of one entry under their names; a stack of experts' or heads' matrices yields each. Skips `elsewhere`."""
    if entry.name.endswith(f"{JOINED_EXPERTS}.weight"):
        yield from _gate_and_up(file, entry, layout, elsewhere)
        return
    if name.replace(HEAD, "0") in elsewhere:
        return
    shape = entry.shape
    number = next((number for number in (EXPERT, HEAD) if number in name), None)
    if len(shape) > 1 and number is not None:
        size = entry.num_bytes // shape[0]
        for index in range(shape[0]):
            if number == EXPERT and name.replace(EXPERT, str(index)) in elsewhere:
                continue
            own = replace(entry, shape=shape[1:], start=entry.start + index * size, num_bytes=size)
            yield name.replace(number, str(index)), _weight(file, own, layout)
        return
    if len(shape) > 2:
        raise ModelLoadError(f"tensor {entry.name!r} has {len(shape)} dimensions")
    if entry.name.endswith("ffn_gate_inp_shexp.weight"):  # a matrix of one row, which GGUF stores as a vector
        entry = replace(entry, shape=(1, *shape))
    weight = _weight(file, entry, layout)
    if entry.name.endswith("ssm_conv1d.weight") and isinstance(weight, torch.Tensor):
        weight = weight.unsqueeze(1)  # Hugging Face stores a channel's taps as a matrix of one row
    if entry.name.endswith("ssm_a") and isinstance(weight, torch.Tensor):  # -exp(A_log)
        if not bool((weight < 0).all()):
            raise ModelLoadError(f"tensor {entry.name!r} must be negative")
        weight = weight.float().neg().log()
    yield name, weight


def _gate_and_up(
    file: GGUFFile, entry: TensorEntry, layout: HeadLayout, elsewhere: Collection[str]
) -> Iterator[tuple[str, WeightTensor]]:
    count, rows, columns = entry.shape
    size = entry.num_bytes // count // 2
    for index in range(count):
        for place, kind in enumerate((GATE_EXPERTS, UP_EXPERTS)):
            own = entry.name.replace(JOINED_EXPERTS, kind)
            start = entry.start + (2 * index + place) * size
            part = replace(entry, name=own, shape=(rows // 2, columns), start=start, num_bytes=size)
            name = hf_name(own, layout.names)
            assert name is not None, "an architecture with gates of experts has both"
            name = name.replace(EXPERT, str(index))
            if name not in elsewhere:
                yield name, _weight(file, part, layout)


def _weight(file: GGUFFile, entry: TensorEntry, layout: HeadLayout) -> WeightTensor:
    # The elements of a vector may be permuted like the rows of a matrix.
    num_rows = entry.shape[0] if len(entry.shape) == 2 or entry.type.name in PLAIN_DTYPES else 1
    rows = np.frombuffer(file.data(entry), dtype=np.uint8).reshape(num_rows, -1)
    own = entry.name.split(".")[2] if layer_of(entry.name) is not None else ""
    num_heads = {"attn_q": layout.num_heads, "attn_k": layout.num_kv_heads}.get(own)
    if layout.names.interleaved and num_heads is not None:
        rows = _halves_apart(rows, num_heads, entry.name)
    if layout.state is not None and own in _VALUE_ROWS:
        rows = _value_rows(rows, entry.name, layout.state)
    dtype = PLAIN_DTYPES.get(entry.type.name)
    if dtype is not None:
        plain = torch.from_numpy(rows).view(dtype).view(entry.shape)
        is_norm = entry.name.endswith("_norm.weight") and own != "ssm_norm" and layout.names.norm_offset
        plain = plain.float() - layout.names.norm_offset if is_norm else plain
        return plain if layout.state is None or own != "ssm_out" else _value_columns(plain, layout.state)
    try:
        if len(entry.shape) == 2 and entry.type.name in _WHOLE_BLOCKS and (layout.state is None or own != "ssm_out"):
            return _block_weight(file, entry, rows)
        weight = taken_apart(rows, entry.type)
        if layout.state is not None and own == "ssm_out":
            return _value_columns(weight, layout.state)
    except ModelLoadError as error:
        raise ModelLoadError(f"tensor {entry.name!r}: {error.message}") from None
    return weight if len(entry.shape) == 2 else weight.dequantize()[0]


def _block_weight(file: GGUFFile, entry: TensorEntry, rows: Bytes) -> BlockWeight:
    blocks = rows.reshape(-1, entry.type.num_bytes)
    for first in range(0, len(blocks), _CHUNK_BYTES // entry.type.num_bytes):
        some = blocks[first : first + _CHUNK_BYTES // entry.type.num_bytes]
        if entry.type.name == "MXFP4":
            is_finite = some[:, 0].max() != _NAN_EXPONENT
        else:
            halves = (some[:, at : at + 2].view("<u2") & _MOST_HALF for at in FORMATS[entry.type.name].half_places)
            is_finite = all(each.max() != _MOST_HALF for each in halves)
        if not is_finite:
            raise ModelLoadError("scales hold infinities or NaN")
    return BlockWeight(
        torch.from_numpy(rows),
        _WHOLE_BLOCKS[entry.type.name],
        entry.shape[1],
        unpack=lambda part: taken_apart(part.numpy(), entry.type),
        release=lambda: file.release(entry),
    )


def taken_apart(rows: Bytes, block: BlockType) -> IntegerWeight | Float4Weight:
    """Unpack rows [n, bytes of a row]. Raises ModelLoadError for non-finite scales."""
    if block.name == "MXFP4":
        return _mxfp4_weight(rows, rows.shape[1] // block.num_bytes * block.values)
    return _integer_weight(rows, block)


def _mxfp4_weight(rows: Bytes, num_columns: int) -> Float4Weight:
    """Reorder codes so neighbours share a byte. rows: [n, bytes of a row]. Raises ModelLoadError for invalid
    exponents."""
    blocks = rows.reshape(len(rows), -1, 1 + MX_GROUP // 2)
    codes = np.concatenate((blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4), axis=2)
    pairs = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
    exponents = np.ascontiguousarray(blocks[:, :, 0])
    return Float4Weight(torch.from_numpy(pairs.reshape(len(rows), -1)), torch.from_numpy(exponents), num_columns)


def _halves_apart(rows: Bytes, num_heads: int, name: str) -> Bytes:
    """Move even rows before odd ones in each head: the file has rotated pairs as neighbours. rows: [n, bytes of a row];
    returns a copy."""
    count = len(rows)
    if count % (2 * num_heads):
        raise ModelLoadError(f"tensor {name!r} has {count} rows, which {num_heads} heads cannot share in pairs")
    return rows.reshape(num_heads, count // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(count, -1)


def _by_key(heads: StateHeads, size: int) -> npt.NDArray[np.intp]:
    """Permutation from the file's order of value heads (the first of every key head, then the second ...) to Hugging
    Face's. size: rows per value head."""
    places = np.arange(heads.num_values * size).reshape(heads.num_values // heads.num_keys, heads.num_keys, size)
    return places.swapaxes(0, 1).flatten()


def _value_rows(rows: Bytes, name: str, heads: StateHeads) -> Bytes:
    """Rows of value heads in Hugging Face's order. rows: [n, bytes of a row]; returns a copy."""
    own = name.split(".")[2]
    size = heads.value_dim if own in _OF_ELEMENTS else 1
    first = heads.key_rows if own in _BEHIND_KEYS else 0
    if len(rows) != first + heads.num_values * size:
        raise ModelLoadError(f"tensor {name!r} has {len(rows)} rows, which {heads.num_values} value heads cannot share")
    return np.concatenate((rows[:first], rows[first:][_by_key(heads, size)]))


def _value_columns(weight: WeightTensor, heads: StateHeads) -> WeightTensor:
    """Columns for value heads in Hugging Face's order. Raises ModelLoadError if the heads do not fill the columns or
    split groups."""
    if weight.shape[1] != heads.num_values * heads.value_dim:
        raise ModelLoadError(f"{heads.num_values} value heads cannot share its {weight.shape[1]} columns")
    columns = torch.from_numpy(_by_key(heads, heads.value_dim))
    if isinstance(weight, torch.Tensor):
        return weight[:, columns]
    if not isinstance(weight, IntegerWeight):
        raise ModelLoadError("the columns of such a matrix can be ordered in formats of integers alone")
    if heads.value_dim % weight.group_size:
        raise ModelLoadError(f"value heads of {heads.value_dim} elements cut through groups of {weight.group_size}")
    groups = torch.from_numpy(_by_key(heads, heads.value_dim // weight.group_size))
    offsets = None if weight.offsets is None else weight.offsets[:, groups]
    return replace(weight, values=weight.values[:, columns], scales=weight.scales[:, groups], offsets=offsets)


def _integer_weight(rows: Bytes, block: BlockType) -> IntegerWeight:
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


def read_ahead(items: Generator[T, None, None], depth: int) -> Iterator[T]:
    """Iterate with `depth` items made in advance on another thread. Errors are raised in place. Closing early waits for
    the item in the making and closes `items`."""

    def make() -> tuple[T, ...]:
        for item in items:
            return (item,)
        return ()

    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as pool:
        pending: deque[Future[tuple[T, ...]]] = deque(pool.submit(make) for _ in range(depth))
        try:
            while made := pending.popleft().result():
                pending.append(pool.submit(make))
                yield made[0]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            items.close()


_ROTATED = {"attn_q": 0, "attn_k": 1}
"""Matrices with rows in another order in an adapter's file, where pairs are neighbours -> index of their number of
heads."""


def read_gguf_matrices(path: Path, heads: tuple[int, int]) -> dict[str, dict[str, torch.Tensor]]:
    """An adapter file's A and B by Hugging Face's module name. heads: model's query and key heads. Raises
    ModelLoadError."""
    with GGUFFile(path) as file:
        adapter = read_gguf_adapter(file)
        found = {}
        for module, pair in adapter.entries.items():
            matrices = {part: _matrix_of(file, entry) for part, entry in pair.items()}
            own = pair["B"].name.split(".")[2]
            if adapter.names.interleaved and own in _ROTATED:
                b = matrices["B"].float().numpy()
                rows = _halves_apart(b, heads[_ROTATED[own]], pair["B"].name)
                matrices["B"] = torch.from_numpy(rows.copy())
            if EXPERT not in module:
                found[module] = matrices
                continue
            for expert, (a, b) in enumerate(zip(matrices["A"], matrices["B"], strict=True)):
                found[module.replace(EXPERT, str(expert))] = {"A": a, "B": b}
        return found


def _matrix_of(file: GGUFFile, entry: TensorEntry) -> torch.Tensor:
    rows = np.frombuffer(file.data(entry), dtype=np.uint8).reshape(math.prod(entry.shape[:-1]), -1)
    dtype = PLAIN_DTYPES.get(entry.type.name)
    if dtype is not None:
        return torch.from_numpy(rows.copy()).view(dtype).view(entry.shape)
    return taken_apart(rows, entry.type).dequantize().view(entry.shape)
