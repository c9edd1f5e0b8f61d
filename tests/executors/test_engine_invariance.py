"""The whole engine below the text: tokens and logprobs do not depend on how the work is cut into steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.clock import SystemClock
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.executors.local import LocalExecutor
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from tests.models.families import FAMILIES
from tests.models.harness import randomize, save

KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3, "n": 2, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5, "n": 3},
    {"temperature": 0.7, "top_k": 20, "prompt_logprobs": 1, "logprobs": 0, "min_tokens": 9},
    {"temperature": 1.5, "min_p": 0.01, "logit_bias": {5: 3.0}, "frequency_penalty": 0.2},
]
MAX_TOKENS = 24
EOS = 11


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(randomize(FAMILIES["mistral"]()), tmp_path_factory.mktemp("mistral"))


def requests() -> list[EngineRequest]:
    rng = random.Random(0)
    made = []
    for number in range(12):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(3, 50))]
        if number % 3 == 0:
            prompt = [7] * 20 + prompt
        made.append(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=MAX_TOKENS, **KINDS[number % 4]),
                max_tokens=MAX_TOKENS,
                seed=number,
                eos_token_ids=[EOS],
                bad_token_sequences=[[3], [4, 5]] if number % 4 == 3 else [],
            )
        )
    return made


def run(model_path: Path, **options: Any) -> tuple[dict[Any, Any], int]:
    """Everything that came out, by request and sequence, and the number of preemptions."""
    settings = {"num_threads": 1, "max_num_seqs": 16, "max_num_batched_tokens": 128, "num_blocks_override": 300}
    config = resolve(EngineOptions(model=str(model_path), **{**settings, **options}))
    executor = LocalExecutor(config)
    core = EngineCore(config, executor, SystemClock())
    for request in requests():
        core.handle(AddRequest(request))
    found: dict[Any, Any] = {}
    while core.has_work:
        outputs = core.step()
        for update in outputs.updates:
            key = (update.request_id, update.index)
            found.setdefault((*key, "tokens"), []).extend(update.new_token_ids)
            found.setdefault((*key, "logprobs"), []).extend(update.logprobs or [])
            if update.prompt_logprobs is not None:
                found.setdefault((*key, "prompt"), []).extend(update.prompt_logprobs.entries)
            if update.finish_reason is not None:
                found[*key, "reason"] = update.finish_reason
    preemptions = core.stats().preemptions_total
    core.shutdown()
    return found, preemptions


@pytest.fixture(scope="module")
def steady(model_path: Path) -> dict[Any, Any]:
    """One step after the other, whole prompts, room for everything."""
    found, preemptions = run(model_path)
    assert preemptions == 0
    assert {str(reason) for key, reason in found.items() if key[2] == "reason"} == {"stop", "length"}
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"queue_depth": 2},
        {"max_prefill_chunk": 7},
        {"block_size": 8, "num_blocks_override": 600},
        {"max_num_seqs": 3, "enable_prefix_caching": False},
        {"queue_depth": 2, "max_prefill_chunk": 13, "num_blocks_override": 22},
    ],
    ids=str,
)
def test_the_same_whatever_the_steps(model_path: Path, steady: dict[Any, Any], options: dict[str, Any]) -> None:
    found, preemptions = run(model_path, **options)
    assert found == steady
    assert (preemptions > 0) == (options.get("num_blocks_override") == 22)
