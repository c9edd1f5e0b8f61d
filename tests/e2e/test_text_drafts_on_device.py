"""Drafts from texts on the host where the device knows more tokens of a sequence than the host: they change no token,
and where the texts are right, so are the drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.config.options import EngineOptions
from quire.structured_outputs_params import StructuredOutputsParams
from tests.e2e.conftest import GREEDY, exact
from tests.e2e.test_drafts import KINDS, NGRAM, OTHERS, PROMPTS
from tests.e2e.test_drafts_on_device import ACROSS, OPTIONS, PLAIN, run
from tests.long import all_but_long
from tests.models.conftest import SavedModel

FEW_BLOCKS = 14
"""Fewer than requests with children take together."""
METHODS = {name: {**given, "num_speculative_tokens": 3} for name, given in OTHERS.items()} | {"ngram": NGRAM}
SHORT = [msgspec.structs.replace(kind, max_tokens=9) for kind in KINDS[:3]]


@pytest.fixture(scope="module")
def directory(saved_model: Callable[[str], SavedModel]) -> str:
    return str(saved_model("llama").directory)


def generate(
    directory: str, prompts: list[dict[str, Any]], asked: list[Any], repeat: int = 1, **options: Any
) -> tuple[list[list[object]], dict[str, Any]]:
    """Results of each repetition, and the statistics of all."""
    keywords = {"model": directory, **OPTIONS, **options}
    with LLM.from_options(EngineOptions.from_keywords(keywords), executor=PLAIN) as llm:
        found = [exact(llm.generate(prompts, asked, use_tqdm=False)) for _ in range(repeat)]
        return found, llm.stats()


@pytest.mark.parametrize(
    ("method", "queue_depth"),
    all_but_long([(each, depth) for each in METHODS for depth in (1, 2)], [("suffix", 2), ("hostile", 2)]),
)
def test_equal_bits(directory: str, method: str, queue_depth: int) -> None:
    """Some sequences have children, and some are preempted; predictions are right at times. The second time `suffix`
    knows the texts of the first."""
    has_children = method != "hostile"
    kinds = [SHORT[0], SHORT[1 + has_children]]
    expected, _ = run(directory, kinds, queue_depth=queue_depth)
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in PROMPTS[: len(kinds)]]
    if method == "ngram":
        for prompt in prompts:
            prompt["prediction"] = [5, 6, 7, 6, 5, 7, 7, 5, 5, 6, 6] * 2
    options = {"queue_depth": queue_depth, "max_prefill_chunk": 11, "num_blocks_override": FEW_BLOCKS}
    given = {**METHODS[method], "adaptive": False}
    found, stats = generate(directory, prompts, kinds, 2, speculative_config=given, **options)
    assert found == [expected, expected]
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]
    assert (stats["preemptions_total"] > 0) == has_children


@pytest.mark.parametrize(
    ("method", "queue_depth"),
    all_but_long([(each, depth) for each in ("ngram", "suffix") for depth in (1, 2)], [("ngram", 2)]),
)
def test_a_known_text_is_drafted(directory: str, method: str, queue_depth: int) -> None:
    """All drafts of a text are right, and come in time, if the text was predicted, or the client had it before."""
    asked = [msgspec.structs.replace(GREEDY, max_tokens=24)]
    (texts,), _ = generate(directory, [{"prompt_token_ids": PROMPTS[1]}], asked)
    text = list(texts[0][0])  # type: ignore[index]
    prompt: dict[str, Any] = {"prompt_token_ids": PROMPTS[1]}
    if method == "ngram":
        prompt["prediction"] = text
    given = {**METHODS[method], "adaptive": False, "prompt_lookup_min": 3}
    if method == "suffix":
        del given["prompt_lookup_min"]
    found, stats = generate(directory, [prompt], asked, 2, speculative_config=given, queue_depth=queue_depth)
    assert found == [texts, texts]
    assert stats["accepted_draft_tokens_total"] >= (30 if method == "ngram" else 12)
    assert stats["accepted_draft_tokens_total"] > 0.8 * stats["draft_tokens_total"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-window", "deepseek-v3.2", "qwen3.5-small-states"])
def test_other_layers(name: str, saved_model: Callable[[str], SavedModel]) -> None:
    """Over windows, over latents that are chosen among, and with states, whose border the drafts cross."""
    directory = str(saved_model(name).directory)
    expected, _ = run(directory, KINDS[:2], prompts=ACROSS)
    prompts = [{"prompt_token_ids": ids} for ids in ACROSS]
    given = {**METHODS["suffix"], "adaptive": False}
    found, stats = generate(directory, prompts, KINDS[:2], speculative_config=given, queue_depth=2)
    assert found == [expected]
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]


@pytest.mark.long
def test_constrained_requests_have_none(bundled_model_path: Path) -> None:
    """Beside one that has: each has its text without drafts."""
    free = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    constrained = msgspec.structs.replace(free, structured_outputs=StructuredOutputsParams(regex="(ab){9}"))
    prompt, asked = [{"prompt": "for i in range(10):\n    print(i)\n"}] * 2, [free, constrained]
    options = OPTIONS | {"skip_tokenizer_init": False, "max_num_seqs": 2, "queue_depth": 2}
    expected, _ = generate(str(bundled_model_path), prompt, asked, **options)
    given = {**METHODS["suffix"], "adaptive": False}
    found, stats = generate(str(bundled_model_path), prompt, asked, 2, speculative_config=given, **options)
    assert found == expected * 2
    assert 0 < stats["accepted_draft_tokens_total"] <= 2 * 13
