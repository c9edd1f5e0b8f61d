"""Drafts of heads where the device knows how many tokens a sequence has: they change no token, and as many are right as
on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM
from quire.config.options import EngineOptions
from tests.e2e.conftest import GREEDY, Variant, exact, generate
from tests.e2e.test_drafts import KINDS, TORCH
from tests.e2e.test_drafts_on_device import EAGER, GRAPHS, OPTIONS, SHORT, run, run_plainly
from tests.e2e.test_eagle import saved as saved_eagle
from tests.e2e.test_head_drafts import MTP, leaning
from tests.long import all_but_long
from tests.models.harness import random_prompts
from tests.models.head_twins import saved as saved_mtp
from tests.models.hybrid_families import SMALL_STATES

HEADS = ("eagle3", "eagle", "dense", "deepseek-v3")
FEWER = [msgspec.structs.replace(kind, max_tokens=10) for kind in KINDS]


Saved = Callable[[str], tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Directory of a model, and `speculative_config` of its head."""
    return cache(lambda name: save(name, tmp_path_factory.mktemp(name)))


def save(name: str, directory: Path) -> tuple[str, dict[str, Any]]:
    if name.startswith("eagle"):
        case = saved_eagle(name, directory)
        return str(case.variant.directory), case.drafts
    saved_mtp(name, directory, **({} if name.startswith("deepseek") else SMALL_STATES))
    leaning(directory)
    return str(directory), MTP


@pytest.mark.parametrize("queue_depth", all_but_long([1, 2], [2]))
@pytest.mark.parametrize("name", all_but_long(HEADS, ["eagle3"]))
def test_equal_bits(name: str, queue_depth: int, saved: Saved) -> None:
    directory, given = saved(name)
    kinds, options = FEWER[:2], {"queue_depth": queue_depth, "max_prefill_chunk": 11}
    found, stats = run(directory, kinds, speculative_config=given, **options)
    assert found == run_plainly(directory, kinds, **options)
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]


@pytest.mark.parametrize("name", all_but_long(HEADS, ["dense"]))
def test_as_many_are_right_as_on_a_cpu(name: str, saved: Saved) -> None:
    """In each place behind a text, whose prompt comes in chunks."""
    directory, given = saved(name)
    prompts, asked = random_prompts([21, 13], 97, seed=11), [msgspec.structs.replace(GREEDY, max_tokens=20)] * 2
    options = {"queue_depth": 1, "max_prefill_chunk": 8, "speculative_config": {**given, "adaptive": False}}
    found, stats = run(directory, asked, prompts=prompts, **options)
    variant = Variant("", {**TORCH, "state_snapshot_interval": 64, "dtype": "float32"}, directory=directory)
    outputs, expected = generate(variant, prompts, asked, **options)
    assert [each[0] for each in found] == [each.outputs[0].token_ids for each in outputs]  # type: ignore[index]
    assert stats["accepted_drafts_by_position"] == expected["accepted_drafts_by_position"]
    assert stats["draft_tokens_total"] == expected["draft_tokens_total"]
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]


@pytest.mark.long
@pytest.mark.parametrize("name", HEADS)
def test_interpreted_kernels(name: str, saved: Saved) -> None:
    """Beside graphs of the model, whose results a head reads."""
    directory, given = saved(name)
    options = {"batch_invariant": True, "max_num_seqs": 4, "block_size": 16, "max_num_batched_tokens": 32}
    prompts = [[7, 5, 7, 5, 7], [9, 8, 6]]
    expected, _ = run(directory, SHORT, EAGER, prompts, **options)
    keywords = {"model": directory, **OPTIONS, **options, "speculative_config": given}
    with LLM.from_options(EngineOptions.from_keywords(keywords), executor=GRAPHS) as llm:
        for _ in range(2):
            assert (
                exact(llm.generate([{"prompt_token_ids": ids} for ids in prompts], SHORT, use_tqdm=False)) == expected
            )
        stats = llm.stats()
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]


@pytest.mark.long
def test_where_prompts_meet(saved: Saved) -> None:
    """Prefix hits, children, preemptions, and sequences that end while the next step runs."""
    directory, given = saved("eagle")
    kinds = FEWER[:4]
    options: dict[str, Any] = {"num_blocks_override": 24, "max_prefill_chunk": 11}
    found, stats = run(directory, kinds, speculative_config=given, **options)
    assert found == run(directory, kinds, **options)[0]
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]
    assert stats["preemptions_total"] > 0


def test_rejected_drafts_before_a_border(tmp_path: Path) -> None:
    """A step whose drafts were left out at a border leaves the host's count of tokens too high: the next step's drafts
    stay off the border all the same."""
    saved_mtp("dense", tmp_path, **SMALL_STATES)
    directory, asked = str(tmp_path), [msgspec.structs.replace(GREEDY, max_tokens=8)] * 4
    prompts = [random_prompts([length], 97)[0] for length in (56, 57, 58, 59)]
    given = {**MTP, "num_speculative_tokens": 1, "adaptive": False}
    found, stats = run(directory, asked, prompts=prompts, speculative_config=given, queue_depth=2)
    assert found == run(directory, asked, prompts=prompts, queue_depth=2)[0]
    assert stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"] / 2
