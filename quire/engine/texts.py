"""The texts of a front end with an event loop: tokenising and chat templates, which keep the loop free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from quire.clock import Clock, SystemClock
from quire.engine.front_end import FrontEnd
from quire.engine.input_processor import RenderedChat
from quire.engine.pictures import Pictures
from quire.errors import QuireError, UserError
from quire.tokenization.conversation import Conversation
from quire.tokenization.helpers import ABANDONMENT, Abandonment, Rendering
from quire.utils.fair_threads import FairThreads

INLINE_CHARACTERS = 20_000
"""Longer texts are tokenised on another thread: the loop goes on serving others meanwhile."""
MAX_LONG_TEXTS = 2
"""Long texts and conversations worked on at a time: tokenising takes 70 to 300 times a text's size in memory."""
LONG_WORK = 2 * 2**20
"""Characters or bytes. A longer text never takes the last of these threads, so that shorter ones do not wait for it."""
SHORT_CONVERSATION_BYTES = 64 * 2**10
"""Conversations of at most as many bytes have a thread of their own, so that they wait for no long work."""

T = TypeVar("T")


class Texts:
    """Work on the texts of one front end, beside its event loop."""

    def __init__(self, front_end: FrontEnd, clock: Clock | None = None) -> None:
        """clock: for the time that conversations wait."""
        self.helpers = front_end.helpers
        """None where the model has no tokenizer."""
        self._front_end = front_end
        self._clock = clock or SystemClock()
        self._text_threads = FairThreads(MAX_LONG_TEXTS, "quire-text", long_size=LONG_WORK)
        self._chat_thread = FairThreads(1, "quire-chat", long_size=LONG_WORK)
        self.pictures = Pictures(front_end, self._text_threads)

    def close(self) -> None:
        """Let the threads end when their texts are done."""
        self._text_threads.shutdown(wait=False)
        self.pictures.close()
        self._chat_thread.shutdown(wait=False)

    async def read_elsewhere(
        self, reader: str, argument: str, content: Sequence[bytes], decode: Callable[[bytes | bytearray], T]
    ) -> T:
        """What the function `reader` ("module:name") of a helper makes of `argument` and the bytes of `content`,
        decoded on another thread. Cancelled, it drops what is waiting, and what is being read when it is done. Raises
        InternalError when the helper ends."""
        helpers = self.helpers
        assert helpers is not None, "servers are of models that have a tokenizer"
        size = sum(map(len, content))
        work = self._text_threads.submit(size, lambda: decode(helpers.read(reader, argument, content)))
        return await asyncio.wrap_future(work)

    async def encode(self, text: str, *, add_special_tokens: bool = True, is_cut: bool = False) -> list[int]:
        """Token ids of `text`. Raises UserError when the model has no tokenizer, PromptTooLongError for a text far
        longer than the model's context. is_cut: only the end of the tokens will be kept."""
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

    async def render(self, conversation: Conversation) -> RenderedChat:
        """Write and tokenise a conversation. One job of a helper writes the conversation, and tokenises the text
        where that is long. Cancelled, it drops what is waiting, and ends the helper that tokenises.

        Raises as InputProcessor.render_chat, and QuireError for a conversation that has waited too long."""
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
        text, token_ids = await _in_turn(threads, work.size, write)
        if token_ids is None:
            add_special_tokens = conversation.add_special_tokens
            token_ids = await self.off_loop(len(text), lambda: inputs.tokenise_chat(text, add_special_tokens))
        rendered = RenderedChat(text, token_ids)
        if takes is None:
            return rendered
        return inputs.with_images(rendered, await self.pictures.ready(takes, pictures, conversation.media))

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` on a text here when it is short, on one of few other threads when it is long. size: characters, or
        as much. Cancelled, it ends what another process does for `work`."""
        return work() if size <= INLINE_CHARACTERS else await _in_turn(self._text_threads, size, work)


async def _in_turn(threads: FairThreads, size: int, work: Callable[[], T]) -> T:
    """Run `work` on one of the threads, in the callers' turns. Cancelled, it ends what another process tokenises for
    `work`."""
    abandonment = Abandonment()

    def abandonable() -> T:
        ABANDONMENT.set(abandonment)
        try:
            return work()
        finally:
            ABANDONMENT.set(None)

    try:
        return await asyncio.wrap_future(threads.submit(size, abandonable))
    except asyncio.CancelledError:
        abandonment.leave()
        raise
