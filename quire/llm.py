"""LLM: the offline API."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar, Unpack

import msgspec

from quire.adapter_orders import AdapterRef
from quire.beam_search_params import BeamSearchOutput, BeamSearchParams, to_beam_search_output
from quire.config.engine_keywords import EngineKeywords
from quire.config.options import BUNDLED_MODEL, EngineOptions
from quire.engine.adapters import LoRARequests
from quire.engine.call_options import CallOptions, PoolingOptions, truncation_of, with_processor_kwargs
from quire.engine.client import DEFAULT_EXECUTOR
from quire.engine.input_processor import Prompt, prompt_text
from quire.engine.messages import Abort, AddRequest, EngineOutputs, RequestRejected
from quire.engine.public_names import spelled_out
from quire.errors import EngineDeadError, InternalError, UserError
from quire.multimodal.inputs import MediaOptions
from quire.offline_engine import Conversation, OfflineEngine
from quire.outputs import RequestOutput, raise_if_nonfinite
from quire.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.tokenization.conversation import ContentFormat, conversation_of
from quire.utils.progress import MakeBar, ProgressBar

T = TypeVar("T")
PoolingPrompts = Prompt | Sequence[Prompt]

_POLL_SECONDS = 1.0
"""Longest time that Ctrl-C goes unnoticed while the core sends nothing."""


class ChatOptions(CallOptions, total=False):
    """Further arguments of `LLM.chat`, most of them for the template."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    chat_template_content_format: ContentFormat
    priority: int | Sequence[int] | None


