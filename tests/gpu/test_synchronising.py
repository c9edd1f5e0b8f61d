"""Steps are enqueued without waiting for the card: torch reports every call that would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quire import SamplingParams
from tests.gpu.conftest import complete, greedy, open_engine
from tests.models.conftest import SavedModel
from tests.models.harness import random_prompts

pytestmark = pytest.mark.gpu(interpretable=False)

KINDS = {
    "greedy": greedy(24),
    "draws": SamplingParams(
        temperature=0.8, top_p=0.9, top_k=30, min_p=0.05, max_tokens=24, ignore_eos=True, detokenize=False
    ),
    "rules": greedy(
        24, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={3: 1.0}, min_tokens=4, stop_token_ids=[5]
    ),
    "logprobs": greedy(24, logprobs=5, prompt_logprobs=2),
    "children": SamplingParams(n=3, temperature=1.0, max_tokens=24, ignore_eos=True, detokenize=False),
}


@contextmanager
def no_synchronising() -> Iterator[None]:
    """Raises where torch would wait for the card. (Waiting for an event, as for a result's copy, is none of those.)"""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_card_is_watched() -> None:
    """What the others rely on."""
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronising():
        x.sum().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"cuda_graphs": "piecewise"}], ids=str)
def test_steps_do_not_wait(kind: str, options: dict[str, Any], saved_model: Callable[[str], SavedModel]) -> None:
    prompts = random_prompts([40, 3, 17, 25], 97)
    with open_engine(saved_model("qwen3-window").directory, max_num_batched_tokens=32, **options) as llm:
        complete(llm, prompts, KINDS[kind])  # compiles and captures, which may wait
        with no_synchronising():
            outputs = complete(llm, random_prompts([40, 3, 17, 25], 97, seed=9), KINDS[kind])
    assert all(completion.token_ids for output in outputs for completion in output.outputs)
