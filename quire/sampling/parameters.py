"""Sampling parameters of every live row and their encoding. `COLUMNS` is the one table of parameters: host columns,
device words and `quire.kernels.triton.sampling_words` follow from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from quire.sampling.draw import MIN_TEMPERATURE
from quire.sampling.lists import RowLists
from quire.sampling.processors import NO_PROCESSORS, ProcessorRows
from quire.step import SequenceSampling

SEED_MASK = 2**64 - 1
MAX_WORD = 2**31 - 1


class Feature:
    """Bits of the sampler's features that a row uses. A step runs those in the union over its rows. A new feature has a
    condition in `features_of`, and changes scores (`EDITS`) unless `_NOT_EDITS` names it."""

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
    TOKEN_MASK = 1 << 11
    """Feature of a batch, never of a row: masks come with the step."""
    PROCESSED = 1 << 12
    """Logits processor concerns the row."""


PENALTIES = Feature.REPETITION_PENALTY | Feature.OUTPUT_PENALTIES
ALL_FEATURES = tuple(bit for name, bit in vars(Feature).items() if name.isupper())
_NOT_EDITS = Feature.GREEDY | Feature.RANDOM | Feature.FILTERS | Feature.LOGPROBS | Feature.CANDIDATES
EDITS = sum(ALL_FEATURES) & ~_NOT_EDITS
"""Features that change single scores before a token is chosen."""


def features_of(sampling: SequenceSampling) -> int:
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


def _temperature(sampling: SequenceSampling) -> float:
    params = sampling.params
    return 0.0 if params.is_greedy else max(params.temperature, float(MIN_TEMPERATURE))


class ParameterColumn(NamedTuple):
    """Entry of COLUMNS. Parameter: type on the host, type in a device row (None: host only), value."""

    name: str
    dtype: type[np.generic]
    word_dtype: type[np.generic] | None
    encode: Callable[[SequenceSampling], float]


COLUMNS = (
    ParameterColumn("features", np.int64, np.int32, features_of),
    ParameterColumn("seed", np.uint64, np.uint64, lambda sampling: sampling.seed & SEED_MASK),
    ParameterColumn("top_p", np.float64, np.float64, lambda sampling: sampling.params.top_p),
    ParameterColumn("top_k", np.int64, np.int32, lambda sampling: min(max(sampling.params.top_k, 0), MAX_WORD)),
    ParameterColumn("temperature", np.float32, np.float32, _temperature),
    ParameterColumn("min_p", np.float32, np.float32, lambda sampling: sampling.params.min_p),
    ParameterColumn("presence_penalty", np.float32, np.float32, lambda sampling: sampling.params.presence_penalty),
    ParameterColumn("frequency_penalty", np.float32, np.float32, lambda sampling: sampling.params.frequency_penalty),
    ParameterColumn("repetition_penalty", np.float32, np.float32, lambda sampling: sampling.params.repetition_penalty),
    ParameterColumn("min_tokens", np.int64, np.int32, lambda sampling: min(sampling.params.min_tokens, MAX_WORD)),
    ParameterColumn("num_logprobs", np.int64, None, lambda sampling: sampling.params.logprobs or 0),
    ParameterColumn("num_candidates", np.int64, None, lambda sampling: sampling.num_candidates),
    ParameterColumn("num_prompt_logprobs", np.int64, None, lambda sampling: sampling.params.prompt_logprobs or 0),
)
"""top_k: 0 is off; at most 2**31 - 1, above any vocabulary. top_p: 1 is off."""

ROW_DTYPE: np.dtype[Any] = np.dtype([(column.name, column.word_dtype) for column in COLUMNS if column.word_dtype])
"""Row on a device, in 32-bit words. A 64-bit number takes two, the lower half first."""
NUM_WORDS = ROW_DTYPE.itemsize // 4
WORD_OF = {name: offset // 4 for name, (_, offset, *_) in (ROW_DTYPE.fields or {}).items()}
"""Column -> its first word in a device row."""


class Asked(NamedTuple):
    """Rows of a batch that ask for results: indices in the batch, [N] int64, and the number that each wants."""

    indices: np.ndarray
    counts: list[int]


class Listed(NamedTuple):
    """Tokens that N asking rows name, one after the other. where: [P] int64, index of each one's row. token_ids: [P]
    int64. counts: [N], number of each row's tokens."""

    where: np.ndarray
    token_ids: np.ndarray
    counts: list[int]


class SamplingRows:
    """Sampling settings of a worker's running sequences: columns [num_rows], indexed by row, with the types of
    `COLUMNS`; lists of tokens in `lists`."""

    features: np.ndarray
    seed: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    presence_penalty: np.ndarray
    frequency_penalty: np.ndarray
    repetition_penalty: np.ndarray
    min_tokens: np.ndarray
    num_logprobs: np.ndarray
    num_candidates: np.ndarray
    num_prompt_logprobs: np.ndarray

    def __init__(self, num_rows: int, processors: ProcessorRows = NO_PROCESSORS) -> None:
        self.processors = processors
        for column in COLUMNS:
            setattr(self, column.name, np.zeros(num_rows, column.dtype))
        self._used: tuple[np.ndarray | None, int] = (None, 0)
        self.lists = RowLists(num_rows)
        self.rows_with_prompt_logprobs: set[int] = set()
        self._listed: dict[int, list[int]] = {}

    def set(self, row: int, sampling: SequenceSampling) -> None:
        self._used = None, 0
        for column in COLUMNS:
            getattr(self, column.name)[row] = column.encode(sampling)
        if self.processors.set(row, sampling.params):
            self.features[row] |= Feature.PROCESSED
        self.lists.set(row, sampling)
        self.rows_with_prompt_logprobs.discard(row)
        self._listed.pop(row, None)
        if sampling.params.prompt_logprobs is not None:
            self.rows_with_prompt_logprobs.add(row)
        if sampling.params.logprob_token_ids:
            self._listed[row] = sampling.params.logprob_token_ids

    def clear(self, row: int) -> None:
        self.lists.clear(row)
        self.rows_with_prompt_logprobs.discard(row)
        self._listed.pop(row, None)

    def words(self, row: int) -> np.ndarray:
        """[NUM_WORDS] int32: the row for a device's kernels."""
        words = np.zeros(1, ROW_DTYPE)
        for name in WORD_OF:
            words[name] = getattr(self, name)[row]
        return words.view(np.int32)

    def used(self, rows: np.ndarray) -> int:
        """Union of `Feature` over `rows` ([R] int64). The array must never be changed: it is compared by identity."""
        asked, used = self._used
        if asked is not rows:
            used = int(np.bitwise_or.reduce(self.features[rows]))
            self._used = rows, used
        return used

    def listed(self, rows: np.ndarray, asked: Asked) -> Listed | None:
        """Further tokens whose log-probabilities the asking ones of `rows` ([R] int64) want; None: none do."""
        if not self._listed:
            return None
        lists = [self._listed.get(row, ()) for row in rows[asked.indices].tolist()]
        counts = [len(each) for each in lists]
        if not any(counts):
            return None
        return Listed(np.repeat(np.arange(len(lists)), counts), np.concatenate(lists).astype(np.int64), counts)

    def asked(self, rows: np.ndarray, feature: int, counts: np.ndarray) -> Asked:
        """Rows of `rows` ([R] int64) with a feature. counts: [num_rows] int64, results that each row wants."""
        index = np.flatnonzero(self.features[rows] & feature)
        return Asked(index, counts[rows[index]].tolist())
