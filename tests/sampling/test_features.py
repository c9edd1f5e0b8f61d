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


def test_each_feature_is_a_bit_of_its_own() -> None:
    assert len(set(ALL_FEATURES)) == len(ALL_FEATURES)
    assert all(bit.bit_count() == 1 for bit in ALL_FEATURES)


@pytest.mark.parametrize("bit", [bit for bit in ALL_FEATURES if bit & EDITS])
def test_each_feature_that_changes_scores_has_a_pass(bit: int) -> None:
    rows, kernels = SamplingRows(1), RecordingKernels()
    rows.features[0] = bit & ~Feature.TOKEN_MASK
    batch: Any = type("Batch", (), {"rows_host": np.zeros(1, np.int64)})
    masks: Any = object() if bit == Feature.TOKEN_MASK else None
    Sampler(rows, kernels).sample(None, batch, masks)  # type: ignore[arg-type]
    usual = {"set_aside", "choose"}
    assert len([name for name in kernels.passes if name not in usual]) == 1, kernels.passes
