"""Beam search: k best continuations of a prompt (paper §4.4, figure 9), in the scheduler's update. Each step ranks all
continuations: of the first, ended ones become hypotheses, and the k best others go on. Scores (cumulative
log-probability / length ** length_penalty) and results equal those of Transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.decoding.sequence import Request, Sequence
from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.block_table import BlockTable
from quire.request import FinishReason
from quire.step import Candidates, SequenceFork, TokenLogprobs

if TYPE_CHECKING:
    from quire.decoding.masks import Matcher

NO_CANDIDATES = Candidates([], [])


@dataclass(slots=True)
class Beam:
    """One live continuation of a beam search. Its tokens and blocks are in its sequence."""

    sequence: Sequence
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per generated token, if the request asks for them."""
    candidates: Candidates | None = None
    """Candidates for the next token, once the worker has sent them."""
    is_stuck: bool = False
    """True if its constraint allows no next token: no candidates come."""


class Child(NamedTuple):
    """Beam chosen for the next step, one token longer than its parent."""

    parent: Beam
    token_id: int
    cumulative_logprob: float
    logprobs: list[TokenLogprobs]
    matcher: Matcher | None
    """Matcher of the request's constraint after `token_id`."""


class Hypothesis(NamedTuple):
    """Finished continuation of a beam search, ranked by its score."""

    token_ids: list[int]
    """Generated tokens, including the one that ended it."""
    cumulative_logprob: float
    score: float
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason
    stop_reason: int | None
    ends_in_text: bool = False
    """True if its constraint ended it, at a token of the text."""


