"""Order of rehearsals: first a short try, then longer ones, each in its own lane, where clients take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class RehearsalText:
    """Text to rehearse. deadline: time.monotonic(). lane: lane of its next try. was_killed: something other than the
    limits has ended a try, which is repeated once."""

    number: int
    text: str
    client: str
    deadline: float
    lane: int = 0
    was_killed: bool = False


class RehearsalTurns:
    def __init__(self, num_lanes: int) -> None:
        self._lanes: list[OrderedDict[str, deque[RehearsalText]]] = [OrderedDict() for _ in range(num_lanes)]

    def add(self, job: RehearsalText) -> None:
        self._lanes[job.lane].setdefault(job.client, deque()).append(job)

    def take(self, lanes: range) -> RehearsalText | None:
        """Next job of the first of these lanes that has one; None: none has."""
        for lane in lanes:
            clients = self._lanes[lane]
            if clients:
                client, jobs = clients.popitem(last=False)
                job = jobs.popleft()
                if jobs:
                    clients[client] = jobs  # at the end
                return job
        return None

    def remove(self, job: RehearsalText) -> None:
        clients = self._lanes[job.lane]
        jobs = clients.get(job.client)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del clients[job.client]
