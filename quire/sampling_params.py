"""Settings for choosing a request's tokens and for its end. Names and meanings are vLLM's."""

from __future__ import annotations

import enum
import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import UserError, nearest_name, reject_unknown
from quire.structured_outputs_params import StructuredOutputsParams

MAX_N = 256
MAX_BEAM_WIDTH = 32
MAX_BEAM_STOP_TOKENS = 32
"""Limit of a beam search's end tokens, each of which costs a candidate a beam."""
MAX_LENGTH_PENALTY = 10.0
MAX_LOGPROBS = 20
"""Default of the engine's option `max_logprobs`."""
MOST_LOGPROBS = 2**20
"""Bound of the fields, above the size of any vocabulary."""
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 4096
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_TIMEOUT_SECONDS = 1e9
MAX_PATTERN_TOKENS = 256
"""Longest pattern of a repetition."""
MAX_INTEGER = 2**63 - 1
"""Bound of values without a limit of their own, which must fit the wire and the sampler's columns."""


class RequestOutputKind(enum.IntEnum):
    """Outputs of `AsyncLLM.generate`: all so far, what is new, or the last alone."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class ThinkingBudget(msgspec.Struct, frozen=True):
    """Limit of a sequence's thoughts. starts, ends: token ids of the marks around thoughts; the first end is forced.
    is_open: the sequence begins inside thoughts."""

    num_tokens: int
    starts: list[list[int]]
    ends: list[list[int]]
    is_open: bool


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True):
    """Rule that ends a completion which repeats itself: `min_count` copies in a row of a pattern of `min_pattern_size`
    (0 means 1) to `max_pattern_size` tokens (0: off)."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        _integer("max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_TOKENS)
        _integer("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        if self.max_pattern_size > 0 or self.min_count != 0:
            _integer("min_count", self.min_count, 2, None)


class _NamesTheNearest(type(msgspec.Struct)):  # type: ignore[misc]  # a metaclass that is no plain class
    """Adds the nearest field's name to the error for an unknown keyword."""

    if not TYPE_CHECKING:  # editors would take this signature for the fields'

        def __call__(cls, *arguments: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*arguments, **fields)
            except TypeError:
                for name in fields:
                    if name not in cls.__struct_fields__:
                        nearest = nearest_name(name, cls.__struct_fields__)
                        raise TypeError(f"{cls.__name__} has no field {name!r}{nearest}") from None
                raise


class SamplingParams(
    msgspec.Struct,
    metaclass=_NamesTheNearest,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    repr_omit_defaults=True,
):
    """Sampling settings of one request. Invalid and unsupported values raise UserError with `param` set, here or when a
    field is set. A running request keeps its settings."""

    n: int = 1
    """Number of completions of the prompt. They share its KV blocks."""
    best_of: int | None = None
    """Number of generated completions. The `n` with the highest cumulative log-probability come back, at the end. None:
    `n`."""
    use_beam_search: bool = False
    """Search with `best_of` (else `n`) beams instead of sampling. `n` hypotheses come back, at the end, best first
    (quire/decoding/beam.py)."""
    length_penalty: float = 1.0
    """Exponent p in the rank of a hypothesis of t tokens: cumulative_logprob / t ** p."""
    early_stopping: bool | str = False
    """End of a beam search. True: when there are as many hypotheses as beams. False: when the best live beam would not
    get among them if it ended now. "never": when it could not at any length (the longest counts for length_penalty >
    0)."""
    temperature: float = 1.0
    """Divisor of the logits, from 0 (greedy) to 100."""
    top_p: float = 1.0
    """Smallest total probability of the likeliest tokens that stay, above 0, after `top_k`."""
    top_k: int = 0
    """Number of the likeliest tokens that stay, after the penalties. 0 and -1: all."""
    min_p: float = 0.0
    """Least probability of a token, as a share of the likeliest one's, after `top_p`."""
    presence_penalty: float = 0.0
    """Logit subtracted from each token generated before, from -2 to 2."""
    frequency_penalty: float = 0.0
    """Logit subtracted from a token for each time it was generated before, from -2 to 2."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits and factor of negative ones, for tokens of the prompt and generated ones. At least
    0.01."""
    seed: int | None = None
    """Makes the request's tokens reproducible. None, -1: drawn from the engine's seed."""
    stop: list[str] | str | None = None
    """Strings that end the text. The text excludes them, unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the text, beside the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Leave the stop string at the text's end."""
    bad_words: list[str] | None = None
    """Texts whose token sequences are never generated."""
    logit_bias: dict[int, float] | None = None
    """Token id -> value added to its logit."""
    allowed_token_ids: list[int] | None = None
    """Only tokens that may be generated. None: all."""
    ignore_eos: bool = False
    """Go on after end-of-sequence tokens."""
    max_tokens: int | None = 16
    """Limit of a completion's tokens. None: up to the model's context."""
    min_tokens: int = 0
    """Tokens before which end-of-sequence and stop tokens are banned."""
    logprobs: int | None = None
    """Alternatives reported beside each chosen token, up to the engine's max_logprobs. -1: the whole vocabulary; None:
    no log-probabilities. They are the model's, before temperature, penalties and filters, unless the engine's
    logprobs_mode differs."""
    prompt_logprobs: int | None = None
    """Alternatives reported beside each prompt token, with the values of `logprobs`."""
    truncate_prompt_tokens: int | None = None
    """Prompt tokens kept. -1: as many as fit with max_tokens; None: all."""
    truncation_side: str | None = None
    """Side of the prompt cut: "left" (also None), which keeps its last tokens, or "right"."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Rule that ends a repetitive completion. None: none."""
    timeout_s: float | None = None
    """Seconds from the arrival, waiting included, after which the request ends with its tokens so far (finish reason
    "timeout"). None: no limit."""
    structured_outputs: StructuredOutputsParams | None = None
    """Constraint on the text: StructuredOutputsParams, or its fields in a dictionary."""
    thinking_token_budget: int | None = None
    """Limit of tokens of thoughts; then the mark that ends thoughts follows. None and -1: no limit."""
    num_speculative_tokens: int | None = None
    """Limit of drafts in a step, where the engine makes drafts. 0: none; None: the engine chooses."""
    detokenize: bool = True
    """Return text. False: token ids alone."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Content of each output of AsyncLLM."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt, even if the prefix cache has a part of it."""
    spaces_between_special_tokens: bool = True
    """Without effect."""
    skip_clone: bool = False
    """Without effect."""
    extra_args: dict[str, Any] | None = None
    """Arguments of the engine's logits processors."""
    flat_logprobs: bool | None = False
    """Flat log-probabilities; not supported."""
    logprob_token_ids: list[int] | None = None
    """Tokens whose log-probabilities are reported beside `logprobs`, without ranks. At most max_logprobs."""
    prompt_logprob_token_ids: list[list[int]] | None = None
    """Tokens reported beside each prompt token; not supported."""
    prompt_logprob_start: int | None = None
    """First prompt token reported: 0."""
    stream_interval: int | None = None
    """Tokens between streamed outputs: 1."""
    output_text_buffer_length: int = 0
    """Characters held back from streams: 0."""
    watermarking: bool | None = None
    """Watermark in the text; not supported."""
    routed_experts_prompt_start: int | None = 0
    """First prompt token with experts reported; not supported."""
    trace_decode_token_ids: list[int] | None = None
    """Prescribed tokens; not supported."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _optional_integer("seed", self.seed, MIN_SEED, MAX_SEED)
        if self.seed == -1:  # as in vLLM
            msgspec.structs.force_setattr(self, "seed", None)
        _optional_integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        _optional_integer("logprobs", self.logprobs, -1, MOST_LOGPROBS)
        _optional_integer("prompt_logprobs", self.prompt_logprobs, -1, MOST_LOGPROBS)
        _optional_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None)
        if self.truncate_prompt_tokens == 0:
            raise UserError("truncate_prompt_tokens must be at least 1, or -1, not 0", param="truncate_prompt_tokens")
        if self.truncation_side not in (None, "left", "right"):
            raise UserError(
                f"truncation_side must be 'left' or 'right', not {self.truncation_side!r:.100}", param="truncation_side"
            )
        self._check_for_programs()
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise UserError(f"extra_args must be a dictionary, not {self.extra_args!r:.100}", param="extra_args")
        if type(self.output_kind) is not RequestOutputKind:
            msgspec.structs.force_setattr(self, "output_kind", RequestOutputKind(self.output_kind))
        if self.timeout_s is not None:
            _number("timeout_s", self.timeout_s, 0.0, MAX_TIMEOUT_SECONDS, low_open=True)
        for name, flag in zip(_BOOLEANS, _booleans(self), strict=True):
            if type(flag) is not bool:
                raise UserError(f"{name} must be true or false, not {flag!r}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            values = getattr(self, name)
            _token_ids(name, values)
            # Each id once, so that the vocabulary's size bounds the work for the entries.
            if values is not None and len(different := dict.fromkeys(values)) < len(values):
                msgspec.structs.force_setattr(self, name, list(different))
        if self.logprob_token_ids and self.logprobs is None:
            msgspec.structs.force_setattr(self, "logprobs", 0)
        self._check_best_of()
        self._check_beam_search()
        self._check_stop()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise UserError("allowed_token_ids must name at least one token", param="allowed_token_ids")
        _strings("bad_words", self.bad_words)
        self._check_logit_bias()
        _optional_integer("thinking_token_budget", self.thinking_token_budget, -1, None)
        _optional_integer("num_speculative_tokens", self.num_speculative_tokens, 0, None)
        if self.repetition_detection is not None:
            msgspec.structs.force_setattr(self, "repetition_detection", _repetition(self.repetition_detection))
        if self.structured_outputs is not None:
            msgspec.structs.force_setattr(self, "structured_outputs", _structured_outputs(self.structured_outputs))

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__struct_fields__:
            raise AttributeError(f"SamplingParams has no field {name!r}{nearest_name(name, self.__struct_fields__)}")
        checked = msgspec.structs.replace(self, **{name: value})
        for field in self.__struct_fields__:
            super().__setattr__(field, getattr(checked, field))

    def _check_for_programs(self) -> None:
        for given, (name, (value, reason)) in zip(_unavailable(self), UNAVAILABLE.items(), strict=True):
            if given is not None and given is not value and (type(given) is not type(value) or given != value):
                raise UserError(f"{name} is not supported: {reason}", param=name)
        if not isinstance(self.skip_reading_prefix_cache, bool | None):
            raise UserError("skip_reading_prefix_cache must be true or false", param="skip_reading_prefix_cache")
        kind = self.output_kind
        if type(kind) is not RequestOutputKind and (isinstance(kind, bool) or kind not in tuple(RequestOutputKind)):
            raise UserError(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}", param="output_kind")

    def _check_best_of(self) -> None:
        _optional_integer("best_of", self.best_of, 1, MAX_N)
        if self.best_of is not None and self.best_of < self.n:
            raise UserError(f"best_of ({self.best_of}) must not be less than n ({self.n})", param="best_of")

    def _check_beam_search(self) -> None:
        _number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise UserError(
                f'early_stopping must be true, false or "never", not {self.early_stopping!r}', param="early_stopping"
            )
        if not self.use_beam_search:
            for name, harmless in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != harmless:
                    raise UserError(f"{name} is for beam search: it needs use_beam_search=True", param=name)
            return
        if self.num_sequences > MAX_BEAM_WIDTH:
            name = "n" if self.best_of is None else "best_of"
            raise UserError(f"{name} must be at most {MAX_BEAM_WIDTH} with beam search", param=name)
        if self.logprob_token_ids:
            raise UserError("logprob_token_ids is not supported with beam search", param="logprob_token_ids")
        if self.repetition_detection is not None:
            raise UserError("repetition_detection is not supported with beam search", param="repetition_detection")
        for name, harmless_values in _NOT_FOR_BEAM_SEARCH.items():
            if getattr(self, name) not in harmless_values:
                raise UserError(f"{name} has no meaning in a beam search: leave it out", param=name)
        if self.stop_strings:
            raise UserError("stop strings are not supported with beam search: use stop_token_ids", param="stop")
        if len(self.stop_token_ids or ()) > MAX_BEAM_STOP_TOKENS:
            raise UserError(f"beam search takes at most {MAX_BEAM_STOP_TOKENS} stop tokens", param="stop_token_ids")

    def _check_stop(self) -> None:
        _strings("stop", self.stop_strings)
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise UserError(f"at most {MAX_STOP_STRINGS} stop strings are allowed", param="stop")
        if self.stop_strings and not self.detokenize:
            raise UserError("stop strings need detokenize=True", param="stop")

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict) or len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise UserError(f"logit_bias must map at most {MAX_LOGIT_BIAS} token ids to numbers", param="logit_bias")
        _token_ids("logit_bias", list(self.logit_bias))
        for value in self.logit_bias.values():
            _number("logit_bias", value, -100.0, 100.0)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def has_thinking_budget(self) -> bool:
        return self.thinking_token_budget not in (None, -1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.use_beam_search

    @property
    def num_sequences(self) -> int:
        """Sequences that run: `n`, or `best_of`; with beam search the number of beams."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks_samples(self) -> bool:
        """True when sampled sequences are compared at the end, which needs their log-probabilities."""
        return self.num_sequences > self.n and not self.use_beam_search

    @property
    def answers_at_end(self) -> bool:
        """True when no completion can be reported before all are finished."""
        return self.use_beam_search or self.ranks_samples

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> SamplingParams:
        """SamplingParams of a mapping. Raises UserError, with the nearest field, for an unknown key."""
        for name in options:
            if name not in cls.__struct_fields__:
                nearest = nearest_name(name, cls.__struct_fields__)
                raise UserError(f"unknown sampling parameter {name!r}{nearest}", param=name)
        return cls(**options)


_BOOLEANS = (
    "use_beam_search",
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "skip_clone",
)
UNAVAILABLE: dict[str, tuple[object, str]] = {
    "flat_logprobs": (False, "log-probabilities are one dictionary a token"),
    "prompt_logprob_token_ids": (None, "prompt_logprobs gives the likeliest tokens"),
    "prompt_logprob_start": (0, "prompt_logprobs begins with the prompt"),
    "stream_interval": (1, "each output comes when it is there, and the server's chunks by its own setting"),
    "output_text_buffer_length": (0, "the engine holds back what a stop string may end"),
    "watermarking": (False, "texts get no watermark"),
    "routed_experts_prompt_start": (0, "answers do not tell which experts were used"),
    "trace_decode_token_ids": (None, "tokens are not prescribed; grammars and allowed_token_ids restrict them"),
}
"""vLLM's fields that must be None or have the value here."""
PYTHON_ONLY = (
    *UNAVAILABLE,
    "extra_args",
    "logprob_token_ids",
    "structured_outputs",
    "repetition_detection",
    "output_kind",
    "skip_reading_prefix_cache",
    "spaces_between_special_tokens",
    "skip_clone",
)
"""Fields that only Python callers can set."""
_NOT_FOR_BEAM_SEARCH: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
}
"""Settings of random draws, with the values that change nothing."""


