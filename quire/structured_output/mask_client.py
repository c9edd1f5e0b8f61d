"""Client of the mask process."""

from __future__ import annotations

import heapq
import itertools
import os
import socket
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.errors import UserError
from quire.logging import get_logger
from quire.structured_output.mask_memory import MIN_SLOTS, Busy, MaskMemory, make_memory, num_mask_bytes
from quire.structured_output.mask_process import NUM_THREADS
from quire.structured_output.messages import Copy, Done, FrameConnection, Grammar, MaskWork
from quire.structured_output.remote_matcher import NO_SLOT, RemoteMatcher, too_much_work

if TYPE_CHECKING:
    from quire.structured_output.remote_matcher import ConstraintText

logger = get_logger(__name__)

PREFIX = "the constraint of structured_outputs cannot be followed: "
CULPRIT = "the process that makes masks crashes or hangs at it"

MAX_GRAMMARS = 64
"""Limit of kept unused grammars."""
MAX_GRAMMAR_BYTES = 512 * 2**20
"""Memory limit of all grammars, measured as their rehearsals' growth."""
MAX_IDLE_GRAMMAR_BYTES = 32 * 2**20
IDLE_SECONDS = 10.0
"""Seconds without a matcher after which grammars above MAX_IDLE_GRAMMAR_BYTES go, oldest first."""
SMALL_GRAMMAR_BYTES = 8 * 2**20
"""Largest grammar that never waits for room."""
HANG_SECONDS = 10.0
"""Longest seconds for one token, mask or idle message."""
ALONE_SECONDS = 1.0
"""Longest seconds for which all others wait while one matcher is tried."""
LOOK_SECONDS = 1.0
"""Seconds between two checks for hangs and unused grammars."""
MAX_DEATHS = 5
DEATH_SECONDS = 60.0
"""Idle mask process's deaths in DEATH_SECONDS beyond which all matchers fail."""


@dataclass(slots=True)
class KeptGrammar:
    """Grammar that the mask process keeps. number: id in the mask process. used_at: time.monotonic() when a matcher was
    last seen."""

    number: int
    size: int
    used_at: float


