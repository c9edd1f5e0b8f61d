"""Drafts of a model's head change when tokens come and not which; they are those of the head's definition."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import SamplingParams
from quire.errors import ConfigError
from quire.structured_outputs_params import StructuredOutputsParams
from tests.e2e.conftest import GREEDY, Variant, exact, generate
from tests.e2e.draft_models import GUESSED
from tests.e2e.test_drafts import BORDERS, KINDS, PROMPTS, TORCH
from tests.e2e.test_drafts import check as check_drafts
from tests.long import all_but_long
from tests.models.harness import random_prompts
from tests.models.head_twins import saved
from tests.models.hybrid_families import SMALL_STATES

MTP = {"method": "mtp", "num_speculative_tokens": 3}
HEADS = {
    "dense": Variant("dense", BORDERS),
    "moe-torch": Variant("moe", {**TORCH, **BORDERS}),
    "next": Variant("next", BORDERS),
    "deepseek-v3": Variant("deepseek-v3"),
    "deepseek-v3.2-torch": Variant("deepseek-v3.2", TORCH),
    "tied-torch": Variant("tied", {**TORCH, **BORDERS}),
}


def leaning(directory: Path, tokens: tuple[int, int] = GUESSED) -> None:
    """Let the likeliest token be one of two most of the time, for the model and its head, which share a matrix."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    head[tokens[0]] *= 8
    head[tokens[1]] = -head[tokens[0]]
    save_file(tensors, path)


@pytest.fixture(scope="module", params=all_but_long(HEADS, ["dense", "deepseek-v3"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Variant:
    variant, directory = HEADS[request.param], tmp_path_factory.mktemp(request.param)
    saved(variant.family, directory, **({} if variant.family.startswith("deepseek") else SMALL_STATES))
    leaning(directory)
    return replace(variant, directory=str(directory))


@pytest.fixture(scope="module")
def plain(model: Variant) -> list[object]:
    return exact(generate(model, PROMPTS, KINDS)[0])


check = partial(check_drafts, speculative_config=MTP)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_equal_bits(model: Variant, plain: list[object], queue_depth: int) -> None:
    stats = check(model, plain, queue_depth=queue_depth)
    assert stats["prefix_cache_hits_total"] > 0


@pytest.mark.parametrize("mode", all_but_long(["swap", "recompute"], ["recompute"]))
def test_in_chunks_with_few_blocks(model: Variant, plain: list[object], mode: str) -> None:
    """Models take turns in which of both has two steps in flight."""
    turn = [each.family for each in HEADS.values()].index(model.family) + (mode == "recompute")
    few: dict[str, Any] = {"block_size": 8, "max_prefill_chunk": 11, "num_blocks_override": 30}
    few |= {"queue_depth": 1 + turn % 2}
    if mode == "swap":
        few |= {"preemption_mode": "swap", "swap_space": "1MiB"}
    stats = check(model, plain, **few)
    assert stats["preemptions_total"] > 0
    assert (stats["swap_preemptions_total"] > 0) == (mode == "swap")


@pytest.mark.parametrize("depth", all_but_long([1, 2], [2]))
def test_constraints(tmp_path: Path, bundled_model_path: Path, depth: int) -> None:
    """Drafts come a step earlier, as far as the blocks of the sequence have room."""
    size = json.loads((bundled_model_path / "config.json").read_text())["vocab_size"]
    saved("dense", tmp_path, **SMALL_STATES, vocab_size=size)
    leaning(tmp_path, (67, 68))
    shutil.copy(bundled_model_path / "tokenizer.json", tmp_path)
    options = {"skip_tokenizer_init": False, "queue_depth": depth, **BORDERS}
    model = Variant("", options, directory=str(tmp_path))
    pattern = StructuredOutputsParams(regex="(a|b|ab){40,60}")
    asked = SamplingParams(temperature=0.5, seed=1, max_tokens=40, logprobs=0, structured_outputs=pattern)
    outputs, stats = generate(model, PROMPTS[:2], asked, speculative_config=MTP)
    assert exact(outputs) == exact(generate(model, PROMPTS[:2], asked)[0])
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]  # type: ignore[operator]


class Definition:
    """What the head guesses behind a text, by plain torch in float64."""

    def __init__(self, name: str, directory: Path) -> None:
        self.model, self.twin = saved(name, directory)
        leaning(directory)
        tensors = load_file(directory / "model.safetensors")
        self.model.lm_head.weight.data = tensors["lm_head.weight"]
        for each in (self.model, self.twin.body):
            each.set_experts_implementation("eager")
        self.model.double(), self.twin.double()

    @torch.no_grad()
    def guesses(self, text: list[int], count: int) -> list[int]:
        hidden = self.model.model(torch.tensor([text[:-1]])).last_hidden_state
        tokens = list(text[1:])
        for _ in range(count):
            results, logits = self.twin.run(self.model, hidden, torch.tensor([tokens]))
            tokens.append(int(logits[0, -1].argmax()))
            hidden = torch.cat((hidden, results[:, -1:]), dim=1)
        return tokens[-count:]


@pytest.mark.parametrize("backend", all_but_long(["native", "torch"], ["native"]))
@pytest.mark.parametrize(("name", "seed"), [("dense", 9), ("deepseek-v3", 14)])
def test_the_drafts_of_the_definition(tmp_path: Path, name: str, seed: int, backend: str) -> None:
    """As many are accepted, in each place, as of those that the definition makes."""
    definition, has_states = Definition(name, tmp_path), name == "dense"
    prompt, count, most = random_prompts([21], 97, seed=seed)[0], 40, 3
    model = Variant("", {"attention_backend": backend, **BORDERS}, directory=str(tmp_path))
    asked = msgspec.structs.replace(GREEDY, max_tokens=count)
    config = {**MTP, "adaptive": False}
    outputs, stats = generate(model, [prompt], asked, speculative_config=config, max_prefill_chunk=8)
    text, accepted, length = [*prompt, *outputs[0].outputs[0].token_ids], [0] * most, len(prompt) + 1
    while length < len(prompt) + count:
        limit = min(most, len(prompt) + count - length - 1, 62 - (length - 1) % 64 if has_states else most)
        guesses = definition.guesses(text[:length], limit) if limit else []
        for place, (guess, token) in enumerate(zip(guesses, text[length:], strict=False)):
            if guess != token:
                break
            accepted[place] += 1
            length += 1
        length += 1
    assert stats["accepted_drafts_by_position"] == accepted
    assert 0 < accepted[2] < accepted[0] < stats["drafts_total"]


def test_a_model_without_a_head(bundled_model_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mtp' is of checkpoints with a head for drafts, and .* has none"):
        generate(Variant("", directory=str(bundled_model_path)), [[1]], speculative_config=MTP)
