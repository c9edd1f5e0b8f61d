"""Drafts of a model change when tokens come and not which: tokens and logprobs are, bit by bit, those without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire import LLM, SamplingParams
from quire.worker.model_drafts import ModelDrafts
from tests.e2e.conftest import GREEDY, Variant, exact, generate
from tests.e2e.draft_models import MASK, changed, guesses_two_tokens, noisy, parallel, resized
from tests.e2e.test_drafts import BORDERS, KINDS, PROMPTS, TORCH
from tests.e2e.test_drafts_in_text import CONSTRAINTS, OPTIONS, Engines, engines, engines_of
from tests.e2e.test_drafts_in_text import KINDS as KINDS_OF_TEXT
from tests.e2e.test_drafts_in_text import PROMPTS as TEXTS
from tests.e2e.test_restart import GUARD_SECONDS, compare, fates, open_engine, think
from tests.e2e.test_restart import OPTIONS as FEW_BLOCKS_OF_TEXT
from tests.fakes.fates import Fates
from tests.long import all_but_long
from tests.models.conftest import SavedModel

__all__ = ["engines", "fates"]

Saved = Callable[[str], SavedModel]
PAIRS = {
    f"{variant} by {family}": (variant, family)
    for variant, family in (
        (Variant("llama"), "llama"),
        (Variant("qwen3-window"), "llama"),
        (Variant("llama"), "qwen3-window"),
        (Variant("qwen3.5-small-states", BORDERS), "llama-wide"),
        (Variant("deepseek-v3.2"), "llama"),
        (Variant("llama-wide", TORCH), "deepseek-v3"),
        (Variant("llama-wide", {"quantization": "int8", "kv_cache_dtype": "int8"}), "qwen3-moe"),
        (Variant("qwen3-window", TORCH), "qwen3-window"),
        (Variant("qwen3-next-few-experts", {**TORCH, **BORDERS}), "llama-one-kv-head"),
    )
}


FEW_BLOCKS = {
    ("qwen3-window", "llama"): 120,
    ("llama", "qwen3-window"): 76,
    ("qwen3.5-small-states", "llama-wide"): 39,
    ("llama-wide", "deepseek-v3"): 14,
    ("llama-wide", "qwen3-moe"): 26,
    ("qwen3-window", "qwen3-window"): 56,
}
"""Fewer than the requests take together, where layers form several groups."""


SIZES_APART = {
    ("deepseek-v3.2", "llama"),
    ("llama-wide", "deepseek-v3"),
    ("qwen3-next-few-experts", "llama-one-kv-head"),
}
"""Blocks of several sizes: no prompt here ends blocks of all groups."""


def drafting(directory: Path, most: int = 3, **keys: Any) -> dict[str, Any]:
    return {"speculative_config": {"model": str(directory), "num_speculative_tokens": most, **keys}}


def drafting_at_once(directory: Path, target: Path, most: int = 3) -> dict[str, Any]:
    return drafting(parallel(directory, target), most, parallel_drafting=True)


def counts(stats: dict[str, Any]) -> tuple[int, int]:
    """Drafts that were accepted, and all."""
    return stats["accepted_draft_tokens_total"], stats["draft_tokens_total"]


@pytest.fixture(scope="module", params=all_but_long(PAIRS, [*PAIRS][:5]))
def pair(
    request: pytest.FixtureRequest, saved_model: Saved, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Variant, Path]:
    """A model, and one that guesses two of the tokens that it may choose."""
    variant, family = PAIRS[request.param]
    directory = changed(saved_model(family).directory, tmp_path_factory.mktemp("d") / family, guesses_two_tokens)
    return replace(variant, directory=str(saved_model(variant.family).directory)), directory


@pytest.fixture(scope="module")
def plain(pair: tuple[Variant, Path]) -> list[object]:
    return exact(generate(pair[0], PROMPTS, KINDS)[0])


def check(pair: tuple[Variant, Path], plain: list[object], **options: Any) -> dict[str, Any]:
    outputs, stats = generate(pair[0], PROMPTS, KINDS, **{**drafting(pair[1]), **options})
    assert exact(outputs) == plain
    accepted, drafts = counts(stats)
    assert 0 < accepted < drafts
    return stats


def in_turn(pair: tuple[Variant, Path]) -> int:
    """Depth 1 or 2, the other one for the next pair: test_in_chunks_with_few_blocks has both for each."""
    return 1 + [*PAIRS.values()].index((replace(pair[0], directory=""), pair[1].name)) % 2


def test_equal_bits(pair: tuple[Variant, Path], plain: list[object]) -> None:
    stats = check(pair, plain, queue_depth=in_turn(pair))
    assert (stats["prefix_cache_hits_total"] > 0) == ((pair[0].family, pair[1].name) not in SIZES_APART)


@pytest.mark.parametrize(("queue_depth", "mode"), all_but_long([(1, "swap"), (2, "recompute")], [(2, "recompute")]))
def test_in_chunks_with_few_blocks(
    pair: tuple[Variant, Path], plain: list[object], queue_depth: int, mode: str
) -> None:
    """Preempted requests are computed again, or swapped."""
    few: dict[str, Any] = {"block_size": 8, "max_prefill_chunk": 11, "queue_depth": queue_depth}
    few["num_blocks_override"] = FEW_BLOCKS.get((pair[0].family, pair[1].name), 34)
    stats = check(pair, plain, preemption_mode=mode, swap_space="1MiB" if mode == "swap" else None, **few)
    assert stats["preemptions_total"] > 0
    assert (stats["swap_preemptions_total"] > 0) == (mode == "swap")


def test_drafts_of_one_pass(pair: tuple[Variant, Path], plain: list[object], tmp_path: Path) -> None:
    """In chunks, where blocks are few, and with prefix hits."""
    few: dict[str, Any] = {"block_size": 8, "max_prefill_chunk": 11, "queue_depth": 3 - in_turn(pair)}
    few["num_blocks_override"] = FEW_BLOCKS.get((pair[0].family, pair[1].name), 34)
    stats = check(pair, plain, **few, **drafting_at_once(pair[1], tmp_path / pair[1].name))
    assert stats["preemptions_total"] > 0


def test_drafts_of_one_pass_are_those_of_transformers(
    saved_model: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the likeliest token of the place before it, where unknown tokens are masks; in chunks and behind prefix
    hits."""
    saved = saved_model("llama")
    passes = list[tuple[list[int], list[int]]]()
    guess = ModelDrafts._guess

    def noting(self: ModelDrafts, rows: Any, starts: Any, ends: Any, counts: Any, table: Any) -> None:
        texts = [table[row, :end].tolist() for row, end in zip(rows, ends, strict=True)]
        guess(self, rows, starts, ends, counts, table)
        for row, text, count in zip(rows, texts, counts, strict=True):
            passes.append((text, self._drafts[row, :count].tolist()))

    monkeypatch.setattr(ModelDrafts, "_guess", noting)
    model = Variant("llama", directory=str(saved.directory))
    given = drafting_at_once(saved.directory, tmp_path / "llama", 4)
    options = {"block_size": 8, "max_prefill_chunk": 11}
    kinds = [GREEDY, SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)] * 2
    outputs, stats = generate(model, PROMPTS[:2] + PROMPTS[:2], kinds, **given, **options)
    assert exact(outputs) == exact(generate(model, PROMPTS[:2] + PROMPTS[:2], kinds, **options)[0])
    assert 0 < counts(stats)[0] < counts(stats)[1]
    reference = saved.reference
    num_drafts = 0
    for text, found in passes:
        if found:
            with torch.no_grad():
                logits = reference(torch.tensor([text + [MASK] * (len(found) - 1)])).logits[0, -len(found) :]
            assert logits.argmax(-1).tolist() == found
            num_drafts += len(found)
    assert num_drafts >= counts(stats)[1] > 20