_booleans = attrgetter(*_BOOLEANS)
_unavailable = attrgetter(*UNAVAILABLE)


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if type(value) is float and low < value <= high:
        return
    # An integer is finite, but may be too large for `isfinite`.
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        raise UserError(f"{name} must be a finite number, not {value!r}", param=name)
    if value > high or value < low or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise UserError(f"{name} must be in {bracket}{low:g}, {high:g}], not {value!r}", param=name)


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    if type(value) is int and low <= value <= (high or MAX_INTEGER):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} must be an integer, not {value!r}", param=name)
    if not low <= value <= (MAX_INTEGER if high is None else high):
        limit = f"at least {low}" if high is None and value < low else f"between {low} and {high or MAX_INTEGER}"
        raise UserError(f"{name} must be {limit}, not {value}", param=name)


def _optional_integer(name: str, value: object, low: int, high: int | None) -> None:
    if value is not None:
        _integer(name, value, low, high)


def _token_ids(name: str, values: list[int] | None) -> None:
    if values is None:
        return
    if not isinstance(values, list | tuple):
        raise UserError(f"{name} must be a list of token ids, not {values!r}", param=name)
    # Fast for long lists of valid ids: the wrong entry is searched for only when there is one.
    if not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_INTEGER):
        return
    for value in values:
        _integer(name, value, 0, None)


def _strings(name: str, values: list[str] | None) -> None:
    if values is None:
        return
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) and value for value in values):
        raise UserError(f"{name} must be a list of non-empty strings, not {values!r}", param=name)


def _repetition(given: object) -> RepetitionDetectionParams:
    if isinstance(given, RepetitionDetectionParams):
        return given
    name = "repetition_detection"
    if not isinstance(given, dict):
        raise UserError(f"{name} must be RepetitionDetectionParams, not {type(given).__name__}", param=name)
    reject_unknown(map(str, given), RepetitionDetectionParams.__struct_fields__, f"field of {name}")
    try:
        return RepetitionDetectionParams(**given)
    except UserError as error:
        raise UserError(f"{name}: {error.message}", param=name) from None


def _structured_outputs(given: object) -> StructuredOutputsParams:
    if isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, dict):
        raise UserError(
            f"structured_outputs must be StructuredOutputsParams, not {type(given).__name__}",
            param="structured_outputs",
        )
    reject_unknown(map(str, given), StructuredOutputsParams.__struct_fields__, "field of structured_outputs")
    return StructuredOutputsParams(**given)
