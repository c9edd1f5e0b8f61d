"""The search itself on candidates made by hand: what ends, what goes on, when it is over, whose blocks are whose."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from quire.decoding.beam import follow
from quire.decoding.parallel import create_sequences
from quire.decoding.sequence import Request
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.spec import AttentionSpec
from quire.request import EngineRequest, FinishReason
from quire.sampling_params import SamplingParams
from quire.step import Candidates

EOS = 0
BLOCK = 4


class Searcher:
    """A search whose beams have real blocks; `step` gives candidates to the beams, in their order."""

    def __init__(self, prompt: list[int] | None = None, max_tokens: int = 8, **params: Any) -> None:
        layout = KVCacheLayout(BLOCK, 64, *group_layers([AttentionSpec(1, 8, 8, 4)], BLOCK))
        self.kv = KVCacheManager(layout, enable_prefix_caching=True)
        source = EngineRequest(
            request_id="r",
            prompt_token_ids=prompt or [1, 2, 3],
            params=SamplingParams(use_beam_search=True, **params),
            max_tokens=max_tokens,
            seed=0,
            eos_token_ids=[EOS],
        )
        self.request = Request(source, 0.0)
        create_sequences(self.request, source, itertools.count(10))
        assert self.request.beam_search is not None
        self.search = self.request.beam_search
        leader = self.request.sequences[0]
        leader.chain = self.kv.new_chain("")
        leader.blocks = self.kv.allocate_prefix(leader.chain, 0)

    def step(self, *candidates: dict[int, float]) -> None:
        """Compute, take candidates (token -> score), expand and follow."""
        beams = self.search.beams
        assert len(candidates) == len(beams)
        for beam, given in zip(beams, candidates, strict=True):
            sequence = beam.sequence
            growth = self.kv.allocate_slots(sequence.blocks, sequence.num_computed_tokens, len(sequence.token_ids))
            assert growth is not None
            sequence.num_computed_tokens = len(sequence.token_ids)
            is_last = beam is beams[-1]
            assert self.search.offer(sequence, Candidates(list(given), list(given.values()))) is is_last
        children = self.search.expand()
        if not self.search.is_done:
            self.followed = follow(self.search, children, self.kv)
            self.kv.check()

    @property
    def texts(self) -> list[list[int]]:
        return [beam.sequence.token_ids[3:] for beam in self.search.beams]


def test_the_best_of_all_beams_go_on() -> None:
    searcher = Searcher(n=2)
    searcher.step({5: -1.0, 6: -1.5, 7: -3.0})
    assert searcher.texts == [[5], [6]]
    searcher.step({8: -2.0, 9: -2.5, 4: -9.0}, {8: -0.25, 9: -5.0, 4: -6.0})
    assert searcher.texts == [[6, 8], [5, 8]]
    assert [beam.cumulative_logprob for beam in searcher.search.beams] == [-1.75, -3.0]


def test_an_end_counts_only_among_the_first_k() -> None:
    searcher = Searcher(n=2)
    searcher.step({5: -1.0, 6: -1.5, EOS: -1.6})
    assert searcher.search.hypotheses == []
    searcher.step({EOS: -0.5, 7: -4.0, 8: -5.0}, {7: -0.75, 8: -6.0, EOS: -7.0})
    (hypothesis,) = searcher.search.hypotheses
    assert hypothesis[:3] == ([5, EOS], -1.5, -0.75)
    assert (hypothesis.finish_reason, hypothesis.stop_reason) == (FinishReason.STOP, None)
    assert searcher.texts == [[6, 7], [5, 7]]


def test_an_end_beyond_the_first_k_is_passed_over() -> None:
    searcher = Searcher(n=2)
    searcher.step({5: -1.0, 6: -1.5, 7: -4.0})
    searcher.step({EOS: -0.5, 7: -4.0, 8: -5.0}, {7: -0.75, EOS: -1.0, 8: -6.0})
    assert [hypothesis.token_ids for hypothesis in searcher.search.hypotheses] == [[5, EOS]]
    assert searcher.texts == [[6, 7], [5, 7]]


@pytest.mark.parametrize(("next_score", "is_done"), [(-0.5, False), (-1.0, True), (-1.5, True)])
@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_a_live_beam_must_be_better_than_the_worst_hypothesis(
    next_score: float, is_done: bool, early_stopping: bool | str
) -> None:
    """At its present length, since a negative penalty makes a longer one worse; as good is not enough."""
    searcher = Searcher(n=2, length_penalty=-1.0, early_stopping=early_stopping)
    searcher.step({5: -1.0, EOS: -1.25, 6: -1.5})
    searcher.step({EOS: -1.0, 7: next_score, 8: -7.0}, {7: -9.0, 8: -9.0, 9: -9.0})
    assert [hypothesis.score for hypothesis in searcher.search.hypotheses] == [-1.25, -4.0]
    assert searcher.search.is_done is is_done


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [(True, 1.0, True), (False, 1.0, True), ("never", 1.0, False), ("never", 0.0, True), (False, -1.0, True)],
)
def test_when_a_search_is_over(early_stopping: bool | str, length_penalty: float, is_done: bool) -> None:
    searcher = Searcher(n=2, early_stopping=early_stopping, length_penalty=length_penalty)
    searcher.step({EOS: -1.0, 5: -1.25, 6: -4.0})
    assert not searcher.search.is_done
    searcher.step({EOS: -1.0, 7: -6.0, 8: -7.0}, {7: -6.0, 8: -7.0, 9: -8.0})
    assert len(searcher.search.hypotheses) == 2
    assert searcher.search.is_done is is_done


def test_at_the_length_limit_everything_ends() -> None:
    searcher = Searcher(n=1, best_of=3, max_tokens=1, logprobs=1)
    searcher.step({5: -1.0, EOS: -2.0, 6: -3.0, 7: -4.0})
    found = [(each.token_ids, each.finish_reason) for each in searcher.search.hypotheses]
    assert found == [([5], FinishReason.LENGTH), ([EOS], FinishReason.STOP), ([6], FinishReason.LENGTH)]
    assert searcher.search.is_done
    (entry,) = searcher.search.hypotheses[2].logprobs
    assert (entry.token_ids, entry.logprobs, entry.rank) == ([6, 5], [-3.0, -1.0], 3)


def test_fewer_continuations_than_beams() -> None:
    """Rules may leave one token: then one beam lives, more come as soon as there are more, and they may die again."""
    searcher = Searcher(n=3)
    request = searcher.request
    searcher.step({5: 0.0})
    assert (len(searcher.search.beams), len(request.pending_forks)) == (1, 2)
    searcher.step({5: -1.0, 6: -1.1})
    searcher.step({5: -1.0, 6: -2.0}, {5: -1.0, 6: -1.2})
    assert (len(searcher.search.beams), len(request.pending_forks)) == (3, 0)
    searcher.step({EOS: -1.0}, {EOS: -1.0}, {5: -1.0})
    assert (len(searcher.search.beams), len(request.pending_forks)) == (1, 2)
    assert request.sequences[0] is searcher.search.beams[0].sequence
    assert len({sequence.seq_id for sequence in request.sequences}) == 3
    assert searcher.kv.num_live_sequences == 1
    searcher.step({EOS: -1.0})
    assert searcher.search.is_done
    assert len(searcher.search.hypotheses) == 3


def test_blocks_are_shared_and_one_child_keeps_the_place() -> None:
    searcher = Searcher(prompt=list(range(1, 7)), n=3)
    searcher.step({5: -1.0, 6: -1.1, 7: -1.2})
    leader, *children = [beam.sequence for beam in searcher.search.beams]
    assert leader.seq_id == 10
    assert all(child.blocks.tables == leader.blocks.tables for child in children)
    assert searcher.kv.pool.num_used == 2
    assert [(fork.parent, fork.child) for fork in searcher.followed.forks] == [(10, 11), (10, 12)]
    assert searcher.followed.token_overrides == {10: 5, 11: 6, 12: 7}
    assert searcher.followed.dropped == []
    # All come from the second: it keeps its place, and gives its blocks to the two that die.
    searcher.step({5: -9.0, 6: -9.0, 7: -9.0}, {5: -0.1, 6: -0.2, 7: -0.3}, {5: -9.0, 6: -9.0, 7: -9.0})
    assert [each.seq_id for each in searcher.followed.dropped] == [10, 12]
    assert [(fork.parent, fork.child) for fork in searcher.followed.forks] == [(11, 10), (11, 12)]
    assert [beam.sequence.seq_id for beam in searcher.search.beams] == [11, 10, 12]
    assert searcher.texts == [[4, 5, 6, 6, 5], [4, 5, 6, 6, 6], [4, 5, 6, 6, 7]]
    assert searcher.kv.pool.num_used == 2, "the full block and one copy of the last one, which all three share"
    assert searcher.search.num_shared_tokens == 7


def test_preempted_beams_reorder_without_blocks() -> None:
    searcher = Searcher(n=2)
    searcher.step({5: -1.0, 6: -1.1, 7: -3.0})
    for beam in searcher.search.beams:
        searcher.kv.free(beam.sequence.blocks)
        beam.sequence.blocks = None
        beam.sequence.num_computed_tokens = 0
        searcher.search.offer(beam.sequence, Candidates([8, 9], [-1.0, -1.05]))
    followed = follow(searcher.search, searcher.search.expand(), searcher.kv)
    assert followed == ([], [], {})
    assert searcher.texts == [[5, 8], [5, 9]]
    assert all(sequence.num_computed_tokens == 0 for sequence in searcher.request.sequences)
    assert searcher.request.pending_forks == []