ALL_KINDS = [*KINDS_OF_TEXT, *CONSTRAINTS]
CELLS = sorted((f"native-{2 - place % 2}", kind) for place, kind in enumerate(ALL_KINDS))
CELLS += sorted((f"torch-{1 + place % 2}", kind) for place, kind in enumerate(ALL_KINDS))
"""Engines (backend and queue depth) and kinds of requests: each kind meets both backends and both depths, and both
backends meet both depths. In torch a model takes long for each draft."""
OFTEN = [cell for cell in CELLS if cell[0] == "native-2"]
CELLS += [("at_once-1", kind) for kind in ALL_KINDS]


@pytest.fixture(scope="module")
def opened(bundled_model_path: Path, tmp_path_factory: Any) -> Iterator[Callable[[str], Engines]]:
    """By backend and depth one engine without drafts, and one whose drafts are often right: fewer where a model takes
    long for each."""
    directory = tmp_path_factory.mktemp("bundled")
    other = changed(bundled_model_path, directory / "noisy", noisy)
    with ExitStack() as stack:

        @cache
        def engines_by(name: str) -> Engines:
            backend, _, depth = name.partition("-")
            given = drafting(other, 2 if backend == "torch" else 4)
            if backend == "at_once":
                given, backend = drafting_at_once(other, directory / "at_once"), "native"
            options = {"attention_backend": backend, "queue_depth": int(depth), **OPTIONS}
            plain = stack.enter_context(LLM(str(bundled_model_path), **options))
            return engines_of(plain, stack.enter_context(LLM(str(bundled_model_path), **given, **options)), backend)

        yield engines_by


