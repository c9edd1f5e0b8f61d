"""Drafts of heads with checkpoints of their own change when tokens come and not which; they are those of the heads'
definition."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, SamplingParams
from quire.structured_outputs_params import StructuredOutputsParams
from tests.e2e.conftest import GREEDY, Variant, exact, generate
from tests.e2e.draft_models import GUESSED
from tests.e2e.test_drafts import KINDS, PROMPTS, TORCH
from tests.e2e.test_drafts import check as check_drafts
from tests.e2e.test_head_drafts import leaning
from tests.long import all_but_long
from tests.models.eagle_heads import HeadTwin, states_of
from tests.models.families import llama, qwen3
from tests.models.harness import random_prompts, randomize, save

SIZE = 48
FAMILIES = {"llama": llama, "qwen3": qwen3}


@dataclass
class Case:
    """A model, its head, and where both lie."""

    variant: Variant
    twin: HeadTwin
    head: str = ""
    model: Any = None
    name: str = ""

    @property
    def drafts(self) -> dict[str, Any]:
        return {"method": "eagle3" if self.twin.layers else "eagle", "model": self.head, "num_speculative_tokens": 3}


CASES = {
    "eagle3": Case(Variant("llama"), HeadTwin(SIZE, SIZE, 97, (1, 2, 3), [96, *GUESSED, 40, 7])),
    "eagle": Case(Variant("qwen3"), HeadTwin(SIZE, SIZE, 97, has_tables=False)),
    "speculators-torch": Case(
        Variant("qwen3", TORCH),
        HeadTwin(32, SIZE, 97, (1, 3), [*GUESSED, 9], True, {"norm_before_residual": True}, "qwen3", authors=False),
    ),
    "eagle3-shared-torch": Case(Variant("llama", TORCH), HeadTwin(SIZE, SIZE, 97, (3, 2), has_tables=False)),
}


def saved(name: str, directory: Path, tokens: tuple[int, int] = GUESSED, **sizes: object) -> Case:
    """The likeliest token is one of two most of the time, for the model and its head."""
    case = CASES[name]
    model = randomize(FAMILIES[case.variant.family](num_hidden_layers=4, head_dim=16, **sizes))
    save(model, directory / "model")
    leaning(directory / "model", tokens)
    with torch.no_grad():
        model.lm_head.weight.copy_(load_file(directory / "model" / "model.safetensors")["lm_head.weight"])
    twin = replace(case.twin, vocab=model.config.vocab_size)
    if twin.has_tables:
        rows = [twin.ids.index(token) for token in tokens]
        twin.weights["lm_head"][rows[0]] *= 8
        twin.weights["lm_head"][rows[1]] = -twin.weights["lm_head"][rows[0]]
    head = twin.save(directory / "head", directory / "model")
    variant = replace(case.variant, directory=str(directory / "model"))
    return replace(case, variant=variant, twin=twin, head=str(head), model=model, name=name)


@pytest.fixture(scope="module", params=all_but_long(CASES, ["eagle3", "eagle"]))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(case: Case) -> list[object]:
    return exact(generate(case.variant, PROMPTS, KINDS)[0])


def check(case: Case, plain: list[object], **options: Any) -> dict[str, Any]:
    return check_drafts(case.variant, plain, case.drafts, **options)


@pytest.mark.parametrize("queue_depth", all_but_long([1, 2], [2]))
def test_equal_bits(case: Case, plain: list[object], queue_depth: int) -> None:
    stats = check(case, plain, queue_depth=queue_depth)
    assert stats["prefix_cache_hits_total"] > 0


@pytest.mark.parametrize("mode", all_but_long(["swap", "recompute"], []))
def test_in_chunks_with_few_blocks(case: Case, plain: list[object], mode: str) -> None:
    """Heads take turns in which of both has two steps in flight."""
    turn = [*CASES].index(case.name) + (mode == "recompute")
    few: dict[str, Any] = {"block_size": 8, "max_prefill_chunk": 11, "num_blocks_override": 30}
    few |= {"queue_depth": 1 + turn % 2}
    if mode == "swap":
        few |= {"preemption_mode": "swap", "swap_space": "1MiB"}
    stats = check(case, plain, **few)
    assert stats["preemptions_total"] > 0
    assert (stats["swap_preemptions_total"] > 0) == (mode == "swap")


@torch.no_grad()
def guesses(case: Case, text: list[int], count: int) -> list[int]:
    """What the definition guesses behind a text."""
    hidden = case.twin.join(states_of(case.model, case.twin, text[:-1]))
    tokens = list(text[1:])
    for _ in range(count):
        results, logits = case.twin.run(case.model, hidden, tokens)
        tokens.append(int(logits[-1].argmax()))
        hidden = torch.cat((hidden, results[-1:]))
    return tokens[-count:]


@pytest.mark.parametrize("name", all_but_long(CASES, ["eagle3", "eagle"]))
def test_the_drafts_of_the_definition(tmp_path: Path, name: str) -> None:
    """As many are accepted, in each place, as of those that the definition makes."""
    case, count, most = saved(name, tmp_path), 40, 3
    case.model.double()
    prompt = random_prompts([21], 97, seed=11)[0]
    asked = msgspec.structs.replace(GREEDY, max_tokens=count)
    config = {**case.drafts, "adaptive": False}
    outputs, stats = generate(case.variant, [prompt], asked, speculative_config=config, max_prefill_chunk=8)
    text, accepted, length = [*prompt, *outputs[0].outputs[0].token_ids], [0] * most, len(prompt) + 1
    while length < len(prompt) + count:
        limit = min(most, len(prompt) + count - length - 1)
        made = guesses(case, text[:length], limit) if limit else []
        for place, (guess, token) in enumerate(zip(made, text[length:], strict=False)):
            if guess != token:
                break
            accepted[place] += 1
            length += 1
        length += 1
    assert stats["accepted_drafts_by_position"] == accepted
    assert 0 < accepted[2] < accepted[0] < stats["drafts_total"]


@pytest.mark.parametrize("depth", all_but_long([1, 2], [2]))
def test_constraints(tmp_path: Path, bundled_model_path: Path, depth: int) -> None:
    """Drafts come a step earlier, as far as the blocks of the sequence have room."""
    size = json.loads((bundled_model_path / "config.json").read_text())["vocab_size"]
    case = saved("eagle", tmp_path, (67, 68), vocab_size=size)
    shutil.copy(bundled_model_path / "tokenizer.json", tmp_path / "model")
    model = replace(case.variant, options={"skip_tokenizer_init": False, "queue_depth": depth})
    pattern = StructuredOutputsParams(regex="(a|b|ab){40,60}")
    asked = SamplingParams(temperature=0.5, seed=1, max_tokens=40, logprobs=0, structured_outputs=pattern)
    outputs, stats = generate(model, PROMPTS[:2], asked, speculative_config=case.drafts)
    assert exact(outputs) == exact(generate(model, PROMPTS[:2], asked)[0])
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]  # type: ignore[operator]


def test_a_speculator_is_served(tmp_path: Path) -> None:
    """Its model is found, and loaded again with the head behind a deep sleep."""
    case = saved("speculators-torch", tmp_path)
    options: dict[str, Any] = {"num_blocks_override": 200, "num_threads": 1, "skip_tokenizer_init": True, **TORCH}
    with LLM(case.variant.directory, **options) as llm:
        expected = exact(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))
    with LLM(case.head, **options) as llm:
        for _ in range(2):
            before = llm.stats()["accepted_draft_tokens_total"]
            assert exact(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == expected
            assert llm.stats()["accepted_draft_tokens_total"] > before
            llm.sleep(2)
            llm.wake_up()


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "attention_backend": "torch"},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_other_ways_to_compute(tmp_path: Path, options: dict[str, Any]) -> None:
    """A head in other formats than float32, in those of its model; and one whose layer ranks share."""
    case = saved("eagle3", tmp_path)
    model = replace(case.variant, options=options)
    kinds = [msgspec.structs.replace(kind, logprobs=None, prompt_logprobs=None) for kind in KINDS]
    expected = exact(generate(model, PROMPTS, kinds)[0])
    outputs, stats = generate(model, PROMPTS, kinds, speculative_config={**case.drafts, "adaptive": False})
    assert exact(outputs) == expected
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]  # type: ignore[operator]
