"""Features of images as clients send them: files of torch.save in base64, and whatever else may come."""

from __future__ import annotations

import base64
import io
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import UserError
from quire.multimodal.embeddings import EMBEDS, GRID, read_features

SIZE, MERGE, WHERE = 6, 2, "messages[0].content[0].image_embeds"
GIVEN = torch.arange(12 * SIZE).reshape(12, SIZE).float() / 7
PATCHES = torch.tensor([1, 8, 6])


def stored(value: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def read(features: Any, grid: Any = PATCHES) -> Any:
    return read_features({EMBEDS: features, GRID: grid}, WHERE, SIZE, MERGE, is_whole=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_stored_tensors_are_those_of_a_program(dtype: torch.dtype) -> None:
    given = GIVEN.to(dtype)
    image = read(stored(given), stored(PATCHES[None]))
    assert (image.grid, image.size, image.is_encoded, image.num_tokens) == ((1, 4, 3), (12, SIZE), True, 12)
    assert np.array_equal(np.frombuffer(image.pixels, np.float32).reshape(12, SIZE), given.float().numpy())
    assert image == read(given) == read(given[None], [1, 8, 6]) == read(stored(given), stored(PATCHES.int()))


def test_a_part_of_a_larger_tensor() -> None:
    assert read(stored(torch.cat((GIVEN, GIVEN + 1))[12:])) == read(GIVEN + 1)
    assert read(stored(GIVEN.clone())).key != read(GIVEN + 1).key


def test_the_key_has_the_shape() -> None:
    assert read(GIVEN).key != read(GIVEN, [1, 6, 8]).key


def zipped(compression: int = zipfile.ZIP_STORED, **members: bytes) -> str:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"archive/{name.replace('_', '.')}", data)
    return base64.b64encode(buffer.getvalue()).decode()


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def deep_shape(levels: int) -> bytes:
    """Pickle of a tensor whose shape is two tuples that share their parts: comparing them takes 2 ** levels."""
    deep = b"K\x01" + b"q\x00h\x00\x86" * levels
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + 2 * deep + b"\x86K\x01K\x01\x86tR."


@pytest.mark.parametrize(
    ("features", "grid", "message", "name"),
    [
        (GIVEN[:11], PATCHES, "12 tokens of 6 elements are needed, not a shape of [11, 6]", EMBEDS),
        (stored(GIVEN[:, :5].clone()), PATCHES, "not a shape of [12, 5]", EMBEDS),
        (GIVEN / 0, PATCHES, "finite numbers", EMBEDS),
        (GIVEN.double() + 1e300, PATCHES, "finite numbers", EMBEDS),
        (GIVEN.int(), PATCHES, "finite numbers", EMBEDS),
        (GIVEN, [1, 8, 5], "in multiples of 2", GRID),
        (GIVEN, [2, 8, 6], "in multiples of 2", GRID),
        (GIVEN, [1, 2**40, 6], "in multiples of 2", GRID),
        (GIVEN, [1.0, 8.0, 6.0], "in multiples of 2", GRID),
        ("%", PATCHES, "not valid base64", EMBEDS),
        ("AAAA", PATCHES, "as torch.save writes it", EMBEDS),
        (stored({"a": GIVEN}), PATCHES, "as torch.save writes it", EMBEDS),
        (stored(GIVEN.T.contiguous().T), PATCHES, "as torch.save writes it", EMBEDS),
        (stored(GIVEN.to_sparse()), PATCHES, "as torch.save writes it", EMBEDS),
        (zipped(data_pkl=pickle.dumps(Evil())), PATCHES, "as torch.save writes it", EMBEDS),
        (zipped(data_pkl=bytes(2**15)), PATCHES, "as torch.save writes it", EMBEDS),
        (zipped(zipfile.ZIP_DEFLATED, data_pkl=bytes(2**12)), PATCHES, "as torch.save writes it", EMBEDS),
        ([object()], PATCHES, "array or tensor of numbers", EMBEDS),
        ([[1.0], [1.0, 2.0]], PATCHES, "inhomogeneous", EMBEDS),
        (zipped(data_pkl=deep_shape(60)), PATCHES, "as torch.save writes it", EMBEDS),
    ],
)
def test_errors_name_the_field(
    features: Any, grid: Any, message: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught:
        read(features, grid)
    assert message in str(caught.value)
    assert caught.value.param == f"{WHERE}.{name}"
    assert not capsys.readouterr().out, "nothing is run"


def test_both_fields_are_needed() -> None:
    for given in ({EMBEDS: GIVEN}, {EMBEDS: GIVEN, GRID: PATCHES, "more": 1}):
        with pytest.raises(UserError, match="image_embeds and image_grid_thw"):
            read_features(given, WHERE, SIZE, MERGE, is_whole=False)
