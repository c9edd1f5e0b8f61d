"""The watermark: lists, detector, and texts of the bundled model."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.logits_processors.green_list import GreenList


class OtherKey(GreenList):
    KEY = 2**64 - 59


def test_lists_are_a_share_of_the_vocabulary_by_key_and_token() -> None:
    ids = np.arange(4096)
    lists = [GreenList.green(previous, ids) for previous in range(50)]
    assert all(0.45 < each.mean() < 0.55 for each in lists)
    assert all(0.4 < (lists[0] == each).mean() < 0.6 for each in (*lists[1:], OtherKey.green(0, ids)))
    assert GreenList.green(7, np.array([3, 9])).tolist() == GreenList.green(7, ids)[[3, 9]].tolist()


def test_repeated_pairs_count_once() -> None:
    previous, token = next(
        (a, b) for a in range(9) for b in range(9) if a != b and GreenList.green(a, np.array([b]))[0]
    )
    assert abs(GreenList.z_score([previous, token] * 100)) < 2
    assert GreenList.z_score([5]) == GreenList.z_score([]) == 0


@pytest.mark.parametrize("value", [-1, 21, "yes"])
def test_bonuses_that_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="a bonus from 0 to 20"):
        GreenList.validate_params(SamplingParams(extra_args={"watermark": value}))


def marked_and_others(count: int) -> tuple[list[float], list[float]]:
    """z of marked texts and of others, of 200 tokens each, by the bundled model."""
    draw = random.Random(0)
    prompts = [{"prompt_token_ids": [draw.randrange(3, 4000) for _ in range(8)]} for _ in range(count)]
    with LLM(logits_processors=[GreenList], max_num_seqs=64) as llm:

        def texts(extra_args: dict[str, object] | None) -> list[float]:
            params = SamplingParams(max_tokens=200, ignore_eos=True, seed=1, detokenize=False, extra_args=extra_args)
            found = llm.generate(prompts, params, use_tqdm=False)
            return [GreenList.z_score(each.outputs[0].token_ids) for each in found]

        return texts({"watermark": True}), texts(None)


def test_marked_texts_are_told_from_others() -> None:
    marked, others = marked_and_others(4)
    assert min(marked) > 4 > max(others)


@pytest.mark.long
def test_of_a_hundred_texts_each() -> None:
    marked, others = marked_and_others(100)
    assert sum(z > 4 for z in marked) >= 95
    assert sum(z > 4 for z in others) == 0
