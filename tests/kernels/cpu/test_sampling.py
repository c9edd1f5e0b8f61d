"""Native sampling over the vocabulary: what the plain back end computes, and a row's bits in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.sampling.draw import uniform
from quire.sampling.filters import apply_filters

_native = pytest.importorskip("quire.kernels.cpu._native")

from quire.kernels.cpu.runtime import NativeRuntime  # noqa: E402
from quire.kernels.cpu.sampling import VocabularyKernels  # noqa: E402

each_isa = pytest.mark.parametrize("isa", _native.available_isas())
SIZES = [1, 7, 63, 64, 65, 257, 1000, 5003]
NEVER = 10**6
"""What the token table holds where nothing is written."""
SHARED = 2**20 + 29
"""Logits of one row from which on several threads work on it."""


class Rows:
    """Sampling parameters of `count` sequences."""

    def __init__(self, count: int, **columns: Any) -> None:
        self.temperature = np.broadcast_to(np.array(columns.get("temperature", 1.0), np.float32), count).copy()
        self.top_k = np.broadcast_to(np.array(columns.get("top_k", 0), np.int64), count).copy()
        self.top_p = np.broadcast_to(np.array(columns.get("top_p", 1.0), np.float64), count).copy()
        self.min_p = np.broadcast_to(np.array(columns.get("min_p", 0.0), np.float32), count).copy()
        self.seed = np.arange(count).astype(np.uint64) * np.uint64(7919)
        self.numbers = np.arange(count) % 5

    def kernels(self, isa: str, threads: int) -> VocabularyKernels:
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        return VocabularyKernels(NativeRuntime(isa, threads), *columns)

    def choose(
        self, isa: str, logits: np.ndarray, index: Any = None, *, threads: int = 2
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens for the sequences `index` (all), and what their scores have become. Checks the token table, too."""
        index = np.arange(len(self.seed)) if index is None else np.array(index, np.int64)
        scores = logits[index]
        greedy = bool((self.temperature[index] == 0).all())
        prompts = index % 3
        lengths, table = self.numbers[index] + prompts, np.full((len(self.seed), 9), NEVER, np.int32)
        written = table.copy()
        tokens = np.array(self.kernels(isa, threads).choose(scores, index, lengths, prompts, table, greedy))
        written[index, lengths] = np.maximum(tokens, 0)
        assert (table == written).all()
        return tokens, scores


