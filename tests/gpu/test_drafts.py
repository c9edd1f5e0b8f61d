"""Drafts on a card: the tokens of an engine without them, however steps run, and no step waits for the card."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.e2e.draft_models import changed, guesses_two_tokens, parallel
from tests.e2e.test_heads_on_device import HEADS, save
from tests.gpu.conftest import complete, generate, open_engine, tokens, with_graphs
from tests.gpu.test_synchronising import no_synchronising
from tests.models.conftest import SavedModel
from tests.models.harness import random_prompts

pytestmark = pytest.mark.gpu

SavedModels = Callable[[str], SavedModel]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ON_CARD = torch.cuda.is_available()
FEW: dict[str, Any] = {
    "allowed_token_ids": [5, 6, 7],
    "ignore_eos": True,
    "max_tokens": 40 if ON_CARD else 6,
    "detokenize": False,
}
KINDS = [
    SamplingParams(temperature=0.0, **FEW),
    SamplingParams(temperature=1.0, seed=1, **FEW),
    SamplingParams(temperature=0.8, seed=2, n=2, presence_penalty=0.3, repetition_penalty=1.2, **FEW),
    # So hot that seeds alone choose between two tokens: on every processor the same drafts are right and wrong.
    SamplingParams(temperature=100.0, seed=3, **FEW | {"allowed_token_ids": [5, 6], "max_tokens": 12}),
]
PROMPTS = random_prompts([40, 3, 17, 2] if ON_CARD else [5, 3, 4, 2], 97)
ON_CARD_ALONE = pytest.mark.gpu(interpretable=False)
FAMILIES = [
    "llama",
    pytest.param("qwen3-window", marks=ON_CARD_ALONE),
    "deepseek-v3.2",
    pytest.param("qwen3.5-small-states", marks=ON_CARD_ALONE),
]
"""Layers that attend in full, over windows, over latents that are chosen among, and that keep states. Windows and
states are interpreted in tests/e2e/test_drafts_on_device.py."""
INVARIANT: dict[str, Any] = {"batch_invariant": True, "state_snapshot_interval": 64}


def draft_counts(llm: LLM) -> tuple[int, int]:
    """Of all steps so far: drafts that were accepted, and all."""
    stats = llm.stats()
    return stats["accepted_draft_tokens_total"], stats["draft_tokens_total"]


@pytest.mark.parametrize(
    "options",
    [{"enforce_eager": True}, with_graphs("full"), with_graphs("piecewise"), with_graphs("full_and_piecewise")],
    ids=str,
)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_without_drafts(name: str, options: dict[str, Any], saved_model: SavedModels) -> None:
    directory = saved_model(name).directory
    compare(directory, NGRAM, INVARIANT | options)


@pytest.mark.parametrize("options", [{"enforce_eager": True}, with_graphs("full_and_piecewise")], ids=str)
@pytest.mark.parametrize("name", [each for each in FAMILIES if each != "deepseek-v3.2"])
def test_a_model_makes_drafts(name: str, options: dict[str, Any], saved_model: SavedModels, tmp_path: Path) -> None:
    """The other model has layers of its own in the same pool."""
    other = changed(saved_model("llama").directory, tmp_path / "other", guesses_two_tokens)
    given = {"model": str(other), "num_speculative_tokens": 3}
    compare(saved_model(name).directory, given, INVARIANT | options)


@pytest.mark.parametrize("options", [{"enforce_eager": True}, with_graphs("full_and_piecewise")], ids=str)
def test_a_model_makes_drafts_in_one_pass(options: dict[str, Any], saved_model: SavedModels, tmp_path: Path) -> None:
    directory = saved_model("llama").directory
    other = parallel(changed(directory, tmp_path / "other", guesses_two_tokens), tmp_path / "parallel")
    given = {"model": str(other), "num_speculative_tokens": 3, "parallel_drafting": True}
    compare(directory, given, INVARIANT | options)


@pytest.mark.parametrize("options", [{"enforce_eager": True}, with_graphs("full_and_piecewise")], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "eagle3" else ON_CARD_ALONE) for name in HEADS]
)
def test_a_head_makes_drafts(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    directory, given = save(name, tmp_path)
    compare(Path(directory), given, INVARIANT | options)


@cache
def tokens_without_drafts(directory: Path, *options: tuple[str, Any]) -> list[list[list[int]]]:
    return tokens(generate(directory, PROMPTS, KINDS, **dict(options)))


def compare(directory: Path, given: dict[str, Any], options: dict[str, Any]) -> None:
    """Drafts of a `speculative_config` change no token, and no step waits for the card."""
    expected = tokens_without_drafts(directory, *sorted(options.items()))
    with open_engine(directory, speculative_config=given, **options) as llm:
        for _ in range(2 if ON_CARD else 0):  # compiles and captures, which may wait
            assert tokens(complete(llm, PROMPTS, KINDS)) == expected
        with no_synchronising() if ON_CARD else nullcontext():
            found = complete(llm, PROMPTS, KINDS)
        assert tokens(found) == expected
        num_accepted, num_drafts = draft_counts(llm)
    assert 0 < num_accepted < num_drafts
