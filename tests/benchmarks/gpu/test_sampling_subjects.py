"""What is timed of sampling, in a tiny shape in Triton's interpreter: every variant chooses tokens that exist."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.kernels import TINY_SCALE
from benchmarks.gpu.sampling_subjects import HISTORY, SamplingSubjects
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from benchmarks.gpu.subjects import Subject

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "subject",
    [each for each in SamplingSubjects(TINY, CPU, TINY_SCALE).all() if each.case == "256 rows"],
    ids=lambda subject: subject.kernel,
)
def test_every_variant_runs(subject: Subject) -> None:
    for variant in subject.variants:
        (call,) = subject.calls(variant, cache_bytes=1)
        tokens = call()
        assert isinstance(tokens, torch.Tensor)
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < TINY.vocab


def test_the_work() -> None:
    subjects = {(each.kernel, each.case): each.work for each in SamplingSubjects(QWEN3_8B, CPU).all()}
    assert subjects["greedy sampling", "256 rows"].bytes == 256 * 151936 * 2
    assert subjects["top-p sampling", "1 rows"].bytes == 2 * 151936 * 2
    penalties = subjects["penalties", "256 rows"].bytes
    assert penalties == 256 * (151936 * 2 + 151936 * 8 + 68 * HISTORY)
