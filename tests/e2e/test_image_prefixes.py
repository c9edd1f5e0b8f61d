"""Registered prefixes with pictures: kept always, found by what they show, computed again by another engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import PreTrainedModel

from quire.errors import UserError
from quire.llm import LLM
from tests.e2e.test_images import STATES, TALL, WIDE, engine, num_encoded, prompt, settings_of, tokens, tokens_of
from tests.e2e.test_restart import GUARD_SECONDS, open_engine
from tests.fakes.fates import Fates
from tests.models.harness import save
from tests.models.vision_models import (
    GEMMA_PROCESSOR,
    IMAGE_TOKEN,
    PROCESSOR,
    qwen2_5_vl,
    qwen3_5,
    qwen3_vl,
    random_gemma3,
    random_model,
)
from tests.multimodal.pictures import draw

SMALL, OTHER = (draw(seed, size=(8, 8)) for seed in (3, 4))
"""Pictures of one token for the models with PROCESSOR."""


def saved(model: PreTrainedModel, path: Path, settings: dict[str, Any] = PROCESSOR) -> Path:
    save(model, path)
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_model(qwen3_vl), tmp_path_factory.mktemp("prefixes"))


def hits(llm: LLM, given: dict[str, Any], wanted: list[int]) -> int:
    """Tokens of a prompt that were cached; its output is `wanted`."""
    before = llm.stats()["prefix_cache_hits_total"]
    assert tokens(llm, [given]) == [wanted]
    return int(llm.stats()["prefix_cache_hits_total"] - before)


def alone(directory: Path, given: list[dict[str, Any]], **options: Any) -> list[list[int]]:
    """Tokens without a prefix cache, one prompt after the other."""
    with engine(directory, enable_prefix_caching=False, **options) as llm:
        return [tokens(llm, [each])[0] for each in given]


@pytest.mark.parametrize(
    ("build", "settings", "options"),
    [
        (lambda: random_model(qwen3_vl), PROCESSOR, {}),
        pytest.param(lambda: random_model(qwen2_5_vl), PROCESSOR, {}, marks=pytest.mark.long),
        pytest.param(lambda: random_model(qwen3_5), PROCESSOR, STATES, marks=pytest.mark.long),
        (random_gemma3, GEMMA_PROCESSOR, {}),
    ],
    ids=["deep-stack", "windows", "states", "whole images"],
)
def test_a_prompt_that_goes_on_begins_behind_the_last_token(
    build: Callable[[], PreTrainedModel], settings: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Also after other content has filled the pool, and in front of further pictures."""
    path = saved(build(), tmp_path, settings)
    prefix = [5, 6, WIDE, 7, TALL, 8]
    given = [prompt(*prefix, 9, 10), prompt(*prefix, TALL, 11), prompt(*prefix[:4], WIDE, 8, 9)]
    wanted = alone(path, given, **options)
    with engine(path, max_num_batched_tokens=32, **options) as llm:
        name = llm.register_prefix(prompt(*prefix))  # type: ignore[arg-type]
        assert num_encoded(llm) == 2
        length = len(llm.generate([prompt(*prefix)], use_tqdm=False)[0].prompt_token_ids or ())
        for number in range(6):
            tokens(llm, [prompt(draw(20 + number, size=WIDE.size), *range(20 + number, 50 + number))])
        llm.reset_prefix_cache()
        encoded = num_encoded(llm)
        assert hits(llm, given[0], wanted[0]) == length
        assert num_encoded(llm) == encoded, "its pictures are not encoded again"
        assert hits(llm, given[1], wanted[1]) == length
        assert hits(llm, given[2], wanted[2]) < length - 1, "another picture in place of the second"
        with pytest.raises(UserError, match="cannot sleep while prefixes are registered"):
            llm.sleep()
        assert llm.unregister_prefix(name) > 0
        llm.reset_prefix_cache()
        assert hits(llm, given[0], wanted[0]) == 0


def placed(token_ids: list[int], *images: Image.Image) -> dict[str, Any]:
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": list(images)}}


def test_a_picture_in_the_last_block_is_compared(directory: Path) -> None:
    """The block is partly filled, so no hash knows it. A picture that begins behind the prefix is not its own."""
    start = [5, 6, 7, 8, 9, IMAGE_TOKEN]
    same, other = placed([*start, 10, 11], SMALL), placed([*start, 10, 11], OTHER)
    behind = placed([*start, IMAGE_TOKEN, 11, 12], SMALL, OTHER)
    swapped = placed([*start, IMAGE_TOKEN, 11, 12], OTHER, SMALL)
    given = [same, other, behind, swapped]
    wanted = alone(directory, given)
    assert wanted[0] != wanted[1], "the picture matters"
    with engine(directory) as llm:
        llm.register_prefix(placed(start, SMALL))  # type: ignore[arg-type]
        for each, tokens_wanted, count in zip(given, wanted, (6, 4, 6, 4), strict=True):
            assert hits(llm, each, tokens_wanted) == count
            llm.reset_prefix_cache()
        salted = {**same, "cache_salt": "other"}
        assert hits(llm, salted, wanted[0]) == 0
    with engine(directory) as llm:
        llm.register_prefix(start)  # placeholders without a picture are tokens of text
        assert hits(llm, same, wanted[0]) == 4
        with pytest.raises(UserError, match=r"multi_modal_data.image: the prompt has 1 placeholders .*, and 2 images"):
            llm.register_prefix(placed(start, SMALL, OTHER))  # type: ignore[arg-type]


async def test_an_engine_after_one_that_was_killed_computes_it_again(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = [5, 6, WIDE, 7, 8]
    given = prompt(*prefix, 9, 10)
    wanted = alone(directory, [given])
    fates = Fates(tmp_path, monkeypatch)
    engine = open_engine(settings_of(directory))
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            await engine.register_prefix(prompt(*prefix))  # type: ignore[arg-type]
            blocks = (await engine.stats()).num_registered_blocks
            fates.are(("die", 2))
            assert await tokens_of(engine, given) == wanted[0]
            assert (engine.num_restarts, fates.num_left) == (1, 0)
            while (await engine.stats()).num_registered_blocks != blocks:
                await asyncio.sleep(0.01)
            before = (await engine.stats()).prefix_cache_hits_total
            assert await tokens_of(engine, given) == wanted[0]
            assert (await engine.stats()).prefix_cache_hits_total - before == 22 + 2
    finally:
        engine.shutdown()
