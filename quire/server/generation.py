"""Running a request's prompts on the engine, and counting its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from quire.errors import UserError
from quire.outputs import RequestOutput, raise_if_nonfinite
from quire.sampling_params import SamplingParams
from quire.server.protocol.chat import ChatMessage
from quire.server.protocol.common import PromptTokensDetails, Usage
from quire.server.turns import Part, Turns, share_of, split

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncLLM
    from quire.engine.input_processor import Prompt, RenderedChat
    from quire.server.context import ServerContext


class ChatBody(Protocol):
    """What tokenising a conversation needs of a request."""

    @property
    def messages(self) -> list[ChatMessage] | None: ...
    @property
    def generation_prompt(self) -> bool: ...
    @property
    def continue_final_message(self) -> bool: ...
    @property
    def special_tokens(self) -> bool: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...


async def render_chat(engine: AsyncLLM, body: ChatBody) -> RenderedChat:
    """Write the conversation with the model's template and tokenise it. Raises UserError where that fails."""
    messages = body.messages or []
    size = sum(message.size for message in messages)
    return await engine.render(
        await engine.off_loop(size, lambda: [message.to_dict() for message in messages]),
        add_generation_prompt=body.generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        add_special_tokens=body.special_tokens,
    )


async def generate(
    context: ServerContext,
    prompts: list[Prompt],
    params: SamplingParams,
    request_id: str,
    *,
    cache_salt: str | None,
    priority: int,
    prompt_field: str,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (prompt index, what is new) until every prompt is finished; the prompts run side by side, and where they
    are many sequences in turns (quire/server/turns.py).

    Closing the generator, or an error of one prompt, ends all of them. Raises as ServerContext.admit does: this is
    the last door, since others may have come in while the prompt was prepared; and ModelOutputError when the model
    computes NaN or infinite logits for a prompt. prompt_field: what the endpoint calls
    the prompt, for the errors about it.
    """

    share = share_of(context.engine.max_num_seqs)
    if params.answers_at_end and params.num_sequences > share:
        raise UserError(
            f"at most {share} sequences that are compared with one another (best_of, beam_width) are allowed on this "
            f"server, not {params.num_sequences}",
            param="n" if params.best_of is None else "best_of",
        )
    turns = Turns(share)
    size = params.num_sequences
    parts = [Part(turns, *place) for _ in prompts for place in ([(0, size)] if size <= share else split(size, share))]
    per_prompt = len(parts) // len(prompts)

    def stream(number: int) -> AsyncGenerator[RequestOutput, None]:
        index, place = divmod(number, per_prompt)
        name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
        settings, part = params, None
        if per_prompt > 1:
            name = f"{name}.{place}"
            # What is said of the prompt comes with the first part.
            scored = params.prompt_logprobs if place == 0 else None
            settings = msgspec.structs.replace(params, n=parts[number].num_sequences, prompt_logprobs=scored)
        if len(prompts) * size > share:
            part = parts[number]
        return context.engine.generate(
            prompts[index], settings, name, delta=True, cache_salt=cache_salt or "", priority=priority, part=part
        )

    context.admit()
    streams = [stream(number) for number in range(len(parts))]
    num_cached: dict[int, int] = {}
    try:
        async with aclosing(_merge(streams) if len(streams) > 1 else _number(streams[0])) as outputs:
            async for number, output in outputs:
                raise_if_nonfinite(output)
                index = number // per_prompt
                if per_prompt > 1:
                    # Later parts find the whole prompt in the cache; the request found what its first part did.
                    output.num_cached_tokens = num_cached.setdefault(index, output.num_cached_tokens)
                    for completion in output.outputs:
                        completion.index += parts[number].first_index
                yield index, output
    except UserError as error:
        if error.param in ("prompt", "prompt_token_ids"):
            error.param = prompt_field
        raise


async def _number(stream: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with aclosing(stream) as outputs:
        async for output in outputs:
            yield 0, output


async def _merge(
    streams: list[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue()
    # One output of each stream lies in the queue at most: what comes meanwhile is merged where the stream keeps it.
    taken = [asyncio.Event() for _ in streams]

    async def pump(index: int, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    taken[index].clear()
                    queue.put_nowait((index, output))
                    await taken[index].wait()
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(index, outputs)) for index, outputs in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is not None:
                taken[item[0]].set()
                yield item
                continue
            num_open -= 1
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TokenCounter:
    """Counts the tokens of one request for its usage."""

    def __init__(self) -> None:
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}
        self._num_completion_tokens = 0

    def count_output(self, prompt_index: int, output: RequestOutput, *, count_completion: bool = True) -> None:
        self._num_prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        if count_completion:
            self._num_completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def usage(self) -> Usage:
        num_prompt = sum(self._num_prompt_tokens.values())
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_completion_tokens,
            total_tokens=num_prompt + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached_tokens.values())),
        )
