"""The front end's half: from a request's StructuredOutputsParams to a grammar that is known to compile.

It is compiled here only to refuse a bad one before anything runs; the engine core, which needs the masks, compiles it
again (quire/structured_output/masks.py). A grammar's text is what goes from one to the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.errors import UserError, is_interrupt
from quire.structured_output.grammar import refusal, write_grammar
from quire.structured_output.vocabulary import check_tokenizer, make_names
from quire.structured_outputs_params import CONSTRAINTS, StructuredOutputsParams
from quire.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_SECONDS = 10.0
MAX_KEPT = 256
"""Grammars known to compile. Their texts are kept, and are what limits the memory: most have a few kilobytes."""
MAX_KEPT_CHARACTERS = 2**24
MAX_THREADS = 2


class GrammarCompiler:
    """Checks grammars, and remembers those that it has seen. Thread-safe; makes its threads and its vocabulary when the
    first request asks for them."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.config = StructuredOutputsConfig()
        """What holds for every constraint; engines set it before the first."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._names: LLTokenizer | None = None
        self._known: OrderedDict[str, None] = OrderedDict()
        self._num_characters = 0

    def compile(self, params: StructuredOutputsParams) -> str:
        """The grammar, checked. Waits at most COMPILE_SECONDS. Raises UserError with the reason in one line."""
        try:
            return self.submit(params).result(COMPILE_SECONDS)
        except TimeoutError:
            raise too_slow() from None

    def submit(self, params: StructuredOutputsParams) -> Future[str]:
        """`compile` on another thread, without a limit of time: the limits of llguidance end it."""
        check_tokenizer(self._tokenizer)
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="quire-grammar")
            return self._threads.submit(self._compile, params)

    def close(self) -> None:
        """Compile nothing more. Idempotent."""
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, params: StructuredOutputsParams) -> str:
        tokenizer = check_tokenizer(self._tokenizer)
        special = {tokenizer.token_text(each): each for each in tokenizer.special_ids if each < self._vocab_size}
        grammar = write_grammar(self.config.apply(params), special)
        if self._is_known(grammar):
            return grammar
        name = next(name for name in CONSTRAINTS if getattr(params, name) not in (None, False))
        try:
            reason = self._reason_against(grammar)
        except BaseException as error:  # a panic of the native library is no Exception
            if is_interrupt(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        if reason:
            raise refusal(name, reason)
        self._remember(grammar)
        return grammar

    def _reason_against(self, grammar: str) -> str:
        """Why a grammar cannot be used; empty: it can."""
        names = self._special_names()
        state = start_matcher(names, grammar)
        if state.is_error():
            return state.get_error()
        import numpy as np  # the server starts without it

        mask = np.frombuffer(state.compute_bitmask(), np.uint8)
        if state.is_error():
            return state.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if not set(allowed.tolist()) - set(names.eos_tokens) and not state.is_accepting():
            return "no text matches it"
        return ""

    def _special_names(self) -> LLTokenizer:
        with self._lock:
            if self._names is None:
                tokenizer = check_tokenizer(self._tokenizer)
                self._names = make_names(tokenizer, self._vocab_size, self._eos_token_ids)
            return self._names

    def _is_known(self, grammar: str) -> bool:
        with self._lock:
            is_known = grammar in self._known
            if is_known:
                self._known.move_to_end(grammar)
            return is_known

    def _remember(self, grammar: str) -> None:
        with self._lock:
            if grammar not in self._known:
                self._known[grammar] = None
                self._num_characters += len(grammar)
            while len(self._known) > MAX_KEPT or self._num_characters > MAX_KEPT_CHARACTERS:
                self._num_characters -= len(self._known.popitem(last=False)[0])


def start_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar. Never raises for a bad one: `is_error` says so. Lets other threads run."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


async def compiled(compiling: Future[str]) -> str:
    """As `GrammarCompiler.compile`, for what `submit` returned, on an event loop."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(compiling), COMPILE_SECONDS)
    except TimeoutError:
        raise too_slow() from None


def too_slow() -> UserError:
    return UserError(
        f"the constraint takes longer than {COMPILE_SECONDS:g} s to compile: make it simpler",
        param="structured_outputs",
    )
