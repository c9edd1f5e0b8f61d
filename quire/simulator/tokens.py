"""Made-up token ids with which the prefix cache finds exactly what it would find with real ones.

A prompt is a run of consecutive numbers, made when the request arrives: what two requests share is the run of their
group, and what is their own starts with a number that no other request has. A hash of a block stands for all blocks
before it, so that one different token is enough.

A request whose whole prompt is its group's run is a turn of a conversation: what it generates continues the run, and
the next turn, whose prompt is longer, finds prompt and answer in the cache. Whatever else is generated is like nothing
else: the token is the number of its sequence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

from quire.step import NewSequence, StepPlan

OWN_TOKENS = 1 << 30
GROUP_TOKENS = 1 << 31
"""Runs of groups begin here or later; numbers of sequences and of requests stay below."""
BEST_LOSS, BEAM_GAP, GAP_DECAY = 0.6, 2.7, 1.5
"""In log-probability, means: what the best next token costs a beam, and how much more the second best; from the k-th
to the next one it is BEAM_GAP / k ** GAP_DECAY."""
ALIKE = 0.7
"""How often a beam is as sure of its next token as its search is: two beams correlate by the square, one half. All
of it as measured on the bundled model's beams (docs/decisions/0016-simulator.md)."""


def prompt_tokens(number: int, num_tokens: int, group: str | None, num_shared: int) -> list[int]:
    """The prompt of request `number`, of which the first `num_shared` tokens are those of its group."""
    own = OWN_TOKENS + number % OWN_TOKENS
    if group is None or not num_shared:
        return list(range(own, own + num_tokens))
    first = first_of_group(group)
    return [*range(first, first + num_shared), *range(own, own + num_tokens - num_shared)]


def first_of_group(group: str) -> int:
    """Where the run of a group begins."""
    digest = hashlib.blake2b(group.encode(), digest_size=4).digest()
    return GROUP_TOKENS + int.from_bytes(digest, "little") % OWN_TOKENS


class Streams:
    """The token ids that the sequences of an executor generate."""

    def __init__(self) -> None:
        self._first_tokens: dict[int, int] = {}
        """seq_id -> token at position 0, of turns of conversations."""
        self._num_candidates: dict[int, int] = {}
        """seq_id -> candidates to return, of beams."""
        self._requests: dict[int, int] = {}
        """seq_id -> the first sequence of its request, of those that were forked."""

    def follow(self, plan: StepPlan) -> None:
        """Take note of the rows that come and go. O(those)."""
        for seq_id in plan.released:
            self._first_tokens.pop(seq_id, None)
            self._num_candidates.pop(seq_id, None)
            self._requests.pop(seq_id, None)
        for new in plan.new_sequences:
            if new.sampling.num_candidates:
                self._num_candidates[new.seq_id] = new.sampling.num_candidates
            elif is_turn(new):
                self._first_tokens[new.seq_id] = new.token_ids[0]
        if plan.forks or plan.beam_reorders:
            for fork in (*plan.forks, *plan.beam_reorders):
                self._requests[fork.child] = self._requests.get(fork.parent, fork.parent)
                if fork.sampling.num_candidates:
                    self._num_candidates[fork.child] = fork.sampling.num_candidates

    def num_requests(self, plan: StepPlan) -> int:
        """Of how many requests the plan's sequences are, as `follow` was told."""
        if not self._requests:
            return len(plan.seq_ids)
        return len({self._requests.get(seq_id, seq_id) for seq_id in plan.seq_ids})

    def sample(self, plan: StepPlan) -> list[list[int]]:
        """A token for each of the plan's samples, in a list of its own."""
        firsts = self._first_tokens
        if not firsts:
            return [[seq_id] for seq_id in plan.sample_seq_ids]
        starts, counts = plan.start_positions, plan.num_tokens
        return [
            [firsts[seq_id] + starts[source] + counts[source] if seq_id in firsts else seq_id]
            for seq_id, source in zip(plan.sample_seq_ids, plan.sample_from, strict=True)
        ]

    @property
    def has_beams(self) -> bool:
        return bool(self._num_candidates)

    def beams(self, plan: StepPlan) -> Iterator[tuple[int, list[int], list[float]]]:
        """(index among the samples, tokens, scores) of beams: distinct tokens with falling scores, the gaps between
        them drawn from exponential distributions by a hash of step and place."""
        for index, seq_id in enumerate(plan.sample_seq_ids):
            number = self._num_candidates.get(seq_id)
            if number is not None:
                drawn = seq_id
                if _uniform(plan.step_id, seq_id, -1) < ALIKE:
                    drawn = -2 - self._requests.get(seq_id, seq_id)
                score, scores = 0.0, []
                for rank in range(number):
                    mean = BEAM_GAP / rank**GAP_DECAY if rank else BEST_LOSS
                    score += mean * math.log(_uniform(plan.step_id, drawn, rank))
                    scores.append(score)
                yield index, [seq_id * number + rank for rank in range(number)], scores


def is_turn(new: NewSequence) -> bool:
    """Whether a whole prompt is the run of a group, and there is one sample of it."""
    first, last = new.token_ids[0], new.token_ids[new.num_prompt_tokens - 1]
    return (
        first >= GROUP_TOKENS and last - first == new.num_prompt_tokens - 1 and new.sampling.params.num_sequences == 1
    )


def _uniform(*values: int) -> float:
    """Above 0 and at most 1, the same for the same values in every process (hashes of integers are)."""
    mixed = hash(values) & _WORD  # of numbers that lie close together, hashes are not independent
    mixed ^= mixed >> 33
    mixed = mixed * _MULTIPLIER & _WORD
    mixed ^= mixed >> 33
    return ((mixed >> 11) + 1) / (1 << 53)


_WORD, _MULTIPLIER = (1 << 64) - 1, 0xFF51AFD7ED558CCD
