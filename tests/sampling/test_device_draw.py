"""Drawing on the device: the exact distribution, the same tokens that filters keep on the host, no number left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.triton import filters, sampling
from quire.kernels.triton.sampling_shapes import Histories, SamplingShapes, allocate_buffers
from quire.sampling.draw import MIN_TEMPERATURE, compute_weights, uniform
from quire.sampling.filters import apply_filters
from quire.sampling.parameters import Feature
from quire.sampling_params import SamplingParams
from tests.long import one_in
from tests.sampling.device_helpers import SMALL, Device, sample_on
from tests.sampling.helpers import Case, Prepared, naive_probabilities, sample

ONE_SEGMENT = SamplingShapes(segment=64, lanes=32, tile=64, listed=64, ranked=24, num_warps=4)


def drawn(device: torch.device, logits: torch.Tensor, cases: list[Case]) -> list[int]:
    return sample_on(device, logits.expand(len(cases), -1), cases, shapes=ONE_SEGMENT).token_ids


@pytest.mark.parametrize(
    ("options", "count"), [({}, 16), ({"temperature": 0.6, "top_k": 9, "top_p": 0.9}, 5), ({"min_p": 0.05}, 5)], ids=str
)
def test_each_token_is_the_one_at_its_number(device: torch.device, options: dict, count: int) -> None:
    """The cumulative distribution, in float64, at the number that seed and index stand for."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(4)) * 2
    cases = [
        Case(SamplingParams(**options), prompt=[1], output=[2] * (n % 3), seed=n * 2654435761 << 20)
        for n in range(count)
    ]
    cumulative = np.cumsum(naive_probabilities(logits[0].numpy(), cases[0]))
    seeds = np.array([case.sampling.seed % 2**64 for case in cases], np.uint64)
    numbers = uniform(seeds, np.array([len(case.output) for case in cases]))
    expected = np.searchsorted(cumulative, numbers, side="right")
    nearest = np.abs(cumulative[None, :] - numbers[:, None]).min(axis=1)
    assert (nearest > 1e-6).all(), "no number so near to a border that rounding decides"
    assert drawn(device, logits, cases) == expected.tolist()


