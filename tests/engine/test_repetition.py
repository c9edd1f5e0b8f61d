"""Completions that repeat themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.output_processor import RepetitionDetector
from quire.errors import UserError
from quire.sampling_params import RepetitionDetectionParams, SamplingParams


def repeats(token_ids: list[int], params: RepetitionDetectionParams) -> bool:
    """By the definition: the last tokens are `min_count` copies of a pattern."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        pattern = token_ids[len(token_ids) - size :]
        if (
            len(token_ids) >= size * params.min_count
            and token_ids[-size * params.min_count :] == pattern * params.min_count
        ):
            return True
    return False


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 6), st.data())
def test_found_by_the_definition(token_ids: list[int], largest: int, data: st.DataObject) -> None:
    params = RepetitionDetectionParams(
        max_pattern_size=largest,
        min_pattern_size=data.draw(st.integers(0, largest)),
        min_count=data.draw(st.integers(2, 5)),
    )
    detector = RepetitionDetector(params)
    for end in range(1, len(token_ids) + 1):
        assert detector.push(token_ids[end - 1]) == repeats(token_ids[:end], params)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 257, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 4}, "min_count"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count"),
    ],
)
def test_wrong_settings(fields: dict[str, int], param: str) -> None:
    with pytest.raises(UserError) as caught:
        RepetitionDetectionParams(**fields)
    assert caught.value.param == param


def test_beams_are_not_watched() -> None:
    params = RepetitionDetectionParams(max_pattern_size=4, min_count=2)
    with pytest.raises(UserError, match="repetition_detection"):
        SamplingParams(n=2, use_beam_search=True, repetition_detection=params)
