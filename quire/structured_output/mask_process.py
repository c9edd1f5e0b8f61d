"""Mask process: a fork of the fork server that compiles rehearsed grammars and makes an engine's masks, in shared
memory."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import msgspec

from quire.decoding.masks import drafts_behind
from quire.errors import UserError
from quire.structured_output.forks import limit_memory
from quire.structured_output.mask_memory import MaskMemory, MaskScratch
from quire.structured_output.messages import (
    Advance,
    BlockingReader,
    Copy,
    Done,
    Grammar,
    Masked,
    MaskWork,
    MatcherAnswer,
    New,
    RehearsalLimits,
)
from quire.structured_output.rehearsal import in_one_line, start_matcher
from quire.structured_output.sequence_state import NO_TOKEN, MaskShape, SequenceState, unusable
from quire.utils.failures import explain
from quire.utils.frames import encode_frame
from quire.utils.process_memory import give_back_memory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NUM_THREADS = 3
SLOW_THREAD = 2
"""Thread of slow sequences. One of the others leads."""
SLOW_NICE = 5
STACK = 2
"""Stack of each thread relative to a rehearsal's."""
MEMORY = 2
"""Memory relative to a rehearsal's, above the fork's own."""
SLOW_SECONDS = 0.003
"""Processor seconds of a token and its mask that make a sequence slow."""
SLOW_TOKENS = 4
"""Quick masks in a row after which a sequence is no longer slow."""
BRIEF_SECONDS = 0.0001
"""Processor seconds of a mask up to which an answer waits for it."""
PATIENCE = 0.004
"""Longest seconds of one piece of work before another thread leads."""
IDLE_SECONDS = 0.05
"""Seconds without a message after which the standby thread stops looking."""
SWITCH_SECONDS = 0.0005
"""`sys.setswitchinterval` of the mask process."""


NO_DRAFTS: list[tuple[int, int]] = []


class Slot:
    """Sequence in the mask process. Its tasks are done in order, one at a time."""

    def __init__(self, number: int, charge: int, seconds: float, compiled: Compiled) -> None:
        """number: index of its mask in shared memory. charge: number of its request, for fair turns. seconds: known
        processor time of a mask."""
        self.number = number
        self.compiled = compiled
        self.charge = charge
        self.lock = threading.Lock()
        self.state: SequenceState | None = None
        self.serial = 0
        self.is_ended = False
        self.mask_seconds = seconds
        """Processor seconds of its last mask."""
        self.num_slow = SLOW_TOKENS if seconds > SLOW_SECONDS else 0
        self.drafts = NO_DRAFTS
        """(draft token, slot of the mask after it)."""
        self.unanswered: deque[Task] = deque()
        """Tasks with tokens. Only the first is queued or in progress."""
        self.failure = ""
        """Reason why the matcher could not start."""

    def note(self, seconds: float) -> None:
        if seconds > SLOW_SECONDS:
            self.num_slow = SLOW_TOKENS

    def note_mask(self, seconds: float) -> None:
        self.mask_seconds = seconds
        if self.num_slow:
            self.num_slow -= 1
        self.note(seconds)


class Compiled:
    def __init__(self, grammar: Grammar) -> None:
        self._text = grammar.text
        self.seconds = grammar.seconds
        self._compile_seconds = grammar.compile_seconds
        self._lock = threading.Lock()
        self._start: LLMatcher | None = None

    @property
    def is_slow(self) -> bool:
        """True if it is not compiled yet and that takes long."""
        return self._start is None and self._compile_seconds > SLOW_SECONDS

    def start(self, vocabulary: LLTokenizer) -> LLMatcher:
        """New library matcher at the grammar's start. Raises UserError."""
        with self._lock:
            if self._start is None:
                start = start_matcher(vocabulary, self._text)
                if start.is_error():
                    raise UserError(in_one_line(start.get_error()))
                self._start = start
            return self._start.deep_copy()

    def check(self) -> None:
        """Drop the matcher if it makes no masks any more, after a copy of it has failed."""
        with self._lock:
            if self._start is not None:
                state = self._start.deep_copy()
                state.compute_bitmask()
                if state.is_error():
                    self._start = None


