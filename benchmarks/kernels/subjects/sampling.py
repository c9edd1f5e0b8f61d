"""Choosing tokens and ranking log-probabilities over the vocabulary, beside the plain kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.kernels.cases import FLOAT_BYTES, Case
from benchmarks.kernels.measure import Runner
from benchmarks.kernels.run import Prepared
from benchmarks.kernels.subjects.machine import Machine
from quire.sampling.batch import SampleBatch
from quire.sampling.kernels import SamplingKernels
from quire.sampling.native_kernels import NativeKernels
from quire.sampling.parameters import SamplingRows
from quire.sampling.plain_kernels import PlainKernels
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.step import SequenceSampling, TokenLogprobs

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "filtered": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
}
NUM_TOP = 5
MISSED_DRAWS = 0.05
"""Share of rows in which rounding may move a draw to the neighbouring token."""
LOGPROB_TOLERANCE = 1e-5


class ChooseSubject:
    """Where tokens are drawn, both sides work on a fresh copy of the logits, which is timed with them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def memory_bytes(self, case: Case) -> int:
        return 8 * case.rows * case.model.vocab * FLOAT_BYTES

    def prepare(self, case: Case) -> Prepared:
        table, logits = SamplingRows(case.rows), _logits(case)
        for row in range(case.rows):
            table.set(row, SequenceSampling(PARAMS[case.shape], row, [], []))
        index, ones = np.arange(case.rows), np.ones(case.rows, np.int64)
        batch: SampleBatch[np.ndarray] = SampleBatch(index, index, ones, ones, np.zeros((case.rows, 2), np.int32))
        used, is_greedy = table.used(batch.rows), case.shape == "greedy"
        scores = logits.copy()

        def choose(kernels: SamplingKernels[np.ndarray]) -> list[int]:
            if not is_greedy:
                np.copyto(scores, logits)
            return kernels.choose(scores, batch, used).read(iter(()))

        native, plain = NativeKernels(table, self._machine.runtime), PlainKernels(table)
        missed = float(np.mean(np.array(choose(native)) != choose(plain)))
        return Prepared(
            natives={"f32": _once(lambda: choose(native))},
            twins={"f32": _once(lambda: choose(plain))},
            errors={"f32": missed},
            tolerances={"f32": 0.0 if is_greedy else MISSED_DRAWS},
        )


class LogprobsSubject:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def memory_bytes(self, case: Case) -> int:
        return 8 * case.rows * case.model.vocab * FLOAT_BYTES

    def prepare(self, case: Case) -> Prepared:
        table, logits = SamplingRows(case.rows), torch.from_numpy(_logits(case))
        tokens = logits.numpy().argmax(axis=1)

        def logprobs(kernels: SamplingKernels[np.ndarray]) -> list[TokenLogprobs]:
            return Sampler(table, kernels).logprobs(logits, tokens, NUM_TOP).assemble()

        native, plain = NativeKernels(table, self._machine.runtime), PlainKernels(table)
        found, expected = (np.array([entry.logprobs for entry in logprobs(kernels)]) for kernels in (native, plain))
        return Prepared(
            natives={"f32": _once(lambda: logprobs(native))},
            twins={"f32": _once(lambda: logprobs(plain))},
            errors={"f32": float(np.abs(found - expected).max() / np.abs(expected).max())},
            tolerances={"f32": LOGPROB_TOLERANCE},
        )


def _logits(case: Case) -> np.ndarray:
    """[rows, vocab] float32, about as wide as a language model's."""
    return (4 * np.random.default_rng(0).standard_normal((case.rows, case.model.vocab))).astype(np.float32)


def _once(compute: Callable[[], object]) -> Runner:
    def run() -> int:
        compute()
        return 1

    return run