class MaskClient:
    """Engine core's side of the mask process: collects questions, takes answers, replaces a process that died or hangs.
    Used by one thread, except `ended_slots`, to which any may add."""

    def __init__(
        self, vocab_size: int, start: Callable[[int, int], None], condemn: Callable[[ConstraintText, str], None]
    ) -> None:
        """start: start a mask process with the descriptors (connection, memory), and close them. condemn: refuse a text
        from now on."""
        self._vocab_size = vocab_size
        self._start = start
        self._condemn = condemn
        self.num_mask_bytes = num_mask_bytes(vocab_size)
        self.connection: FrameConnection | None = None
        self._memory: MaskMemory | None = None
        self.is_starting = False
        """True until the process has answered; the fork server may have died instead of starting it."""
        self._decoder = msgspec.msgpack.Decoder(Done)
        self._serials = itertools.count(1)
        self._matchers: dict[int, weakref.ref[RemoteMatcher]] = {}
        self.ended_slots: deque[int] = deque()
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._known: set[int] = set()
        """Slots that the process knows."""
        self._missing: set[int] = set()
        """Slots without a complete answer."""
        self._waiting: deque[weakref.ref[RemoteMatcher]] = deque()
        """Matchers to make in the process once their grammars have room."""
        self._copies: list[tuple[RemoteMatcher, RemoteMatcher, bool]] = []
        self._advances: list[RemoteMatcher] = []
        self._grammars: OrderedDict[str, KeptGrammar] = OrderedDict()
        """Text -> grammar in the process, the last requested last."""
        self._ended_grammars: list[int] = []
        """Numbers of grammars that the process must drop."""
        self._numbers = itertools.count(1)
        self._unsettled: list[RemoteMatcher] = []
        """Matchers with news since the last `settle`."""
        self.num_settled = 0
        """Matchers with news in the last `settle`."""
        self._last_sign = self._next_check = self._next_trim = 0.0
        self._suspects: deque[weakref.ref[RemoteMatcher]] = deque()
        """Matchers at work when the process died, to be tried one at a time."""
        self._tried: weakref.ref[RemoteMatcher] | None = None
        self._is_strict = False
        """A matcher is tried while no other one is at work."""
        self._alone_until = 0.0
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        """Latest deaths without a responsible sequence."""

    # What matchers ask

    def next_serial(self) -> int:
        return next(self._serials)

    def add(self, matcher: RemoteMatcher) -> None:
        self._waiting.append(weakref.ref(matcher))

    def advance(self, matcher: RemoteMatcher) -> None:
        self._advances.append(matcher)

    def copy(self, matcher: RemoteMatcher, source: RemoteMatcher, *, wants_mask: bool) -> None:
        self._give_slot(matcher)
        self._copies.append((matcher, source, wants_mask))

    def read(self, slot: int) -> bytes:
        assert self._memory is not None
        return self._memory.read(slot, self.num_mask_bytes)

    # Messages

    def flush(self) -> None:
        if self._tried is not None or self._suspects:
            self._try_next()
        if not (self._advances or self._waiting or self._copies or self.ended_slots or self._ended_grammars):
            return
        self.trim()
        if self.connection is None and not (self._waiting or self._copies):
            self._take_ended()
            return
        connection = self.connection or self._start_process()
        if connection is None:
            return
        work = MaskWork(0, self._take_ended() if self.ended_slots else [], [], [], [], [], [])
        if self._tried is None or not self._is_one_alone():
            self._add_copies(work)
            self._add_advances(work)
        if self._waiting:
            self._add_news(work)
        work.ended_grammars, self._ended_grammars = self._ended_grammars, []
        work.num_slots = self._num_slots
        connection.send(work)

    def _add_copies(self, work: MaskWork) -> None:
        for matcher, source, wants_mask in self._copies:
            if not source.is_made:
                self._waiting.append(weakref.ref(matcher))
            elif matcher.is_held:
                matcher.is_held, matcher.is_made = False, True
                self._known.add(matcher.slot)
                work.copies.append(Copy(matcher.slot, matcher.serial, source.slot, wants_mask))
                self._miss(matcher)
        self._copies.clear()

    def _add_advances(self, work: MaskWork) -> None:
        advances, self._advances = self._advances, []
        for matcher in advances:
            advance = matcher.advanced()
            if advance is not None and not matcher.is_held and matcher.error is None:
                work.advances.append(advance)
                self._miss(matcher)

    def _add_news(self, work: MaskWork) -> None:
        waiting, self._waiting = self._waiting, deque()
        alone = self._tried() if self._tried is not None and self._is_one_alone() else None
        for reference in waiting:
            matcher = reference()
            if matcher is None or matcher.error is not None or not matcher.is_held:
                continue
            if alone is not None and matcher is not alone:
                self._waiting.append(reference)
                continue
            number = self._grammar_number(matcher.constraint.text, work)
            if number is None:
                self._waiting.append(reference)
                continue
            if matcher.slot == NO_SLOT:
                self._give_slot(matcher)
            matcher.is_held = False
            self._known.add(matcher.slot)
            work.news.append(matcher.new(number))
            advance = matcher.advanced()
            if advance is not None:
                work.advances.append(advance)
            self._miss(matcher)

    def _miss(self, matcher: RemoteMatcher) -> None:
        if matcher.has_all:
            return
        if not self._missing:
            self._last_sign = time.monotonic()
        self._missing.add(matcher.slot)

    def receive(self) -> bool:
        """Process the messages that have come. False: there were none."""
        connection = self.connection
        if connection is None:
            return False
        if connection.has_unsent:
            connection.pump()
        frames = connection.receive()
        for frame in frames:
            self._take(self._decoder.decode(frame))
        if frames:
            self._last_sign = time.monotonic()
            self.is_starting = False
        elif connection.is_at_end:
            self._restart([busy.slot for busy in self._busy()])
        return bool(frames)

    def _take(self, done: Done) -> None:
        matchers = self._matchers
        for answer in done.answers:
            reference = matchers.get(answer.slot)
            matcher = None if reference is None else reference()
            if matcher is not None and answer.serial == matcher.serial:
                matcher.take_answer(answer)
                self._note(matcher)
        for masked in done.masks:
            matcher = self._matcher(masked.slot)
            if matcher is not None and masked.serial == matcher.serial:
                matcher.take_mask(masked)
                self._note(matcher)

    def _note(self, matcher: RemoteMatcher) -> None:
        self._unsettled.append(matcher)
        if matcher.has_all:
            self._missing.discard(matcher.slot)
        if matcher.constraint.is_exhausted and matcher.error is None:
            for each in self._live():
                if each.constraint is matcher.constraint:
                    self._fail(each, too_much_work())

    def settle(self) -> None:
        self.num_settled = len(self._unsettled)
        for matcher in self._unsettled:
            matcher.settle()
        self._unsettled.clear()

    def _fail(self, matcher: RemoteMatcher, error: UserError) -> None:
        matcher.fail(error)
        self._missing.discard(matcher.slot)
        self._unsettled.append(matcher)

    def refuse(self, matcher: RemoteMatcher, error: UserError) -> None:
        self._fail(matcher, error)

    def fail_all(self, error: UserError) -> None:
        for matcher in self._live():
            self._fail(matcher, error)

    # Slots and grammars

    def _matcher(self, slot: int) -> RemoteMatcher | None:
        reference = self._matchers.get(slot)
        return None if reference is None else reference()

    def _live(self) -> list[RemoteMatcher]:
        found = {
            id(matcher): matcher for slot in sorted(self._matchers) if (matcher := self._matcher(slot)) is not None
        }
        found |= {id(matcher): matcher for each in self._waiting if (matcher := each()) is not None}
        return list(found.values())

    def _give_slot(self, matcher: RemoteMatcher) -> None:
        matcher.slot = self.take_slot(matcher)

    def take_slot(self, matcher: RemoteMatcher) -> int:
        """Slot for another mask of a matcher, which frees it at its end."""
        if not self._free_slots:
            more = max(MIN_SLOTS, self._num_slots)
            self._free_slots = list(range(self._num_slots, self._num_slots + more))
            self._num_slots += more
            if self._memory is not None:
                self._memory.hold(self._num_slots)
        slot = heapq.heappop(self._free_slots)
        self._matchers[slot] = weakref.ref(matcher)
        return slot

    def _take_ended(self) -> list[int]:
        ended = []
        while self.ended_slots:
            slot = self.ended_slots.popleft()
            del self._matchers[slot]
            heapq.heappush(self._free_slots, slot)
            self._missing.discard(slot)
            if slot in self._known:
                self._known.discard(slot)
                ended.append(slot)
        if ended and not self._matchers and self._memory is not None and self._num_slots > MIN_SLOTS:
            self._memory.forget()
        return ended

    def _grammar_number(self, text: ConstraintText, work: MaskWork) -> int | None:
        """Number of a text's grammar, which is sent if new; None: no room yet."""
        known = self._grammars.get(text.text)
        if known is not None:
            self._grammars.move_to_end(text.text)
            known.used_at = time.monotonic()
            return known.number
        outcome = text.outcome
        assert outcome is not None, "matchers are made of texts that were rehearsed"
        if not self._make_room(outcome.growth):
            return None
        number = next(self._numbers)
        self._grammars[text.text] = KeptGrammar(number, outcome.growth, time.monotonic())
        work.grammars.append(Grammar(number, text.text, outcome.compile_seconds, outcome.seconds))
        return number

    def _make_room(self, size: int) -> bool:
        """Drop unused grammars, the least recently used first, until a new one of `size` bytes fits. False: it must
        wait."""
        total = size + sum(each.size for each in self._grammars.values())
        if total <= MAX_GRAMMAR_BYTES and len(self._grammars) < MAX_GRAMMARS:
            return True
        idle = deque(self._idle_grammars())
        while idle and (total > MAX_GRAMMAR_BYTES or len(idle) >= MAX_GRAMMARS):
            total -= self._drop(idle.popleft())
        is_only_large = all(each.size <= SMALL_GRAMMAR_BYTES for each in self._grammars.values())
        return total <= MAX_GRAMMAR_BYTES or size <= SMALL_GRAMMAR_BYTES or is_only_large

    def trim(self) -> None:
        """Drop grammars unused for a while; the next `flush` tells the process."""
        now = time.monotonic()
        if not self._grammars or now < self._next_trim:
            return
        self._next_trim = now + LOOK_SECONDS
        idle = self._idle_grammars()
        for text in self._grammars.keys() - set(idle):
            self._grammars[text].used_at = now
        total = sum(self._grammars[text].size for text in idle)
        for text in idle:
            if total > MAX_IDLE_GRAMMAR_BYTES and now - self._grammars[text].used_at > IDLE_SECONDS:
                total -= self._drop(text)

    def _idle_grammars(self) -> list[str]:
        used = {matcher.constraint.text.text for slot in self._known if (matcher := self._matcher(slot)) is not None}
        return [text for text in self._grammars if text not in used]

    def _drop(self, text: str) -> int:
        dropped = self._grammars.pop(text)
        self._ended_grammars.append(dropped.number)
        return dropped.size

    # Deaths

    def check(self) -> None:
        """Replace a hanging process: one token or mask takes longer than HANG_SECONDS, or it is silent."""
        now = time.monotonic()
        if not self._missing or now < self._next_check:
            return
        self._next_check = now + LOOK_SECONDS
        busy = self._busy()
        late = [each.slot for each in busy if now - each.since > HANG_SECONDS]
        if late or (not busy and now - self._last_sign > HANG_SECONDS):
            self._restart(late, is_hang=True)

    def start_again(self) -> None:
        """Restart after the fork server's death, which ends the mask process too."""
        if self.connection is not None:
            self._restart([])

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _busy(self) -> list[Busy]:
        return [] if self._memory is None else self._memory.busy(NUM_THREADS)

    def _start_process(self) -> FrameConnection | None:
        try:
            ours, theirs = socket.socketpair()
            self.connection = FrameConnection(ours)
            with theirs:
                descriptor = make_memory()
                self._memory = MaskMemory(descriptor, self._vocab_size)
                if not self._num_slots:
                    self._num_slots = self._memory.num_slots
                    self._free_slots = [slot for slot in range(self._num_slots) if slot not in self._matchers]
                self._memory.hold(self._num_slots)
                self._last_sign = time.monotonic()
                self.is_starting = True
                memory = os.dup(descriptor)
                self._start(theirs.detach(), memory)
        except OSError as error:  # no memory or descriptors for a moment
            logger.warning("the process that makes masks cannot be started: %s", error)
            self._restart([])
        return self.connection

    def _restart(self, slots: list[int], *, is_hang: bool = False) -> None:
        """Go on without the process, which died or hangs at work for these slots."""
        self.close()
        at_work = [matcher for slot in slots if (matcher := self._matcher(slot)) is not None]
        tried = None if self._tried is None else self._tried()
        how = "hangs" if is_hang else "has ended"
        logger.warning("the process that makes masks %s at work for %d sequences", how, len(at_work))
        suspects = [matcher for each in self._suspects if (matcher := each()) is not None]
        if tried is not None and at_work == [tried]:
            self._end_culprit(tried)
        else:
            self._is_strict = tried is not None
            suspects = [*([tried] if tried is not None else []), *suspects]
            suspects += [matcher for matcher in at_work if matcher not in suspects]
        self._suspects, self._tried = deque(map(weakref.ref, suspects)), None
        if not at_work and self._dies_again_and_again():
            self.fail_all(out_of_order())
        live = self._live()
        self._known.clear()
        self._missing.clear()
        self._grammars.clear()
        self._ended_grammars.clear()
        self._copies.clear()
        self._advances.clear()
        self._waiting.clear()
        for matcher in live:
            if matcher.error is None:
                matcher.start_again(is_suspect=matcher in suspects)
                self._unsettled.append(matcher)
                if matcher not in suspects:
                    self._waiting.append(weakref.ref(matcher))

    def _dies_again_and_again(self) -> bool:
        self._deaths.append(time.monotonic())
        return len(self._deaths) > MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATH_SECONDS

    def _end_culprit(self, culprit: RemoteMatcher) -> None:
        self._condemn(culprit.constraint.text, CULPRIT)
        for matcher in self._live():
            if matcher.constraint is culprit.constraint:
                self._fail(matcher, UserError(f"{PREFIX}{CULPRIT}", param="structured_outputs"))

    def _try_next(self) -> None:
        tried = None if self._tried is None else self._tried()
        if tried is not None and not tried.has_all:
            return
        self._tried = None
        while self._suspects and self._tried is None:
            suspect = self._suspects.popleft()()
            if suspect is not None and suspect.error is None:
                self._tried = weakref.ref(suspect)
                self._waiting.append(self._tried)
                self._alone_until = time.monotonic() + ALONE_SECONDS if self._is_strict else 0.0
        self._is_strict = self._is_strict and self._tried is not None

    def _is_one_alone(self) -> bool:
        return self._tried is not None and time.monotonic() < self._alone_until


def out_of_order() -> UserError:
    return UserError(
        "structured outputs are out of order: the processes that make masks end again and again",
        param="structured_outputs",
    )