class LLM(OfflineEngine):
    """Engine for batches of prompts. Several can live in one process; each is used by one thread at a time. Also a
    context manager.

    model: directory in Hugging Face layout, a GGUF file, a hub id, or "bundled". engine_options: see
    `quire.config.options`. Raises ConfigError, ModelLoadError or InsufficientMemoryError.
    """

    @spelled_out
    def __init__(self, model: str = BUNDLED_MODEL, **engine_options: Unpack[EngineKeywords]) -> None:
        self._open(EngineOptions.from_keywords({"model": model, **engine_options}))

    @classmethod
    def from_options(cls, options: EngineOptions, *, executor: str = DEFAULT_EXECUTOR) -> LLM:
        """LLM of options. executor: `"module:attribute"` of a callable from EngineConfig to Executor."""
        llm = cls.__new__(cls)
        llm._open(options, executor)
        return llm

    def _open(self, options: EngineOptions, executor: str = DEFAULT_EXECUTOR) -> None:
        super()._open(options, executor)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Complete every prompt, in order.

        prompts: a text, token ids, an object with `prompt` or `prompt_token_ids`, or a list of those. sampling_params:
        one for all (default `get_default_sampling_params`) or one each. use_tqdm: show a progress bar on a terminal if
        the call takes longer than a second. lora_request, priority: one for all, or one each (docs/adapters.md,
        docs/scheduling.md). options: see CallOptions.

        Raises UserError, with the prompt's index, before anything runs; EngineDeadError; InternalError when an output
        cannot be processed. After an error or Ctrl-C nothing is left running.
        """
        truncation = truncation_of(options)
        listed = [with_processor_kwargs(prompt, options) for prompt in _as_list(prompts)]
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = [msgspec.structs.replace(each, **truncation) for each in _params_for(listed, given)]
        priorities = _priorities_for(listed, 0 if priority is None else priority)
        with self._busy:
            requests = self._process(listed, params, priorities, self._adapters.each(lora_request, len(listed)))
            return self._run(requests, [prompt_text(prompt) for prompt in listed], use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: bool | MakeBar = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the `beam_width` best continuations of every prompt (quire/decoding/beam.py). Arguments and errors are
        those of `generate`, which does the same with SamplingParams(use_beam_search=True). concurrency_limit: checked
        only."""
        if concurrency_limit is not None and concurrency_limit < 1:
            raise UserError(f"concurrency_limit must be at least 1, not {concurrency_limit}", param="concurrency_limit")
        if not isinstance(params, BeamSearchParams):
            raise UserError(f"params must be BeamSearchParams, not {type(params).__name__}", param="params")
        outputs = self.generate(prompts, params.to_sampling_params(), use_tqdm, lora_request)
        return [to_beam_search_output(output, self.tokenizer, params) for output in outputs]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, by the model's chat template. chat_template:
        replaces the model's. Other arguments and errors are those of `generate`; UserError also when the model has no
        template."""
        content_format = options.pop("chat_template_content_format", "auto")
        priority = options.pop("priority", None)
        of_texts = CallOptions(tokenization_kwargs=options.pop("tokenization_kwargs", None))
        media = MediaOptions.of(options.pop("mm_processor_kwargs", None))
        if unknown := options.keys() - ChatOptions.__annotations__.keys():
            raise UserError(f"chat has no argument {min(unknown)!r}", param=min(unknown))
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            with _naming(index, "conversation", of=len(conversations)):
                whole = conversation_of(
                    conversation,  # type: ignore[arg-type]  # told apart above
                    source=chat_template,
                    content_format=content_format,
                    media=media,
                    **options,
                )
                prompts.append(self._input_processor.render_chat(whole).prompt())
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, priority, **of_texts)

    def register_prefix(self, prefix: Prompt, cache_salt: str = "") -> str:
        """Compute a prompt, perhaps with images, now and keep it until `unregister_prefix`; returns its id. Prompts
        that start with all its tokens and have the same `cache_salt` reuse it (docs/prefixes.md). Raises UserError when
        it does not fit or would leave requests no room, ModelOutputError for NaN or infinite logits."""
        with self._busy:
            request = self._input_processor.process_prefix(
                f"prefix-{next(self._numbers)}", prefix, cache_salt=cache_salt
            )
            raise_if_nonfinite(self._run([request], [None], use_tqdm=False)[0])
        return request.request_id

    def embed(
        self,
        prompts: PoolingPrompts,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Embed every prompt, in order.

        prompts: see `LLM.generate`. truncate_prompt_tokens: overrides the PoolingParams. pooling_params: one for all,
        or one each. options: see PoolingOptions. Raises as `LLM.generate`; UserError also for a model that gives no
        vectors.
        """
        cut = _truncation(truncate_prompt_tokens, options)
        finish, lora = self._pooling_processor.embedding, options.get("lora_request")
        return self._pooled("embed", prompts, pooling_params, cut, use_tqdm, finish, lora)

    def classify(
        self,
        prompts: PoolingPrompts,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[ClassificationRequestOutput]:
        """Compute label probabilities for every prompt. Arguments and errors are those of `embed`."""
        cut = _truncation(truncate_prompt_tokens, options)
        finish, lora = self._pooling_processor.classification, options.get("lora_request")
        return self._pooled("classify", prompts, pooling_params, cut, use_tqdm, finish, lora)

    def encode(
        self,
        prompts: PoolingPrompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | MakeBar = True,
        pooling_task: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PoolingRequestOutput]:
        """Pool every prompt: a vector or the scores of its labels. pooling_task: "embed", "classify" or "score", where
        the model supports it; None: the model's task. Other arguments and errors are those of `embed`."""
        if pooling_task is not None:
            self._pooling_processor.check_task(PoolingParams(task=pooling_task).task or "encode")
        cut = _truncation(truncate_prompt_tokens, options)
        finish, lora = self._pooling_processor.pooled, options.get("lora_request")
        return self._pooled("encode", prompts, pooling_params, cut, use_tqdm, finish, lora)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[ScoringRequestOutput]:
        """Score how well each text of `data_2` answers that of `data_1`: the pair's score of a cross-encoder, or the
        cosine of an embedder's two vectors. data_1: one text for all, or as many as `data_2`. Raises as `embed`."""
        self._pooling_processor.check_task("score")
        firsts, seconds = _texts(data_1, "data_1"), _texts(data_2, "data_2")
        if len(firsts) not in (1, len(seconds)):
            raise UserError(f"got {len(firsts)} texts for {len(seconds)}: give one, or as many", param="data_1")
        params = _merged(pooling_params or PoolingParams(), _truncation(truncate_prompt_tokens, options))
        if self._pooling_processor.is_cross_encoder:
            pairs = [(firsts[min(i, len(firsts) - 1)], second) for i, second in enumerate(seconds)]
            outputs = self._pool(pairs, [params] * len(pairs), use_tqdm, options.get("lora_request"))
            return [self._pooling_processor.pair_score(output, params) for output in outputs]
        texts = [(text, None) for text in (*firsts, *seconds)]
        outputs = self._pool(texts, [params] * len(texts), use_tqdm, options.get("lora_request"))
        lefts, rights = outputs[: len(firsts)], outputs[len(firsts) :]
        return [
            self._pooling_processor.similarity(lefts[min(i, len(lefts) - 1)], right, params)
            for i, right in enumerate(rights)
        ]

    def _pooled(
        self,
        task: str,
        prompts: PoolingPrompts,
        params: PoolingParams | Sequence[PoolingParams] | None,
        truncate: int | None,
        use_tqdm: bool | MakeBar,
        finish: Callable[[RequestOutput, PoolingParams], T],
        lora_request: LoRARequests,
    ) -> list[T]:
        self._pooling_processor.check_task(task)
        listed = _as_list(prompts)
        each = params if isinstance(params, Sequence) else [params or PoolingParams()] * len(listed)
        if len(each) != len(listed):
            raise UserError(f"got {len(each)} pooling_params for {len(listed)} prompts", param="pooling_params")
        merged = [_merged(one, truncate) for one in each]
        for asked in {one.task for one in merged if isinstance(one, PoolingParams) and one.task} - {task}:
            if task != "encode":
                raise UserError(f"pooling_params ask for the task {asked!r}, and the call for {task!r}", param="task")
            self._pooling_processor.check_task(asked)
        outputs = self._pool([(prompt, None) for prompt in listed], merged, use_tqdm, lora_request)
        return [finish(output, one) for output, one in zip(outputs, merged, strict=True)]

    def _pool(
        self,
        prompts: Sequence[tuple[Prompt, str | None]],
        params: Sequence[PoolingParams],
        use_tqdm: bool | MakeBar,
        lora_request: LoRARequests,
    ) -> list[RequestOutput]:
        with self._busy:
            requests = []
            adapters = self._adapters.each(lora_request, len(prompts))
            for index, ((prompt, second), each) in enumerate(zip(prompts, params, strict=True)):
                with _naming(index, "prompt", of=len(prompts)):
                    request_id = str(next(self._numbers))
                    request = self._pooling_processor.request(request_id, prompt, each, second=second)
                    requests.append(msgspec.structs.replace(request, adapter=adapters[index]))
            return self._run(requests, [prompt_text(prompt) for prompt, _ in prompts], use_tqdm)

    def _process(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        adapters: Sequence[AdapterRef | None],
    ) -> list[EngineRequest]:
        requests = []
        given = zip(prompts, params, priorities, adapters, strict=True)
        for index, (prompt, each, priority, adapter) in enumerate(given):
            with _naming(index, "prompt", of=len(prompts)):
                request_id = str(next(self._numbers))
                requests.append(
                    self._input_processor.process(request_id, prompt, each, priority=priority, adapter=adapter)
                )
        return requests

    def _run(
        self, requests: list[EngineRequest], texts: list[str | None], use_tqdm: bool | MakeBar
    ) -> list[RequestOutput]:
        for request, text in zip(requests, texts, strict=True):
            self._output_processor.add_request(request, text, final_only=True)
        with _deferred_interrupt() as interrupt, ProgressBar("prompts", len(requests), make=use_tqdm) as bar:
            try:
                for request in requests:
                    self._client.send(AddRequest(request))
                with self._client.computing():
                    return self._collect(requests, interrupt, bar)
            except BaseException:
                self._abandon(requests)
                raise

    def _collect(self, requests: list[EngineRequest], interrupt: _Interrupt, bar: ProgressBar) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        num_tokens, started = 0, time.monotonic()
        while len(finished) < len(requests):
            outputs = self._client.receive(_POLL_SECONDS) or EngineOutputs()
            interrupt.check()
            if outputs.rejections:
                self._raise_refusal(outputs.rejections, requests)
            processed = self._output_processor.process(outputs.updates)
            for abort in processed.aborts:
                self._client.send(abort)
            for failed in processed.failures:
                raise failed.error
            for output in processed.outputs:
                finished[output.request_id] = output
            for update in outputs.updates:
                num_tokens += len(update.new_token_ids)
            bar.update(len(finished), f"{num_tokens / (time.monotonic() - started):.1f} tokens/s")
        return [finished[request.request_id] for request in requests]

    def _raise_refusal(self, rejections: list[RequestRejected], requests: list[EngineRequest]) -> None:
        index = next(i for i, request in enumerate(requests) if request.request_id == rejections[0].request_id)
        with _naming(index, "prompt", of=len(requests)):
            raise rejections[0].error()

    def _abandon(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            with suppress(InternalError):
                self._output_processor.abort(request.request_id)
        with suppress(EngineDeadError):
            for request in requests:
                self._client.send(Abort(request.request_id))
            self._call("stats")  # whose answer comes after the aborts were handled


class _Interrupt:
    """Ctrl-C during a call of LLM, held until the engine is between two steps."""

    def __init__(self) -> None:
        self._pending: tuple[int, FrameType | None] | None = None
        self.usual = signal.getsignal(signal.SIGINT)

    def note(self, number: int, frame: FrameType | None) -> None:
        self._pending = (number, frame)

    def check(self) -> None:
        """Do what SIGINT usually does (raise KeyboardInterrupt), if it came."""
        if self._pending is not None and callable(self.usual):
            pending, self._pending = self._pending, None
            self.usual(*pending)


@contextmanager
def _deferred_interrupt() -> Iterator[_Interrupt]:
    """Hold SIGINT back between two `check`s: in the middle of a step it would leave the scheduler inconsistent."""
    interrupt = _Interrupt()
    if threading.current_thread() is not threading.main_thread() or not callable(interrupt.usual):
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, interrupt.usual)
    interrupt.check()


@contextmanager
def _naming(index: int, noun: str, *, of: int) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if of == 1:
            raise
        raise type(error)(f"{noun} {index}: {error.message}", param=error.param) from None


def _params_for(
    prompts: list[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams]
) -> list[SamplingParams]:
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * len(prompts)
    if not isinstance(sampling_params, Sequence) or len(sampling_params) != len(prompts):
        raise UserError(
            f"sampling_params must be one SamplingParams or a list of {len(prompts)}, one for each prompt",
            param="sampling_params",
        )
    return list(sampling_params)


def _priorities_for(prompts: list[Prompt], priority: int | Sequence[int]) -> list[int]:
    if isinstance(priority, int):
        return [priority] * len(prompts)
    if not isinstance(priority, Sequence) or len(priority) != len(prompts):
        raise UserError(
            f"priority must be an integer or a list of {len(prompts)}, one for each prompt", param="priority"
        )
    return list(priority)


def _as_list(prompts: PoolingPrompts) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}", param="prompts")
    if prompts and all(isinstance(each, int) for each in prompts):
        return [list(prompts)]  # type: ignore[arg-type]  # one prompt as token ids
    return list(prompts)  # type: ignore[arg-type]  # told apart above


def _texts(data: str | Sequence[str], name: str) -> list[str]:
    listed = [data] if isinstance(data, str) else list(data)
    if not listed or not all(isinstance(each, str) for each in listed):
        raise UserError(f"{name} must be a text or a list of texts", param=name)
    return listed


def _truncation(truncate: int | None, options: PoolingOptions) -> int | None:
    given = truncation_of(options)
    if options.get("mm_processor_kwargs"):
        raise UserError("mm_processor_kwargs: models that pool take no pictures", param="mm_processor_kwargs")
    if given.get("truncation_side", "right") != "right":
        raise UserError("truncation_side must be 'right' for models that pool", param="tokenization_kwargs")
    found: int | None = given.get("truncate_prompt_tokens", truncate)
    return found


def _merged(params: PoolingParams, truncate: int | None) -> PoolingParams:
    if truncate is None or not isinstance(params, PoolingParams):
        return params
    return msgspec.structs.replace(params, truncate_prompt_tokens=truncate)
