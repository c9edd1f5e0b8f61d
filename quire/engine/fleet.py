"""One ledger of requests before one or more engines: who asked, what was produced, where each runs and since when.

A `Fleet` is an `EngineClient`. Its members are engines of one configuration, in processes of their own or in this one.
The ledger keeps of each request what another engine needs to go on with the same tokens (`ResumePoint`); text, stop
strings and logprobs are the front end's and outlive the engines anyway. All else is a policy on top: an engine that
dies or hangs is followed by another one; a router chooses the member of a new request; the requests of a member that is
stopped or lost go on at the others; several front ends (sessions) ask, and each hears of its own.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from quire.config.options import EngineOptions
from quire.engine.calls import Calls, Parts, part_of
from quire.engine.client import EngineClient, cause_of_death
from quire.engine.culprit_search import CulpritSearch
from quire.engine.member import WATCH_SECONDS, Member, StartEngine
from quire.engine.messages import (
    Abort,
    AddRequest,
    Call,
    CallResult,
    ClientMessage,
    EngineOutputs,
    EngineReady,
    RequestRejected,
)
from quire.engine.process_client import ProcessClient
from quire.engine.router import beginnings_of, make_router
from quire.errors import EngineDeadError, QuireError
from quire.kv_cache.stats import EngineStats, add_up
from quire.logging import get_logger
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest, FinishReason, ResumePoint

logger = get_logger(__name__)

MAX_STARTS = 3
"""Starts in a row that may fail."""
PAUSE_SECONDS = 1.0
"""Seconds before the second start in a row; doubled before each further one."""
RETRY_SECONDS = 60.0
"""Seconds between two starts of a member that is lost, while others serve its requests."""
MAX_FRUITLESS_DEATHS = 20
"""Deaths in a row, with no token between them, after which a member is lost. A search among 256 requests for the one
that ends the engine takes up to 18."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request that has not ended, or a registered prefix. name: the caller's, without the mark of its session.
    arrival: of time.monotonic. generated, ended: tokens, and the sequences that are over; a beam search reports at its
    end alone."""

    request: EngineRequest
    session: int
    name: str
    arrival: float
    generated: list[list[int]]
    ended: set[int] = field(default_factory=set)
    num_prompt_logprobs: int = 0
    member: Member | None = None
    is_sent: bool = False
    """Whether the engine that `member` has now has got it."""

    @classmethod
    def of(cls, request: EngineRequest, session: int) -> Entry:
        params = request.params
        num_reported = params.n if params.use_beam_search else params.num_sequences
        name, mark, _ = request.request_id.rpartition("#")
        generated: list[list[int]] = [[] for _ in range(num_reported)]
        return cls(request, session, name if mark else request.request_id, time.monotonic(), generated)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def position(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(len, self.generated))

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.generated)

    def note(self, update: SequenceUpdate) -> None:
        """Take what an engine reports."""
        self.generated[update.index] += update.new_token_ids
        if update.prompt_logprobs is not None:
            self.num_prompt_logprobs = update.prompt_logprobs.start + len(update.prompt_logprobs.entries)
        if update.finish_reason is not None:
            self.ended.add(update.index)

    def resumed(self) -> AddRequest:
        """The request as another engine gets it."""
        generated = self.generated
        if self.request.params.use_beam_search:  # hypotheses come at the end, all at once: it begins anew
            generated = [[] for _ in range(self.request.params.num_sequences)]
        age = time.monotonic() - self.arrival
        point = ResumePoint(generated, sorted(self.ended), self.num_prompt_logprobs, age)
        return AddRequest(msgspec.structs.replace(self.request, resume_point=point))


class Fleet:
    """Implements `EngineClient`. One member is received from in the caller's thread; of several each has a thread. The
    thread that receives notices a death and starts the next engine; `send` never waits for that."""

    def __init__(
        self,
        starts: Sequence[StartEngine],
        *,
        restarts: bool = True,
        hung_engine_timeout: float = 0.0,
        router: str = "prefix-aware",
    ) -> None:
        """Starts the first engine, whose failure is an error; the others start when it is ready.

        starts: one for each member. restarts: whether an engine that has died is followed by another one; where not,
        its end is the fleet's. hung_engine_timeout: as of Member. Raises UserError for an unknown router.
        """
        self.members = [Member(number, start, hung_engine_timeout) for number, start in enumerate(starts)]
        self._router = make_router(router, len(starts))
        self._restarts, self._ends_hung = restarts, hung_engine_timeout > 0
        self._lock = threading.RLock()
        """Of the members and of all that follows."""
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, Entry] = {}
        """The requests by their callers' names."""
        self._calls = Calls(self.members)
        self._death: QuireError | None = None
        self._is_closed, self._is_ready = threading.Event(), threading.Event()
        self._arrived: queue.SimpleQueue[Parts | None] = queue.SimpleQueue()
        """Outputs of several members; None wakes the thread that waits for them."""
        self.members[0].client = starts[0](None, None)
        for member in self.members if len(starts) > 1 else ():
            threading.Thread(target=self._run, args=(member,), name=self._name(member), daemon=True).start()

    @property
    def ready(self) -> EngineReady:
        if len(self.members) == 1:
            return self._first_ready
        self._is_ready.wait()
        self._raise_if_over()
        return EngineReady.of_all([member.ready for member in self.members if member.ready is not None])

    @property
    def _first_ready(self) -> EngineReady:
        """Facts of the first engine of the first member. Waits for them."""
        first = self.members[0]
        assert first.client is not None
        return first.ready or first.client.ready

    @property
    def silence(self) -> float:
        """Seconds: the least of the engines that are up, where one that hangs is ended, else the most."""
        silences = [member.silence for member in self.members if member.is_up] or [0.0]
        return min(silences) if self._ends_hung else max(silences)

    @property
    def is_restarting(self) -> bool:
        """Whether every engine has died, and no next one is ready yet."""
        return all(member.death is not None for member in self.members)

    @property
    def num_restarts(self) -> int:
        return sum(member.num_restarts for member in self.members)

    def send(self, *messages: ClientMessage) -> None:
        self.submit(0, *messages)

    def submit(self, session: int, *messages: ClientMessage) -> list[RequestRejected]:
        """As `send`, from one of several sessions. Returns the requests whose names another session uses."""
        rejected = []
        batches: dict[int, list[ClientMessage]] = {}
        with self._lock:
            self._raise_if_over()
            for message in messages:
                receivers: Sequence[Member] = self.members
                match message:
                    case AddRequest(request):
                        entry = Entry.of(request, session)
                        other = self._names.get(entry.name)
                        if other is not None and other.session != session:
                            text = f"request id {entry.name!r} is already in use"
                            rejected.append(RequestRejected(request.request_id, text, "request_id"))
                            continue
                        self._entries[request.request_id] = self._names[entry.name] = entry
                        member = self._choose(request)
                        self._place(entry, member)
                        entry.is_sent = member.is_up and member.search.allows(request.request_id)
                        receivers = [member] if entry.is_sent else ()
                    case Abort(request_id, index):
                        receivers = self._abort(request_id, index)
                    case Call(_, "stop_replica" | "start_replica", _):
                        self._stop_or_start(message, session)
                        receivers = ()
                    case Call(_, method, argument):
                        receivers = self._owner(argument) if method == "unregister_prefix" else ()
                        receivers = receivers or self._calls.receivers(method)
                        message = self._calls.open(message, receivers, session)
                for member in receivers:
                    batches.setdefault(member.number, []).append(message)
            for number, batch in batches.items():
                if self.members[number].is_up:
                    self.members[number].deliver(*batch)
        return rejected

    def close_session(self, session: int) -> None:
        """A front end has ended: abort its requests, and drop the answers to its calls."""
        with self._lock:
            self.submit(session, *[Abort(key) for key, entry in self._entries.items() if entry.session == session])

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        parts = self.receive_parts(timeout)
        return None if parts is None else parts.get(0) or EngineOutputs()

    def receive_parts(self, timeout: float | None = None) -> Parts | None:
        """As `receive`, for each session what is its own."""
        self._raise_if_over()
        if len(self.members) == 1:
            return self._pump(self.members[0], None if timeout is None else time.monotonic() + timeout)
        try:
            parts = self._arrived.get(timeout=timeout)
        except queue.Empty:
            return None
        if parts is None:
            self._raise_if_over()
        return parts

    def shutdown(self, timeout: float = 5.0) -> None:
        self._end(EngineDeadError("the engine was shut down"))
        deadline = time.monotonic() + timeout
        for member in self.members:
            if member.client is not None:
                member.client.shutdown(max(0.0, deadline - time.monotonic()))

    # The ledger.

    def _stop_or_start(self, call: Call, session: int) -> None:
        """Let a member be stopped or started by its thread, which also answers the call (`_tell`)."""
        member, is_wanted = self.members[int(call.argument)], call.method == "start_replica"
        if not is_wanted and not any(each.is_up for each in self.members if each is not member):
            text = f"replica {member.number} cannot be stopped: none of the others is up to go on with its requests"
            self._arrived.put({session: EngineOutputs(results=[CallResult(call.call_id, error=text)])})
            return
        member.is_wanted = is_wanted
        member.asked.append((session, call.call_id))
        if is_wanted and member.is_up:
            self._tell(member)

    def _tell(self, member: Member) -> None:
        """Answer those who asked that a member be stopped or started: 1 where it is up."""
        parts: Parts = {}
        with self._lock:
            for session, call_id in member.asked:
                part_of(parts, session).results.append(CallResult(call_id, int(member.is_up)))
            member.asked.clear()
        if parts:
            self._arrived.put(parts)

    def _choose(self, request: EngineRequest) -> Member:
        if len(self.members) == 1:
            return self.members[0]
        takers = [member for member in self.members if member.takes_new]
        takers = takers or [member for member in self.members if not member.is_lost]
        self._router.learn([member.num_live if member in takers else None for member in self.members])
        return self.members[self._router.choose(beginnings_of(request))]

    def _place(self, entry: Entry, member: Member | None) -> None:
        """A request is at another member from now on, or at none."""
        before, entry.member, entry.is_sent = entry.member, member, False
        if member is not None:
            member.num_live += 1
        if before is not None:
            before.num_live -= 1
            self._clear(before, entry)

    def _clear(self, member: Member, entry: Entry) -> None:
        """A request does not end its engine; others may have waited for that."""
        if member.search.note_end(entry.request_id):
            self._send_waiting(member)

    def _forget(self, entry: Entry) -> None:
        """A request is over."""
        del self._entries[entry.request_id]
        if self._names.get(entry.name) is entry:
            del self._names[entry.name]
        self._place(entry, None)

    def _abort(self, request_id: str, index: int | None) -> Sequence[Member]:
        """Note an abort; who else must hear of it."""
        entry = self._entries.get(request_id)
        if entry is None or entry.member is None or entry.is_over:
            return ()
        receivers = [entry.member] if entry.is_sent else []
        if index is None or not entry.request.params.use_beam_search:
            entry.ended |= set(range(len(entry.generated))) if index is None else {index}
            if entry.is_over:
                self._forget(entry)
        return receivers

    def _send_waiting(self, member: Member) -> None:
        """Send what a member's engine has not got and may have."""
        for entry in self._at(member) if member.is_up else ():
            if not entry.is_sent and member.search.allows(entry.request_id):
                entry.is_sent = True
                member.deliver(entry.resumed())

    def _at(self, member: Member) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.member is member]

    def _owner(self, prefix_id: str) -> Sequence[Member]:
        """The member that has a registered prefix, which is to be no longer; no member knows another id."""
        entry = self._entries.get(prefix_id)
        owners = [entry.member] if entry is not None and entry.member is not None else self.members[:1]
        if entry is not None and entry.is_over:
            self._forget(entry)
        return owners

    # What a member tells, and its deaths.

    def _run(self, member: Member) -> None:
        """Body of a member's thread."""
        try:
            while True:
                parts = self._pump(member, None)
                if parts is not None:
                    self._arrived.put(parts)
        except BaseException as error:  # a thread that ended in silence would leave every request waiting
            self._end(error)

    def _pump(self, member: Member, deadline: float | None) -> Parts | None:
        """What a member tells next, its starts included; None at the deadline."""
        while True:
            self._raise_if_over()
            try:
                if not member.is_up:
                    self._bring_up(member)
                outputs = member.receive(deadline)
            except EngineDeadError as death:
                self._raise_if_over()
                if member.ready is None or (member.is_wanted and not self._restarts):
                    self._end(death)
                    raise
                parts = self._note_death(member, death)
                if parts:
                    return parts
                continue
            return None if outputs is None else self._take(member, outputs)

    def _take(self, member: Member, outputs: EngineOutputs) -> Parts:
        """Note what a member tells; returns what each session is told."""
        parts: Parts = {}
        with self._lock:
            if outputs.updates:
                member.num_fruitless = 0
            for update in outputs.updates:
                entry = self._entries.get(update.request_id)
                if entry is None:
                    continue  # aborted meanwhile
                entry.note(update)
                part_of(parts, entry.session).updates.append(update)
                if update.finish_reason is not None and entry.is_over:
                    is_kept = update.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                    if entry.request.register_prefix and is_kept:
                        self._clear(member, entry)
                    else:
                        self._forget(entry)
                elif member.search.has_suspects and member.search.note_progress(entry.request_id, entry.position):
                    self._send_waiting(member)
            for rejected in outputs.rejections:
                entry = self._entries.get(rejected.request_id)
                if entry is not None:
                    self._forget(entry)
                    part_of(parts, entry.session).rejections.append(rejected)
                    if entry.request.register_prefix:
                        logger.warning("a prefix could not be registered: %s", rejected.message)
            for result in outputs.results:
                self._calls.answer(result.call_id, member, result, parts)
            if outputs.stats is not None:
                member.stats = outputs.stats
                part_of(parts, 0).stats = add_up([member.counted for member in self.members])
        return parts

    def _note_death(self, member: Member, death: EngineDeadError) -> Parts:
        """Note what a death says of the requests. Returns what their sessions are told of it."""
        parts: Parts = {}
        with self._lock:
            self._raise_if_over()
            member.note_death(death)
            here = self._at(member)
            running = {entry.request_id: entry.position for entry in here if entry.is_sent and not entry.is_over}
            for entry in here:
                entry.is_sent = False
                if entry.is_over:  # a prefix, to be registered again
                    entry.generated, entry.ended = [[]], set()
            if not member.is_wanted:
                self._lose(member, f"{self._name(member)} was stopped")
                return parts
            culprit = member.search.note_death(running)
            if culprit is not None:
                entry = self._entries[culprit]
                self._forget(entry)
                message = f"the engine died whenever it ran this request, the last time without another one: {death}"
                rejected = RequestRejected(culprit, message, is_culprit=True)
                part_of(parts, entry.session).rejections.append(rejected)
            what = "; requests go on in groups, to find which one ends it" if member.search.is_searching else ""
            text = "error %s: %s died with %d requests, and is started again%s: %s"
            logger.warning(text, death.error_id, self._name(member), len(running), what, death)
            if member.num_fruitless > MAX_FRUITLESS_DEATHS:
                self._lose(member, f"{self._name(member)} died {member.num_fruitless} times in a row without a token")
        return parts

    def _bring_up(self, member: Member) -> None:
        """Wait until a member's engine is ready, behind a death start another one, and give it what lives."""
        started, death = time.monotonic(), member.death
        for attempt in itertools.count():
            if attempt or (member.is_lost and member.is_wanted):
                self._is_closed.wait(RETRY_SECONDS if member.is_lost else PAUSE_SECONDS * 2 ** (attempt - 1))
            if death is not None and member.client is not None:
                member.client.shutdown()
            while not member.is_wanted and not self._is_closed.is_set():
                self._tell(member)
                self._is_closed.wait(WATCH_SECONDS)
            self._raise_if_over()
            try:
                if death is not None or member.client is None:
                    member.client = member.start(self._first_ready, member.stats_before)
                if self._is_closed.is_set():
                    member.client.shutdown()
                ready = member.client.ready
                break
            except QuireError as error:
                self._raise_if_over()
                if death is None:
                    raise
                logger.warning("%s could not be started again: %s", self._name(member), error)
                self._tell(member)
                if attempt + 1 == MAX_STARTS and not member.is_lost:
                    self._lose(member, f"{self._name(member)} could not be started again: {error}")
        with self._lock:
            self._raise_if_over()
            member.is_up, member.is_lost, member.death, member.ready = True, False, None, member.ready or ready
            self._calls.resend(member)
            self._send_waiting(member)
            self._calls.resend_open(member)
            self._tell(member)
            if all(each.ready for each in self.members):
                self._is_ready.set()
        if death is not None:
            member.num_restarts += 1
            text = "%s is back after %.1f s; %d requests go on"
            logger.warning(text, self._name(member), time.monotonic() - started, member.num_live)

    def _lose(self, member: Member, reason: str) -> None:
        """Go on without a member until an engine of it starts: the others serve its requests. Raises EngineDeadError,
        as from then on, when there are no others."""
        with self._lock:
            death = member.death
            assert death is not None
            member.is_lost, member.num_fruitless, member.search = True, 0, CulpritSearch()
            if all(each.is_lost for each in self.members):
                self._end(EngineDeadError(f"{reason}: {death}", summary=reason, error_id=death.error_id))
                self._raise_if_over()
            log = logger.error if member.is_wanted else logger.warning
            log("error %s: %s; its requests go on at the others", death.error_id, reason)
            for entry in self._at(member):
                target = self._choose(entry.request)
                self._place(entry, target)
                self._send_waiting(target)
            parts: Parts = {}
            self._calls.give_up(member, parts)
            self._arrived.put(parts)

    def _name(self, member: Member) -> str:
        return "the engine" if len(self.members) == 1 else f"replica {member.number}"

    def _end(self, error: BaseException) -> None:
        """The end of the fleet; the first cause counts."""
        with self._lock:
            if self._death is None:
                self._death = error if isinstance(error, QuireError) else cause_of_death(error)
        self._is_closed.set()
        self._is_ready.set()
        self._arrived.put(None)

    def _raise_if_over(self) -> None:
        death = self._death
        if death is not None:
            raise death.again()


