"""Running of a request's prompts on the engine, and counting of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.adapter_orders import AdapterRef
from quire.engine.output_stream import MergedOutput
from quire.engine.request_part import EACH_STEP, IN_BACKGROUND
from quire.errors import UserError
from quire.logging import REQUEST_ID
from quire.lora_request import LoRARequest
from quire.multimodal.inputs import NO_OPTIONS, MediaOptions
from quire.outputs import RequestMetrics, RequestOutput, raise_if_nonfinite
from quire.request import FinishReason
from quire.sampling_params import SamplingParams
from quire.server.errors import unavailable
from quire.server.limits import CHARGE, Charge, client_salt, names_owner
from quire.server.protocol.chat import TemplateInputs
from quire.server.protocol.common import AnswerTimes, CompletionTokensDetails, PromptTokensDetails, Usage
from quire.server.protocol.messages import ChatMessage, found_messages
from quire.server.request_share import PromptPart, Turns, share_of, split
from quire.server.running import Work
from quire.tokenization.conversation import Conversation

if TYPE_CHECKING:
    from quire.engine.input_processor import Prompt, RenderedChat
    from quire.server.context import ServerContext


T = TypeVar("T")
ADAPTER_NAMES = {"lora_request": "model"}
NO_INPUTS = TemplateInputs()


class ChatBody(Protocol):
    """Request fields that tokenizing a conversation needs."""

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


async def render_chat(
    context: ServerContext,
    body: ChatBody,
    tools: list[dict[str, Any]] | None = None,
    inputs: TemplateInputs = NO_INPUTS,
) -> RenderedChat:
    """Render and tokenize a conversation with the model's template. Raises UserError if that fails, or for a request's
    untrusted template."""
    if inputs.source is not None and not context.settings.trust_request_chat_template:
        raise UserError(
            "chat_template is not taken from requests: the server needs --trust-request-chat-template",
            param="chat_template",
        )
    messages = found_messages(body.messages)
    return await context.engine.texts.render(
        Conversation(
            messages=messages,
            media=_media_options(context, inputs) if messages.pictures else NO_OPTIONS,
            tools=tools,
            add_generation_prompt=body.generation_prompt,
            continue_final_message=body.continue_final_message,
            documents=inputs.documents,
            variables={
                **context.settings.default_chat_template_kwargs,
                **body.chat_template_kwargs,
                **inputs.options,
            },
            source=inputs.source,
            content_format=context.settings.chat_template_content_format,
            add_special_tokens=body.special_tokens,
        )
    )


class Terms(NamedTuple):
    """Terms of a request's prompts: two of its fields, and its adapter."""

    cache_salt: str | None
    priority: int
    adapter: LoRARequest | AdapterRef | None


def _media_options(context: ServerContext, inputs: TemplateInputs) -> MediaOptions:
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if getattr(inputs, name) and not context.settings.trust_request_mm_kwargs:
            raise UserError(
                f"{name} is not taken from requests: the server needs --trust-request-mm-kwargs", param=name
            )
    return MediaOptions.of(inputs.mm_processor_kwargs, inputs.media_io_kwargs, names_owner(inputs.cache_salt))