def normal(*shape: int, seed: int = 0, scale: float = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * np.float32(scale)


# -- the best token ---------------------------------------------------------------------------------------------------


@each_isa
@pytest.mark.parametrize("size", SIZES)
def test_best_tokens(isa: str, size: int) -> None:
    logits = normal(40, size)
    logits[10:20] = np.round(logits[10:20])  # many equal ones
    logits[20] = 0
    logits[21] = -np.inf
    logits[21, size // 2] = -5
    logits[22, ::2], logits[22, 1::2] = -0.0, 0.0
    logits[23:] -= 100
    tokens, scores = Rows(40, temperature=0).choose(isa, logits)
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert scores.tobytes() == logits.tobytes()


@each_isa
@pytest.mark.parametrize("size", [1, 65, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nonfinite_rows_are_told_and_change_no_others(isa: str, size: int, temperature: float) -> None:
    logits = normal(60, size)
    clean, _ = Rows(60, temperature=temperature).choose(isa, logits)
    rng = np.random.default_rng(1)
    for row, value in [(3, np.nan), (11, np.inf), (31, -np.nan), (59, np.nan)]:
        logits[row, rng.integers(size)] = value
    logits[40] = -np.inf
    logits[41, :], logits[41, size - 1] = np.nan, 1
    bad = [3, 11, 31, 40, 41, 59] if size > 1 else [3, 11, 31, 40, 59]
    tokens, _ = Rows(60, temperature=temperature).choose(isa, logits)
    assert np.flatnonzero(tokens < 0).tolist() == bad
    sound = np.setdiff1d(np.arange(60), bad)
    assert tokens[sound].tolist() == clean[sound].tolist()


@each_isa
def test_one_row_is_shared_by_the_threads(isa: str) -> None:
    logits = normal(1, SHARED)
    best = int(logits.argmax())
    logits[0, [best, SHARED - 2, SHARED // 2]] = logits.max() + 1
    logits[0, SHARED - 1] = -np.inf
    for threads in (1, 2, 3):
        tokens, _ = Rows(1, temperature=0).choose(isa, logits, threads=threads)
        assert tokens[0] == logits.argmax()
        nonfinite = logits.copy()
        nonfinite[0, SHARED - 5] = np.nan
        for temperature in (0.0, 1.0):
            assert Rows(1, temperature=temperature).choose(isa, nonfinite, threads=threads)[0].tolist() == [-1]


# -- filters ----------------------------------------------------------------------------------------------------------


def weights_of(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    logits = {
        "steep": lambda: rng.normal(size=size) * 6,
        "flat": lambda: rng.normal(size=size) * 0.05,
        "equal": lambda: np.zeros(size),
        "steps": lambda: np.round(rng.normal(size=size) * 2),
        "impossible": lambda: np.where(rng.random(size) < 0.9, -np.inf, rng.normal(size=size)),
    }[kind]()
    logits[rng.integers(size)] = max(0.0, logits.max())
    return np.exp(logits - logits.max()).astype(np.float32)


@each_isa
@pytest.mark.parametrize("kind", ["steep", "flat", "equal", "steps", "impossible"])
def test_the_same_tokens_are_kept(isa: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    kernels = Rows(1).kernels(isa, 1)
    for size in (1, 3, 50, 1500, 9001):
        weights = weights_of(kind, size, rng)
        total = float(weights.astype(np.float64).sum())
        for top_k in (0, 1, 2, 7, 40, size - 1, size, size + 9):
            for top_p in (1.0, 1e-12, 0.05, 0.5, 0.9, 0.999, 1 - 1e-9):
                min_p = float(rng.choice([0.0, 0.01, 0.3, 1.0]))
                expected = weights[None].copy()
                columns = (np.array([top_k]), np.array([top_p]), np.array([min_p], np.float32))
                apply_filters(expected, np.array([total]), *columns)
                lowest = kernels.lowest_kept(weights, total, top_k, top_p, min_p)
                actual = np.where(weights >= np.float32(lowest), weights, 0)
                assert (actual == expected[0]).all(), (size, top_k, top_p, min_p)


@each_isa
def test_a_share_that_is_reached_exactly_needs_no_more(isa: str) -> None:
    weights = np.array([0.25, 1.0, 0.5, 0.125, 0.125], np.float32)
    kernels = Rows(1).kernels(isa, 1)
    for top_k, top_p, lowest in ((0, 0.5, 1.0), (0, 0.75, 0.5), (0, 0.875, 0.25), (3, 4 / 7, 1.0), (0, 0.75001, 0.25)):
        assert kernels.lowest_kept(weights, 2.0, top_k, top_p, 0.0) == lowest


@each_isa
def test_more_weights_than_a_thread_can_list(isa: str) -> None:
    weights = 1 - np.random.default_rng(4).random(300_001).astype(np.float32) / 2
    weights[0] = 1
    total = float(weights.astype(np.float64).sum())
    kernels = Rows(1).kernels(isa, 1)
    for top_k, top_p in ((0, 0.9), (290_000, 1.0), (290_000, 0.5)):
        expected = weights[None].copy()
        apply_filters(expected, np.array([total]), np.array([top_k]), np.array([top_p]), np.array([0.0], np.float32))
        lowest = kernels.lowest_kept(weights, total, top_k, top_p, 0.0)
        assert ((weights >= np.float32(lowest)) == (expected[0] > 0)).all()


# -- draws ------------------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.9, "min_p": 0.001},
]


def kept_weights(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """One row's weights in float64 after the filters; equal ones live or die together."""
    scores = logits.astype(np.float64) / temperature
    weights = np.exp(scores - scores.max())
    order = np.sort(weights)[::-1]
    limit = min(top_k, len(order)) if top_k > 0 else len(order)
    cumulative = np.cumsum(order[:limit])
    last = limit - 1 if top_p == 1 else min(int((cumulative < top_p * cumulative[-1]).sum()), limit - 1)
    return np.where(weights >= max(order[last], min_p), weights, 0)


@each_isa
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_draw_is_where_its_number_falls(isa: str, options: dict[str, Any]) -> None:
    for size in (1, 65, 5003):
        logits = normal(150, size)
        logits[50:70, ::3] = -np.inf
        logits[50:70, 0] = 1.0
        rows = Rows(150, **options)
        tokens, _ = rows.choose(isa, logits)
        numbers = uniform(rows.seed, rows.numbers)
        for i, token in enumerate(tokens):
            columns = (rows.temperature[i], rows.top_k[i], rows.top_p[i], rows.min_p[i])
            weights = kept_weights(logits[i], *(column.item() for column in columns))
            assert weights[token] > 0
            share = np.cumsum(weights) / weights.sum()
            before = share[token - 1] if token else 0.0
            assert before - 1e-5 <= numbers[i] <= share[token] + 1e-5


@each_isa
def test_random_numbers_are_those_of_the_plain_sampler(isa: str) -> None:
    rows = Rows(500)
    tokens, _ = rows.choose(isa, np.zeros((500, 4096), np.float32))
    assert tokens.tolist() == np.floor(uniform(rows.seed, rows.numbers) * 4096).astype(int).tolist()


@each_isa
def test_tiny_temperatures_and_large_scores(isa: str) -> None:
    logits = normal(20, 300)
    logits[5] *= 1e30
    logits[:, 17] = -1e30
    for temperature in (1e-45, 1e-30, 1e-6):
        tokens, _ = Rows(20, temperature=temperature).choose(isa, logits)
        assert tokens.tolist() == logits.argmax(axis=1).tolist()
    logits[:, :16] = 1e31
    seen = {int(token) for token in Rows(20, temperature=1e-45).choose(isa, logits)[0][:5]}
    assert seen <= set(range(16))
    assert len(seen) > 1


@each_isa
@pytest.mark.parametrize(("size", "count"), [(65, 40), (5003, 40), (90_001, 8)])
def test_a_row_has_the_same_bits_everywhere(isa: str, size: int, count: int) -> None:
    logits = normal(count, size)
    columns = {
        "temperature": np.arange(count) % 4 * 0.5,
        "top_k": np.array([0, 5, 0, 40, 10**6])[np.arange(count) % 5],
        "top_p": np.array([1.0, 0.9, 0.3])[np.arange(count) % 3],
        "min_p": np.array([0.0, 0.0, 0.01, 0.3])[np.arange(count) % 4],
    }
    rows = Rows(count, **columns)
    tokens, weights = rows.choose(isa, logits, threads=1)
    alone = [rows.choose(isa, logits, [i], threads=2) for i in range(count)]
    assert [int(token[0]) for token, _ in alone] == tokens.tolist()
    assert b"".join(weight.tobytes() for _, weight in alone) == weights.tobytes()
    for threads in (1, 2, 3):
        order = np.random.default_rng(threads).permutation(count)
        together, scores = rows.choose(isa, logits, order, threads=threads)
        assert together.tolist() == tokens[order].tolist()
        assert scores.tobytes() == weights[order].tobytes()


@each_isa
def test_a_row_that_threads_share_has_the_same_bits(isa: str) -> None:
    size = SHARED // 4 + 1000
    rows = Rows(3, top_p=[0.9, 1.0, 1.0], top_k=[0, 100, 0])
    logits = normal(3, size)
    tokens, weights = rows.choose(isa, logits, threads=1)
    for threads, index in ((2, [0]), (3, [1]), (3, [0, 2]), (2, [2, 1, 0])):
        shared, scores = rows.choose(isa, logits, index, threads=threads)
        assert shared.tolist() == tokens[index].tolist()
        assert scores.tobytes() == weights[index].tobytes()


@each_isa
def test_no_rows_strided_rows_and_wrong_shapes(isa: str) -> None:
    kernels = Rows(4, temperature=0).kernels(isa, 2)
    none, table = np.empty(0, np.int64), np.zeros((4, 5), np.int32)

    def choose(scores: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> list[int]:
        return kernels.choose(scores, rows, lengths, lengths, table, True)

    assert choose(np.empty((0, 50), np.float32), none, none) == []
    wide = normal(4, 64)
    index = np.arange(4)
    assert choose(wide[:, :50], index, index) == wide[:, :50].argmax(axis=1).tolist()
    with pytest.raises(ValueError, match="outside the token table"):
        choose(wide, index, index + 2)
    for scores, rows in ((wide[:, ::2], index), (wide, index + 1), (wide, index[:3]), (np.empty((4, 0), "f"), index)):
        with pytest.raises(ValueError):
            choose(scores, rows, rows)
    with pytest.raises(TypeError):
        choose(wide.astype(np.float64), index, index)
    wide[:] = -wide  # the same array with other scores, then another one: each is read where it lies
    assert choose(wide, index, index) == wide.argmax(axis=1).tolist()
    assert choose(-wide, index, index) == (-wide).argmax(axis=1).tolist()
    with pytest.raises(ValueError, match="vocabulary"):
        kernels.rank(wide, np.array([0, 1, 2, 64]), 3)
    logprobs, ranks, top_tokens, _ = kernels.rank(np.empty((0, 50), np.float32), none, 5)
    assert (logprobs.shape, ranks.shape, top_tokens.shape) == ((0,), (0,), (0, 5))


# -- log-probabilities ------------------------------------------------------------------------------------------------


@each_isa
@pytest.mark.parametrize("size", [1, 3, 64, 1000, 5003])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_log_probabilities_and_ranks(isa: str, size: int, num_top: int) -> None:
    logits = normal(30, size)
    logits[5:15] = np.round(logits[5:15])
    logits[15:20, size // 2 :] = -np.inf
    logits[15:20, 0] = 2.0
    logits[20] = np.sort(logits[20])  # the ranking changes with every token
    logits[21:25] += 3e4
    tokens = np.random.default_rng(1).integers(0, max(1, size // 2), 30)
    kernels = Rows(1).kernels(isa, 2)
    logprobs, ranks, top_tokens, top_logprobs = kernels.rank(logits, tokens, num_top)
    wide = logits.astype(np.float64)
    largest = wide.max(axis=1, keepdims=True)
    expected = wide - largest - np.log(np.exp(wide - largest).sum(axis=1, keepdims=True))
    chosen = logits[np.arange(30), tokens]
    np.testing.assert_allclose(logprobs, expected[np.arange(30), tokens], rtol=1e-6, atol=1e-5)
    assert ranks.tolist() == ((logits > chosen[:, None]).sum(axis=1) + 1).tolist()
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_top]
    assert top_tokens.tolist() == order.tolist()
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(expected, order, 1), rtol=1e-6, atol=1e-5)


@each_isa
def test_log_probabilities_have_the_same_bits_everywhere(isa: str) -> None:
    logits = normal(70, 5003)
    tokens = np.arange(70) * 3
    whole = Rows(1).kernels(isa, 1).rank(logits, tokens, 20)
    for threads in (1, 2, 3):
        kernels = Rows(1).kernels(isa, threads)
        for index in ([0], [69, 3], list(range(1, 70)), list(range(70))):
            part = kernels.rank(logits[index], tokens[index], 20)
            for found, expected in zip(part, whole, strict=True):
                assert found.tobytes() == expected[index].tobytes()


@each_isa
def test_nonfinite_rows_have_no_log_probabilities(isa: str) -> None:
    logits = normal(6, 130)
    sound = Rows(1).kernels(isa, 1).rank(logits, np.zeros(6, np.int64), 3)
    logits[1, 129], logits[3, 0], logits[4] = np.nan, np.inf, -np.inf
    logprobs, ranks, top_tokens, _ = Rows(1).kernels(isa, 2).rank(logits, np.zeros(6, np.int64), 3)
    assert np.isnan(logprobs).tolist() == [False, True, False, True, True, False]
    for row in (0, 2, 5):
        assert logprobs[row] == sound[0][row]
        assert ranks[row] == sound[1][row]
        assert top_tokens[row].tolist() == sound[2][row].tolist()
