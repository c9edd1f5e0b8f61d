"""Drafts where the device knows how many tokens a sequence has, and the host within bounds only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM
from quire.config.options import EngineOptions
from quire.worker.graph_dispatch import Execution
from tests.e2e.conftest import GREEDY, exact
from tests.e2e.device_models import MODELS
from tests.e2e.draft_models import changed, guesses_two_tokens, parallel
from tests.e2e.test_drafts import KINDS, NGRAM, PROMPTS
from tests.long import all_but_long
from tests.models.conftest import SavedModel
from tests.models.harness import random_prompts, randomize, save

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "triton",
    "dtype": "float32",
    "max_model_len": 128,
    "num_blocks_override": 100,
    "max_num_seqs": 8,
    "block_size": 8,
    "skip_tokenizer_init": True,
    "state_snapshot_interval": 64,
}
FEW_BLOCKS = {len(KINDS): 34, 2: 14}
"""By how many kinds of requests run together: fewer blocks than they take."""
PLAIN = "tests.fakes.host_math:HostMathExecutor"


def run(
    directory: str,
    kinds: list[Any],
    executor: str = PLAIN,
    prompts: Sequence[list[int]] = PROMPTS,
    **options: Any,
) -> tuple[list[object], dict[str, Any]]:
    keywords = {"model": directory, **OPTIONS, **options}
    with LLM.from_options(EngineOptions.from_keywords(keywords), executor=executor) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts[: len(kinds)]], kinds, use_tqdm=False)
        return exact(found), llm.stats()


_PLAIN_RUNS: dict[str, tuple[list[object], dict[str, Any]]] = {}


def run_plainly(directory: str, kinds: list[Any], *others: Any, **options: Any) -> list[object]:
    """Results without drafts, which do not depend on the number of steps in flight: computed once in a process."""
    options.pop("queue_depth", None)
    key = repr((directory, kinds, others, sorted(options.items())))
    if key not in _PLAIN_RUNS:
        _PLAIN_RUNS[key] = run(directory, kinds, *others, **options)
    found, stats = _PLAIN_RUNS[key]
    assert stats["draft_tokens_total"] == 0
    return found


@pytest.fixture(scope="module")
def directory(saved_model: Callable[[str], SavedModel]) -> str:
    return str(saved_model("llama").directory)


def check(directory: str, num_kinds: int, preempts: bool, queue_depth: int, given: dict[str, Any]) -> None:
    options = {"num_blocks_override": FEW_BLOCKS[num_kinds]} if preempts else {}
    kinds = KINDS[:num_kinds]
    found, stats = run(directory, kinds, speculative_config=given, queue_depth=queue_depth, **options)
    assert found == run_plainly(directory, kinds)
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]
    assert (stats["preemptions_total"] > 0) == preempts


# Together with those of test_a_model_makes_drafts: numbers of kinds, preemptions, depths and drafters meet in pairs.
@pytest.mark.parametrize(
    ("num_kinds", "preempts", "queue_depth"),
    all_but_long([(2, True, 2), (6, False, 1), (2, False, 1)], [(2, True, 2)]),
)
def test_equal_bits(directory: str, num_kinds: int, preempts: bool, queue_depth: int) -> None:
    check(directory, num_kinds, preempts, queue_depth, NGRAM)


@pytest.fixture(scope="module")
def drafting(saved_model: Callable[[str], SavedModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model that guesses two of the tokens that requests may choose."""
    source = saved_model("llama").directory
    other = changed(source, tmp_path_factory.mktemp("drafting") / "model", guesses_two_tokens)
    return {"speculative_config": {"model": str(other), "num_speculative_tokens": 3}}


@pytest.mark.parametrize(
    ("num_kinds", "preempts", "queue_depth"),
    all_but_long([(2, True, 1), (6, False, 2), (6, True, 2)], [(2, True, 1)]),
)
def test_a_model_makes_drafts(
    directory: str, drafting: dict[str, Any], num_kinds: int, preempts: bool, queue_depth: int
) -> None:
    check(directory, num_kinds, preempts, queue_depth, drafting["speculative_config"])


