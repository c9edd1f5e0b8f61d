"""The sampling parameters of every live row, as columns that a step gathers by row index."""

from __future__ import annotations

import numpy as np

from quire.sampling.bad_words import BadWordsColumn
from quire.sampling.ragged import RaggedColumn, TokenLists
from quire.step import SequenceSampling

SEED_MASK = 2**64 - 1


class Feature:
    """The features of the sampler that a row uses, as bits. A step runs only those in the union over its rows.

    Plain integers: an enumeration's operators take a microsecond each, several times in every step.
    """

    GREEDY = 1 << 0
    RANDOM = 1 << 1
    FILTERS = 1 << 2
    LOGIT_BIAS = 1 << 3
    REPETITION_PENALTY = 1 << 4
    OUTPUT_PENALTIES = 1 << 5
    MIN_TOKENS = 1 << 6
    BAD_WORDS = 1 << 7
    ALLOWED_TOKENS = 1 << 8
    LOGPROBS = 1 << 9
    CANDIDATES = 1 << 10


EDITS = (
    Feature.LOGIT_BIAS
    | Feature.REPETITION_PENALTY
    | Feature.OUTPUT_PENALTIES
    | Feature.MIN_TOKENS
    | Feature.BAD_WORDS
    | Feature.ALLOWED_TOKENS
)
"""Features that change single scores before a token is chosen."""
NEEDS_INDEX_OF_ROW = Feature.LOGIT_BIAS | Feature.MIN_TOKENS | Feature.BAD_WORDS | Feature.ALLOWED_TOKENS


class SamplingRows:
    """Columns of shape [num_rows], indexed by row; ragged parameters in columns of their own."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.features = np.zeros(num_rows, np.int64)
        self.seed = np.zeros(num_rows, np.uint64)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float64)
        self.min_p = np.zeros(num_rows, np.float32)
        self.presence_penalty = np.zeros(num_rows, np.float32)
        self.frequency_penalty = np.zeros(num_rows, np.float32)
        self.repetition_penalty = np.ones(num_rows, np.float32)
        self.min_tokens = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.zeros(num_rows, np.int64)
        self.num_candidates = np.zeros(num_rows, np.int64)
        self.num_prompt_logprobs = np.zeros(num_rows, np.int64)
        self.logit_bias = RaggedColumn()
        self.stop_tokens = RaggedColumn()
        self.allowed_tokens = TokenLists()
        self.bad_words = BadWordsColumn()
        self.rows_with_prompt_logprobs: set[int] = set()

    def set(self, row: int, sampling: SequenceSampling) -> None:
        """Write every column of `row`."""
        params = sampling.params
        self.features[row] = features_of(sampling)
        self.seed[row] = sampling.seed & SEED_MASK
        self.temperature[row] = 0 if params.is_greedy else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.repetition_penalty[row] = params.repetition_penalty
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = params.logprobs or 0
        self.num_candidates[row] = sampling.num_candidates
        self.num_prompt_logprobs[row] = params.prompt_logprobs or 0
        self.logit_bias.set(row, params.logit_bias or {})
        self.stop_tokens.set(row, sampling.stop_token_ids if params.min_tokens else ())
        self.allowed_tokens.set(row, params.allowed_token_ids or ())
        self.bad_words.set(row, sampling.bad_token_sequences)
        self.rows_with_prompt_logprobs.discard(row)
        if params.prompt_logprobs is not None:
            self.rows_with_prompt_logprobs.add(row)

    def clear(self, row: int) -> None:
        """Drop what `row` owns beyond its fixed columns (those are overwritten by the next owner)."""
        for column in (self.logit_bias, self.stop_tokens, self.allowed_tokens, self.bad_words):
            column.clear(row)
        self.rows_with_prompt_logprobs.discard(row)

    def used(self, rows: np.ndarray) -> int:
        """The union of `Feature` over `rows` ([R] int64)."""
        return int(np.bitwise_or.reduce(self.features[rows]))

    def index_of_row(self, rows: np.ndarray) -> np.ndarray:
        """[num_rows] int64: the position of each row in `rows`, -1 where it is absent."""
        index = np.full(self.num_rows, -1, np.int64)
        index[rows] = np.arange(len(rows))
        return index


def features_of(sampling: SequenceSampling) -> int:
    """The features that a sequence uses, as bits of `Feature`."""
    params = sampling.params
    wanted = Feature.GREEDY if params.is_greedy else Feature.RANDOM
    conditions = {
        Feature.FILTERS: not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
        Feature.LOGIT_BIAS: bool(params.logit_bias),
        Feature.REPETITION_PENALTY: params.repetition_penalty != 1,
        Feature.OUTPUT_PENALTIES: params.presence_penalty != 0 or params.frequency_penalty != 0,
        Feature.MIN_TOKENS: params.min_tokens > 0 and bool(sampling.stop_token_ids),
        Feature.BAD_WORDS: bool(sampling.bad_token_sequences),
        Feature.ALLOWED_TOKENS: params.allowed_token_ids is not None,
        # The log-probabilities of a beam are those of its candidates.
        Feature.LOGPROBS: (params.logprobs is not None or params.ranks_samples) and not sampling.num_candidates,
        Feature.CANDIDATES: sampling.num_candidates > 0,
    }
    for feature, condition in conditions.items():
        if condition:
            wanted |= feature
    return wanted
