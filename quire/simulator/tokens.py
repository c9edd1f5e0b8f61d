"""Made-up token ids with the prefix-cache hits of real ones. A prompt is its group's run of consecutive numbers, then
its own. Behind a whole run the output continues it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

from quire.step import NewSequence, StepPlan

OWN_TOKENS = 1 << 30
GROUP_TOKENS = 1 << 31
"""First token of the groups' runs; numbers of sequences and requests are lower."""
BEST_LOSS, BEAM_GAP, GAP_DECAY = 0.6, 2.7, 1.5
"""Mean log-probability that the best next token costs a beam; the gap after the k-th is BEAM_GAP / k ** GAP_DECAY."""
ALIKE = 0.7
"""Share of steps in which a beam draws its search's scores, not its own. Measured, like the values above, on the
bundled model's beams (docs/decisions/0016-simulator.md)."""


def prompt_tokens(number: int, num_tokens: int, group: str | None, num_shared: int) -> list[int]:
    """Token ids of request `number`, whose first `num_shared` tokens are its group's."""
    own = OWN_TOKENS + number % OWN_TOKENS
    if group is None or not num_shared:
        return list(range(own, own + num_tokens))
    first = first_of_group(group)
    return [*range(first, first + num_shared), *range(own, own + num_tokens - num_shared)]


def first_of_group(group: str) -> int:
    digest = hashlib.blake2b(group.encode(), digest_size=4).digest()
    return GROUP_TOKENS + int.from_bytes(digest, "little") % OWN_TOKENS


class Streams:
    def __init__(self) -> None:
        self._first_tokens: dict[int, int] = {}
        """seq_id -> token at position 0, for turns of conversations."""
        self._num_candidates: dict[int, int] = {}
        """seq_id -> candidates to return, for beams."""
        self._requests: dict[int, int] = {}
        """seq_id -> first sequence of its request, for forked sequences."""

    def follow(self, plan: StepPlan) -> None:
        """Record a plan's new and released rows, in time proportional to them."""
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
        if not self._requests:
            return len(plan.seq_ids)
        return len({self._requests.get(seq_id, seq_id) for seq_id in plan.seq_ids})

    def sample(self, plan: StepPlan) -> list[list[int]]:
        """One made-up token id for each of the plan's samples, each in a list."""
        firsts = self._first_tokens
        if not firsts:
            return [[seq_id] for seq_id in plan.sample_seq_ids]
        starts, counts = plan.start_positions, plan.num_tokens
        return [
            [firsts[seq_id] + starts[source] + counts[source] if seq_id in firsts else seq_id]
            for seq_id, source in zip(plan.sample_seq_ids, plan.sample_from, strict=True)
        ]

    def token(self, seq_id: int, position: int) -> int:
        """Made-up token id of a sequence at a position."""
        first = self._first_tokens.get(seq_id)
        return seq_id if first is None else first + position

    def is_beam(self, seq_id: int) -> bool:
        return seq_id in self._num_candidates

    @property
    def has_beams(self) -> bool:
        return bool(self._num_candidates)

    def beams(self, plan: StepPlan) -> Iterator[tuple[int, list[int], list[float]]]:
        """(index among the samples, tokens, scores) of beams: distinct tokens with falling scores; a hash of step and
        place draws the gaps from exponential distributions."""
        for index, seq_id in enumerate(plan.sample_seq_ids):
            number = self._num_candidates.get(seq_id)
            if number is not None:
                drawn = seq_id
                if uniform(plan.step_id, seq_id, -1) < ALIKE:
                    drawn = -2 - self._requests.get(seq_id, seq_id)
                score, scores = 0.0, []
                for rank in range(number):
                    mean = BEAM_GAP / rank**GAP_DECAY if rank else BEST_LOSS
                    score += mean * math.log(uniform(plan.step_id, drawn, rank))
                    scores.append(score)
                yield index, [seq_id * number + rank for rank in range(number)], scores


def is_turn(new: NewSequence) -> bool:
    """True for a turn of a conversation: the whole prompt is a group's run, with one sample."""
    first, last = new.token_ids[0], new.token_ids[new.num_prompt_tokens - 1]
    return (
        first >= GROUP_TOKENS and last - first == new.num_prompt_tokens - 1 and new.sampling.params.num_sequences == 1
    )


def uniform(*values: int) -> float:
    mixed = hash(values) & _WORD  # hashes of neighbouring numbers are not independent
    mixed ^= mixed >> 33
    mixed = mixed * _MULTIPLIER & _WORD
    mixed ^= mixed >> 33
    return ((mixed >> 11) + 1) / (1 << 53)


_WORD, _MULTIPLIER = (1 << 64) - 1, 0xFF51AFD7ED558CCD
