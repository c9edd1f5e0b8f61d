"""Beam search through the whole control plane, over the executor that verifies every plan."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from quire.request import FinishReason
from quire.step import StepPlan
from tests.fakes.core import CoreDriver, generate_alone, make_config

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
ENDS = tuple(range(0, 97, 5))


def search(n: int, **params: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "n": n, "use_beam_search": True, "max_tokens": 12, **params}


def driver(**options: Any) -> CoreDriver:
    return CoreDriver(make_config(**options), record=True)


def found(driver: CoreDriver, name: str) -> list[list[int]]:
    return [tokens for (request, _), tokens in sorted(driver.tokens.items()) if request == name]


def test_hypotheses_come_at_the_end_best_first() -> None:
    engine = driver()
    engine.add("r", **search(3, best_of=4, eos=ENDS, min_tokens=3, logprobs=2))
    steps = 0
    while engine.core.has_work:
        assert engine.tokens == {}
        engine.step()
        steps += 1
    assert len(engine.tokens) == 3 < steps
    assert engine.core.stats().generation_tokens_total == sum(map(len, engine.tokens.values()))
    scores = [engine.rankings["r", index][1] for index in range(3)]
    assert scores == sorted(scores, reverse=True)
    for key, tokens in engine.tokens.items():
        assert len(tokens) >= 4, "min_tokens tokens and the end"
        assert not set(tokens[:-1]) & set(ENDS)
        assert (tokens[-1] in ENDS) == (engine.finished[key] is FinishReason.STOP)
        entries = engine.logprobs[key]
        assert [entry.token_ids[0] for entry in entries] == tokens
        assert sum(entry.logprobs[0] for entry in entries) == pytest.approx(engine.rankings[key][0])
        assert engine.rankings[key][1] == pytest.approx(engine.rankings[key][0] / len(tokens))
    engine.assert_all_free()


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 5, 5), (3, 9)])
@pytest.mark.parametrize("chunk", [None, 3])
def test_the_same_beside_others_and_preempted(queue_depth: int, windows: tuple[Any, ...], chunk: int | None) -> None:
    requests = {
        "plain": {"prompt": PROMPT[:4], "max_tokens": 25},
        "one": search(4, eos=ENDS, early_stopping="never"),
        "samples": {"prompt": PROMPT, "max_tokens": 20, "n": 3, "temperature": 1.0},
        "two": search(2, eos=ENDS[:2], length_penalty=0.0),
        "three": search(1),
        "four": search(4, max_tokens=9, eos=(90, 91)),
    }
    # The largest request needs 34 blocks in a group.
    engine = driver(
        num_blocks=35 * len(windows),
        block_size=2,
        windows=windows,
        queue_depth=queue_depth,
        max_num_seqs=12,
        max_prefill_chunk=chunk,
    )
    for name, request in requests.items():
        engine.add(name, **request)
    engine.run()
    assert engine.refused == {}
    if windows == (None,):  # windows leave room
        assert engine.core.stats().preemptions_total > 0
    for name, request in requests.items():
        assert found(engine, name) == generate_alone(**request)


def test_a_pool_as_small_as_the_request() -> None:
    """20 tokens with KV: five blocks, the first two of them full of prompt and shared."""
    engine = driver(num_blocks=2 + 3 * 3, block_size=4, windows=(None,))
    engine.add("too large", **search(3, max_tokens=13))
    engine.add("r", **search(3))
    engine.run()
    assert set(engine.refused) == {"too large"}
    assert found(engine, "r") == generate_alone(**search(3))


def test_only_last_partial_blocks_are_copied_and_one_child_keeps_the_row() -> None:
    engine = driver(block_size=4, windows=(None,))
    engine.add("r", **search(4, max_tokens=30))
    engine.run()
    plans = engine.executor.plans
    assert sum(len(plan.beam_reorders) for plan in plans) > 20
    for plan in plans:
        if not plan.beam_reorders:
            assert plan.block_copies == []
            continue
        parents = {fork.parent for fork in plan.beam_reorders}
        children = {fork.child for fork in plan.beam_reorders}
        assert not parents & children
        assert parents | children <= set(plan.seq_ids)
        assert {seq_id for seq_id, _ in plan.token_overrides} == set(plan.seq_ids)
        tail = plan.start_positions[0] // 4
        assert all(index == tail for _, _, index, _ in plan.replaced_blocks)
        # A new block for each child, none for the one that stays; at a block's start there is nothing to copy.
        assert len(plan.block_copies) == (len(children) if plan.start_positions[0] % 4 else 0)


def resumed(plans: list[StepPlan]) -> StepPlan:
    """The plan in which preempted beams fork again."""
    (plan,) = (plan for plan in plans if any(fork.token_ids for fork in plan.forks))
    return plan


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preempted_beams_fork_where_they_differ(enable_prefix_caching: bool) -> None:
    engine = driver(num_blocks=50, block_size=2, windows=(None,), enable_prefix_caching=enable_prefix_caching)
    engine.add("first", prompt=[1, 2, 3], max_tokens=40)
    engine.add("second", prompt=[4, 5, 6], max_tokens=40)
    engine.add("r", **search(4, max_tokens=20))
    engine.run()
    assert engine.core.stats().preemptions_total > 0
    for fork in resumed(engine.executor.plans).forks:
        assert fork.token_ids is not None
    plan = resumed(engine.executor.plans)
    histories = [fork.token_ids for fork in plan.forks]
    position = plan.seq_ids.index(plan.forks[0].parent)
    num_shared = plan.start_positions[position] + plan.num_tokens[position]
    assert num_shared > len(PROMPT), "more than the prompt is computed once"
    assert len({tuple(history[:num_shared]) for history in histories}) == 1
    assert found(engine, "r") == generate_alone(**search(4, max_tokens=20))


def test_a_beam_waits_for_its_result_and_others_do_not() -> None:
    engine = driver(queue_depth=2)
    engine.add("beams", **search(2))
    engine.add("plain", prompt=[7, 8], max_tokens=20)
    engine.run()
    plans = engine.executor.plans
    beams = {seq_id for plan in plans for fork in plan.beam_reorders for seq_id in (fork.parent, fork.child)}
    for before, after in itertools.pairwise(plans):
        if set(before.sample_seq_ids) & beams and set(before.seq_ids) - beams and set(after.seq_ids) - beams:
            assert not set(after.seq_ids) & beams
    assert sum(bool(set(plan.seq_ids) & beams) for plan in plans) == 12
    assert sum(1 for plan in plans if set(plan.seq_ids) - beams) == 20


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("steps", range(1, 14))
def test_an_abort_frees_everything_at_any_moment(queue_depth: int, steps: int) -> None:
    engine = driver(num_blocks=30, block_size=2, queue_depth=queue_depth, max_num_seqs=6)
    engine.add("r", **search(4))
    engine.add("other", **search(2, seed=2))
    for _ in range(steps):
        engine.step()
    engine.abort("r", 1)  # a hypothesis is not there to be aborted before all are
    engine.abort("r")
    engine.scheduler.check()
    engine.run()
    assert found(engine, "other") == generate_alone(**search(2))
    assert "r" not in {request for request, _ in engine.tokens} or steps >= 12


def test_one_index_cannot_be_aborted() -> None:
    engine = driver()
    engine.add("r", **search(2))
    engine.step()
    engine.abort("r", 1)
    engine.run()
    assert found(engine, "r") == generate_alone(**search(2))


def test_the_width_counts_as_rows() -> None:
    engine = driver(max_num_seqs=4)
    engine.add("wide", **search(5))
    engine.add("a", **search(3, max_tokens=4))
    engine.add("b", **search(2, max_tokens=4))
    engine.step()
    assert engine.refused == {"wide": "n=5 exceeds the engine's max_num_seqs of 4"}
    assert engine.core.stats().num_waiting == 1, "there are rows for one of them, with all its beams to come"
    engine.run()


def test_fewer_hypotheses_than_asked_for() -> None:
    def choose_none(driver: CoreDriver) -> None:
        """The model allows one token only."""
        rule = driver.executor._rule
        candidates = rule.candidates
        rule.candidates = lambda *state: _first_of(candidates(*state))  # type: ignore[method-assign]

    engine = driver()
    choose_none(engine)
    engine.add("r", **search(3, max_tokens=4))
    engine.run()
    assert [len(tokens) for tokens in found(engine, "r")] == [4, 0, 0]
    assert list(engine.rankings) == [("r", 0)]
    assert set(engine.finished.values()) == {FinishReason.LENGTH}


def _first_of(candidates: Any) -> Any:
    del candidates.token_ids[1:], candidates.scores[1:]
    return candidates


def test_best_of_runs_more_sequences_than_come_back() -> None:
    engine = driver()
    engine.add("r", prompt=PROMPT, n=2, best_of=5, temperature=1.0, max_tokens=3)
    engine.run()
    assert len(engine.tokens) == 5, "the front end compares them"
    assert all(len(engine.logprobs[key]) == 3 for key in engine.tokens)
    engine.add("wide", prompt=PROMPT, n=2, best_of=9, temperature=1.0)
    engine.step()
    assert engine.refused == {"wide": "best_of=9 exceeds the engine's max_num_seqs of 8"}