class BeamSearch:
    """Beam search of one request: live beams and best hypotheses, both best first."""

    def __init__(self, request: Request) -> None:
        params = request.params
        self.width = params.num_sequences
        self.beams = [Beam(request.sequences[0])]
        self.hypotheses: list[Hypothesis] = []
        """Finished continuations, at most `width`, ranked by score."""
        self.is_done = False
        self.failure: str | None = None
        self.request = request
        self._max_tokens = request.max_tokens
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._num_logprobs = params.logprobs
        self._why_stuck = "no beam can go on"
        self._matchers: dict[tuple[int, int], Matcher] = {}
        """(sequence id of a beam, number of its candidate) -> the beam's matcher after that candidate."""

    @property
    def sequences(self) -> list[Sequence]:
        return [beam.sequence for beam in self.beams]

    @property
    def running_sequences(self) -> list[Sequence]:
        return [each for each in self.request.sequences if each.blocks is not None]

    @property
    def num_shared_tokens(self) -> int:
        """Leading tokens common to all live beams, including the prompt."""
        token_ids = [beam.sequence.token_ids for beam in self.beams]
        # A prefix common to the smallest and the largest list in sorted order is common to all.
        first, last = min(token_ids), max(token_ids)
        pairs = enumerate(zip(first, last, strict=True))
        return next((position for position, (one, other) in pairs if one != other), len(first))

    def offer(self, sequence: Sequence, candidates: Candidates) -> bool:
        """Take the candidates (likeliest next tokens) of one beam. Returns True when all beams have theirs and `expand`
        is due."""
        for beam in self.beams:
            if beam.sequence is sequence:
                beam.candidates = NO_CANDIDATES if beam.is_stuck else candidates
        return self.has_candidates

    def give_up(self, sequence: Sequence, reason: str) -> None:
        """End a beam whose constraint allows no next token; the last beam ends the search. reason: reported if the
        search has no hypothesis then."""
        self._why_stuck = reason
        for beam in self.beams:
            beam.is_stuck |= beam.sequence is sequence

    def forget_candidates(self) -> None:
        self._matchers = {}
        for beam in self.beams:
            beam.candidates = None

    @property
    def has_candidates(self) -> bool:
        return all(beam.candidates is not None for beam in self.beams)

    @property
    def awaited(self) -> list[Matcher]:
        """Matchers (grammars) whose answers `expand` waits for."""
        return [matcher for matcher in self._matchers.values() if not matcher.is_ready]

    def expand(self) -> list[Child] | None:
        """Rank all continuations, keep those of the first `width` that end, and return those that go on: at most
        `width`, best first, none when the search is done. Returns None if matchers have yet to answer: call again."""
        length = self.beams[0].sequence.num_output_tokens + 1
        ranked = self._ranked()
        if not self._ask(ranked, length):
            return None
        children: list[Child] = []
        for rank, (cumulative, beam, number) in enumerate(ranked):
            if rank >= self.width and len(children) == self.width:
                break
            child = self._child(beam, number, cumulative)
            if self.failure is not None:
                self.is_done = True
                return []
            end = self._end_of(child.token_id, child.matcher, length)
            if end is None:
                if len(children) < self.width:
                    children.append(child)
            elif rank < self.width:
                self._add_hypothesis(child, length, *end)
        self._matchers = {}
        if not (children or self.hypotheses):
            self.failure = self._why_stuck
        if not children or self._is_settled(children[0].cumulative_logprob, length):
            self.is_done = True
            return []
        return children

    def cut(self, reason: FinishReason) -> None:
        """End the search early: live beams with generated tokens become hypotheses."""
        for beam in self.beams:
            generated = beam.sequence.token_ids[self.request.num_prompt_tokens :]
            if generated:
                score = self._score(beam.cumulative_logprob, len(generated))
                entry = Hypothesis(generated, beam.cumulative_logprob, score, beam.logprobs, reason, None)
                self._keep(entry)
        self.is_done = True

    def _ranked(self) -> list[tuple[float, Beam, int]]:
        continuations = [
            (beam.cumulative_logprob + score, beam, number)
            for beam in self.beams
            if beam.candidates is not None
            for number, score in enumerate(beam.candidates.scores)
        ]
        continuations.sort(key=lambda continuation: -continuation[0])
        return continuations

    def _ask(self, ranked: list[tuple[float, Beam, int]], length: int) -> bool:
        """Ask the matchers of the continuations that `expand` looks at; returns True if all have answered."""
        num_children = 0
        for rank, (_, beam, number) in enumerate(ranked):
            if rank >= self.width and num_children == self.width:
                break
            matcher = None
            if self._is_constrained(beam, number):
                if (beam.sequence.seq_id, number) not in self._matchers:
                    for _, other, other_number in ranked[rank : rank + self.width]:
                        self._ask_one(other, other_number)
                matcher = self._matchers[beam.sequence.seq_id, number]
                if not matcher.is_ready:
                    return False
                if matcher.error is not None or not matcher.num_accepted:
                    break
            assert beam.candidates is not None
            is_child = self._end_of(beam.candidates.token_ids[number], matcher, length) is None
            num_children += is_child and num_children < self.width
        return True

    def _ask_one(self, beam: Beam, number: int) -> None:
        key = beam.sequence.seq_id, number
        if self._is_constrained(beam, number) and key not in self._matchers:
            assert beam.sequence.matcher is not None
            assert beam.candidates is not None
            self._matchers[key] = beam.sequence.matcher.copy()
            self._matchers[key].advance([beam.candidates.token_ids[number]], 0)

    def _is_constrained(self, beam: Beam, number: int) -> bool:
        assert beam.candidates is not None
        return beam.sequence.matcher is not None and beam.candidates.token_ids[number] not in self.request.end_token_ids

    def _end_of(self, token_id: int, matcher: Matcher | None, length: int) -> tuple[FinishReason, int | None] | None:
        """(finish reason, stop token for `stop_reason`) of a beam that `token_id` ends; None: it goes on. A text ended
        by its constraint waits for an end token's score."""
        request = self.request
        if token_id in request.stop_token_ids:
            return FinishReason.STOP, token_id
        if token_id in request.eos_token_ids:
            return FinishReason.STOP, None
        is_last = length >= self._max_tokens
        if matcher is not None and matcher.is_finished and (is_last or not request.eos_token_ids):
            return FinishReason.STOP, None
        return (FinishReason.LENGTH, None) if is_last else None

    def _child(self, beam: Beam, number: int, cumulative: float) -> Child:
        assert beam.candidates is not None
        token_ids, scores = beam.candidates.token_ids, beam.candidates.scores
        logprobs = []
        if (num_top := self._num_logprobs) is not None:
            alternatives = [token_ids[number], *token_ids[:num_top]], [scores[number], *scores[:num_top]]
            logprobs = [*beam.logprobs, TokenLogprobs(*alternatives, rank=number + 1)]
        matcher = self._matchers[beam.sequence.seq_id, number] if self._is_constrained(beam, number) else None
        if matcher is not None and matcher.error is not None:
            self.failure = matcher.error.message
        elif matcher is not None and not matcher.num_accepted:
            self.failure = f"token {token_ids[number]} does not follow the constraint"
        return Child(beam, token_ids[number], cumulative, logprobs, matcher)

    def _add_hypothesis(self, child: Child, length: int, reason: FinishReason, stop_token: int | None) -> None:
        generated = child.parent.sequence.token_ids[self.request.num_prompt_tokens :]
        score = self._score(child.cumulative_logprob, length)
        ended = [*generated, child.token_id]
        ends_in_text = child.matcher is not None and child.matcher.ends_in_text
        self._keep(Hypothesis(ended, child.cumulative_logprob, score, child.logprobs, reason, stop_token, ends_in_text))

    def _keep(self, hypothesis: Hypothesis) -> None:
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)  # ties go to the earlier hypothesis
        del self.hypotheses[self.width :]

    def _score(self, cumulative: float, length: int) -> float:
        return float(cumulative / length**self._length_penalty)

    def _is_settled(self, best_cumulative: float, length: int) -> bool:
        if len(self.hypotheses) < self.width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens  # the length at which a log-probability scores best
        return self._score(best_cumulative, length) <= self.hypotheses[-1].score


