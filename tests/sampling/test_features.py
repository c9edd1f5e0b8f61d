"""The features of the sampler: each one that changes scores has a pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.sampling.parameters import ALL_FEATURES, EDITS, Feature, SamplingRows
from quire.sampling.sampler import Sampler


class RecordingKernels:
    """Notes which passes that change scores were asked for."""

    def __init__(self) -> None:
        self.passes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def note(*_arguments: Any) -> Any:
            self.passes.append(name)
            return (None, None)

        return note


class RecordingProcessors:
    """Notes that rows were handed to the operator's processors: behind the scores' temperature, or before it."""

    def __init__(self, passes: list[str]) -> None:
        self._passes = passes

    def set(self, _row: int, _params: Any) -> bool:
        return True

    def apply(self, _scores: Any, _batch: Any, temperature: Any) -> dict[int, str]:
        self._passes.append("processors" if temperature is None else "invariant processors")
        return {}


def test_each_feature_is_a_bit_of_its_own() -> None:
    assert len(set(ALL_FEATURES)) == len(ALL_FEATURES)
    assert all(bit.bit_count() == 1 for bit in ALL_FEATURES)


@pytest.mark.parametrize("bit", [bit for bit in ALL_FEATURES if bit & EDITS])
def test_each_feature_that_changes_scores_has_a_pass(bit: int) -> None:
    kernels = RecordingKernels()
    rows = SamplingRows(1, RecordingProcessors(kernels.passes))
    rows.features[0] = bit & ~Feature.TOKEN_MASK
    batch: Any = type("Batch", (), {"rows_host": np.zeros(1, np.int64)})
    masks: Any = object() if bit == Feature.TOKEN_MASK else None
    Sampler(rows, kernels).sample(None, batch, masks)  # type: ignore[arg-type]
    usual = {"set_aside", "choose", "invariant processors"}
    assert len([name for name in kernels.passes if name not in usual]) == 1, kernels.passes
    assert ("invariant processors" in kernels.passes) == (bit == Feature.PROCESSED)
