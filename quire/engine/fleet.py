"""Ledger of requests before one or more engines.

A `Fleet` is an `EngineClient` over engines of one configuration. The ledger keeps what another engine needs to continue
each request with the same tokens (`ResumePoint`).
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from quire.engine.client import EngineClient, cause_of_death
from quire.engine.culprit_search import CulpritSearch
from quire.engine.member import Entry, Member, StartEngine
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
from quire.engine.router import beginnings_of, make_router
from quire.errors import EngineDeadError, QuireError
from quire.kv_cache.stats import EngineStats, add_up, carry_over
from quire.logging import get_logger
from quire.parallel.replica_memory import CommonMemory
from quire.request import EngineRequest, FinishReason
from quire.utils.failures import explain

logger = get_logger(__name__)

MAX_STARTS = 3
"""Failed starts in a row after which a member is lost."""
PAUSE_SECONDS = 1.0
"""Seconds before the second start in a row; doubled for each further one."""
RETRY_SECONDS = 60.0
"""Seconds between starts of a lost member while others serve."""
MAX_FRUITLESS_DEATHS = 20
"""Deaths in a row without a token that lose a member; a culprit search takes up to 18."""
STATES = {"sleep": "sleep", "wake_up": "sleep", "pause": "pause", "resume": "pause"}
"""Method -> the call that begins the state which it begins or ends."""
LAST_STEP_SECONDS = 1.0
"""Seconds for an engine to end when one that shares its experts has ended."""
FOR_REQUESTS = ("abort_all", "sleep")
"""Calls about requests, which a member answers while its next engine starts."""
REPLICA_CALLS = ("stop_replica", "start_replica")
"""Calls that members answer themselves, with 1 if an engine is up."""
KEPT = (FinishReason.STOP, FinishReason.LENGTH)
"""Finish reasons of a prefix that counts as registered."""
SUMS = ("reset_prefix_cache", "abort_all")
"""Calls whose answers are summed (`stats` too); for others the maximum counts."""

Parts = defaultdict[int, EngineOutputs]
"""Outputs by session. Session 0 gets the statistics."""


@dataclass(slots=True)
class OpenCall:
    """Control call that some members have not answered yet. asked: call as sent to members. session, call_id: caller's
    call. waiting: numbers of members that owe an answer."""

    asked: Call
    session: int
    call_id: int
    waiting: set[int]
    results: dict[int, CallResult] = field(default_factory=dict)


class Fleet:
    """An `EngineClient` over members (engines of one model): chooses one per request, restarts dead ones. One member is
    served in the thread that calls `receive`, several in a thread each."""

    def __init__(
        self,
        starts: Sequence[StartEngine],
        *,
        restarts: bool = True,
        hung_engine_timeout: float = 0.0,
        router: str = "prefix-aware",
        common: CommonMemory | None = None,
    ) -> None:
        """Start the first engine (failure raises); the others start when it is ready. starts: one start function per
        member. restarts: True replaces a dead engine; else its death ends the fleet. hung_engine_timeout: see Member.
        common: shared by engines that end and start together (None: each by itself). Raises UserError for an unknown
        router."""
        self.members = [Member(number, start, hung_engine_timeout) for number, start in enumerate(starts)]
        if len(starts) == 1:
            self.members[0].name = "the engine"
        self._router = make_router(router, len(starts))
        self._common = common
        self._restarts, self._ends_hung = restarts, hung_engine_timeout > 0
        self._lock = threading.Condition()
        """Guards the members and everything below. Notified when an engine is ready or must start, and at the end."""
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, Entry] = {}
        """Requests by their callers' names."""
        self._open: dict[int, OpenCall] = {}
        """Open calls by the numbers sent to the members."""
        self._numbers = itertools.count(1)
        self._states: list[Call] = []
        """Calls, in order, that bring a new engine into the fleet's current state."""
        self._death: QuireError | None = None
        self._arrived: queue.SimpleQueue[Parts] = queue.SimpleQueue()
        """Outputs of several members; an empty one wakes the receiving thread."""
        self.members[0].client = starts[0](None, None)
        self.members[0].generation = self._generation
        for member in self.members if len(starts) > 1 else ():
            threading.Thread(target=self._run, args=(member,), name=member.name, daemon=True).start()

    @property
    def ready(self) -> EngineReady:
        if len(self.members) == 1:
            return self._first_ready
        with self._lock:
            self._lock.wait_for(lambda: self._death is not None or all(member.ready for member in self.members))
            self._raise_if_over()
            return EngineReady.of_all([member.ready for member in self.members if member.ready is not None])

    @property
    def _generation(self) -> int:
        return 0 if self._common is None else self._common.generation

    @property
    def _first_ready(self) -> EngineReady:
        """Facts found at the start of the first member's first engine; waits for it."""
        first = self.members[0]
        assert first.client is not None
        return first.ready or first.client.ready

    @property
    def silence(self) -> float:
        """Seconds since engines last made progress: the minimum over the engines that are up if hung ones are ended,
        else the maximum."""
        silences = [member.silence for member in self.members if member.is_up] or [0.0]
        return min(silences) if self._ends_hung else max(silences)

    @property
    def stopped(self) -> int | None:
        """Rank whose process is stopped (SIGSTOP), or ENGINE_STOPPED; None: none. If hung engines are ended, only
        if every engine that is up has one."""
        found = [member.client.stopped for member in self.members if member.is_up and member.client is not None]
        if self._ends_hung and None in found:
            return None
        return next((each for each in found if each is not None), None)

    @property
    def is_restarting(self) -> bool:
        """True if every engine is dead and no successor is ready."""
        return all(member.death is not None for member in self.members)

    @property
    def num_restarts(self) -> int:
        return sum(member.num_restarts for member in self.members)

    def send(self, *messages: ClientMessage) -> None:
        self.submit(0, *messages)

    def submit(self, session: int, *messages: ClientMessage) -> list[RequestRejected]:
        """Send messages of one session. Returns the requests whose names another session uses."""
        rejected = []
        batches: defaultdict[int, list[ClientMessage]] = defaultdict(list)
        with self._lock:
            self._raise_if_over()
            for message in messages:
                receivers: Sequence[Member] = self.members
                match message:
                    case AddRequest(request):
                        entry = Entry.of(request, session)
                        if self._names.get(entry.name, entry).session != session:
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
                    case Call():
                        receivers = self._receivers(message)
                        if message.method in FOR_REQUESTS:
                            self._send_kept(receivers)
                        waiting = {member.number for member in receivers}
                        opened = OpenCall(message, session, message.call_id, waiting)
                        message = opened.asked = Call(next(self._numbers), message.method, message.argument)
                        self._open[message.call_id] = opened
                        if message.method in REPLICA_CALLS:
                            self._stop_or_start(message.method, *receivers)
                            receivers = ()
                for member in receivers:
                    batches[member.number].append(message)
            for number, batch in batches.items():
                if self.members[number].is_up:
                    self.members[number].deliver(*batch)
        return rejected

    def close_session(self, session: int) -> None:
        """End a session: abort its requests and drop the answers to its calls."""
        with self._lock:
            self.submit(session, *[Abort(key) for key, entry in self._entries.items() if entry.session == session])

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        parts = self.receive_parts(timeout)
        return None if parts is None else parts[0]

    def receive_parts(self, timeout: float | None = None) -> Parts | None:
        """Receive outputs, split by session; otherwise as `receive`."""
        self._raise_if_over()
        if len(self.members) == 1:
            return self._pump(self.members[0], None if timeout is None else time.monotonic() + timeout)
        try:
            parts = self._arrived.get(timeout=timeout)
        except queue.Empty:
            return None
        if not parts:
            self._raise_if_over()
        return parts

    def shutdown(self, timeout: float = 5.0) -> None:
        self._end(EngineDeadError("the engine was shut down"))
        deadline = time.monotonic() + timeout
        for member in self.members:
            if member.client is not None:
                member.client.shutdown(max(0.0, deadline - time.monotonic()))
            if self._common is not None:  # a step waits for one that has ended
                deadline = min(deadline, time.monotonic() + LAST_STEP_SECONDS)
        if self._common is not None:
            self._common.close()

    # Requests.

    def _choose(self, request: EngineRequest) -> Member:
        if len(self.members) == 1:
            return self.members[0]
        takers = [member for member in self.members if member.takes_new]
        takers = takers or [member for member in self.members if not member.is_lost]
        self._router.learn([len(member.entries) if member in takers else None for member in self.members])
        return self.members[self._router.choose(beginnings_of(request))]

    def _place(self, entry: Entry, member: Member | None) -> None:
        before, entry.member, entry.is_sent = entry.member, member, False
        if member is not None:
            member.entries[entry.request_id] = entry
        if before is not None:
            del before.entries[entry.request_id]
            if before.search.note_end(entry.request_id):
                self._send_waiting(before)

    def _send_kept(self, members: Iterable[Member]) -> None:
        # A call for all requests also concerns those that a search keeps back.
        for member in members:
            if member.is_up and member.search.is_searching:
                member.search = CulpritSearch()
                self._send_waiting(member)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.request_id]
        if self._names.get(entry.name) is entry:
            del self._names[entry.name]
        self._place(entry, None)

    def _abort(self, request_id: str, index: int | None) -> Sequence[Member]:
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
        for entry in member.entries.values() if member.is_up else ():
            if not entry.is_sent and member.search.allows(entry.request_id):
                entry.is_sent = True
                member.deliver(entry.resumed())

    # Calls.

    def _receivers(self, call: Call) -> Sequence[Member]:
        up = [member for member in self.members if member.is_up]
        match call.method:
            case "stop_replica" | "start_replica":
                return [self.members[int(call.argument)]]
            case "unregister_prefix" if (entry := self._entries.get(call.argument)) is not None:
                if entry.member is not None:
                    up = [entry.member]
                if entry.is_over:
                    self._forget(entry)
            case "kv_snapshot":
                up = up[:1]
        if call.method in FOR_REQUESTS or not up:
            return [member for member in self.members if not member.is_lost]
        return up

    def _stop_or_start(self, method: str, member: Member) -> None:
        is_wanted = method == "start_replica"
        if not is_wanted and self._common is not None:
            text = f"{member.name} cannot be stopped: the others need its experts"
            self._settle(member, CallResult(0, error=text), ["stop_replica"])
            return
        if not is_wanted and not any(each.stays_up for each in self.members if each is not member):
            text = f"{member.name} cannot be stopped: none of the others is up to go on with its requests"
            self._settle(member, CallResult(0, error=text), ["stop_replica"])
            return
        member.is_wanted = is_wanted
        member.is_stopping = member.is_stopping or (member.is_up and not is_wanted)
        self._lock.notify_all()
        if is_wanted and member.stays_up:
            self._settle(member, CallResult(0, 1), REPLICA_CALLS)

    def _settle(self, member: Member, result: CallResult | None = None, methods: Container[str] | None = None) -> None:
        """Take `result` as a member's answer to open calls (None: no answer). methods: only calls of these methods;
        None: all."""
        parts = Parts(EngineOutputs)
        for opened in list(self._open.values()):
            if methods is None or opened.asked.method in methods:
                self._answer(opened, member, result, parts)
        if parts:
            self._arrived.put(parts)

    def _answer(self, opened: OpenCall, member: Member, result: CallResult | None, parts: Parts) -> None:
        if member.number not in opened.waiting:
            return
        opened.waiting.discard(member.number)
        if result is not None:
            if isinstance(result.value, EngineStats):
                result.value = carry_over(member.stats_before, result.value)
            opened.results[member.number] = result
        if not opened.waiting:
            del self._open[opened.asked.call_id]
            result = self._combined(opened)
            self._note_state(opened, result)
            parts[opened.session].results.append(msgspec.structs.replace(result, call_id=opened.call_id))

    def _combined(self, opened: OpenCall) -> CallResult:
        results = list(opened.results.values())
        wrong = next((result for result in results if result.error is not None), None)
        if wrong is not None or len(self.members) == 1 or (results and results[0].kv is not None):
            return wrong or results[0]
        values = [result.value for result in results]
        snapshots = [value for value in values if isinstance(value, EngineStats)]
        if snapshots:
            others = [member.counted for member in self.members if member.number not in opened.results]
            return CallResult(0, add_up([*snapshots, *others]))
        numbers = [value for value in values if isinstance(value, int)]
        return CallResult(0, sum(numbers) if opened.asked.method in SUMS else max(numbers, default=0))

    def _note_state(self, opened: OpenCall, result: CallResult) -> None:
        call, begun_by = opened.asked, STATES.get(opened.asked.method)
        if begun_by is None:
            return
        if result.error is None:
            is_part = call.method == "wake_up" and bool(result.value)
            kept = [begun_by] if is_part else []
            self._states = [each for each in self._states if STATES[each.method] != begun_by or each.method in kept]
            self._states += [call] if is_part or call.method == begun_by else []
        elif call.method == "sleep" and not any(each.method == "sleep" for each in self._states):
            for number, each in opened.results.items():
                if each.error is None:  # all members sleep, or none
                    self.members[number].deliver(Call(0, "wake_up"))

    # Outputs and deaths of members.

    def _run(self, member: Member) -> None:
        try:
            while True:
                self._pump(member, None)
        except BaseException as error:  # if this thread ended silently, every request would wait for ever
            self._end(error)

    def _pump(self, member: Member, deadline: float | None) -> Parts | None:
        while True:
            self._raise_if_over()
            try:
                if not member.is_up:
                    self._bring_up(member)
                outputs = member.receive(deadline)
            except EngineDeadError as death:
                self._raise_if_over()
                is_first = member.ready is None and not member.is_ended_with_others
                if is_first or (not member.is_stopping and not self._restarts):
                    self._end(death)
                    raise
                self._end_others(member)
                parts = self._note_death(member, death)
                if parts:
                    return parts
                continue
            return None if outputs is None else self._take(member, outputs)

    def _take(self, member: Member, outputs: EngineOutputs) -> Parts:
        parts = Parts(EngineOutputs)
        with self._lock:
            if outputs.updates:
                member.num_fruitless = 0
            for update in outputs.updates:
                entry = self._entries.get(update.request_id)
                if entry is None:
                    continue  # aborted meanwhile
                entry.note(update)
                parts[entry.session].updates.append(update)
                is_over = update.finish_reason is not None and entry.is_over
                if is_over and not (entry.request.register_prefix and update.finish_reason in KEPT):
                    self._forget(entry)
                elif member.search.has_suspects and member.search.note_progress(
                    entry.request_id, math.inf if is_over else entry.position
                ):
                    self._send_waiting(member)
            for rejected in outputs.rejections:
                entry = self._entries.get(rejected.request_id)
                if entry is not None:
                    self._forget(entry)
                    parts[entry.session].rejections.append(rejected)
                    if entry.request.register_prefix:
                        logger.warning("a prefix could not be registered: %s", rejected.message)
            for result in outputs.results:
                opened = self._open.get(result.call_id)
                if opened is not None:
                    self._answer(opened, member, result, parts)
            if outputs.stats is not None:
                member.stats = outputs.stats
                parts[0].stats = add_up([member.counted for member in self.members])
            return self._pass_on(parts)

    def _pass_on(self, parts: Parts) -> Parts:
        # Under the lock: the answer of all members comes behind the outputs that each sent before its own.
        if len(self.members) > 1:
            self._arrived.put(parts)
        return parts

    def _note_death(self, member: Member, death: EngineDeadError) -> Parts:
        parts = Parts(EngineOutputs)
        with self._lock:
            self._raise_if_over()
            was_stopped = member.is_stopping or member.is_ended_with_others
            member.note_death(death)
            here = list(member.entries.values())
            running = {entry.request_id: entry.position for entry in here if entry.is_sent and not entry.is_over}
            for entry in here:
                entry.is_sent = False
                if entry.is_over:  # a registered prefix is computed again
                    entry.generated, entry.ended = [[]], set()
            if was_stopped:
                return parts
            culprit = member.search.note_death(running)
            if culprit is not None:
                entry = self._entries[culprit]
                self._forget(entry)
                message = f"the engine died whenever it ran this request, the last time without another one: {death}"
                parts[entry.session].rejections.append(RequestRejected(culprit, message, is_culprit=True))
            what = "; requests go on in groups, to find which one ends it" if member.search.is_searching else ""
            text = "error %s: %s died with %d requests, and is started again%s: %s"
            logger.warning(text, death.error_id, member.name, len(running), what, death)
            if member.num_fruitless > MAX_FRUITLESS_DEATHS:
                self._lose(member, f"{member.name} died {member.num_fruitless} times in a row without a token")
            return self._pass_on(parts) if parts else parts

    def _end_others(self, member: Member) -> None:
        clients: list[EngineClient] = []
        with self._lock:
            if self._common is not None and self._death is None and member.generation == self._common.generation:
                for other in self.members:
                    if other is not member and other.client is not None:
                        other.is_ended_with_others = True
                        clients.append(other.client)
                self._common.renew()
        for client in clients:
            client.shutdown(0.0)

    def _restart(self, member: Member) -> None:
        attempt = 0
        while True:
            assert member.client is not None
            member.client.shutdown()
            with self._lock:
                if attempt or (member.is_lost and member.is_wanted):
                    pause = RETRY_SECONDS if member.is_lost else PAUSE_SECONDS * 2 ** (attempt - 1)
                    self._lock.wait_for(lambda: self._death is not None or not member.is_wanted, pause)
                while not member.is_wanted and self._death is None:
                    if not member.is_lost:
                        self._lose(member, f"{member.name} was stopped")
                    self._settle(member)
                    self._lock.wait()
            self._raise_if_over()
            try:
                self._start(member)
                return
            except (QuireError, OSError, zmq.ZMQError) as error:  # no process, memory or descriptor for a moment
                self._raise_if_over()
                self._end_others(member)  # it may have joined a step already
                if member.is_ended_with_others:
                    continue
                attempt += 1
                reason = str(error) if isinstance(error, QuireError) else explain(error)
                logger.warning("%s could not be started again: %s", member.name, reason)
                with self._lock:
                    if member.is_wanted:  # else a call to stop it is answered when its requests are elsewhere
                        self._settle(member, None, REPLICA_CALLS)
                    if attempt == MAX_STARTS and not member.is_lost:
                        self._lose(member, f"{member.name} could not be started again: {reason}")

    def _start(self, member: Member) -> EngineReady:
        ready = self._first_ready
        with self._lock:
            member.generation, member.is_ended_with_others = self._generation, False
        client = member.start(ready, member.stats_before)
        with self._lock:
            member.client = client
            has_others = member.generation == self._generation
            member.is_ended_with_others |= not has_others
        if self._death is not None or not has_others:  # a shutdown, or another's death, may have come meanwhile
            client.shutdown()
        return member.client.ready

    def _bring_up(self, member: Member) -> None:
        """Wait for a member's engine and restore its predecessor's state, requests and open calls."""
        started, death = time.monotonic(), member.death
        if death is not None:
            self._restart(member)
        ready = self._start(member) if member.client is None else member.client.ready
        with self._lock:
            self._raise_if_over()
            member.is_up, member.is_stopping = True, not member.is_wanted
            member.is_lost, member.death, member.ready = False, None, member.ready or ready
            self._lock.notify_all()
            for state in self._states:
                member.deliver(Call(0, state.method, state.argument))
            self._send_waiting(member)
            for opened in self._open.values():
                if opened.asked.method in STATES:
                    opened.waiting.add(member.number)
                if member.number in opened.waiting and opened.asked.method not in REPLICA_CALLS:
                    member.deliver(opened.asked)
            if death is not None:  # before an answer says that the engine is up
                member.num_restarts += 1
                text = "%s is back after %.1f s; %d requests go on"
                logger.warning(text, member.name, time.monotonic() - started, len(member.entries))
            if member.is_wanted:
                self._settle(member, CallResult(0, 1), REPLICA_CALLS)

    def _lose(self, member: Member, reason: str) -> None:
        """Mark a member as lost until an engine of it starts; the others take its requests. Raises EngineDeadError
        without others. reason: failed starts, fruitless deaths, or a stop."""
        with self._lock:
            death = member.death or EngineDeadError(reason)
            member.is_lost, member.num_fruitless, member.search = True, 0, CulpritSearch()
            if self._common is not None or all(each.is_lost for each in self.members):
                self._end(EngineDeadError(f"{reason}: {death}", summary=reason, error_id=death.error_id))
                self._raise_if_over()
            log = logger.error if member.is_wanted else logger.warning
            log("error %s: %s; its requests go on at the others", death.error_id, reason)
            for entry in list(member.entries.values()):
                target = self._choose(entry.request)
                self._place(entry, target)
                self._send_waiting(target)
            self._settle(member)

    def _end(self, error: BaseException) -> None:
        with self._lock:
            if self._death is None:
                self._death = error if isinstance(error, QuireError) else cause_of_death(error)
            self._lock.notify_all()
        self._arrived.put(Parts(EngineOutputs))

    def _raise_if_over(self) -> None:
        death = self._death
        if death is not None:
            raise death.again()