class BlockSharing(Protocol):
    """Part of KVCacheManager by which beams fork and free blocks."""

    def fork(self, parent: BlockTable, num_tokens: int) -> BlockTable: ...

    def free(self, blocks: BlockTable) -> None: ...


class Followed(NamedTuple):
    """Changes that `follow` makes for the next plan."""

    dropped: list[Sequence]
    """Sequences of dropped beams. Their slots are released before the forks."""
    forks: list[SequenceFork]
    """Beam slots that start as a copy of another slot."""
    token_overrides: dict[int, int]
    """Sequence id of every live beam -> its new token."""


def follow(search: BeamSearch, children: list[Child], kv: BlockSharing) -> Followed:
    """Make `children` the live beams: assign beam slots, share and free blocks, append the tokens.

    Preempted beams have no blocks: only their tokens change, and nothing is reported.
    """
    request = search.request
    heirs: dict[Sequence, Child] = {}
    others = [child for child in children if heirs.setdefault(child.parent.sequence, child) is not child]
    free = sorted((each for each in request.sequences if each not in heirs), key=lambda each: each.seq_id)
    # Share blocks before any are freed, and copy before anything changes: a beam slot may get another beam below.
    copies = [_copy(child.parent.sequence, kv) for child in others]
    dropped = []
    for beam in search.beams:
        sequence = beam.sequence
        if sequence not in heirs and sequence.blocks is not None:
            kv.free(sequence.blocks)
            sequence.blocks = None
            sequence.num_computed_tokens = 0
            dropped.append(sequence)
    forks = []
    holder_of = {id(child): sequence for sequence, child in heirs.items()}
    for child, copied, place in zip(others, copies, free, strict=False):
        place.token_ids, place.blocks, place.chain, place.num_computed_tokens = copied
        holder_of[id(child)] = place
        if place.blocks is not None:
            forks.append(SequenceFork(child.parent.sequence.seq_id, place.seq_id, place.sampling))
    search.beams = []
    for child in children:
        sequence = holder_of[id(child)]
        sequence.token_ids.append(child.token_id)
        sequence.matcher = child.matcher
        search.beams.append(Beam(sequence, child.cumulative_logprob, child.logprobs))
    live = set(holder_of.values())
    request.sequences.sort(key=lambda sequence: (sequence not in live, sequence.seq_id))
    has_rows = search.beams[0].sequence.blocks is not None
    request.pending_forks = [each for each in request.sequences if each not in live] if has_rows else []
    chosen = {beam.sequence.seq_id: beam.sequence.token_ids[-1] for beam in search.beams} if has_rows else {}
    return Followed(dropped, forks, chosen)


def _copy(parent: Sequence, kv: BlockSharing) -> tuple[list[int], BlockTable | None, HashChain | None, int]:
    blocks, chain = None, parent.chain
    if parent.blocks is not None:
        blocks = kv.fork(parent.blocks, parent.num_computed_tokens)
        chain = blocks.chain
    elif chain is not None:
        chain = chain.fork(chain.num_blocks)
    return list(parent.token_ids), blocks, chain, parent.num_computed_tokens
