"""GGUF's IQ and TQ types: numbers as gguf's own package reads them, and whole models of types mixed in one matrix."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ModelLoadError
from quire.models.gguf import weights
from quire.quantization.block_weight import BlockWeight
from quire.quantization.integer_weight import IntegerWeight
from tests.fakes.gguf import GRID_BLOCKS, TYPE_NUMBERS, StoredTensor, grid_blocks
from tests.fakes.gguf_model import WIDE, save_stored, to_gguf
from tests.models.families import llama, qwen3_moe
from tests.models.harness import randomize
from tests.models.test_gguf import file_of, generate, read
from tests.models.test_gguf_sizes import (
    SIZES,
    THREE_TYPES,
    WIDE_EXPERTS,
    assert_counted,
    dense,
    described,
    every,
)

STORED = {
    "IQ4_XS": (8, 32), "IQ3_S": (4, 32), "IQ3_XXS": (8, 32), "IQ2_S": (8, 16), "IQ2_XS": (8, 16), "IQ2_XXS": (8, 32),
    "IQ1_S": (4, 32), "IQ1_M": (4, 16), "TQ1_0": (4, 256), "TQ2_0": (4, 256),
}  # fmt: skip
"""Bits and group size of the integer weight."""
DIGESTS = {
    "IQ4_XS": "85e8931ab2fbff036f5b66e15c881efe",
    "IQ3_S": "f9c4bc3e86790a9259c5daa265e9adc9",
    "IQ3_XXS": "d6e0354118d40ce81732baaf232cefea",
    "IQ2_S": "df0fb960530c7f4dfc2872e1be84bbed",
    "IQ2_XS": "617f08c80e79c834eb51f23ce2c9ce91",
    "IQ2_XXS": "e92ed9263267ad62348273766c76c16a",
    "IQ1_S": "0780bd1ef705ece42493daf791994abb",
    "IQ1_M": "df329d78ec8861dc738d35dc48784192",
    "TQ1_0": "27348cac088ccc407e32dd3580ac595a",
    "TQ2_0": "741ed2ad7562311bff3bf6c9b0adbc11",
}
"""Of `some_blocks` as gguf 0.19.0 dequantises them, in float32; a zero of either sign is +0."""
NUM_BLOCKS = 300


def some_blocks(type_name: str) -> bytes:
    """Every kind of scale: the largest, the smallest, none, and ordinary ones of both signs."""
    edges = [65504.0, -65504.0, 6e-8, -6e-8, 6.2e-5, 0.0, -0.0, 1.0]
    ordinary = np.sin(np.arange(NUM_BLOCKS - len(edges), dtype=np.float64)) / 16
    return grid_blocks(type_name, type_name.encode(), np.concatenate((edges, ordinary)))


def found_weights(type_name: str, path: Path) -> IntegerWeight:
    tensor = StoredTensor(TYPE_NUMBERS[type_name], (NUM_BLOCKS // 3, 3 * 256), some_blocks(type_name))
    weight = read(file_of({"output.weight": tensor}, path / "model.gguf"))["lm_head.weight"]
    weight = weight.unpacked() if isinstance(weight, BlockWeight) else weight
    assert isinstance(weight, IntegerWeight)
    return weight


@pytest.mark.parametrize("chunk", [2**18, 1000])
@pytest.mark.parametrize("type_name", list(GRID_BLOCKS))
def test_weights_are_those_of_the_reference(
    type_name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_CHUNK_BYTES", chunk)
    weight = found_weights(type_name, tmp_path)
    assert (weight.bits, weight.group_size) == STORED[type_name]
    plain = weight.dequantize().numpy() + np.float32(0)
    assert hashlib.sha256(plain.astype("<f4").tobytes()).hexdigest()[:32] == DIGESTS[type_name]


@pytest.mark.parametrize("type_name", list(GRID_BLOCKS))
def test_weights_are_those_of_ggufs_package(type_name: str, tmp_path: Path) -> None:
    quants = pytest.importorskip("gguf.quants")
    constants = pytest.importorskip("gguf.constants")
    rows = np.frombuffer(some_blocks(type_name), dtype=np.uint8).reshape(NUM_BLOCKS // 3, -1)
    expected = quants.dequantize(rows, constants.GGMLQuantizationType[type_name])
    assert np.array_equal(found_weights(type_name, tmp_path).dequantize().numpy(), expected)


@pytest.mark.parametrize("type_name", list(GRID_BLOCKS))
def test_scales_that_are_not_finite(type_name: str, tmp_path: Path) -> None:
    data = grid_blocks(type_name, b"", np.array([1.0, np.inf]))
    tensor = StoredTensor(TYPE_NUMBERS[type_name], (2, 256), data)
    with pytest.raises(ModelLoadError, match=r"tensor .output\.weight.: scales hold infinities or NaN"):
        read(file_of({"output.weight": tensor}, tmp_path / "model.gguf"))


@pytest.mark.parametrize("type_name", list(GRID_BLOCKS))
def test_rows_that_blocks_do_not_divide(type_name: str, tmp_path: Path) -> None:
    tensor = StoredTensor(TYPE_NUMBERS[type_name], (2, 128), bytes(GRID_BLOCKS[type_name][1]))
    with pytest.raises(ModelLoadError, match=rf"of {type_name} cannot have the shape \[2, 128\]"):
        read(file_of({"output.weight": tensor}, tmp_path / "model.gguf"))


@pytest.mark.parametrize("number", [9, 24, 40, 41, 99])
def test_types_that_are_not_read(number: int, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is stored as .*, which is not supported \(known: BF16, F16"):
        read(file_of({"output.weight": StoredTensor(number, (2, 256), bytes(2048))}, tmp_path / "model.gguf"))


# Whole models.

MIXES = {
    "dynamic": {
        "token_embd": "IQ4_XS", "output": "Q6_K",
        "attn_q": "IQ3_S", "attn_k": "IQ4_XS", "attn_v": "Q6_K", "attn_output": "IQ2_S",
        "ffn_gate": "IQ2_XXS", "ffn_up": "Q4_K", "ffn_down": "IQ3_XXS",
    },
    "low": {
        "token_embd": "Q8_0", "output": "IQ3_S",
        "attn_q": "IQ1_M", "attn_k": "TQ2_0", "attn_v": "Q4_0", "attn_output": "IQ2_XS",
        "ffn_gate": "TQ1_0", "ffn_up": "IQ1_S", "ffn_down": "IQ1_M",
    },
}  # fmt: skip
"""Three types in one matrix, and two with values that are signed in one and not in the other."""


@pytest.mark.parametrize("mix", list(MIXES))
def test_greedy_tokens_of_a_mix_are_those_of_the_dequantised_directory(mix: str, tmp_path: Path) -> None:
    model = randomize(llama(**WIDE))
    writer, stored = to_gguf(model, "llama", MIXES[mix])
    path = writer.write(tmp_path / "model.gguf")
    expected = generate(save_stored(model, stored, tmp_path / "directory"))
    assert len({token for tokens, _ in expected for token in tokens}) > 3  # not stuck
    assert generate(path) == expected


@pytest.mark.parametrize("mix", list(MIXES))
def test_native_kernels_compute_a_mix(mix: str, tmp_path: Path) -> None:
    model = randomize(llama(**WIDE))
    writer, stored = to_gguf(model, "llama", MIXES[mix])
    expected = generate(save_stored(model, stored, tmp_path / "directory"))
    found = generate(
        writer.write(tmp_path / "model.gguf"), attention_backend="native", kv_cache_dtype="float32", dtype="float32"
    )
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-3)


def test_native_kernels_compute_experts_of_three_types(tmp_path: Path) -> None:
    """Gate in one type and up in another, in the file's blocks: the tokens of the weights made floating point."""
    path = dense(qwen3_moe(**WIDE_EXPERTS), "qwen3moe", THREE_TYPES).write(tmp_path / "model.gguf")
    expected = generate(path)
    found = generate(path, attention_backend="native", kv_cache_dtype="float32", dtype="float32")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-3)


SIZED: dict[str, dict[str, str]] = {
    **MIXES,
    **{name: every(name) for name in GRID_BLOCKS},
}


@pytest.mark.parametrize("name", list(SIZED))
def test_a_file_takes_what_is_counted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dense(llama(**SIZES), "llama", SIZED[name]).write(tmp_path / "model.gguf")
    assert_counted(path, described(path), monkeypatch)
