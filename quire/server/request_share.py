"""Fairness between requests: the sequences of one HTTP request take turns, to leave rows of the batch to others. A
request of many prompts or completions runs in parts: engine requests that join the queue in turn, with the seed of
their place."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from quire.request import EngineRequest

SHORTEST_TIMEOUT = 1e-9
"""Timeout in seconds of a part that timed out or was aborted before its turn."""


def share_of(max_num_seqs: int) -> int:
    """Maximum sequences of one HTTP request in the engine; a quarter of the rows, at least one, is left to others."""
    return max(1, max_num_seqs - max(1, max_num_seqs // 4))


def split(n: int, share: int) -> Iterator[tuple[int, int]]:
    """Yield (first index, number of sequences) for the parts of a prompt's `n` sequences."""
    for first in range(0, n, share):
        yield first, min(share, n - first)


class Turns:
    """Places for `share` sequences of one HTTP request, which its parts take, given in the order of asking."""

    def __init__(self, share: int) -> None:
        self._num_free = share
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.has_ended = False

    def end(self) -> None:
        """Give waiting parts their turns at once, with no time to run."""
        self.has_ended = True

    async def take(self, num_places: int) -> None:
        """Wait for `num_places` (at most the share) at once. A cancelled call takes none."""
        if not self._waiting and num_places <= self._num_free:
            self._num_free -= num_places
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_places, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn was given before the cancellation
                self._num_free += num_places
            self._give()
            raise

    def give_back(self, num_places: int) -> None:
        self._num_free += num_places
        self._give()

    def _give(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self._num_free):
            num_places, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._num_free -= num_places
                turn.set_result(None)


class PromptPart:
    """Sequences of one prompt, from `first_index` on. `AsyncLLM.generate` waits for the turn after its checks, and ends
    it. lines: places of all batches' lines."""

    def __init__(self, turns: Turns, first_index: int, num_sequences: int, lines: Turns | None = None) -> None:
        self._turns = turns
        self._arrival = time.monotonic()
        self._places = [turns] if lines is None else [turns, lines]
        self._taken: list[Turns] = []
        self.group = turns
        self.first_index = first_index
        self.num_sequences = num_sequences

    async def wait_turn(self, request: EngineRequest) -> EngineRequest:
        """Wait for the turn. Returns the request with the remaining timeout."""
        for places in self._places:
            await places.take(self.num_sequences)
            self._taken.append(places)
        params = request.params
        if self._turns.has_ended:
            params = msgspec.structs.replace(params, timeout_s=SHORTEST_TIMEOUT)
        elif params.timeout_s is not None:
            left = max(SHORTEST_TIMEOUT, params.timeout_s - (time.monotonic() - self._arrival))
            params = msgspec.structs.replace(params, timeout_s=left)
        return msgspec.structs.replace(request, params=params, first_index=self.first_index)

    def end_turn(self) -> None:
        """Give the places back. Idempotent; allowed before `wait_turn`."""
        for places in self._taken:
            places.give_back(self.num_sequences)
        self._taken.clear()