def kept_on_host(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Tokens that can be drawn."""
    temperature = np.maximum(np.float32(params.temperature), MIN_TEMPERATURE)
    weights = compute_weights(logits[None], temperature[None])[:, : len(logits)]
    columns = np.array([params.top_k]), np.array([params.top_p]), np.array([params.min_p], np.float32)
    apply_filters(weights, weights.astype(np.float64).sum(axis=1), *columns)
    return set(np.flatnonzero(weights[0] > 0).tolist())


def kept_on_device(
    device: torch.device, logits: np.ndarray, params: list[SamplingParams], shapes: SamplingShapes
) -> list[set[int]]:
    """The same by the kernels: each of `params` with the same logits. Also checks that such tokens are drawn."""
    cases = [Case(some, seed=number) for number, some in enumerate(params)]
    made = Prepared(cases, platform=Device(device, shapes))
    batch, words = made.batch, made.kernels._words
    histories = Histories(batch.lengths, batch.num_prompt_tokens, batch.token_table)
    scores = torch.from_numpy(logits).to(device).expand(len(cases), -1).contiguous()
    buffers = allocate_buffers(*scores.shape, shapes, device, filtered=True)
    sampling.scan(scores, batch.rows, words, buffers, shapes, random=False, filtered=Feature.FILTERS)
    filters.cutoff(batch.rows, words, len(logits), buffers, shapes, Feature.FILTERS)
    filters.collect(scores, batch.rows, words, buffers, shapes, Feature.FILTERS)
    filters.pick_filtered(scores, batch.rows, words, histories, buffers, shapes, Feature.FILTERS)
    lowest = buffers.cutoffs[:, 2].cpu().numpy()
    kept = []
    for number, some in enumerate(params):
        temperature = np.maximum(np.float32(some.temperature), MIN_TEMPERATURE)
        weights = compute_weights(logits[None], temperature[None])[0, : len(logits)]
        # A GPU's exponentials are not NumPy's to the last bit.
        kept.append(set(np.flatnonzero((weights > 0) & (weights >= lowest[number] * (1 - 1e-6))).tolist()))
        token, is_sound = buffers.chosen[number].tolist()
        assert is_sound
        assert token in kept[-1]
    return kept


def assert_same_kept(
    device: torch.device, logits: np.ndarray, params: list[SamplingParams], shapes: SamplingShapes = SMALL
) -> None:
    found = kept_on_device(device, logits, params, shapes)
    for some, kept in zip(params, found, strict=True):
        assert kept == kept_on_host(logits, some), some


KINDS = {
    "steep": lambda rng, size: rng.normal(size=size) * 6,
    "flat": lambda rng, size: rng.normal(size=size) * 0.05,
    "equal": lambda rng, size: np.zeros(size),
    "steps": lambda rng, size: np.round(rng.normal(size=size) * 2),
    "impossible": lambda rng, size: np.where(rng.random(size) < 0.9, -np.inf, rng.normal(size=size)),
}


@pytest.mark.parametrize("kind", one_in(2, KINDS))
def test_the_same_tokens_are_kept(device: torch.device, kind: str) -> None:
    """By the list, and where that is too short by passes over the row (k above 24, wide nuclei, small min-p)."""
    rng = np.random.default_rng(3)
    logits = KINDS[kind](rng, 131).astype(np.float32)
    logits[rng.integers(131)] = max(0.0, logits.max())
    params = [
        SamplingParams(top_k=1),
        SamplingParams(top_k=7, top_p=0.6, min_p=0.01),
        SamplingParams(top_k=60, top_p=0.9),
        SamplingParams(top_p=0.5, temperature=0.3),
        SamplingParams(top_p=1 - 1e-9, top_k=500),
        SamplingParams(min_p=0.001),
    ]
    assert_same_kept(device, logits, params)


def test_a_share_that_is_reached_exactly_needs_no_more(device: torch.device) -> None:
    logits = np.log(np.array([0.25, 1.0, 0.5, 0.125, 0.125])).astype(np.float32)
    weights = compute_weights(logits[None], np.ones(1, np.float32))[0, :5]
    assert weights.tolist() == [0.25, 1.0, 0.5, 0.125, 0.125], "sums are exact"
    rounding = 0.0 if device.type == "cpu" else 1e-6  # compiled, exponentials are approximate
    params = [SamplingParams(top_p=share - rounding) for share in (0.5, 0.75, 0.875, 0.75001)]
    assert kept_on_device(device, logits, params, SMALL) == [{1}, {1, 2}, {0, 1, 2}, {0, 1, 2}]


@pytest.mark.parametrize("listed", [1, 32], ids=["passes", "list"])
def test_the_mass_that_top_k_leaves_is_that_of_k_tokens(device: torch.device, listed: int) -> None:
    """Of several tokens that are equal at the edge all stay, but only some count for top-p."""
    logits = np.log(np.array([1.0, 0.5, 0.5, 0.5, 0.5, 0.25])).astype(np.float32)
    shapes = SamplingShapes(segment=64, lanes=32, tile=64, listed=listed, ranked=24, num_warps=4)
    params = [SamplingParams(top_k=2, top_p=0.68), SamplingParams(top_k=2, top_p=0.6)]
    assert [kept_on_host(logits, some) for some in params] == [{0, 1, 2, 3, 4}, {0}]
    assert_same_kept(device, logits, params, shapes)


@settings(max_examples=8)
@given(
    values=st.lists(st.sampled_from([-np.inf, -30.0, -3.0, -1.0, -0.5, 0.0, 0.25, 2.0]), min_size=1, max_size=150),
    temperature=st.sampled_from([1e-30, 0.1, 1.0, 7.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 20, 40, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.7, 0.2, 1e-9]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_any_row_with_many_equal_tokens(
    device: torch.device, values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array([*values, 1.0], np.float32)
    if top_k == 0 and top_p == 1.0:
        min_p = max(min_p, 0.001)  # at least one filter
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_same_kept(device, logits, [params])


@pytest.mark.parametrize("kind", ["steep", "flat"])
def test_lists_and_passes_draw_the_same_tokens(device: torch.device, kind: str) -> None:
    """Short lists make the kernel rank by passes; what is drawn stays the same, and the host's."""
    logits = torch.from_numpy(KINDS[kind](np.random.default_rng(8), 100).astype(np.float32)).expand(4, -1)
    settings = [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.3}, {"top_k": 15, "top_p": 0.5, "temperature": 0.5}]
    cases = [Case(SamplingParams(**some), seed=number) for number, some in enumerate(settings)]
    short = SamplingShapes(segment=64, lanes=32, tile=64, listed=2, ranked=24, num_warps=4)
    long = SamplingShapes(segment=64, lanes=32, tile=64, listed=256, ranked=24, num_warps=4)
    expected = sample(logits, cases).token_ids
    assert sample_on(device, logits, cases, shapes=short).token_ids == expected
    assert sample_on(device, logits, cases, shapes=long).token_ids == expected