async def generate(
    context: ServerContext,
    prompts: list[Prompt],
    params: SamplingParams,
    request_id: str,
    *,
    answer_id: str,
    terms: Terms,
    names: Mapping[str, str],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (prompt index, new output) until every prompt is finished. The prompts run side by side; many sequences
    take turns (quire/server/request_share.py). An error of one prompt ends all. Raises as
    ServerContext.admit does; ModelOutputError for NaN or infinite logits. answer_id: known to the client. names:
    engine's field names -> the request's, for errors."""
    share = share_of(context.engine.max_num_seqs)
    if params.answers_at_end and params.num_sequences > share:
        raise UserError(
            f"at most {share} sequences that are compared with one another (best_of, beam_width) are allowed on this "
            f"server, not {params.num_sequences}",
            param="n" if params.best_of is None else "best_of",
        )
    turns, lines = Turns(share), context.line_places if IN_BACKGROUND.get() else None
    size = params.num_sequences
    places = [(0, size)] if size <= share else list(split(size, share))
    parts = [PromptPart(turns, *place, lines) for _ in prompts for place in places]
    per_prompt = len(parts) // len(prompts)
    salt = client_salt(terms.cache_salt)
    ids = _part_ids(request_id, len(prompts), per_prompt)

    def stream(number: int) -> AsyncGenerator[RequestOutput, None]:
        index, place = divmod(number, per_prompt)
        settings, part = params, None
        if per_prompt > 1:
            # The first part alone returns the prompt's log-probabilities.
            scored = params.prompt_logprobs if place == 0 else None
            settings = msgspec.structs.replace(params, n=parts[number].num_sequences, prompt_logprobs=scored)
        if len(prompts) * size > share or lines is not None:
            part = parts[number]
        run = partial(context.engine.generate, cache_salt=salt, priority=terms.priority, lora_request=terms.adapter)
        return run(prompts[index], settings, ids[number], delta=True, part=part)

    context.admit()
    charge, in_background = CHARGE.get() or Charge(context.metrics), IN_BACKGROUND.get()
    REQUEST_ID.set(request_id)
    streams = [stream(number) for number in range(len(parts))]
    num_cached: dict[int, int] = {}

    def placed(number: int, output: RequestOutput) -> tuple[int, RequestOutput]:
        raise_if_nonfinite(output)
        check_line(output, in_background=in_background)
        index = number // per_prompt
        charge.count((request_id, index), output)
        if per_prompt > 1:
            # Later parts find the whole prompt in the cache; only the first part's number is the request's.
            output.num_cached_tokens = num_cached.setdefault(index, output.num_cached_tokens)
            for completion in output.outputs:
                completion.index += parts[number].first_index
        return index, output

    try:
        with context.running.hold((answer_id, request_id), Work(ids, turns, in_background)):
            if len(streams) == 1:  # each generator in the way adds time per output
                async with aclosing(streams[0]) as outputs:
                    async for output in outputs:
                        yield placed(0, output)
            else:
                async with aclosing(merged(streams)) as outputs_of:
                    async for number, output in outputs_of:
                        yield placed(number, output)
    except UserError as error:
        raise error.named({**ADAPTER_NAMES, **names}) from None


def check_line(output: RequestOutput, *, in_background: bool) -> None:
    """Raise ApiError (503) for a line of a batch that was ended early; the batch asks it again."""
    if in_background and any(each.finish_reason == FinishReason.ABORT for each in output.outputs):
        raise unavailable("a line of a batch was ended early")


def _part_ids(request_id: str, num_prompts: int, per_prompt: int) -> list[str]:
    prompts = [request_id] if num_prompts == 1 else [f"{request_id}-{index}" for index in range(num_prompts)]
    return prompts if per_prompt == 1 else [f"{name}.{place}" for name in prompts for place in range(per_prompt)]


def spaced(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None], interval: int | None
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Join outputs so each brings `interval` tokens of a completion, except a prompt's first and a completion's last.
    interval: None: leave them as they are. Call before `outputs` begins."""
    EACH_STEP.set(interval is not None)
    return outputs if interval in (None, 1) else _joined(outputs, interval)


async def _joined(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None], interval: int
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    held: dict[int, MergedOutput] = {}
    num_tokens: dict[tuple[int, int], int] = {}
    begun: set[int] = set()
    async with aclosing(outputs):
        async for number, output in outputs:
            if number not in begun:
                begun.add(number)
                yield number, output
                continue
            if number in held:
                held[number].merge(output)
            else:
                held[number] = MergedOutput(output)
            is_due = output.finished
            for completion in output.outputs:
                place = number, completion.index
                num_tokens[place] = num_tokens.get(place, 0) + len(completion.token_ids)
                is_due = is_due or num_tokens[place] >= interval or completion.finish_reason is not None
            if is_due:
                for place in [place for place in num_tokens if place[0] == number]:
                    del num_tokens[place]
                yield number, held.pop(number).output()


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (stream's index, item). One stream's error ends all streams."""
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()
    # The queue holds at most one output of each stream; the stream itself merges those that come meanwhile.
    taken = [asyncio.Event() for _ in streams]

    async def pump(index: int, outputs: AsyncGenerator[T, None]) -> None:
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
    def __init__(self) -> None:
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}
        self._num_completion_tokens = 0
        self._metrics = RequestMetrics()

    def count_output(self, prompt_index: int, output: RequestOutput, *, count_completion: bool = True) -> None:
        self._num_prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        self._metrics = output.metrics
        if count_completion:
            for completion in output.outputs:
                self._num_completion_tokens += len(completion.token_ids)

    @property
    def draft_steps(self) -> bytes:
        """Last prompt's byte pairs (drafted, accepted)."""
        return self._metrics.draft_steps

    def usage(self, num_reasoning: int | None = None, num_predicted: int | None = None) -> Usage:
        """num_reasoning: completion tokens of the reasoning; None if the model does not reason. num_predicted: tokens
        of the request's prediction, if any."""
        details: CompletionTokensDetails | UnsetType = UNSET
        if num_reasoning is not None:
            details = CompletionTokensDetails(num_reasoning)
        if num_predicted is not None:
            details = CompletionTokensDetails() if details is UNSET else details
            details.accepted_prediction_tokens = accepted = min(num_predicted, sum(self.draft_steps[1::2]))
            details.rejected_prediction_tokens = num_predicted - accepted
        num_prompt = sum(self._num_prompt_tokens.values())
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_completion_tokens,
            total_tokens=num_prompt + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached_tokens.values())),
            completion_tokens_details=details,
        )

    def times(self) -> AnswerTimes | None:
        """Durations of the phases; None for several prompts."""
        if len(self._num_prompt_tokens) != 1:
            return None
        measured, num_tokens = self._metrics, self._num_completion_tokens
        times = AnswerTimes(queue_time_ms=1000 * measured.queue_time)
        if measured.time_to_first_token:
            generating = max(0.0, measured.latency - measured.time_to_first_token)
            computing = measured.latency - measured.queue_time
            times.time_to_first_token_ms = 1000 * (measured.time_to_first_token - measured.queue_time)
            times.generation_time_ms = 1000 * generating
            times.mean_itl_ms = 1000 * generating / (num_tokens - 1) if num_tokens > 1 else None
            times.tokens_per_second = num_tokens / computing if computing > 0 else None
        return times
