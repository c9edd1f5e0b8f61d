"""Blocks of GGUF files that are written: read back they are near the weights, and nearer than plain rounding."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from quire.errors import ModelLoadError
from quire.models.gguf import encode as module
from quire.models.gguf.blocks import FORMATS
from quire.models.gguf.encode import TYPES, encode
from quire.models.gguf.fits import fit_affine, fit_factor, fit_symmetric
from tests.fakes.gguf import quantize

LOST = {
    "Q8_0": 6e-5, "Q6_K": 6e-4, "Q5_K": 2e-3, "Q5_1": 2e-3, "Q5_0": 2.88e-3, "Q4_K": 8e-3,
    "IQ4_XS": 1e-2, "IQ4_NL": 1e-2,
}  # fmt: skip
"""Share of the sum of squares that is lost, at most, of normal weights."""


def some_rows(num_rows: int = 24, columns: int = 512) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(num_rows, columns, generator=generator) * 0.02
    rows[:, ::61] *= 4
    return rows


def decoded(encoded: np.ndarray, type_name: str) -> torch.Tensor:
    block = TYPES[type_name]
    values, scales, offsets = FORMATS[type_name].unpack(encoded.reshape(-1, block.num_bytes))
    grid = values.reshape(*scales.shape, -1) * scales[..., None]
    grid = grid if offsets is None else grid + offsets[..., None]
    return torch.from_numpy(grid.reshape(len(encoded), -1).astype(np.float32))


def lost(rows: torch.Tensor, found: torch.Tensor, weights: torch.Tensor | float = 1.0) -> float:
    return float((weights * (found - rows).square()).sum() / (weights * rows.square()).sum())


@pytest.mark.parametrize("type_name", list(LOST))
def test_what_is_read_back_is_near(type_name: str) -> None:
    rows = some_rows()
    encoded = encode(rows, type_name)
    assert encoded.shape == (24, 512 // TYPES[type_name].values * TYPES[type_name].num_bytes)
    assert lost(rows, decoded(encoded, type_name)) < LOST[type_name]


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K"])
def test_the_search_loses_less_than_plain_rounding(type_name: str) -> None:
    rows = some_rows(4)
    plain = np.frombuffer(quantize(type_name, rows), dtype=np.uint8).reshape(4, -1)
    assert lost(rows, decoded(encode(rows, type_name), type_name)) < 0.9 * lost(rows, decoded(plain, type_name))


@pytest.mark.parametrize("type_name", ["Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "IQ4_XS", "IQ4_NL"])
def test_columns_that_count_more_are_nearer(type_name: str) -> None:
    rows = some_rows()
    counts = torch.ones(512)
    counts[::5] = 100.0
    alike, unlike = (decoded(encode(rows, type_name, each), type_name) for each in (None, counts))
    assert lost(rows, unlike, counts) < 0.95 * lost(rows, alike, counts)


@pytest.mark.parametrize("type_name", list(LOST))
def test_bytes_do_not_depend_on_what_is_done_together(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows().bfloat16()
    expected = encode(rows, type_name)
    monkeypatch.setattr(module, "WORKING_VALUES", 700)
    with ThreadPoolExecutor(3) as pool:
        assert np.array_equal(encode(rows, type_name, pool=pool), expected)


@pytest.mark.parametrize("type_name", list(LOST))
def test_zeros_and_constants(type_name: str) -> None:
    rows = torch.zeros(5, 256)
    rows[1], rows[2], rows[3, 77], rows[4] = 0.25, -0.25, 1.0, 1e-9
    found = decoded(encode(rows, type_name), type_name)
    assert torch.equal(found[0], rows[0])
    assert torch.allclose(found[1:3], rows[1:3], rtol=0.01)
    assert torch.allclose(found[3:], rows[3:], atol=0.01)
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("type_name", [*LOST, "F16"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_no_numbers(type_name: str, value: float) -> None:
    rows = some_rows()
    rows[3, 5] = value
    with pytest.raises(ModelLoadError, match="infinities or NaN"):
        encode(rows, type_name)


def test_floating_point_is_stored_as_it_is() -> None:
    rows = some_rows()
    for name, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        assert torch.equal(torch.from_numpy(encode(rows, name)).view(dtype), rows.to(dtype))
    with pytest.raises(ModelLoadError, match="too large for float16"):
        encode(torch.full((1, 32), 1e6), "F16")


def test_weights_on_a_line_are_found_again() -> None:
    """Codes times a scale, less an offset, have no error."""
    codes = torch.arange(32).remainder(16).float()
    x = (0.37 * codes - 1.5)[None]
    scales, offsets = fit_affine(x, torch.ones_like(x), 15, is_positive=True)
    assert float(scales) == pytest.approx(0.37, rel=1e-4)
    assert float(offsets) == pytest.approx(1.5, rel=1e-4)
    x = (-0.2 * (torch.arange(16) * 4 - 32).float())[None]
    assert float(fit_symmetric(x, torch.ones_like(x), 32).abs()) == pytest.approx(0.2, rel=1e-4)


def test_scales_of_a_block_are_whole_numbers_of_one_half() -> None:
    scales = torch.tensor([[0.1, 0.02, 0.063, 0.0, 0.09, 0.01, 0.05, 0.03]])
    factor, codes = fit_factor(scales, torch.ones_like(scales), 0, 63)
    assert torch.equal(codes, codes.round().clamp(0, 63))
    assert torch.equal(factor, factor.half().float())
    assert torch.allclose(factor[:, None] * codes, scales, atol=0.001)