@pytest.mark.parametrize(("engines", "kind"), all_but_long(CELLS, OFTEN), indirect=["engines"])
def test_requests_of_all_kinds(engines: Engines, kind: str) -> None:
    """Twice: the second time all prompts are in the prefix cache."""
    asked = engines.asked(kind)
    expected = engines.plain.generate(TEXTS, asked, use_tqdm=False)
    for _ in range(2):
        accepted, drafts = engines.counts()
        found = engines.drafting.generate(TEXTS, asked, use_tqdm=False)
        assert exact(found) == exact(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert [(each.text, each.finish_reason, each.stop_reason) for each in ours.outputs] == [
                (each.text, each.finish_reason, each.stop_reason) for each in theirs.outputs
            ]
        now_accepted, now_drafts = engines.counts()
        assert 0 < now_accepted - accepted < now_drafts - drafts


@pytest.mark.parametrize(
    ("backend", "depth"),
    all_but_long([("native", 1), ("native", 2), ("torch", 1), ("torch", 2)], [("native", 2), ("torch", 1)]),
)
def test_a_model_guesses_its_own_tokens(saved_model: Saved, backend: str, depth: int) -> None:
    """All drafts of a greedy text are right, in chunks, behind prefix hits, and one by one."""
    model = Variant("llama", {"attention_backend": backend}, directory=str(saved_model("llama").directory))
    prompts, options = [*PROMPTS, PROMPTS[0][:67]], {"queue_depth": depth, "block_size": 8, "max_prefill_chunk": 11}
    asked = [
        msgspec.structs.replace(GREEDY, max_tokens=30, num_speculative_tokens=most) for most in (4, 1, 3, 4, 2, 4, 4)
    ]
    given = drafting(Path(model.directory), 4, adaptive=False)
    outputs, stats = generate(model, prompts, asked, **given, **options)
    assert exact(outputs) == exact(generate(model, prompts, asked, **options)[0])
    accepted, drafts = counts(stats)
    assert accepted == drafts > 100
    assert stats["prefix_cache_hits_total"] > 0


def test_a_model_catches_up(saved_model: Saved) -> None:
    """While two sequences run they have no drafts, and the model that would make them computes nothing for a while."""
    model = Variant("llama", directory=str(saved_model("llama").directory))
    asked = [msgspec.structs.replace(GREEDY, max_tokens=number) for number in (29, 60)]
    given = drafting(
        Path(model.directory), adaptive=False, num_speculative_tokens_per_batch_size=[[1, 1, 3], [2, 2, 0]]
    )
    outputs, stats = generate(model, PROMPTS[:2], asked, **given)
    assert exact(outputs) == exact(generate(model, PROMPTS[:2], asked)[0])
    accepted, drafts = counts(stats)
    assert 20 < accepted == drafts < 30


@pytest.mark.parametrize("rows", [90, 100])
def test_vocabularies_that_differ_by_padding(saved_model: Saved, tmp_path: Path, rows: int) -> None:
    """Ids that one of the models does not have are no drafts, and are read as another token."""
    source = saved_model("llama").directory
    other = changed(source, tmp_path / "other", resized(rows))
    model = Variant("llama", directory=str(source))
    params = [
        GREEDY,
        SamplingParams(temperature=100.0, seed=1, max_tokens=30, ignore_eos=True, allowed_token_ids=[5, 96]),
    ]
    outputs, stats = generate(model, PROMPTS[:2], params, **drafting(other))
    assert exact(outputs) == exact(generate(model, PROMPTS[:2], params)[0])
    assert counts(stats)[0] > 0


def test_no_drafts_behind_the_longest_text_of_the_model_that_makes_them(saved_model: Saved) -> None:
    model = Variant("llama", directory=str(saved_model("llama").directory))
    expected, _ = generate(model, PROMPTS[:1], GREEDY)
    totals = []
    for longest in (60, 90, 256):
        given = drafting(Path(model.directory), max_model_len=longest)
        outputs, stats = generate(model, PROMPTS[:1], GREEDY, **given)
        assert exact(outputs) == exact(expected)
        totals.append(counts(stats)[0])
    assert 0 == totals[0] < totals[1] < totals[2]


def test_an_engine_that_slept(saved_model: Saved) -> None:
    """Weights of both models are loaded again."""
    directory = str(saved_model("llama").directory)
    options = {
        "num_blocks_override": 100,
        "num_threads": 1,
        "skip_tokenizer_init": True,
        **drafting(Path(directory), adaptive=False),
    }
    with LLM(directory, **options) as llm:
        for level in (1, 2):
            expected = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
            before = counts(llm.stats())
            llm.sleep(level)
            llm.wake_up()
            assert exact(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == exact(expected)
            now = counts(llm.stats())
            assert now[0] - before[0] == now[1] - before[1] > 0


@pytest.mark.parametrize("ranks", all_but_long([1, 2], []))
def test_ranks(saved_model: Saved, ranks: int) -> None:
    """Each of two ranks has the model that makes drafts whole, or both share it."""
    directory = saved_model("llama-wide").directory
    model = Variant("llama-wide", {"tensor_parallel_size": 2}, directory=str(directory))
    expected = exact(generate(model, PROMPTS[:2], GREEDY)[0])
    given = drafting(directory, draft_tensor_parallel_size=ranks, adaptive=False)
    outputs, stats = generate(model, PROMPTS[:2], GREEDY, **given)
    assert exact(outputs) == expected
    accepted, drafts = counts(stats)
    assert 0 < accepted <= drafts
    assert accepted == drafts or ranks == 1  # one rank adds in another order


@pytest.mark.long
@pytest.mark.parametrize("queue_depth", [1, 2])
async def test_an_engine_that_is_killed(
    fates: Fates, queue_depth: int, bundled_model_path: Path, tmp_path: Path
) -> None:
    """Requests go on with the same tokens, and have drafts again behind the death."""
    other = changed(bundled_model_path, tmp_path / "noisy", noisy)
    engine = open_engine({**FEW_BLOCKS_OF_TEXT, "queue_depth": queue_depth, **drafting(other)})
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            await think(engine)
            await compare(engine, fates, [("die", 23)], 18)
            stats = await engine.stats()
        assert 0 < stats.accepted_draft_tokens_total < stats.draft_tokens_total
    finally:
        engine.shutdown()
