"""Which token comes next in FakeExecutor: a function of the numbers that its KV slots hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from quire.step import Candidates, SequenceSampling, TokenLogprobs

_MASK = 2**63 - 1
_GREEDY_SEED = 0x5EED

ChooseToken = Callable[[SequenceSampling, int, list[int]], int]
"""(sampling, number of tokens generated before, all tokens so far) -> the next token."""


def mix(*values: int) -> int:
    """A number that depends on all of `values` and is the same in every process."""
    return hash(values) & _MASK


def pooled_vector(state: int) -> list[float]:
    """The last hidden state of a token with the number `state`."""
    return [float(mix(state, place) % 2**20) for place in range(4)]


class TokenRule:
    """choose: replaces the rule that picks tokens."""

    def __init__(self, vocab_size: int, choose: ChooseToken | None) -> None:
        self._vocab_size = vocab_size
        self._choose = choose

    def pick(self, sampling: SequenceSampling, token_ids: list[int], num_prompt_tokens: int, state: int) -> int:
        """The token behind `token_ids`. state: the number of the last of them."""
        index = len(token_ids) - num_prompt_tokens
        if self._choose is not None:
            return self._choose(sampling, index, token_ids)
        seed = _GREEDY_SEED if sampling.params.is_greedy else sampling.seed
        token_id = mix(state, seed, index) % self._vocab_size
        while index < sampling.params.min_tokens and token_id in sampling.stop_token_ids:
            token_id = (token_id + 1) % self._vocab_size
        return token_id

    def candidates(self, sampling: SequenceSampling, num_generated: int, state: int) -> Candidates:
        """Distinct tokens with falling scores, so close together that often the worse beam has the better child."""
        banned = set(sampling.stop_token_ids) if num_generated < sampling.params.min_tokens else set()
        token_ids: dict[int, None] = {}
        number = 0
        while len(token_ids) < min(sampling.num_candidates, self._vocab_size - len(banned)):
            token_id = mix(state, number) % self._vocab_size
            number += 1
            if token_id not in banned:
                token_ids[token_id] = None
        gaps = [0.25 + mix(state, number, 1) % 64 / 64 for number in range(len(token_ids))]
        return Candidates(list(token_ids), [-gap for gap in accumulate(gaps)])

    def logprobs(self, token_id: int, state: int, num_top: int) -> TokenLogprobs:
        top = [mix(state, rank) % self._vocab_size for rank in range(num_top)]
        return TokenLogprobs([token_id, *top], [-1.0 - 0.5 * rank for rank in range(num_top + 1)], rank=1)