@pytest.fixture(scope="module")
def drafting_at_once(drafting: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    given = drafting["speculative_config"]
    other = parallel(Path(given["model"]), tmp_path_factory.mktemp("at_once") / "model")
    return {**given, "model": str(other), "parallel_drafting": True}


@pytest.mark.parametrize(
    ("num_kinds", "preempts", "queue_depth"),
    all_but_long([(2, True, 2), (6, False, 1), (6, True, 2)], [(2, True, 2)]),
)
def test_a_model_makes_drafts_in_one_pass(
    directory: str, drafting_at_once: dict[str, Any], num_kinds: int, preempts: bool, queue_depth: int
) -> None:
    check(directory, num_kinds, preempts, queue_depth, drafting_at_once)


@pytest.mark.long
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_drafts_of_one_pass_are_those_of_a_cpu(directory: str, queue_depth: int, tmp_path: Path) -> None:
    """As many are right, at the same places: in chunks, and behind a prefix hit."""
    prompts, asked = [PROMPTS[0], PROMPTS[0], PROMPTS[1]], [msgspec.structs.replace(GREEDY, max_tokens=40)] * 3
    other = parallel(Path(directory), tmp_path / "model")
    given = {"model": str(other), "num_speculative_tokens": 4, "adaptive": False, "parallel_drafting": True}
    options = {"speculative_config": given, "queue_depth": queue_depth, "max_prefill_chunk": 11}
    found, stats = run(directory, asked, prompts=prompts, **options)
    with LLM(directory, **{**OPTIONS, **options}) as llm:
        expected = exact(llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False))
        of_cpu = llm.stats()
    assert [tokens[0] for tokens in found] == [tokens[0] for tokens in expected]
    names = "accepted_drafts_by_position", "draft_tokens_total", "prefix_cache_hits_total"
    assert [stats[name] for name in names] == [of_cpu[name] for name in names]
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]


@pytest.mark.parametrize("queue_depth", all_but_long([1, 2], [2]))
def test_a_model_guesses_its_own_tokens(directory: str, queue_depth: int) -> None:
    """All drafts of a greedy text are right: in chunks, behind prefix hits, for children, and where some steps have no
    drafts."""
    asked = [
        msgspec.structs.replace(GREEDY, max_tokens=length, num_speculative_tokens=most)
        for length, most in ((30, 4), (44, 1), (30, 0), (25, 4), (33, 2), (30, 3), (30, 4))
    ]
    prompts, options = [*PROMPTS, PROMPTS[0][:67]], {"queue_depth": queue_depth, "max_prefill_chunk": 11}
    given = {"model": directory, "num_speculative_tokens": 4, "adaptive": False}
    given["num_speculative_tokens_per_batch_size"] = [[1, 3, 4], [4, 5, 0], [6, 9, 4]]
    found, stats = run(directory, asked, prompts=prompts, speculative_config=given, **options)
    assert found == run_plainly(directory, asked, prompts=prompts, **options)
    assert stats["accepted_draft_tokens_total"] == stats["draft_tokens_total"] > 80
    assert stats["prefix_cache_hits_total"] > 0


@pytest.mark.parametrize("method", all_but_long(["ngram", "model"], ["ngram"]))
def test_an_oracle_replays_texts(directory: str, method: str, drafting: dict[str, Any]) -> None:
    """As many drafts are right as asked for with every drafter: none of the model's own ever is."""
    asked = [msgspec.structs.replace(GREEDY, max_tokens=40)] * 2
    expected = run_plainly(directory, asked)
    for rate in (1.0, 0.5):
        given = NGRAM if method == "ngram" else drafting["speculative_config"]
        keywords = {"model": directory, **OPTIONS, "speculative_config": {**given, "adaptive": False, "oracle": rate}}
        with LLM.from_options(EngineOptions.from_keywords(keywords), executor=PLAIN) as llm:
            texts = [found[0] for found in expected]  # type: ignore[index]
            prompts = [
                {"prompt_token_ids": ids, "prediction": list(text)} for ids, text in zip(PROMPTS, texts, strict=False)
            ]
            assert exact(llm.generate(prompts, asked, use_tqdm=False)) == expected
            stats = llm.stats()
        accepted, drafts = stats["accepted_draft_tokens_total"], stats["draft_tokens_total"]
        assert (accepted == drafts > 0) if rate == 1.0 else (0.2 * drafts < accepted < 0.8 * drafts), (accepted, drafts)


OTHERS = [
    *(("qwen3-window", 1, 100), ("qwen3-window", 2, 100)),
    *(("deepseek-v3.2", 1, 100), ("deepseek-v3.2", 2, 12)),
    *(("qwen3.5-small-states", 1, 12), ("qwen3.5-small-states", 2, 100)),
]
"""Families whose layers attend over windows, over latents that are chosen among, and keep states; depths; numbers
of blocks, of which 12 are so few that requests are preempted (100 suffice: a pool for one sequence over windows holds
two). Each family meets both depths, and both numbers if it can be preempted; each depth both numbers."""
ACROSS = [PROMPTS[2], PROMPTS[1]]
"""One crosses the border of 64 tokens with its drafts."""