def open_fleet(
    options: EngineOptions, executor: str, *, restarts: bool | None = None, hung_engine_timeout: float = 0.0
) -> Fleet:
    """`data_parallel_size` engines in processes of their own, and those that follow them, all with as many blocks as
    the first. Where steps are logged, each writes a file of its own. restarts, hung_engine_timeout: as of Fleet; None:
    where there are several."""
    counts = [itertools.count() for _ in range(options.data_parallel_size)]

    def start(replica: int, ready: EngineReady | None, stats: EngineStats | None) -> EngineClient:
        changes: dict[str, Any] = {}
        if ready is not None and ready.num_blocks:
            changes["num_blocks_override"] = ready.num_blocks
        if stats is not None and stats.num_host_blocks:
            changes["swap_space"] = stats.num_host_blocks * stats.block_bytes * len(counts)  # it takes its share of it
        number = next(counts[replica])
        if options.step_log is not None:
            marks = (f".replica{replica}" if replica else "") + (f".{number}" if number else "")
            changes["step_log"] = options.step_log + marks
        name = f"engine {replica}" if len(counts) > 1 else "engine"
        return ProcessClient(msgspec.structs.replace(options, **changes), executor=executor, name=name)

    starts = [partial(start, replica) for replica in range(len(counts))]
    restarts = len(starts) > 1 if restarts is None else restarts
    return Fleet(starts, restarts=restarts, hung_engine_timeout=hung_engine_timeout if restarts else 0.0)
