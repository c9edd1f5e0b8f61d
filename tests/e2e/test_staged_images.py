"""Images and videos of a pipeline: the first stage has the tower, and all have the bits of one rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedModel, Qwen3VLForConditionalGeneration

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.config.vision import EncoderCosts
from quire.engine.async_engine import AsyncLLM
from quire.errors import ConfigError
from quire.llm import LLM
from tests.e2e.test_image_prefixes import saved
from tests.e2e.test_images import (
    GREEDY,
    PROMPTS,
    STATES,
    TALL,
    WIDE,
    engine,
    num_encoded,
    prompt,
    settings_of,
    tokens_of,
)
from tests.e2e.test_restart import GUARD_SECONDS, open_engine
from tests.fakes.fates import Fates
from tests.models.vision_models import (
    GEMMA_PROCESSOR,
    PROCESSOR,
    qwen2_5_vl,
    qwen3_5,
    qwen3_vl,
    random_gemma3,
    random_model,
)

STAGES = {"pipeline_parallel_size": 2, "num_threads": 1}
GIVEN = [*PROMPTS, prompt(WIDE, 8, TALL, TALL, 5, WIDE, 9), prompt(*range(10, 65), WIDE, 3)]
LIKELY = msgspec.structs.replace(GREEDY, logprobs=3)


def deep_stack() -> PreTrainedModel:
    """Model with features behind three of its four layers, which two equal stages would cut."""
    config = qwen3_vl(deepstack_visual_indexes=[0, 1, 2]).config
    config.text_config.num_hidden_layers = 4
    return random_model(lambda: Qwen3VLForConditionalGeneration(config))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(deep_stack(), tmp_path_factory.mktemp("qwen3-vl"))


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[Any]:
    return of_one_rank(directory)


def of_one_rank(path: Path, **options: Any) -> list[Any]:
    with engine(path, attention_backend="native", num_threads=1, **options) as llm:
        found = likely(llm)
    assert found[0] != found[2], "the image matters"
    return found


def likely(llm: LLM, given: list[dict[str, Any]] = GIVEN) -> list[Any]:
    """Tokens and log-probabilities of each prompt."""
    outputs = [each.outputs[0] for each in llm.generate(given, LIKELY, use_tqdm=False)]
    return [(list(each.token_ids), each.logprobs) for each in outputs]


def staged(path: Path, **options: Any) -> LLM:
    return engine(path, **{"attention_backend": "native", "max_num_batched_tokens": 20, **STAGES, **options})


@pytest.mark.parametrize(
    ("build", "settings", "options"),
    [
        (deep_stack, PROCESSOR, {}),
        pytest.param(lambda: random_model(qwen2_5_vl), PROCESSOR, {}, marks=pytest.mark.long),
        pytest.param(lambda: random_model(qwen3_5), PROCESSOR, STATES, marks=pytest.mark.long),
        pytest.param(random_gemma3, GEMMA_PROCESSOR, {}, marks=pytest.mark.long),
    ],
    ids=["deep-stack", "windows", "states", "whole images"],
)
def test_the_bits_of_one_rank(
    build: Callable[[], PreTrainedModel], settings: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """In chunks that end inside images, two plans in flight; behind hits that end there; each alone; after a sleep."""
    path = saved(build(), tmp_path, settings)
    expected = of_one_rank(path, **options)
    with staged(path, **options) as llm:
        assert likely(llm) == expected
        assert llm.stats()["encoder_seconds_total"] > 0
        encoded = num_encoded(llm)
        assert likely(llm) == expected
        assert llm.stats()["prefix_cache_hits_total"] >= 64
        assert num_encoded(llm) == encoded
        llm.reset_prefix_cache()
        assert [likely(llm, [each])[0] for each in GIVEN] == expected
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert likely(llm, GIVEN[:2]) == expected[:2]


@pytest.mark.parametrize("swap", [0, 2**20], ids=["recompute", "swap"])
def test_preempted_prompts_and_features_that_are_dropped(
    directory: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch, swap: int
) -> None:
    """Too few blocks for all, and room for the features of one image."""
    monkeypatch.setattr("quire.config.vision.CACHE_BYTES", 0)
    with staged(directory, num_blocks_override=24, swap_space=swap) as llm:
        assert likely(llm, GIVEN[:4] * 2) == expected[:4] * 2
        assert llm.stats()["preemptions_total"] > 0
        assert num_encoded(llm) > 2


@pytest.mark.long
def test_stages_of_two_ranks(directory: Path) -> None:
    """Images are dealt to the ranks of the first stage. Bits are those of two ranks."""
    expected = of_one_rank(directory, tensor_parallel_size=2)
    with staged(directory, tensor_parallel_size=2) as llm:
        assert likely(llm) == expected
        assert likely(llm) == expected


async def test_a_request_that_is_left_is_encoded_no_further(
    directory: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EncoderCosts, "layer_tokens", lambda self, grid: 10**6)  # one layer a step
    engine = AsyncLLM.from_options(EngineOptions.from_keywords(settings_of(directory) | STAGES), in_process=True)
    try:
        for _ in range(3):
            leaving = asyncio.ensure_future(tokens_of(engine, GIVEN[1]))
            while not (await engine.stats()).encoded_images_total:
                await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert await tokens_of(engine, GIVEN[0]) == expected[0][0]
            stats = await engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert await tokens_of(engine, GIVEN[1]) == expected[1][0]
    finally:
        engine.shutdown()


@pytest.mark.long
async def test_an_engine_after_one_that_was_killed(
    directory: Path, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates = Fates(tmp_path, monkeypatch)
    fates.are(("die", 3))
    engine = open_engine(settings_of(directory) | STAGES)
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            found = await asyncio.gather(*(tokens_of(engine, each) for each in GIVEN))
        assert found == [tokens for tokens, _ in expected]
        assert (engine.num_restarts, fates.num_left) == (1, 0)
    finally:
        engine.shutdown()


def test_deep_stack_layers_are_the_first_stages(directory: Path) -> None:
    def shape(stages: int, **options: Any) -> list[int]:
        found = resolve(EngineOptions(model=str(directory), pipeline_parallel_size=stages, **options))
        return [len(stage) for stage in found.model.shape.stages(stages)]

    assert shape(2) == [3, 1]
    with pytest.raises(ConfigError, match="size=3 is not possible: the model's first 3 of 4 layers add an image's"):
        shape(3)
    for options in ({"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0, "video": 0}}):
        assert shape(2, **options) == [2, 2]
        assert len(shape(3, **options)) == 3