class Task:
    """Work for one slot: tokens with their answer, or its mask. is_slow: done by the slow thread. with_mask: the answer
    comes with the mask."""

    __slots__ = ("compiled", "is_slow", "mask_serial", "slot", "with_mask", "work")

    def __init__(
        self, slot: Slot, work: New | Advance | None, compiled: Compiled | None = None, mask_serial: int = 0
    ) -> None:
        self.slot = slot
        self.work = work
        self.compiled = compiled
        self.mask_serial = mask_serial
        self.is_slow = slot.num_slow > 0 or (compiled is not None and compiled.is_slow)
        self.with_mask = self.is_slow or (type(work) is Advance and work.with_mask)


class SlowTasks:
    """Tasks of slow sequences, by requests in turns."""

    def __init__(self) -> None:
        self._charges: OrderedDict[int, deque[Task]] = OrderedDict()

    def add(self, task: Task) -> None:
        self._charges.setdefault(task.slot.charge, deque()).append(task)

    def take(self) -> Task | None:
        if not self._charges:
            return None
        charge, tasks = self._charges.popitem(last=False)
        task = tasks.popleft()
        if tasks:
            self._charges[charge] = tasks
        return task


class MaskProcess:
    """Slots, grammars and tasks, under one lock held for moments only."""

    def __init__(
        self, connection: socket.socket, memory: MaskMemory, vocabulary: LLTokenizer, shape: MaskShape
    ) -> None:
        self._connection = connection
        self._reader = BlockingReader(connection)
        self._memory = memory
        self._vocabulary = vocabulary
        self._shape = shape
        self._decoder = msgspec.msgpack.Decoder(MaskWork)
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._message_came = threading.Condition(self._lock)
        self._slow_came = threading.Condition(self._lock)
        self._leader = 0
        """Thread that reads messages and does quick work."""
        self._began = 0.0
        """time.monotonic() when the leader began its piece of work; 0.0: it reads."""
        self._last_message = 0.0
        self._is_asleep = False
        """True while the standby thread waits for a message without looking."""
        self._firsts: deque[Task] = deque()
        """Answers without masks, which the engine core waits for."""
        self._masks: deque[Task] = deque()
        self._slow = SlowTasks()
        self._answers: list[MatcherAnswer] = []
        self._masked: list[Masked] = []
        self._whole: list[MatcherAnswer] = []
        """Answers to send when no mask is left to make."""
        self._slots: dict[int, Slot] = {}
        self._grammars: dict[int, Compiled] = {}
        self._consume_apart = ConsumeApart(vocabulary)

    def work(self, thread: int) -> None:
        """Do tasks and read messages until the engine core is gone."""
        try:
            scratch = MaskScratch(self._shape.num_written)
            turn = self._turn
            if thread == SLOW_THREAD:
                turn = self._slow_turn
                be_nice(threading.get_native_id())
            while True:
                turn(thread, scratch)
        except BaseException:  # the engine core starts another process
            traceback.print_exc()
        finally:
            os._exit(1)

    def _turn(self, thread: int, scratch: MaskScratch) -> None:
        with self._lock:
            task = self._next_task(thread)
            leads = self._leader == thread
            if task is None and not leads:
                self._stand_by(thread)
                return
        if task is None:
            self._read()
            return
        while task is not None:
            done = self._perform(task, thread, scratch)
            with self._lock:
                self._keep(task, done)
                message = self._take_done()
                task = self._next_task(thread)
            if message is not None:
                self._send(message)
        self._memory.note_work(thread, -1, 0.0)

    def _next_task(self, thread: int) -> Task | None:
        tasks, leads = self._firsts or self._masks, self._leader == thread
        if not leads and self._began:
            return None
        task = tasks.popleft() if tasks else None
        if leads:
            self._began = 0.0 if task is None else time.monotonic()
        return task

    def _stand_by(self, thread: int) -> None:
        now = time.monotonic()
        if self._began and now - self._began > PATIENCE:
            self._leader, self._began = thread, 0.0
        elif self._began or now - self._last_message < IDLE_SECONDS:
            self._message_came.wait(PATIENCE)
        else:
            self._is_asleep = True
            self._message_came.wait()
            self._is_asleep = False

    def _slow_turn(self, thread: int, scratch: MaskScratch) -> None:
        with self._lock:
            task = self._slow.take()
            if task is None:
                self._slow_came.wait()
                return
        done = self._perform(task, thread, scratch)
        self._memory.note_work(thread, -1, 0.0)
        with self._lock:
            self._keep(task, done)
            message = self._take_done()
        if message is not None:
            self._send(message)

    def _read(self) -> None:
        frames = self._reader.read()
        if not frames:
            os._exit(0)  # the engine core is gone
        tasks = [task for frame in frames for task in self._take(self._decoder.decode(frame))]
        is_brief = len(tasks) == 1 and tasks[0].slot.mask_seconds < BRIEF_SECONDS
        with self._lock:
            self._last_message = time.monotonic()
            for task in tasks:
                task.with_mask |= is_brief
                if task.work is not None:
                    task.slot.unanswered.append(task)
                if task.work is None or task is task.slot.unanswered[0]:
                    self._add(task)
            if self._is_asleep:
                self._message_came.notify()

    def _take(self, work: MaskWork) -> list[Task]:
        with self._lock:
            self._memory.hold(work.num_slots)
            for number in work.ended_slots:
                self._slots.pop(number).is_ended = True
        for number in work.ended_grammars:
            del self._grammars[number]
        if work.ended_grammars:
            give_back_memory()
        for grammar in work.grammars:
            self._grammars[grammar.number] = Compiled(grammar)
        tasks = [task for copy in work.copies if (task := self._copy(copy)) is not None]
        for new in work.news:
            compiled = self._grammars[new.grammar]
            slot = self._slots[new.slot] = Slot(new.slot, new.charge, compiled.seconds, compiled)
            tasks.append(Task(slot, new, compiled))
        return tasks + [Task(self._slots[advance.slot], advance) for advance in work.advances]

    def _add(self, task: Task) -> None:
        if task.is_slow:
            self._slow.add(task)
            self._slow_came.notify()
        elif task.work is None or task.with_mask:
            self._masks.append(task)
        else:
            self._firsts.append(task)

    def _copy(self, copy: Copy) -> Task | None:
        source = self._slots[copy.source]
        slot = self._slots[copy.slot] = Slot(copy.slot, source.charge, 0.0, source.compiled)
        with source.lock:
            assert source.state is not None, "copies are made of matchers that have answered"
            slot.state = source.state.copy()
            slot.mask_seconds, slot.num_slow = source.mask_seconds, source.num_slow
        slot.serial = copy.serial
        return Task(slot, None, mask_serial=copy.serial) if copy.wants_mask else None

    def _perform(self, task: Task, thread: int, scratch: MaskScratch) -> MatcherAnswer | Masked | None:
        slot, work = task.slot, task.work
        self._memory.note_work(thread, slot.number, time.monotonic())
        with slot.lock:
            if slot.is_ended:
                return None
            scratch.begin()
            if work is None:
                if task.mask_serial != slot.serial:
                    return None
                return Masked(slot.number, slot.serial, *self._make_mask(slot, scratch))
            answer = self._answer(task, work, scratch)
            if task.with_mask and answer.num_draft_masks:
                seconds, error, param, num_draft_masks = self._make_mask(slot, scratch)
                answer.seconds += seconds
                answer.is_masked, answer.is_slow = True, slot.num_slow > 0
                answer.mask_error, answer.mask_param, answer.num_draft_masks = error, param, num_draft_masks
        return answer

    def _keep(self, task: Task, done: MatcherAnswer | Masked | None) -> None:
        if task.work is not None:
            self._queue_after(task)
        if done is None:
            return
        if type(done) is Masked:
            self._masked.append(done)
            return
        assert type(done) is MatcherAnswer
        if task.is_slow or not task.with_mask:
            self._answers.append(done)
            if done.num_draft_masks < 0:
                self._add(Task(task.slot, None, mask_serial=done.serial))
        else:
            self._whole.append(done)

    def _queue_after(self, task: Task) -> None:
        """Queue the slot's task that waits for this one."""
        unanswered = task.slot.unanswered
        unanswered.popleft()
        if unanswered:
            following = unanswered[0]
            following.is_slow |= task.is_slow or task.slot.num_slow > 0  # the slow thread wakes no other thread
            following.with_mask |= following.is_slow
            self._add(following)

    def _answer(self, task: Task, work: New | Advance, scratch: MaskScratch) -> MatcherAnswer:
        """Follow the tokens. `num_draft_masks` is -1 if the mask must be made."""
        slot, compiled = task.slot, task.compiled
        slot.serial = work.serial
        slot.drafts = NO_DRAFTS
        consume, clock = consume_here, no_seconds
        if task.is_slow:
            consume, clock = self._consume_apart, self._consume_apart.seconds
        started = clock()
        answer = MatcherAnswer(slot.number, work.serial, 0, (), False, False, False, NO_TOKEN, False, False, 0.0)
        try:
            if type(work) is New:
                assert compiled is not None
                start = compiled.start(self._vocabulary)
                scratch.seconds()  # compiling was rehearsed
                started = clock()
                slot.state = SequenceState(start, self._shape, work.mark, work.ignore_eos, work.allowed)
            state = slot.state
            if state is None:
                raise UserError(slot.failure)
            answer.num_accepted = state.accept(work.tokens, consume)
            if answer.num_accepted < len(work.tokens):
                if state.failure:
                    raise unusable(state.failure)
                answer.is_masked, answer.mask_error = True, "a token does not follow the constraint"
                slot.compiled.check()
            else:
                certain = state.certain_token()
                if type(work) is Advance:
                    if certain != NO_TOKEN:
                        answer.forced = state.take_forced(work.num_forced, consume)
                        certain = state.certain_token()
                    if work.drafts and not task.is_slow:
                        left = drafts_behind(answer.forced, work.drafts)
                        slot.drafts = list(zip(left, work.draft_slots, strict=False))
                answer.is_free = state.is_free
                answer.only = certain if certain != NO_TOKEN and state.may_take(certain) else NO_TOKEN
                if slot.drafts or not (answer.is_free or answer.only != NO_TOKEN):
                    answer.num_draft_masks = -1
            answer.is_finished, answer.ends_in_text = state.is_finished, state.ends_in_text
        except UserError as error:
            answer.error = error.message
        except BaseException as error:  # a panic of the native library is no Exception
            answer.error = in_one_line(explain(error))
        if slot.state is None:
            slot.failure = answer.error
        answer.seconds = scratch.seconds() + clock() - started
        slot.note(answer.seconds)
        answer.is_slow = slot.num_slow > 0
        return answer

    def _make_mask(self, slot: Slot, scratch: MaskScratch) -> tuple[float, str, str, int]:
        """Make a slot's mask, and write it unless the slot has ended. Returns `seconds`, `error`, `param` and
        `num_draft_masks` of Masked."""
        error = param = ""
        try:
            assert slot.state is not None
            slot.state.write_mask(scratch.view, scratch.address)
            with self._lock:
                if not slot.is_ended:
                    self._memory.write(slot.number, scratch.view)
        except UserError as found:
            error, param = found.message, found.param or ""
            slot.compiled.check()
        except BaseException as found:  # a panic of the native library is no Exception
            error = in_one_line(explain(found))
        seconds = scratch.seconds()
        slot.note_mask(seconds)
        num_drafts = self._make_draft_masks(slot, scratch) if slot.drafts and not error else 0
        return seconds, error, param, num_drafts

    def _make_draft_masks(self, slot: Slot, scratch: MaskScratch) -> int:
        """Make the masks after drafts, up to one that is not allowed or ends the text; returns their number."""
        assert slot.state is not None
        state, started = slot.state.copy(), time.thread_time()
        for number, (token_id, place) in enumerate(slot.drafts):
            is_late = time.thread_time() - started > SLOW_SECONDS
            if is_late or not state.accept([token_id], consume_here) or state.is_finished:
                return number
            try:
                state.write_mask(scratch.view, scratch.address)
            except UserError:
                slot.compiled.check()
                return number
            with self._lock:
                if not slot.is_ended:
                    self._memory.write(place, scratch.view)
        return len(slot.drafts)

    def _take_done(self) -> Done | None:
        if self._firsts or (self._masks and not self._answers):
            return None
        answers, self._answers = self._answers, []
        masked: list[Masked] = []
        if not self._masks:
            answers += self._whole
            masked, self._masked, self._whole = self._masked, [], []
        if not answers and not masked:
            return None
        self._sending.acquire()  # in this order they are sent
        return Done(answers, masked)

    def _send(self, message: Done) -> None:
        try:
            self._connection.sendall(encode_frame(message))
        except OSError:
            os._exit(0)  # the engine core is gone
        finally:
            self._sending.release()