@pytest.mark.long
@pytest.mark.parametrize(("name", "queue_depth", "num_blocks"), OTHERS)
def test_other_layers(name: str, queue_depth: int, num_blocks: int, saved_model: Callable[[str], SavedModel]) -> None:
    directory = str(saved_model(name).directory)
    options = {"queue_depth": queue_depth, "num_blocks_override": num_blocks}
    found, stats = run(directory, KINDS[:2], prompts=ACROSS, speculative_config=NGRAM, **options)
    assert found == run_plainly(directory, KINDS[:2], prompts=ACROSS)
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]
    assert (stats["preemptions_total"] > 0) == (num_blocks < 100)


def test_rejected_drafts_before_a_border(drafting: dict[str, Any], saved_model: Callable[[str], SavedModel]) -> None:
    """A step whose drafts were left out at a border leaves the host's count of tokens too high: the next step's drafts
    stay off the border all the same."""
    directory, prompts = str(saved_model("qwen3.5-small-states").directory), [random_prompts([58], 97)[0]]
    asked = [msgspec.structs.replace(GREEDY, max_tokens=10)]
    given = {**drafting["speculative_config"], "num_speculative_tokens": 1, "adaptive": False}
    found, stats = run(directory, asked, prompts=prompts, speculative_config=given, queue_depth=2)
    assert found == run(directory, asked, prompts=prompts)[0]
    assert stats["accepted_draft_tokens_total"] == 0 < stats["draft_tokens_total"]


EAGER, GRAPHS = "quire.executors.local:LocalExecutor", "tests.fakes.graph_worker:GraphExecutor"
SHORT = [
    msgspec.structs.replace(kind, max_tokens=9, temperature=heat, seed=6)
    for kind, heat in zip(KINDS, (0, 100), strict=False)
]
PAIR = Execution("full", 2 * (1 + NGRAM["num_speculative_tokens"]), 2)


@pytest.fixture(scope="module")
def small_model(saved_model: Callable[[str], SavedModel], tmp_path_factory: Any) -> Callable[[str], Path]:
    """Directories of models for the interpreted kernels."""

    @cache
    def directory_of(name: str) -> Path:
        if name not in MODELS:
            return saved_model(name).directory
        return save(randomize(MODELS[name]()), tmp_path_factory.mktemp(name) / "model")

    return directory_of


OF_MODELS = {"full": "full", "latent": "full", "mixed": "mixed", "qwen3.5-small-states": "full"}
"""Models, and of which others make drafts for them."""
CELLS = [(name, method) for method in ("ngram", "model") for name in OF_MODELS] + [("full", "at_once")]


@pytest.mark.parametrize(("name", "method"), all_but_long(CELLS, [("full", "ngram")]))
def test_graphs_of_drafts_change_no_bit(
    name: str, method: str, small_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Triton's kernels, interpreted, without drafts and with them: eager, in full graphs of one row and of one row and
    drafts, and in pieces, beside prompts. A model that makes drafts has full graphs of one row and of two, or of
    all rows of a pass that makes drafts at once."""
    directory, given = str(small_model(name)), NGRAM
    options = {"batch_invariant": True, "max_num_seqs": 4, "block_size": 16, "max_num_batched_tokens": 32}
    if method != "ngram":
        other = changed(small_model(OF_MODELS[name]), tmp_path / "guesses", guesses_two_tokens)
        given = {"model": str(other), "num_speculative_tokens": 3}
    if method == "at_once":
        given |= {"model": str(parallel(Path(given["model"]), tmp_path / "at_once")), "parallel_drafting": True}
    prompts = [[7, 5, 7, 5, 7], [9, 8, 6]]
    expected = run_plainly(directory, SHORT, EAGER, prompts, **options)
    for executor in (EAGER, GRAPHS):
        keywords = {"model": directory, **OPTIONS, **options, "speculative_config": given}
        with LLM.from_options(EngineOptions.from_keywords(keywords), executor=executor) as llm:
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            assert exact(llm.generate(asked, SHORT, use_tqdm=False)) == expected
            stats = llm.stats()
            assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]
            compute = llm._client._core._executor._worker._runner._compute  # type: ignore[attr-defined]
            if executor == GRAPHS:
                assert exact(llm.generate(asked, SHORT, use_tqdm=False)) == expected
                assert {each.kind for each in compute.passes._captured} == {"full", "piecewise"}
                assert compute.passes._captured[PAIR].graph.num_replays > 0
                if method != "ngram":
                    sizes = (2, 4) if method == "model" else (12,)
                    replays = compute.columns.drafts._passes.runner._captured
                    assert all(replays[Execution("full", count, 2)].graph.num_replays > 0 for count in sizes)
