"""The engine core's half: the masks of requests with a grammar. Implements `quire.decoding.masks.MaskSource`."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.decoding.masks import ConstraintSpec, mask_of
from quire.errors import UserError, is_interrupt
from quire.logging import get_logger
from quire.structured_output.compiler import start_matcher
from quire.structured_output.vocabulary import check_tokenizer, make_vocabulary
from quire.tokenization.tokenizer import Tokenizer
from quire.utils.failures import explain

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = get_logger(__name__)

MAX_KEPT = 64
"""Compiled grammars that are kept beside those in use."""


class GrammarMasks:
    """Compiles grammars on one thread of its own, and keeps the latest. Used by the engine core's thread."""

    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer | None], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """load_tokenizer: called once, on that thread. eos_token_ids: the model's; they and the tokenizer's own end a
        text."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._vocabulary: MaskVocabulary | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._is_preparing = False

    def constraint(self, text: str) -> Grammar:
        grammar = self._kept.pop(text, None)
        if grammar is None or grammar.has_failed:
            grammar = Grammar(self._start_thread().submit(self._compile, text))
        self._kept[text] = grammar
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return grammar

    def prepare(self) -> None:
        """Make the vocabulary, which holds the interpreter for most of a second: better before requests come than
        among them. A tokenizer that cannot be used is the first constraint's error."""
        if not self._is_preparing:
            self._is_preparing = True
            self._start_thread().submit(self._made_vocabulary)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _start_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        return self._thread

    def _made_vocabulary(self) -> MaskVocabulary:
        """On the thread. Raises UserError for a tokenizer that cannot be used."""
        if self._vocabulary is None:
            started = time.perf_counter()
            tokenizer = check_tokenizer(self._load_tokenizer())
            ends = [token_id for token_id in tokenizer.ends(self._eos_token_ids) if 0 <= token_id < self._vocab_size]
            buffer = MaskBuffer(self._vocab_size, has_end=bool(ends))
            tokens = make_vocabulary(tokenizer, self._vocab_size, ends)
            self._vocabulary = MaskVocabulary(tokens, packed(ends, buffer.size), buffer)
            logger.info("the vocabulary for structured outputs took %.2f s", time.perf_counter() - started)
        return self._vocabulary

    def _compile(self, text: str) -> tuple[LLMatcher, MaskVocabulary]:
        """On the thread. Raises UserError."""
        try:
            vocabulary = self._made_vocabulary()
            state = start_matcher(vocabulary.tokens, text)
        except UserError:
            raise
        except BaseException as error:  # a panic of the native library is no Exception
            if is_interrupt(error):
                raise
            raise unusable(explain(error)) from error
        if state.is_error():
            raise unusable(state.get_error())
        return state, vocabulary


class MaskBuffer:
    """Where llguidance writes the masks of one thread, one after the other: that takes 12 us less than the bytes that
    `compute_bitmask` makes of a vocabulary of 150,000 tokens."""

    def __init__(self, vocab_size: int, *, has_end: bool) -> None:
        """has_end: a token of the model ends texts; else one behind its vocabulary does (`make_vocabulary`), which the
        masks leave out."""
        self.size = 4 * -(-vocab_size // 32)
        self._bytes = np.empty(self.size if has_end else 4 * (vocab_size // 32 + 1), np.uint8)
        self._address = self._bytes.ctypes.data

    def mask_of(self, state: LLMatcher) -> bytes:
        state.unsafe_compute_mask_ptr(self._address, len(self._bytes))
        return self._bytes[: self.size].tobytes()


class MaskVocabulary(NamedTuple):
    """A model's tokens. eos_bits: [bytes of a mask] uint8, the tokens that end a text. buffer: where its masks are
    written."""

    tokens: LLTokenizer
    eos_bits: np.ndarray
    buffer: MaskBuffer


class Grammar:
    """A grammar that is compiled, or is being compiled. Implements Constraint."""

    def __init__(self, compiling: Future[tuple[LLMatcher, MaskVocabulary]]) -> None:
        self._compiling = compiling

    @property
    def is_ready(self) -> bool:
        return self._compiling.done()

    @property
    def has_failed(self) -> bool:
        return self._compiling.done() and self._compiling.exception() is not None

    def matcher(self, spec: ConstraintSpec, token_ids: Sequence[int]) -> GrammarMatcher:
        start, vocabulary = self._compiling.result()
        matcher = GrammarMatcher(start.deep_copy(), spec, vocabulary.eos_bits, vocabulary.buffer)
        for token_id in token_ids:
            matcher.accept(token_id)
        return matcher


class GrammarMatcher:
    """Implements Matcher."""

    def __init__(self, state: LLMatcher, spec: ConstraintSpec, eos_bits: np.ndarray, buffer: MaskBuffer) -> None:
        self._state = state
        self._buffer = buffer
        num_bytes = buffer.size
        self._eos_bits = eos_bits if spec.ignore_eos else None
        self._allowed = None if spec.allowed_token_ids is None else packed(spec.allowed_token_ids, num_bytes)
        self._start_after = list(spec.start_after)
        self._recent: deque[int] = deque(maxlen=len(self._start_after))
        self.is_finished = self.ends_in_text = False

    def accept(self, token_id: int) -> bool:
        if self._start_after:
            self._recent.append(token_id)
            if list(self._recent) == self._start_after:
                self._start_after = []
            return True
        state = self._state
        if self.is_finished or not state.consume_token(token_id):
            return False
        if state.is_stopped() and not state.is_error():
            self.is_finished, self.ends_in_text = True, state.stop_reason() != "EndOfSentence"
        return True

    def forced_token(self) -> int | None:
        if self._start_after or self.is_finished:
            return None
        tokens = self._state.compute_ff_tokens()
        if not tokens or (self._allowed is not None and not self._allowed[tokens[0] // 8] >> tokens[0] % 8 & 1):
            return None
        return tokens[0]

    def mask(self) -> bytes | None:
        if self._start_after:
            return None
        state = self._state
        mask = self._buffer.mask_of(state)
        if state.is_error():
            raise unusable(state.get_error())
        if self._eos_bits is not None:
            others = np.frombuffer(mask, np.uint8) & ~self._eos_bits
            mask = others.tobytes() if others.any() else mask
        if self._allowed is not None and not (np.frombuffer(mask, np.uint8) & self._allowed).any():
            raise UserError(
                "no token of allowed_token_ids can come next under the constraint of structured_outputs",
                param="allowed_token_ids",
            )
        return mask

    def mask_of(self, *token_ids: int) -> bytes:
        return mask_of(token_ids, self._buffer.size)

    def copy(self) -> GrammarMatcher:
        found = copy.copy(self)
        found._state, found._recent = self._state.deep_copy(), self._recent.copy()
        return found


def packed(token_ids: Sequence[int], num_bytes: int) -> np.ndarray:
    """[num_bytes] uint8: a bit for each token."""
    bits = np.zeros(8 * num_bytes, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little")


def unusable(reason: str) -> UserError:
    text = " ".join(reason.split())
    if text.startswith("NoExtension"):
        text = "no token of this model continues the text"
    return UserError(
        f"the constraint of structured_outputs cannot be followed: {text[:300]}", param="structured_outputs"
    )
