from __future__ import annotations

import asyncio
import contextlib
import itertools
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from quire.engine.messages import CallResult
from quire.errors import QuireError
from quire.kv_cache.stats import EngineStats
from quire.outputs import CompletionOutput, Logprob, RequestOutput, is_damaged
from quire.request import EngineRequest

T = TypeVar("T")

MAX_SEPARATE = 32
"""Outputs of one request that queue separately before they are merged."""


class OutputStream:
    """Outputs of one request until its consumer takes them, on one event loop.

    request_id: the caller's. key: engine's id of the request, never reused. delta: outputs queue separately up to
    MAX_SEPARATE and are merged beyond. Otherwise a newer output replaces the older.
    """

    def __init__(self, request_id: str, key: str, *, delta: bool) -> None:
        self.request_id = request_id
        self.key = key
        self._delta = delta
        self._waiting: deque[RequestOutput | MergedOutput] = deque()
        self._error: QuireError | None = None
        self._consumer: asyncio.Future[None] | None = None
        """Future that `get` awaits."""

    def put(self, output: RequestOutput) -> None:
        """Queue an output for its caller. It may be shared and is not modified."""
        if not self._delta:
            self._waiting.clear()
        # A damaged output becomes an error for the consumer, so it is not merged with earlier outputs.
        if len(self._waiting) < MAX_SEPARATE or is_damaged(output):
            self._waiting.append(output)
        else:
            newest = self._waiting[-1]
            if isinstance(newest, RequestOutput):
                newest = self._waiting[-1] = MergedOutput(newest)
            newest.merge(output)
        self._wake()

    def fail(self, error: QuireError) -> None:
        """Make `get` raise `error` after the queued outputs."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._consumer = asyncio.get_running_loop().create_future()
            await self._consumer
        waiting = self._waiting.popleft()
        return waiting if isinstance(waiting, RequestOutput) else waiting.output()

    def _wake(self) -> None:
        if self._consumer is not None and not self._consumer.done():
            self._consumer.set_result(None)

    async def last(self) -> RequestOutput:
        while not (output := await self.get()).finished:
            pass
        return output


class MergedOutput:
    """Consecutive deltas of one request, joined in linear time. For a caller slower than the engine."""

    def __init__(self, first: RequestOutput) -> None:
        self._last = first
        self._prompt_logprobs = first.prompt_logprobs
        self._completions: dict[int, _MergedCompletion] = {}
        self._add_completions(first)

    def merge(self, output: RequestOutput) -> None:
        self._last = output
        if self._prompt_logprobs is None:
            self._prompt_logprobs = output.prompt_logprobs
        self._add_completions(output)

    def output(self) -> RequestOutput:
        """All deltas as one; completions in order of first mention."""
        return msgspec.structs.replace(
            self._last,
            outputs=[completion.output() for completion in self._completions.values()],
            prompt_logprobs=self._prompt_logprobs,
        )

    def _add_completions(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            merged = self._completions.get(completion.index)
            if merged is None:
                merged = self._completions[completion.index] = _MergedCompletion()
            merged.merge(completion)


class _MergedCompletion:
    __slots__ = ("_last", "_logprobs", "_text", "_token_ids")

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs = _PackedLogprobs()
        self._last: CompletionOutput

    def merge(self, completion: CompletionOutput) -> None:
        self._last = completion
        self._token_ids += completion.token_ids
        for entry in completion.logprobs or ():
            self._logprobs.append(entry)
        if completion.text:
            self._text.append(completion.text)

    def output(self) -> CompletionOutput:
        return msgspec.structs.replace(
            self._last,
            text="".join(self._text),
            token_ids=self._token_ids,
            logprobs=None if self._last.logprobs is None else self._logprobs.entries(),
        )


class _PackedLogprobs:
    """Logprobs of many tokens in arrays: a fifth of the memory."""

    __slots__ = ("_num_alternatives", "_ranks", "_texts", "_token_ids", "_values")

    def __init__(self) -> None:
        self._num_alternatives = array("i")
        self._token_ids = array("i")
        self._values = array("d")
        self._ranks = array("i")
        """Ranks; 0 stands for None."""
        self._texts: list[str | None] = []

    def append(self, entry: dict[int, Logprob]) -> None:
        self._num_alternatives.append(len(entry))
        self._token_ids.extend(entry)
        for alternative in entry.values():
            self._values.append(alternative.logprob)
            self._ranks.append(alternative.rank or 0)
            self._texts.append(alternative.decoded_token)

    def entries(self) -> list[dict[int, Logprob]]:
        """Logprobs at each position, in order: token id -> Logprob."""
        alternatives = zip(self._token_ids, self._values, self._ranks, self._texts, strict=True)
        return [
            {
                token_id: Logprob(value, rank or None, text)
                for token_id, value, rank, text in itertools.islice(alternatives, count)
            }
            for count in self._num_alternatives
        ]


class StatsListener:
    """Observer, on the event loop, of everything that enters and leaves the engine. Override the methods you need.
    /metrics and the live view are listeners."""

    def record_request(self, request_id: str, request: EngineRequest, text: str | None) -> None:
        """A request is about to be sent to the core, on its own task. request_id: the caller's. text: prompt's
        text, if given."""

    def record_rejected(self, request_id: str) -> None:
        """The core rejected a request; no output follows."""

    def record_outputs(self, outputs: list[RequestOutput]) -> None:
        """Outputs as the engine makes them (cumulative or delta), last ones included."""

    def record_stats(self, stats: EngineStats) -> None:
        """Latest snapshot of the engine's statistics."""


@dataclass(slots=True)
class Delivery:
    """Outputs, errors and answers from one message of the core. outputs, failures: with their requests' streams.
    results: with the future of each call. last_outputs (of failed requests), rejected (ids) and stats: for
    listeners."""

    outputs: list[tuple[OutputStream, RequestOutput]] = field(default_factory=list)
    failures: list[tuple[OutputStream, QuireError]] = field(default_factory=list)
    results: list[tuple[asyncio.Future[CallResult], CallResult]] = field(default_factory=list)
    last_outputs: list[RequestOutput] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    stats: EngineStats | None = None

    def hand_over(self, listeners: Iterable[StatsListener]) -> None:
        """Hand all to streams and calls, then to listeners; runs on the event loop."""
        for stream, output in self.outputs:
            stream.put(output)
        for stream, error in self.failures:
            stream.fail(error)
        for future, result in self.results:
            if not future.done():
                future.set_result(result)
        heard = [output for _, output in self.outputs] + self.last_outputs
        for listener in listeners:
            if heard:
                listener.record_outputs(heard)
            for request_id in self.rejected:
                listener.record_rejected(request_id)
            if self.stats is not None:
                listener.record_stats(self.stats)


async def last_only(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if output.finished:
                yield output


async def all_of(running: Sequence[Awaitable[T]]) -> list[T]:
    """Await several calls; all results in order. If one fails, the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_awaited(each)) for each in running]
    return [task.result() for task in tasks]


async def _awaited(each: Awaitable[T]) -> T:
    return await each
