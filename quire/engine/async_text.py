"""The part of AsyncLLM that reads and writes text: tokenising and chat templates, which keep the event loop free."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

from quire.engine.input_processor import InputProcessor, RenderedChat
from quire.engine.long_texts import ABANDONMENT, Abandonment, LongTexts
from quire.errors import UserError
from quire.tokenization.chat_template import PreparedConversation
from quire.tokenization.tokenizer import Tokenizer
from quire.utils.fair_threads import FairThreads

INLINE_CHARACTERS = 20_000
"""Longer texts are tokenised on another thread: the loop goes on serving others meanwhile."""
MESSAGE_CHARACTERS = 64
"""What a message counts besides its content."""

MAX_LONG_TEXTS = 2
"""Long texts tokenised at a time: tokenising takes 70 to 300 times a text's size in memory."""
LONG_WORK = 2 * 2**20
"""Characters or bytes. A longer text never takes the last free thread, so that shorter ones do not wait for it."""

T = TypeVar("T")


class AsyncText(ABC):
    """Part of AsyncLLM."""

    long_texts: LongTexts | None
    """The processes that work on long texts; None where the model has no tokenizer."""

    def __init__(self) -> None:
        self._text_threads = FairThreads(MAX_LONG_TEXTS, "quire-text", long_size=LONG_WORK)

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """None when the model has none."""

    @property
    @abstractmethod
    def input_processor(self) -> InputProcessor:
        """Checks and tokenises prompts."""

    def close_threads(self) -> None:
        """Let the threads end when their texts are done."""
        self._text_threads.shutdown(wait=False)

    async def read_elsewhere(self, reader: str, argument: str, content: bytes, decode: Callable[[bytes], T]) -> T:
        """What the function `reader` ("module:name") makes of `argument` and `content` in one of these processes,
        decoded on another thread. Cancelled, it drops what is waiting, and what is being read when it is done. Raises
        InternalError when the process ends."""
        texts = self.long_texts
        assert texts is not None, "servers are of models that have a tokenizer"
        work = self._text_threads.submit(len(content), lambda: decode(texts.read(reader, argument, content)))
        return await asyncio.wrap_future(work)

    async def encode(self, text: str, *, add_special_tokens: bool = True, is_cut: bool = False) -> list[int]:
        """Token ids of `text`. Raises UserError when the model has no tokenizer, PromptTooLongError for a text far
        longer than the model's context. is_cut: only the end of the tokens will be kept."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UserError("this model has no tokenizer", param="prompt")
        inputs = self.input_processor
        inputs.check_text_length(text, "prompt", is_cut=is_cut)

        def work() -> list[int]:
            if not is_cut:
                inputs.check_num_tokens(text, "prompt")
            return tokenizer.encode(text, add_special_tokens)

        return await self.off_loop(len(text), work)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> RenderedChat:
        """Write and tokenise a conversation; `options` as in InputProcessor.render_chat."""
        return self.input_processor.render_chat(messages, **options)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]] | PreparedConversation,
        *,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> RenderedChat:
        """`render_chat` that keeps the loop free: templates are rendered in another process."""
        inputs = self.input_processor
        rendering = await self.off_loop(_size(messages), lambda: inputs.submit_chat(messages, **options))
        text = await asyncio.wrap_future(rendering)
        return await self.off_loop(len(text), lambda: inputs.tokenise_chat(text, add_special_tokens))

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` on a text here when it is short, on one of few other threads when it is long. size: characters, or
        as much. Cancelled, it ends what another process does for `work`."""
        if size <= INLINE_CHARACTERS:
            return work()
        context, abandonment = copy_context(), Abandonment()
        context.run(ABANDONMENT.set, abandonment)
        try:
            return await asyncio.wrap_future(self._text_threads.submit(size, lambda: context.run(work)))
        except asyncio.CancelledError:
            abandonment.leave()
            raise


def _size(messages: Sequence[Mapping[str, Any]] | PreparedConversation) -> int:
    """Characters of a conversation, roughly and no more than it takes to call it long."""
    size = 0
    if isinstance(messages, PreparedConversation):
        return sum(len(memoryview(message)) for message in messages.messages)
    for message in messages:
        content = message.get("content")
        size += MESSAGE_CHARACTERS + (len(content) if isinstance(content, str) else _size_of_parts(content))
        if size > INLINE_CHARACTERS:
            break
    return size


def _size_of_parts(content: Any) -> int:
    """Characters of a content that is a list of parts."""
    parts = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return sum(MESSAGE_CHARACTERS + (len(text) if isinstance(text, str) else 0) for text in texts)