def consume_here(state: LLMatcher, token_id: int) -> bool:
    """Follow a token, holding the interpreter."""
    return state.consume_token(token_id)


def no_seconds() -> float:
    return 0.0


class ConsumeApart:
    """Follow a token on a thread of the library, while other threads of this process run; used by one at a time."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        from llguidance import LLExecutor, LLMatcher

        before = set(threads_of_process())
        self._executor = LLExecutor(1)
        self._other = start_matcher(vocabulary, LLMatcher.grammar_from_regex("[^\\x00-\\U0010ffff]"))
        """Matcher that takes no token, as the library threads only several."""
        self(self._other.deep_copy(), 0)
        found = set(threads_of_process()) - before
        self._clock = thread_clock(min(found)) if len(found) == 1 else None
        for each in found:
            be_nice(each)

    def __call__(self, state: LLMatcher, token_id: int) -> bool:
        return self._executor.consume_token_par([(state, token_id), (self._other, 0)])[0]

    def seconds(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)


def wake_politely() -> None:
    """Keep this process from preempting others when it wakes up."""
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def leave_the_first_core() -> None:
    """Keep this process off the core of the engine core's thread (csrc/pool.cpp)."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1:] or cores)


def be_nice(thread: int) -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, thread, SLOW_NICE)


def threads_of_process() -> list[int]:
    """Thread ids; empty without /proc."""
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return []


def thread_clock(thread: int) -> int:
    return (~thread << 3) | 6


def serve_masks(
    connection: socket.socket,
    memory: int,
    vocabulary: LLTokenizer,
    vocab_size: int,
    end_ids: list[int],
    limits: RehearsalLimits,
) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    wake_politely()
    leave_the_first_core()
    shape = MaskShape.of(vocab_size, end_ids)
    process = MaskProcess(connection, MaskMemory(memory, vocab_size), vocabulary, shape)
    threading.stack_size(STACK * limits.stack)
    for thread in range(1, NUM_THREADS):
        threading.Thread(target=process.work, args=(thread,), daemon=True).start()
    limit_memory(MEMORY * limits.memory)  # besides the stacks
    process.work(0)
