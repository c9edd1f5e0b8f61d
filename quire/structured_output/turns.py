"""The order in which texts are rehearsed.

A text first gets a short try, and, where that is not enough, longer ones, each in a lane of its own: so one that takes
milliseconds waits for short tries of others alone. In a lane, clients take turns.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Job:
    """A text to rehearse. deadline: by time.monotonic(). lane: of its next try. was_killed: something else than the
    limits has ended a try, which is made again once."""

    number: int
    text: str
    client: str
    deadline: float
    lane: int = 0
    was_killed: bool = False


class Turns:
    """The jobs that wait, by lane."""

    def __init__(self, num_lanes: int) -> None:
        self._lanes: list[OrderedDict[str, deque[Job]]] = [OrderedDict() for _ in range(num_lanes)]

    def add(self, job: Job) -> None:
        self._lanes[job.lane].setdefault(job.client, deque()).append(job)

    def take(self, lanes: range) -> Job | None:
        """The next job of the first of these lanes that has one."""
        for lane in lanes:
            clients = self._lanes[lane]
            if clients:
                client, jobs = clients.popitem(last=False)
                job = jobs.popleft()
                if jobs:
                    clients[client] = jobs  # at the end
                return job
        return None

    def remove(self, job: Job) -> None:
        """Drop a job, if it waits."""
        clients = self._lanes[job.lane]
        jobs = clients.get(job.client)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del clients[job.client]
