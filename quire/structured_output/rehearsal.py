"""Rehearsal of one text in a fork: compilation and first mask."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from quire.structured_output.forks import be_silent, limit, limit_memory
from quire.structured_output.messages import BlockingReader, Outcome, RehearsalLimits, Try
from quire.utils.child_process import describe_exit
from quire.utils.failures import explain
from quire.utils.frames import encode_frame
from quire.utils.process_memory import own_memory
from quire.utils.sizes import format_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_REASON = 300
MAX_ROW_ITEMS = 20_000
"""Limit of parser items after one token. An object of 2,000 optional properties has 8,000."""
STEP_FUEL = 2_000_000
"""Lexer work for a mask and its following tokens, some 0.15 s."""
ONE_OF = "oneOf is supported where no value follows two of its schemas, by their types or by constants of a property"

ENDS_BY_LIMITS = tuple(
    -number
    for number in (
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGPROF,
        signal.SIGXCPU,
        signal.SIGALRM,
        signal.SIGABRT,
    )
)
"""Statuses of forks ended by their own doing."""


def start_matcher(vocabulary: LLTokenizer, text: str) -> LLMatcher:
    """Compile a grammar, letting other threads run. A bad one does not raise; see `is_error`."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=MAX_ROW_ITEMS, step_lexer_fuel=STEP_FUEL, verbose_errors=False)
    return LLMatcher(vocabulary, text, log_level=0, limits=limits)


def rehearse(connection: socket.socket, vocabulary: LLTokenizer, limits: RehearsalLimits) -> None:
    """Work of a fork: wait for a Try and answer with an Outcome, unless the kernel ends it."""
    limit(resource.RLIMIT_CORE, 0)
    be_silent(0, 1, 2)
    frames = BlockingReader(connection).read()
    if not frames:
        return  # the fork server is gone
    work = msgspec.msgpack.decode(frames[0], type=Try)
    os.nice(work.nice)
    limit_memory(limits.memory)
    signal.setitimer(signal.ITIMER_PROF, work.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, max(work.seconds, 0.001))
    try:
        outcome = outcome_of(vocabulary, work.text)
    except MemoryError:
        outcome = Outcome(out_of_memory(limits))
    except BaseException as error:  # a panic of the native library is no Exception
        outcome = Outcome(in_one_line(explain(error)))
    connection.sendall(encode_frame(outcome))


def outcome_of(vocabulary: LLTokenizer, text: str) -> Outcome:
    before, began = own_memory(), time.thread_time()
    state = start_matcher(vocabulary, text)
    if state.is_error():
        return Outcome(in_one_line(state.get_error()))
    started = time.thread_time()
    state.compute_ff_tokens()
    mask = int.from_bytes(state.compute_bitmask(), "little")
    ended = time.thread_time()
    if state.is_error():
        return Outcome(in_one_line(state.get_error()))
    ends = sum(1 << token_id for token_id in set(vocabulary.eos_tokens))
    first = mask & ~ends
    if not first and not state.is_accepting():
        return Outcome("no text matches it")
    if first and (reason := _failure_behind(state, (first & -first).bit_length() - 1)):
        return Outcome(reason)
    return Outcome("", max(0, own_memory() - before), started - began, ended - started)


def _failure_behind(state: LLMatcher, token_id: int) -> str:
    """Reason why the library fails after a first token; empty: it does not."""
    if state.consume_token(token_id) and not state.is_stopped():
        state.compute_bitmask()
    reason = state.get_error() if state.is_error() else ""
    return "" if reason.startswith("NoExtension") else in_one_line(reason)


def why_it_ended(status: int, limits: RehearsalLimits) -> str:
    """Reason against a text whose fork ended with this `returncode`."""
    if status == -signal.SIGSEGV or status == -signal.SIGBUS:
        return "its parts are nested, or refer to one another, too deeply"
    if status == -signal.SIGPROF or status == -signal.SIGXCPU:
        return f"it takes longer than {limits.cpu_seconds[-1]:g} s of processor time to compile: make it simpler"
    if status == -signal.SIGALRM:
        return too_late(limits)
    if status == -signal.SIGABRT:
        return out_of_memory(limits)
    return f"the process that compiles it {describe_exit(status)}, twice"


def too_late(limits: RehearsalLimits) -> str:
    return f"it takes longer than {limits.seconds:g} s to compile: make it simpler"


def out_of_memory(limits: RehearsalLimits) -> str:
    return f"it takes more than {format_bytes(limits.memory)} of memory to compile: make it simpler"


def in_one_line(reason: str) -> str:
    text = " ".join(reason.split())
    if text.startswith("NoExtension"):
        text = "no token of this model continues the text"
    if "coerce_one_of" in text:  # an option of the library, which requests cannot set
        text = ONE_OF
    return text[:MAX_REASON]
