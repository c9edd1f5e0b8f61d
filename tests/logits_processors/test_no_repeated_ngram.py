"""No n-gram twice, token by token."""

from __future__ import annotations

import random

import pytest
import torch

from quire.logits_processors import BatchUpdate
from quire.logits_processors.no_repeated_ngram import ARGUMENT, NoRepeatedNgram
from quire.sampling_params import SamplingParams


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_would_repeat_is_impossible(size: int) -> None:
    draw, params = random.Random(size), SamplingParams(extra_args={ARGUMENT: size})
    prompt, output = [draw.randrange(9) for _ in range(6)], list[int]()
    processor = NoRepeatedNgram(None, torch.device("cpu"), False)
    update: BatchUpdate | None = BatchUpdate(1, [], [(0, params, prompt, output)], [])
    for number in range(12):
        processor.update_state(update)
        update = None
        tokens = prompt + output
        seen = {tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)}
        last = tokens[len(tokens) - size + 1 :]
        expected = [token for token in range(9) if (*last, token) in seen]
        found = processor.apply(torch.zeros(1, 9))[0]
        assert torch.flatten(torch.nonzero(found < 0)).tolist() == expected, number
        output += [draw.randrange(9) for _ in range(1 + number % 3)]


@pytest.mark.parametrize("size", [0, 65, "3", True])
def test_sizes_that_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match="from 1 to 64"):
        NoRepeatedNgram.validate_params(SamplingParams(extra_args={ARGUMENT: size}))
    assert not NoRepeatedNgram.concerns(SamplingParams())
