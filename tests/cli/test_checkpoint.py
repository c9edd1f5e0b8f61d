"""Headers against real files."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.cli.checkpoint import read_checkpoint
from quire.errors import ModelLoadError
from tests.fakes.gguf import TYPE_NUMBERS, GGUFWriter, StoredTensor


def test_headers_are_summed_by_dtype(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "two.safetensors", metadata={"x": "y"})
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.num_files == 2
    assert checkpoint.elements == {"F32": 15, "BF16": 9}
    assert checkpoint.bytes == {"F32": 60, "BF16": 18}


def test_a_gguf_file_is_summed_by_type(tmp_path: Path) -> None:
    tensors = {
        "a": StoredTensor(TYPE_NUMBERS["F32"], (3, 5), bytes(60)),
        "b": StoredTensor(TYPE_NUMBERS["Q8_0"], (2, 64), bytes(136)),
        "c": StoredTensor(TYPE_NUMBERS["Q8_0"], (32,), bytes(34)),
    }
    path = GGUFWriter({}, tensors).write(tmp_path / "model.gguf")
    checkpoint = read_checkpoint(path)
    assert checkpoint is not None
    assert (checkpoint.format, checkpoint.num_files) == ("GGUF", 1)
    assert checkpoint.elements == {"F32": 15, "Q8_0": 160}
    assert checkpoint.bytes == {"F32": 60, "Q8_0": 170}
    assert read_checkpoint(tmp_path) == checkpoint
    (tmp_path / "split").mkdir()
    GGUFWriter({}, tensors).write_split(tmp_path / "split", 2)
    assert read_checkpoint(tmp_path / "split") == replace(checkpoint, num_files=2)
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    beside = read_checkpoint(tmp_path)
    assert beside is not None
    assert beside.format == "safetensors"


def test_no_files_is_none(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05\x00",
        b"\x10\x00\x00\x00\x00\x00\x00\x00{}",
        b"\xff" * 16,
        b'\x07\x00\x00\x00\x00\x00\x00\x00{"a":1}',
        b'\x29\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F3","shape":[2],"x":"123"}}',
    ],
)
def test_corrupt_headers_name_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"bad\.safetensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b'{"a":' + b"[" * 100_000, "not a valid safetensors file"),
        (b"{}" + b" " * 2**24, "which may have"),
        (b'{"a":[' + b"{}," * 2**16 + b"{}]}", "more than 65536 tensors"),
        (b'{"a":{"dtype":"F32","shape":[' + b"1," * 2**20 + b"1]}}", "more than 1048576 values"),
        (b'{"a":{"dtype":"F32","shape":[9223372036854775808]}}', "not a short list of sizes"),
        (b'{"a":{"dtype":"F32","shape":[-1]}}', "not a short list of sizes"),
        (b'{"a":{"dtype":"' + b"x" * 10**6 + b'","shape":[1]}}', "unknown dtype"),
    ],
)
def test_headers_have_the_limits_of_loading(tmp_path: Path, header: bytes, said: str) -> None:
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelLoadError, match=said) as raised:
        read_checkpoint(tmp_path)
    assert len(str(raised.value)) < 1000


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="is a FIFO"):
        read_checkpoint(tmp_path)
