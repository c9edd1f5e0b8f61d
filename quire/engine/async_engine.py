"""AsyncLLM: concurrent requests on one asyncio loop, over an engine in its own process (or in this one)."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack

import msgspec

from quire.adapter_orders import AdapterRef
from quire.beam_search_params import BeamSearchOutput, BeamSearchParams, to_beam_search_output
from quire.config.engine import EngineConfig
from quire.config.engine_keywords import EngineKeywords
from quire.config.model import ModelConfig
from quire.config.options import BUNDLED_MODEL, EngineOptions, HasOptions
from quire.engine.adapters import KnownAdapters
from quire.engine.call_options import PoolingOptions, truncation_of, with_processor_kwargs
from quire.engine.client import DEFAULT_EXECUTOR, EngineClient
from quire.engine.engine_process import EngineProcess
from quire.engine.front_end import check_mode, check_reset, open_front_end
from quire.engine.inprocess_client import InProcessClient
from quire.engine.input_processor import (
    InputProcessor,
    Prompt,
    RenderedChat,
    has_images,
    mix_seed,
    num_units,
    prompt_text,
)
from quire.engine.messages import EngineReady
from quire.engine.open_fleet import open_fleet
from quire.engine.output_stream import StatsListener, all_of, last_only
from quire.engine.pooling_processor import PoolingProcessor
from quire.engine.process_client import ProcessClient
from quire.engine.public_names import described, missing, spelled_out, user_tokenizer
from quire.engine.request_part import RequestPart
from quire.engine.session import Session
from quire.engine.shared_client import SharedClient
from quire.engine.sleep import part_of
from quire.engine.texts import FrontEndTexts
from quire.errors import ConfigError, EngineDeadError, UserError
from quire.kv_cache.stats import EngineStats
from quire.lora_request import LoRARequest
from quire.multimodal.inputs import NoImages
from quire.outputs import RequestOutput
from quire.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.request import EngineRequest
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.snapshot import KVSnapshot
from quire.tokenization.conversation import conversation_of
from quire.tokenization.tokenizer import Tokenizer
from quire.tokenization.user_tokenizer import UserTokenizer
from quire.utils.heartbeat import HUNG_ENGINE_TIMEOUT

POLL_SECONDS = 0.01
"""Seconds between checks while a caller waits for requests to end."""

T = TypeVar("T")


class AsyncLLM:
    """Asynchronous engine for one event loop at a time. Keyword arguments are the engine's options
    (`quire.config.options`). The constructor returns while the engine process still starts; `ready` waits for it."""

    @spelled_out
    def __init__(
        self,
        *,
        model: str = BUNDLED_MODEL,
        in_process: bool = False,
        restart_engine: bool | None = None,
        hung_engine_timeout: float = HUNG_ENGINE_TIMEOUT,
        **engine_options: Unpack[EngineKeywords],
    ) -> None:
        """Start an engine. in_process: run the core in a thread of this process. restart_engine: start another engine,
        in which all requests continue, when an engine process dies or is silent for `hung_engine_timeout` seconds (0:
        no limit); None: only if `data_parallel_size` > 1. Raises ConfigError or ModelLoadError."""
        start = _starter(in_process, restart_engine, hung_engine_timeout)
        options = EngineOptions.from_keywords({"model": model, **engine_options})
        self._open(options, lambda options, config: start(options, config, executor=DEFAULT_EXECUTOR))

    @classmethod
    def from_options(
        cls,
        options: EngineOptions,
        *,
        in_process: bool = False,
        restart_engine: bool | None = None,
        hung_engine_timeout: float = HUNG_ENGINE_TIMEOUT,
        executor: str = DEFAULT_EXECUTOR,
        process: EngineProcess | None = None,
    ) -> AsyncLLM:
        """Build an engine from options. executor: see `LLM.from_options`. process: has already imported the engine's
        modules; for a single engine without restarts. Others: see the constructor."""
        engine = cls.__new__(cls)
        start = _starter(in_process, restart_engine, hung_engine_timeout, process)
        engine._open(options, lambda options, config: start(options, config, executor=executor))
        return engine

    @classmethod
    def from_engine_args(cls, engine_args: HasOptions) -> AsyncLLM:
        """Build an engine from `quire.AsyncEngineArgs`."""
        return cls.from_options(engine_args.to_options())

    @classmethod
    def of_session(cls, options: EngineOptions, client: SharedClient) -> AsyncLLM:
        """Connect to an engine that several processes share. Each session derives its own seeds for requests without
        one."""
        engine = cls.__new__(cls)
        engine._open(options, lambda options, config: client)
        session = engine._session
        session.namespace, session.control, session.loads = (
            f"{client.session}.",
            client.state.engine,
            client.state.loads,
        )
        engine.input_processor.seed = mix_seed(options.seed, client.session)
        return engine

    def _open(self, options: EngineOptions, start: Callable[[EngineOptions, EngineConfig], EngineClient]) -> None:
        self._front_end = open_front_end(options, start)
        self._front_end.encode_long_texts_elsewhere()
        self.texts = FrontEndTexts(self._front_end)
        self._session = Session(self._front_end.client, self._front_end.output_processor, self.texts)
        self._finalizer = weakref.finalize(self._session, self._front_end.shutdown)
        self._session.start()

    # Facts about the engine.

    @property
    def ready(self) -> EngineReady:
        """Facts that the engine found at its start; waits for it. Raises the error of a failed start."""
        return self._session.client.ready

    def __repr__(self) -> str:
        return f"AsyncLLM({described(self._front_end.options)})"

    if not TYPE_CHECKING:  # only at run time: with it, a type checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            raise missing(self, name)

    @property
    def model_config(self) -> ModelConfig:
        return self._front_end.config.model

    @property
    def engine_config(self) -> EngineConfig:
        return self._front_end.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front_end.tokenizer

    def get_tokenizer(self) -> UserTokenizer:
        """Tokenizer with the methods of a Transformers tokenizer. Raises UserError if the model has none."""
        return user_tokenizer(self.tokenizer, self.input_processor)

    @property
    def input_processor(self) -> InputProcessor:
        """Processor that checks and tokenises prompts. Waits for the engine's start. For servers and tools."""
        return self._front_end.input_processor

    @property
    def adapters(self) -> KnownAdapters:
        """Registry of the LoRA adapters that calls and requests have named."""
        return self._front_end.adapters

    @property
    def pooling(self) -> PoolingProcessor:
        return self._front_end.pooling_processor

    @property
    def takes_priorities(self) -> bool:
        return self._front_end.config.scheduler.scheduling_policy == "priority"

    @property
    def takes_images(self) -> bool:
        return not isinstance(self.input_processor.images, NoImages)

    @property
    def max_num_seqs(self) -> int:
        return self._front_end.config.scheduler.max_num_seqs

    @property
    def errored(self) -> bool:
        """True if the engine is dead or was shut down."""
        return self._session.death is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """New exception that names the cause of death. Only valid if `errored`."""
        death = self._session.death
        assert death is not None, "the engine is not dead"
        return death.again()

    @property
    def is_restarting(self) -> bool:
        """True while no engine is up and a new one starts; requests wait and then continue."""
        return self._session.client.is_restarting

    @property
    def num_restarts(self) -> int:
        return self._session.client.num_restarts

    @property
    def silence(self) -> float:
        """Seconds since the engine process last made progress (quire/engine/heartbeat.py)."""
        return self._session.client.silence

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead, and EngineUnresponsiveError if its process has been silent for
        SILENCE_LIMIT seconds. A long step is not silence."""
        self._session.check_health()

    def check_awake(self) -> None:
        """Raise EngineAsleepError if a front end has sent the engine to sleep."""
        self._session.check_awake()

    def add_listener(self, listener: StatsListener) -> None:
        """Register a listener for all further outputs and snapshots."""
        self._session.listeners.append(listener)

    # Load.

    @property
    def num_unfinished(self) -> int:
        """Number of requests begun and not ended in this process, including those being tokenised or with outputs left
        to read."""
        return self._session.num_unfinished

    @property
    def num_pending(self) -> int:
        """Number of requests that run, wait or are being prepared, over all processes that share the engine (also in
        the figures below). A finished request does not count, even with outputs left to read."""
        return self._session.num_pending

    @property
    def num_running(self) -> int:
        """Number of running requests, as the engine last reported."""
        return self._session.control.num_running

    @property
    def num_waiting(self) -> int:
        """Number of requests outside the background that wait or are being prepared; those that the engine has not
        reported yet count as waiting. For /metrics and admission limits."""
        return self._session.num_waiting

    @property
    def num_queued_tokens(self) -> int:
        """Total prompt tokens of the requests without output token yet. Admission limits compare with it."""
        return self._session.num_queued_tokens

    @property
    def queue_seconds(self) -> float:
        """Estimated seconds to compute `num_queued_tokens` at the recent rate; infinite if nothing was computed."""
        return self._session.queue_seconds

    # Requests.

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        delta: bool = False,
        cache_salt: str = "",
        priority: int = 0,
        part: RequestPart | None = None,
        **options: Unpack[PoolingOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs as they come, the last one with `finished`, or as `sampling_params.output_kind` says. delta:
        see OutputProcessor.add_request. priority: lower is earlier. part: place among several requests of one caller,
        which start in turn. options: see PoolingOptions. Leaving the iterator, or cancelling its task, aborts the
        request. Raises UserError for a bad prompt or an id in use, EngineDeadError, EngineUnresponsiveError as
        `check_health` does, InternalError if its output cannot be processed, EngineAsleepError, and QuireError while
        draining."""
        lora_request = options.pop("lora_request", None)
        if options:
            sampling_params = msgspec.structs.replace(sampling_params, **truncation_of(options))
            prompt = with_processor_kwargs(prompt, options)
        process = partial(self._process, prompt, sampling_params, (cache_salt, priority), lora_request)
        kind = getattr(sampling_params, "output_kind", None)  # the input processor rejects other types
        delta = delta or kind is RequestOutputKind.DELTA
        outputs = self._session.run_request(process, prompt_text(prompt), request_id, delta=delta, part=part)
        return last_only(outputs) if kind is RequestOutputKind.FINAL_ONLY else outputs

    async def register_prefix(self, prefix: Prompt, cache_salt: str = "") -> str:
        """Compute a prefix (text or token ids) and keep it until `unregister_prefix`; returns its id. See
        LLM.register_prefix. A cancelled call registers nothing. Raises EngineUnresponsiveError as `call` does."""
        ready = await self._with_pictures(prefix, cache_salt)

        def process(name: str) -> EngineRequest:
            return self.input_processor.process_prefix(name, ready, cache_salt=cache_salt)

        return await self._session.run_prefix(process)

    async def unregister_prefix(self, prefix_id: str) -> int:
        """Unregister a prefix; returns the number of blocks that no registered prefix holds any more. Raises UserError
        for an unknown id."""
        return await self._count("unregister_prefix", prefix_id)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None, *, cache_salt: str = ""
    ) -> BeamSearchOutput:
        """Find the `beam_width` best continuations of a prompt, as `generate` with
        SamplingParams(use_beam_search=True). Cancelling the task aborts the search."""
        if not isinstance(params, BeamSearchParams):
            raise UserError(f"params must be BeamSearchParams, not {type(params).__name__}", param="params")
        running = self.generate(prompt, params.to_sampling_params(), request_id, cache_salt=cache_salt)
        async with contextlib.aclosing(running) as outputs:
            output = await anext(outputs)
        return to_beam_search_output(output, self.tokenizer, params)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> RenderedChat:
        """Render and tokenise a conversation on the calling thread; `options` as in `conversation_of`."""
        return self.input_processor.render_chat(conversation_of(messages, **options))

    # Texts to vectors, labels and scores. Cancelling a waiting task aborts its request. They raise the errors of
    # `generate`, and UserError if the model does not support the task.

    async def embed(
        self, prompt: Prompt, params: PoolingParams, request_id: str | None = None, *, priority: int = 0
    ) -> EmbeddingRequestOutput:
        """Embedding vector of a text."""
        self.pooling.check_task("embed")
        return self.pooling.embedding(await self.pool(prompt, params, request_id, priority=priority), params)

    async def classify(
        self, prompt: Prompt, params: PoolingParams, request_id: str | None = None, *, priority: int = 0
    ) -> ClassificationRequestOutput:
        """Probabilities of a classifier's labels for a text."""
        self.pooling.check_task("classify")
        return self.pooling.classification(await self.pool(prompt, params, request_id, priority=priority), params)

    async def pool_any(
        self, prompt: Prompt, params: PoolingParams, request_id: str | None = None, *, priority: int = 0
    ) -> PoolingRequestOutput:
        """Raw pooled output for a text, as `LLM.encode`."""
        self.pooling.check_task("encode")
        return self.pooling.pooled(await self.pool(prompt, params, request_id, priority=priority), params)

    async def score(
        self, data_1: list[str], data_2: list[str], params: PoolingParams, *, priority: int = 0
    ) -> list[ScoringRequestOutput]:
        """Similarity or relevance score of each text of `data_2` to its partner in `data_1`, which has one text for all
        or one for each."""
        self.pooling.check_task("score")
        places = [min(i, len(data_1) - 1) for i in range(len(data_2))]
        if self.pooling.is_cross_encoder:
            pairs = [(data_1[place], second) for place, second in zip(places, data_2, strict=True)]
            running = [self.pool(first, params, second=second, priority=priority) for first, second in pairs]
            return [self.pooling.pair_score(output, params) for output in await all_of(running)]
        outputs = await all_of([self.pool(text, params, priority=priority) for text in (*data_1, *data_2)])
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
        lora_request: LoRARequest | AdapterRef | None = None,
    ) -> RequestOutput:
        """Run a pooling request and return its only output. second: second text of a pair. Base of `embed`, `classify`
        and `score`."""
        processor = await asyncio.to_thread(lambda: self.pooling)
        adapter = self.adapters.resolve(lora_request)

        async def process(name: str) -> EngineRequest:
            size = len(prompt_text(prompt) or "") + len(second or "")
            request = await self.texts.off_loop(
                size,
                lambda: processor.request(
                    name, prompt, params, second=second, priority=priority, cache_salt=cache_salt
                ),
            )
            return request if adapter is None else msgspec.structs.replace(request, adapter=adapter)

        async with contextlib.aclosing(
            self._session.run_request(process, prompt_text(prompt), request_id, part=part)
        ) as outputs:
            async for output in outputs:
                if output.finished:
                    return output
        raise AssertionError("a request ends with an output")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; their iterators yield a last output with finish reason "abort". Unknown ids are ignored."""
        self._session.abort(request_id)

    def knows(self, request_ids: Iterable[str]) -> bool:
        """True if a request of one of these ids runs or waits. An admin's abort asks it."""
        return self._session.knows(request_ids)

    # Control.

    async def call(self, method: str, argument: str = "") -> EngineStats | int | None:
        """Send a control call to the core (see the message Call) and return its value. Raises UserError for an unknown
        method, InternalError if the call fails, and EngineUnresponsiveError if the engine is silent or the call times
        out (quire/engine/heartbeat.py)."""
        return (await self._session.ask(method, argument)).value

    @property
    def sleep_level(self) -> int:
        """Level of sleep, 1 or 2; 0 while awake."""
        return self._session.control.sleep_level

    @property
    def pauses(self) -> bool:
        """True while a caller in any process has paused the engine."""
        return self._session.control.pauses

    @property
    def refuses_new(self) -> bool:
        """True if the pause rejects new requests ("abort", "wait")."""
        return self._session.control.refuses_new

    async def stats(self) -> EngineStats:
        """Fetch current statistics."""
        value = (await self._session.ask("stats")).value
        assert isinstance(value, EngineStats)
        return value

    async def kv_snapshot(self) -> KVSnapshot:
        """Every block and live request at the core's next turn. `request_id` is the engine's key: the caller's id, "#"
        and a unique number. For the live view."""
        snapshot = (await self._session.ask("kv_snapshot")).kv
        assert snapshot is not None
        return snapshot

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> int:
        """Drop all cached prefixes; returns the number of blocks that held one. See LLM.reset_prefix_cache."""
        check_reset(reset_connector)
        return await self._count("reset_prefix_cache")

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Start no request until `resume`; new ones wait (a server rejects them unless mode is "keep"). mode: "abort"
        ends all requests with finish reason "abort"; "wait" returns when running ones have ended; "keep" suspends them.
        clear_cache: drop cached prefixes, except with "keep". Raises UserError for another mode."""
        check_mode(mode)
        control = self._session.control
        control.pauses, control.refuses_new = True, mode != "keep"
        await self._session.ask("pause", "all" if mode == "keep" else "new")
        control.pauses, control.refuses_new = True, mode != "keep"  # the answer to a resume may have come since
        if mode == "abort":
            await self._session.ask("abort_all")
        if mode == "wait":
            while (stats := await self.stats()).num_running + stats.num_preempted:
                await asyncio.sleep(POLL_SECONDS)
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """End a pause, if any."""
        try:
            await self._session.ask("resume")
        finally:  # an engine that answers too late has resumed all the same
            self._session.control.pauses = self._session.control.refuses_new = False

    pause_generation, resume_generation = pause, resume
    """vLLM's names for `pause` and `resume`."""

    async def is_paused(self) -> bool:
        return bool(await self._count("is_paused"))

    async def sleep(self, level: int | str = 1, mode: str | None = None) -> None:
        """Free memory until `wake_up`: the KV cache, and the weights, which move to host memory on a device (level 1)
        or are dropped (level 2). mode: None refuses while requests live, "abort" ends them, "wait" waits for them.
        Raises UserError while requests live or a pause holds them, or prefixes are registered."""
        if mode is not None:
            check_mode(mode)
        control = self._session.control
        control.is_asleep = mode in ("abort", "wait") or control.is_asleep
        try:
            if mode == "abort":
                await self._session.ask("abort_all")
            while mode == "wait" and (stats := await self.stats()).num_running + stats.num_waiting:
                if await self.is_paused():
                    raise UserError('requests wait for the end of a pause: call resume, or sleep with mode "abort"')
                await asyncio.sleep(POLL_SECONDS)
            await self._session.ask("sleep", str(level))
        except BaseException:
            control.is_asleep = control.sleep_level > 0  # not as it was before: another call may have given up since
            raise
        control.is_asleep, control.sleep_level = True, int(level)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Accept requests again, with an empty cache. tags: ["weights"] restores only the weights, ["kv_cache"] the
        rest after them. Raises InternalError if memory or the checkpoint is gone, UserError for other tags."""
        if not await self._count("wake_up", part_of(tags)):
            self._session.control.is_asleep, self._session.control.sleep_level = False, 0

    async def is_sleeping(self) -> bool:
        return bool(await self._count("is_sleeping"))

    async def stop_replica(self, number: int) -> None:
        """Stop one of several engines (`data_parallel_size`) and free its memory, until `start_replica`. Its requests
        continue on the others with the same tokens. Raises UserError if no other replica is up."""
        await self._count("stop_replica", self._replica(number))

    async def start_replica(self, number: int) -> bool:
        """Start a stopped replica; returns whether it is up. A failed start is logged and retried every minute. An
        admin's order."""
        return bool(await self._count("start_replica", self._replica(number)))

    def _replica(self, number: int) -> str:
        count = self._front_end.options.data_parallel_size
        if not 0 <= number < count or count == 1:
            known = f"0 to {count - 1}" if count > 1 else "there is one engine alone"
            raise UserError(f"there is no replica {number} (data_parallel_size: {known})", param="replica")
        return str(number)

    async def _count(self, method: str, argument: str = "") -> int:
        value = (await self._session.ask(method, argument)).value
        assert isinstance(value, int)
        return value

    async def drain(self, timeout: float | None = None) -> bool:
        """Reject new requests and wait for the running ones; after `timeout` seconds abort the rest. Returns whether
        all ended by themselves. Raises EngineDeadError if the engine dies meanwhile."""
        return await self._session.drain(timeout)

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the engine; open requests fail with EngineDeadError. Idempotent."""
        if self._finalizer.detach() is not None:
            self._front_end.shutdown(timeout)
            self.texts.close()
            self._session.die(EngineDeadError("the engine was shut down"))

    async def _process(
        self, prompt: Prompt, params: SamplingParams, terms: tuple[str, int], lora_request: Any, request_id: str
    ) -> EngineRequest:
        adapter = None if lora_request is None else await asyncio.to_thread(self.adapters.resolve, lora_request)
        ready = await self._with_pictures(prompt, terms[0])

        def process() -> EngineRequest:
            salt, priority = terms
            return self.input_processor.process(
                request_id, ready, params, cache_salt=salt, priority=priority, adapter=adapter
            )

        if not self._front_end.is_ready:
            return await asyncio.to_thread(process)  # on a thread, because it waits for the core
        return await self.texts.off_loop(num_units(ready, params), process)

    async def _with_pictures(self, prompt: Prompt, salt: str) -> Prompt:
        if not isinstance(prompt, Mapping) or not has_images(prompt):
            return prompt
        return await self.texts.pictures.of_prompt(prompt, salt)


def _starter(
    in_process: bool, restart_engine: bool | None, hung_engine_timeout: float, process: EngineProcess | None = None
) -> Callable[..., EngineClient]:
    if in_process and restart_engine:
        raise ConfigError("restart_engine needs the engine in a process of its own", param="restart_engine")

    def start(options: EngineOptions, config: EngineConfig, executor: str) -> EngineClient:
        if in_process:
            return InProcessClient(options, executor=executor, config=config)
        if restart_engine or options.data_parallel_size > 1:
            return open_fleet(options, executor, restarts=restart_engine, hung_engine_timeout=hung_engine_timeout)
        return ProcessClient(options, executor=executor, process=process)

    return start
