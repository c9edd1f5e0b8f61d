"""The part of AsyncLLM that models which pool have: vectors, labels and scores of texts."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from quire.engine.input_processor import Prompt, prompt_text
from quire.engine.pooling_processor import PoolingProcessor
from quire.engine.request_part import RequestPart
from quire.outputs import RequestOutput
from quire.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.request import EngineRequest

T = TypeVar("T")


class AsyncPooling(ABC):
    """Part of AsyncLLM. Cancelling a task that waits here aborts its request; the errors are those of
    `AsyncLLM.generate`, and UserError for what the model cannot do."""

    @property
    @abstractmethod
    def pooling(self) -> PoolingProcessor:
        """Makes the requests, and what callers get of their outputs. Waits as `AsyncLLM.ready` does."""

    @abstractmethod
    def run_request(
        self,
        process: Callable[[str], Awaitable[EngineRequest]],
        text: str | None,
        request_id: str | None,
        *,
        delta: bool = False,
        part: RequestPart | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM.run_request."""

    @abstractmethod
    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """As AsyncLLM.off_loop."""

    async def embed(
        self, prompt: Prompt, params: PoolingParams, request_id: str | None = None, *, priority: int = 0
    ) -> EmbeddingRequestOutput:
        """The vector of a text."""
        self.pooling.check_task("embed")
        return self.pooling.embedding(await self.pool(prompt, params, request_id, priority=priority), params)

    async def classify(
        self, prompt: Prompt, params: PoolingParams, request_id: str | None = None, *, priority: int = 0
    ) -> ClassificationRequestOutput:
        """The probabilities of a classifier's labels."""
        self.pooling.check_task("classify")
        return self.pooling.classification(await self.pool(prompt, params, request_id, priority=priority), params)

    async def pool_any(
        self, prompt: Prompt, params: PoolingParams, request_id: str | None = None, *, priority: int = 0
    ) -> PoolingRequestOutput:
        """What the model makes of a text. (`LLM.encode`; here `encode` gives token ids.)"""
        self.pooling.check_task("encode")
        return self.pooling.pooled(await self.pool(prompt, params, request_id, priority=priority), params)

    async def score(
        self, data_1: list[str], data_2: list[str], params: PoolingParams, *, priority: int = 0
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` answers that of `data_1`, which has one text for all, or as many."""
        self.pooling.check_task("score")
        places = [min(i, len(data_1) - 1) for i in range(len(data_2))]
        if self.pooling.is_cross_encoder:
            pairs = [(data_1[place], second) for place, second in zip(places, data_2, strict=True)]
            running = [self.pool(first, params, second=second, priority=priority) for first, second in pairs]
            return [self.pooling.pair_score(output, params) for output in await _all(running)]
        outputs = await _all([self.pool(text, params, priority=priority) for text in (*data_1, *data_2)])
        lefts, rights = outputs[: len(data_1)], outputs[len(data_1) :]
        return [
            self.pooling.similarity(lefts[place], right, params) for place, right in zip(places, rights, strict=True)
        ]

    async def pool(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str | None = None,
        *,
        second: str | None = None,
        priority: int = 0,
        part: RequestPart | None = None,
        cache_salt: str = "",
    ) -> RequestOutput:
        """The last output of a pooled request, with what the model made of the prompt."""
        processor = await asyncio.to_thread(lambda: self.pooling)

        async def process(name: str) -> EngineRequest:
            size = len(prompt_text(prompt) or "") + len(second or "")
            return await self.off_loop(
                size,
                lambda: processor.request(
                    name, prompt, params, second=second, priority=priority, cache_salt=cache_salt
                ),
            )

        async with aclosing(self.run_request(process, prompt_text(prompt), request_id, part=part)) as outputs:
            async for output in outputs:
                if output.finished:
                    return output
        raise AssertionError("a request ends with an output")


async def _all(running: Sequence[Awaitable[T]]) -> list[T]:
    """All results, in order. When one fails, the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_awaited(each)) for each in running]
    return [task.result() for task in tasks]


async def _awaited(each: Awaitable[T]) -> T:
    return await each
