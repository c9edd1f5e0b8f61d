"""Calls to the engines of a fleet (quire/engine/fleet.py): which of them answer, and how their answers become one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.member import Member
from quire.engine.messages import Call, CallResult, EngineOutputs
from quire.kv_cache.stats import EngineStats, add_up, carry_over

STATES = {"sleep": "sleep", "wake_up": "sleep", "pause": "pause", "resume": "pause"}
"""Method of a call -> the call that brings about the state that it begins or ends."""
FOR_REQUESTS = ("abort_all", "sleep")
"""Calls that concern requests, wherever they are: a member whose next engine is still starting answers them too."""
SUMS = ("reset_prefix_cache", "abort_all")
"""Calls whose answers add up, as those to `stats` do; of others the greatest counts."""

Parts = dict[int, EngineOutputs]
"""Outputs by session. Statistics come with those of session 0."""


def part_of(parts: Parts, session: int) -> EngineOutputs:
    """The outputs of a session, which may be the first."""
    part = parts.get(session)
    if part is None:
        part = parts[session] = EngineOutputs()
    return part


@dataclass(slots=True)
class _Open:
    """A call that not all have answered. waiting: numbers of those members. call_id: the session's."""

    call: Call
    waiting: set[int]
    session: int
    call_id: int
    results: dict[int, CallResult] = field(default_factory=dict)


class Calls:
    """Used under the fleet's lock."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1)
        self._states: dict[str, Call] = {}
        """The calls that bring about the state that the engines were told to be in."""

    def open(self, call: Call, receivers: Sequence[Member], session: int) -> Call:
        """Note a call; returns it as the members get it."""
        sent = Call(next(self._numbers), call.method, call.argument)
        waiting = {member.number for member in receivers}
        self._open[sent.call_id] = _Open(sent, waiting, session, call.call_id)
        return sent

    def receivers(self, method: str) -> Sequence[Member]:
        """The members that answer a call."""
        up = [member for member in self._members if member.is_up]
        if method == "kv_snapshot" and up:
            return up[:1]
        return [member for member in self._members if not member.is_lost] if method in FOR_REQUESTS or not up else up

    def answer(self, number: int, member: Member, result: CallResult | None, parts: Parts) -> None:
        """Note a member's answer (None: it will give none). The last one goes to the session."""
        opened = self._open.get(number)
        if opened is None or member.number not in opened.waiting:
            return
        opened.waiting.discard(member.number)
        if result is not None:
            if isinstance(result.value, EngineStats):
                result.value = carry_over(member.stats_before, result.value)
            opened.results[member.number] = result
        if opened.waiting:
            return
        del self._open[number]
        result = self._combined(opened)
        self._note_state(opened, result)
        result.call_id = opened.call_id
        part_of(parts, opened.session).results.append(result)

    def give_up(self, member: Member, parts: Parts) -> None:
        """No engine of a member will answer."""
        for number in list(self._open):
            self.answer(number, member, None, parts)

    def resend(self, member: Member) -> None:
        """Bring a member's next engine to the state of the one before."""
        for state in self._states.values():
            member.deliver(Call(0, state.method, state.argument))

    def resend_open(self, member: Member) -> None:
        """Ask a member's next engine what the one before has not answered, and for states that are not settled."""
        for opened in self._open.values():
            if opened.call.method in STATES:
                opened.waiting.add(member.number)
            if member.number in opened.waiting:
                member.deliver(opened.call)

    def _combined(self, opened: _Open) -> CallResult:
        """One answer for all; the first error counts."""
        results = list(opened.results.values())
        wrong = next((result for result in results if result.error is not None), None)
        if wrong is not None or len(self._members) == 1 or (results and results[0].kv is not None):
            return wrong or results[0]
        values = [result.value for result in results]
        snapshots = [value for value in values if isinstance(value, EngineStats)]
        if snapshots:
            others = (member.counted for member in self._members if member.number not in opened.results)
            return CallResult(0, add_up([*snapshots, *others]))
        numbers = [value for value in values if isinstance(value, int)]
        return CallResult(0, sum(numbers) if opened.call.method in SUMS else max(numbers, default=0))

    def _note_state(self, opened: _Open, result: CallResult) -> None:
        method = opened.call.method
        if method not in STATES:
            return
        if result.error is not None:
            for number, each in opened.results.items() if method == "sleep" and "sleep" not in self._states else ():
                if each.error is None:  # all sleep, or none
                    self._members[number].deliver(Call(0, "wake_up"))
        elif method == "wake_up" and result.value:
            self._states[method] = opened.call  # behind the call that sent it to sleep
        else:
            self._states.pop(STATES[method], None)
            if STATES[method] == "sleep":
                self._states.pop("wake_up", None)
            if method in STATES.values():
                self._states[method] = opened.call
