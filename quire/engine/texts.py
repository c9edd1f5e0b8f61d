"""Tokenising and chat templates outside a front end's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from quire.clock import Clock, SystemClock
from quire.engine.front_end import FrontEnd
from quire.engine.input_processor import RenderedChat
from quire.engine.pictures import Pictures
from quire.errors import PromptTooLongError, QuireError, UserError
from quire.tokenization.conversation import Conversation
from quire.tokenization.helpers import Rendering, in_turn
from quire.tokenization.text_lengths import check_num_characters, longest
from quire.utils.fair_threads import FairThreads

INLINE_CHARACTERS = 20_000
"""Length from which a text is tokenised on another thread, and of those tokenised in one turn of the loop."""
CALL_CHARACTERS = 100
"""Length of a text that takes as long as the call."""
MAX_LONG_TEXTS = 2
"""Long texts and conversations that a front end tokenises at once."""
LONG_WORK = 2 * 2**20
"""Characters or bytes above which a text never takes the last thread."""
SHORT_CONVERSATION_BYTES = 64 * 2**10
"""Size up to which conversations use a thread of their own."""

T = TypeVar("T")


class FrontEndTexts:
    """Tokenises and renders one front end's texts, on threads or in a helper process."""

    def __init__(self, front_end: FrontEnd, clock: Clock | None = None) -> None:
        """clock: measures the waiting time of conversations."""
        self.helpers = front_end.helpers
        self._front_end = front_end
        self._clock = clock or SystemClock()
        self._text_threads = FairThreads(MAX_LONG_TEXTS, "quire-text", long_size=LONG_WORK)
        self._chat_thread = FairThreads(1, "quire-chat", long_size=LONG_WORK)
        self.pictures = Pictures(front_end, self._text_threads)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inline = asyncio.Lock()
        self._num_inline = 0
        """Characters read in this turn of the loop."""

    def close(self) -> None:
        """Let the threads end after their current work."""
        self._text_threads.shutdown(wait=False)
        self.pictures.close()
        self._chat_thread.shutdown(wait=False)

    async def read_elsewhere(
        self, reader: str, argument: str, content: Sequence[bytes], decode: Callable[[bytes | bytearray], T]
    ) -> T:
        """Call the helper's function `reader` ("module:name") with `argument` and `content`, and decode its result on
        another thread. Cancelling drops waiting work at once. Raises InternalError if the helper dies."""
        helpers = self.helpers
        assert helpers is not None, "servers are of models that have a tokenizer"
        size = sum(map(len, content))
        work = self._text_threads.submit(size, lambda: decode(helpers.read(reader, argument, content)))
        return await asyncio.wrap_future(work)

    async def encode(self, text: str, *, add_special_tokens: bool = True, is_cut: bool = False) -> list[int]:
        """Token ids of `text`. is_cut: only the last tokens will be kept. Raises UserError if the model has no
        tokenizer, PromptTooLongError for a text far longer than the context."""
        tokenizer = self._front_end.tokenizer
        if tokenizer is None:
            raise UserError("this model has no tokenizer", param="prompt")
        inputs = self._front_end.input_processor
        inputs.check_text_length(text, "prompt", is_cut=is_cut)

        def work() -> list[int]:
            if not is_cut:
                inputs.check_num_tokens(text, "prompt")
            return tokenizer.encode(text, add_special_tokens)

        return await self.off_loop(len(text), work)

    async def encode_parts(self, parts: Sequence[int | str], *, add_special_tokens: bool = True) -> list[int]:
        """Token ids and those of texts, in one list. add_special_tokens: to a text in the first place. Raises as
        `encode`."""
        texts = [part for part in parts if isinstance(part, str)]
        tokenizer, inputs = self._front_end.tokenizer, self._front_end.input_processor
        if tokenizer is None:
            raise UserError("this model has no tokenizer", param="prompt")
        size = sum(map(len, texts))
        check_num_characters(size, inputs.max_model_len, "prompt")
        if len(parts) > inputs.max_model_len:
            message = f"{longest(inputs.max_model_len)}, and the prompt has {len(parts)} parts"
            raise PromptTooLongError(message, param="prompt")

        def work() -> list[int]:
            for text in texts:
                inputs.check_num_tokens(text, "prompt")
            short = iter(tokenizer.encode_batch([each for each in texts if len(each) <= INLINE_CHARACTERS], False))
            found: list[int] = []
            for number, part in enumerate(parts):
                if isinstance(part, int):
                    found.append(part)
                    continue
                is_first = add_special_tokens and not number
                token_ids = next(short) if len(part) <= INLINE_CHARACTERS else None
                if token_ids is None or is_first:
                    token_ids = tokenizer.encode(part, is_first)
                found += token_ids
            return found

        return await self.off_loop(size + len(texts) * CALL_CHARACTERS, work)

    async def render(self, conversation: Conversation) -> RenderedChat:
        """Render and tokenise a conversation in a helper. Cancelling drops waiting work, and ends a helper that is
        tokenising. Raises as InputProcessor.render_chat, and QuireError after too long a wait."""
        inputs = self._front_end.input_processor
        pictures = conversation.messages.pictures
        takes = inputs.image_inputs_of(pictures)
        work = inputs.prepare_chat(conversation)
        since = self._clock.now()
        limit = self.helpers.limits.queue_seconds if self.helpers is not None else 0.0

        def write() -> Rendering:
            waited = self._clock.now() - since
            if waited > limit:
                raise QuireError(f"too many conversations are being rendered: this one has waited {waited:.0f} seconds")
            return inputs.write_text(work)

        threads = self._chat_thread if work.size <= SHORT_CONVERSATION_BYTES else self._text_threads
        text, token_ids = await in_turn(threads, work.size, write)
        if token_ids is None:
            add_special_tokens = conversation.add_special_tokens
            token_ids = await self.off_loop(len(text), lambda: inputs.tokenise_chat(text, add_special_tokens))
        rendered = RenderedChat(text, token_ids, is_continued=conversation.continue_final_message)
        if takes is None:
            return rendered
        return inputs.with_images(rendered, await self.pictures.ready(takes, pictures, conversation.media))

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` inline if `size` (in characters) is small, else on a thread. Cancelling also ends work in other
        processes."""
        if size > INLINE_CHARACTERS:
            return await in_turn(self._text_threads, size, work)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._inline, self._num_inline = loop, asyncio.Lock(), 0
        async with self._inline:  # in order of arrival
            if self._num_inline + size > INLINE_CHARACTERS:
                await asyncio.sleep(0)  # behind _end_turn, and what else is ready
            if not self._num_inline:
                loop.call_soon(self._end_turn)
            self._num_inline += size + CALL_CHARACTERS
            return work()

    def _end_turn(self) -> None:
        self._num_inline = 0
