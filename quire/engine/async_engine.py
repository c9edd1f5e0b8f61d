"""AsyncLLM: many requests at once on one asyncio loop, over an engine in a process of its own (or in this one).

A receiver thread waits for the core and turns its tokens into text; the loop gets one call for everything that a step
produced. Requests end when they finish, when their consumer leaves, or all at once when the engine dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, Unpack

import msgspec

from quire.beam_search_params import BeamSearchOutput, BeamSearchParams, to_beam_search_output
from quire.call_options import PoolingOptions, truncation_of
from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.engine.async_control import AsyncControl, ControlState
from quire.engine.async_load import AsyncLoad
from quire.engine.async_pooling import AsyncPooling
from quire.engine.async_text import AsyncText
from quire.engine.client import DEFAULT_EXECUTOR, EngineClient, cause_of_death
from quire.engine.fleet import open_fleet
from quire.engine.front_end import FrontEnd, open_front_end
from quire.engine.heartbeat import HUNG_ENGINE_TIMEOUT, check_responsive, wait_for_answer
from quire.engine.inprocess_client import InProcessClient
from quire.engine.input_processor import InputProcessor, Prompt, mix_seed, num_units, prompt_text
from quire.engine.long_prompts import encode_pieces
from quire.engine.messages import Abort, AddRequest, Call, CallResult, EngineOutputs, EngineReady
from quire.engine.outbox import Outbox
from quire.engine.output_stream import Delivery, OutputStream, StatsListener
from quire.engine.pooling_processor import PoolingProcessor
from quire.engine.process_client import ProcessClient
from quire.engine.request_part import CLIENT_NAME, EACH_STEP, Preparations, RequestPart, turn_of
from quire.engine.shared_client import SharedClient
from quire.engine.shared_state import EngineState
from quire.errors import ConfigError, EngineDeadError, InternalError, QuireError, UserError
from quire.outputs import RequestOutput, raise_if_nonfinite
from quire.request import EngineRequest
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.stats import EngineStats
from quire.tokenization.tokenizer import Tokenizer

_PARAMETERS = {"unregister_prefix": "prefix_id", "sleep": "level", "wake_up": "tags", "pause": "mode"}
"""What a method's argument is called."""


class HasOptions(Protocol):
    def to_options(self) -> EngineOptions: ...


class AsyncLLM(AsyncText, AsyncPooling, AsyncControl, AsyncLoad):
    """Used from one event loop at a time. Keyword arguments are the engine's options (`quire.config.options`).

    The constructor returns while the engine process is still starting; `ready` waits for it.
    """

    def __init__(
        self,
        *,
        in_process: bool = False,
        restart_engine: bool | None = None,
        hung_engine_timeout: float = HUNG_ENGINE_TIMEOUT,
        **engine_options: Any,
    ) -> None:
        """in_process: run the core in a thread of this process. restart_engine: when an engine process dies, or has
        given no sign of life for `hung_engine_timeout` seconds (0: only when it dies), start another one, in which
        every request goes on (quire/engine/fleet.py); None: where there are several (`data_parallel_size`). Raises
        ConfigError or ModelLoadError."""
        start = _starter(in_process, restart_engine, hung_engine_timeout)
        options = EngineOptions.from_keywords(engine_options)
        self._open(options, lambda options: start(options, executor=DEFAULT_EXECUTOR))

    @classmethod
    def from_options(
        cls,
        options: EngineOptions,
        *,
        in_process: bool = False,
        restart_engine: bool | None = None,
        hung_engine_timeout: float = HUNG_ENGINE_TIMEOUT,
        executor: str = DEFAULT_EXECUTOR,
    ) -> AsyncLLM:
        """As the constructor. executor: `"module:attribute"` of a callable from EngineConfig to Executor."""
        engine = cls.__new__(cls)
        start = _starter(in_process, restart_engine, hung_engine_timeout)
        engine._open(options, lambda options: start(options, executor=executor))
        return engine

    @classmethod
    def from_engine_args(cls, engine_args: HasOptions) -> AsyncLLM:
        """As the constructor, of `quire.AsyncEngineArgs`."""
        return cls.from_options(engine_args.to_options())

    @classmethod
    def of_session(cls, options: EngineOptions, client: SharedClient) -> AsyncLLM:
        """Over an engine that several processes share. Requests without a seed get other ones than in other
        sessions."""
        engine = cls.__new__(cls)
        engine._open(options, lambda options: client)
        engine._namespace = f"{client.session}."
        engine._control, engine._loads = client.state.engine, client.state.loads
        engine.input_processor.seed = mix_seed(options.seed, client.session)
        return engine

    def _open(self, options: EngineOptions, start: Callable[[EngineOptions], EngineClient]) -> None:
        self._front_end: FrontEnd = open_front_end(options, start)
        self._front_end.encode_long_texts_elsewhere()
        self._client: EngineClient = self._front_end.client
        self._namespace = ""
        """What tells the keys of our requests from those of other processes."""
        self._control: ControlState | EngineState = ControlState()
        self._listeners: list[StatsListener] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        # Guards the output processor and the fields below, which the loop and the receiver thread share.
        self._lock = threading.Lock()
        self._streams: dict[str, OutputStream] = {}
        """By key; `_keys` finds the key of a request's id."""
        self._keys: dict[str, str] = {}
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._death: EngineDeadError | None = None
        self._numbers = itertools.count(1)
        self._outbox = Outbox(self._client)
        AsyncLoad.__init__(self)
        self._draining = False
        self._all_finished = asyncio.Event()
        AsyncText.__init__(self, self._front_end.helpers)
        self._finalizer = weakref.finalize(self, self._front_end.shutdown)
        receiver = threading.Thread(
            target=_receive, args=(self._client, weakref.ref(self)), name="quire-receiver", daemon=True
        )
        receiver.start()

    # What the engine is.

    @property
    def ready(self) -> EngineReady:
        """Facts found at the start; waits for its end. Raises what the start-up failed with."""
        return self._client.ready

    @property
    def model_config(self) -> ModelConfig:
        return self._front_end.config.model

    @property
    def engine_config(self) -> EngineConfig:
        return self._front_end.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front_end.tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        """Checks and tokenises prompts. Waits as `ready` does."""
        return self._front_end.input_processor

    @property
    def pooling(self) -> PoolingProcessor:
        return self._front_end.pooling_processor

    @property
    def takes_priorities(self) -> bool:
        """Whether a request may bring a priority."""
        return self._front_end.config.scheduler.scheduling_policy == "priority"

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""
        return self._front_end.config.scheduler.max_num_seqs

    @property
    def errored(self) -> bool:
        """Whether the engine is dead (or was shut down)."""
        return self._death is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """A new error with the cause of death. Only when `errored`."""
        assert self._death is not None, "the engine is not dead"
        return self._death.again()

    @property
    def is_restarting(self) -> bool:
        """Whether the engine has died and another one starts: requests wait, and go on in it."""
        return self._client.is_restarting

    @property
    def num_restarts(self) -> int:
        """How often the engine was started again."""
        return self._client.num_restarts

    @property
    def silence(self) -> float:
        """Seconds for which the engine process has given no sign of life (quire/engine/heartbeat.py)."""
        return self._client.silence

    def check_health(self) -> None:
        """Raise EngineDeadError when the engine is dead, and EngineUnresponsiveError when its process has given no sign
        of life for SILENCE_LIMIT seconds: it, or one of its ranks, is stopped or dead-locked, or one thread keeps the
        interpreter. A long step is no silence."""
        self._check_alive()
        check_responsive(self._client.silence)

    def _check_alive(self) -> None:
        if self.errored:
            raise self.dead_error

    def add_listener(self, listener: StatsListener) -> None:
        """`listener` hears of every output and snapshot from now on."""
        self._listeners.append(listener)

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
        """Yield outputs as they come, the last one with `finished`, or what `sampling_params.output_kind` says; `delta`
        as in OutputProcessor.add.

        priority: lower is earlier (docs/scheduling.md). part: holds a checked request back until its turn. options: see
        PoolingOptions.

        Leaving the iterator, or cancelling the task that waits in it, aborts the request and frees its blocks.
        Raises UserError for a bad prompt or an id in use (before anything runs), EngineDeadError at once when the
        engine dies, EngineUnresponsiveError before the start as `check_health` does (a request that has begun waits
        until the engine goes on), InternalError when its output cannot be processed, EngineAsleepError while the engine
        sleeps, and QuireError while draining.
        """
        if options:
            sampling_params = msgspec.structs.replace(sampling_params, **truncation_of(options))
        process = partial(self._process, prompt, sampling_params, cache_salt, priority)
        kind = getattr(
            sampling_params, "output_kind", None
        )  # what is no SamplingParams is refused when it is processed
        delta = delta or kind is RequestOutputKind.DELTA
        outputs = self.run_request(process, prompt_text(prompt), request_id, delta=delta, part=part)
        return _last_only(outputs) if kind is RequestOutputKind.FINAL_ONLY else outputs

    async def run_request(
        self,
        process: Callable[[str], Awaitable[EngineRequest]],
        text: str | None,
        request_id: str | None,
        *,
        delta: bool = False,
        part: RequestPart | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for a request of any kind. process: makes it from the name that the engine gets. text: of its
        prompt, to be reported."""
        self.check_health()
        if self._draining:
            raise QuireError("the engine is draining and takes no new requests")
        self.check_awake()
        self._bind_loop()
        with self._counted():
            name = request_id or uuid.uuid4().hex
            stream = OutputStream(name, f"{name}#{self._namespace}{next(self._numbers)}", delta=delta)
            async with contextlib.AsyncExitStack() as stack:
                with self._preparations.count(part):
                    with self._lock:
                        self._publish()
                    request = await process(stream.key)
                    request = msgspec.structs.replace(request, client=CLIENT_NAME.get(), each_step=EACH_STEP.get())
                    token_ids = request.prompt_token_ids
                    pieces = await self.off_loop(len(token_ids), partial(encode_pieces, token_ids))
                    request = await stack.enter_async_context(turn_of(part, request))
                # Not inside: another process, which may look at any moment, would count it twice and refuse its own.
                self._submit(AddRequest(request, pieces), text, stream, delta)
                try:
                    finished = False
                    while not finished:
                        output = await stream.get()
                        finished = output.finished
                        yield output
                finally:
                    self._leave(stream)

    async def register_prefix(self, prefix: Prompt, cache_salt: str = "") -> str:
        """Compute a prefix (a text or token ids) now and keep it until `unregister_prefix`; returns its id.

        As LLM.register_prefix. Cancelled, it leaves nothing registered. Raises EngineUnresponsiveError as `call` does.
        """
        self.check_health()
        if self._draining:
            raise QuireError("the engine is draining and takes no new requests")
        self._bind_loop()
        name = f"prefix-{uuid.uuid4().hex}"
        stream = OutputStream(name, name, delta=True)
        with self._counted():
            with self._preparations.count(None):
                request = await asyncio.to_thread(
                    lambda: self.input_processor.process_prefix(name, prefix, cache_salt=cache_salt)
                )
            self._submit(AddRequest(request), None, stream, True)
            computing = asyncio.ensure_future(stream.last())
            try:
                raise_if_nonfinite(await wait_for_answer(computing, "register_prefix", lambda: self._client.silence))
            except BaseException:
                computing.cancel()
                self._leave(stream)
                with contextlib.suppress(EngineDeadError):
                    self._client.send(Call(next(self._numbers), "unregister_prefix", name))
                raise
        return name

    async def unregister_prefix(self, prefix_id: str) -> int:
        """Unregister a prefix; returns how many blocks no longer belong to a registered prefix. Raises
        UserError for an id that is not registered."""
        value = await self.call("unregister_prefix", prefix_id)
        assert isinstance(value, int)
        return value

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None, *, cache_salt: str = ""
    ) -> BeamSearchOutput:
        """Search the `beam_width` best continuations of a prompt. Cancelling the task aborts the search; the errors are
        those of `generate`, which does the same with SamplingParams(use_beam_search=True)."""
        if not isinstance(params, BeamSearchParams):
            raise UserError(f"params must be BeamSearchParams, not {type(params).__name__}", param="params")
        running = self.generate(prompt, params.to_sampling_params(), request_id, cache_salt=cache_salt)
        async with contextlib.aclosing(running) as outputs:
            output = await anext(outputs)
        return to_beam_search_output(output, self.tokenizer, params)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their iterators get a last output whose finish reason is "abort". Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            stream = self._streams.get(self._keys.get(name, ""))
            if stream is not None:
                output = self._leave(stream)
                if output is not None:
                    stream.put(output)

    # Control.

    async def call(self, method: str, argument: str = "") -> EngineStats | int | None:
        """Ask the core (see the message Call). Raises UserError for what it does not know, InternalError for what
        fails, and EngineUnresponsiveError when the engine is silent or does not answer in time
        (quire/engine/heartbeat.py)."""
        return (await self.ask(method, argument)).value

    async def ask(self, method: str, argument: str = "") -> CallResult:
        """As `call`, for answers of any kind."""
        self.check_health()
        loop = self._bind_loop()
        call_id = next(self._numbers)
        future: asyncio.Future[CallResult] = loop.create_future()
        with self._lock:
            self._check_alive()
            self._calls[call_id] = future
        try:
            self._outbox.flush()
            self._client.send(Call(call_id, method, argument))
            result = await wait_for_answer(future, method, lambda: self._client.silence)
        finally:
            self._calls.pop(call_id, None)
        self._check_alive()
        result.raise_error(_PARAMETERS.get(method, "method"))
        return result

    def begin_drain(self) -> None:
        """From now on `generate` rejects new requests; running requests go on."""
        self._draining = True

    async def drain(self, timeout: float | None = None) -> bool:
        """Reject new requests and wait for the running ones; after `timeout` seconds abort what is left.

        Returns whether all ended by themselves. Raises EngineDeadError when the engine dies meanwhile.
        """
        self.begin_drain()
        try:
            async with asyncio.timeout(timeout):
                await self._until_finished()
            self._check_alive()
            return True
        except TimeoutError:
            await self.abort(list(self._keys))
            return False

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the engine; waiting requests fail with EngineDeadError. Idempotent."""
        if self._finalizer.detach() is not None:
            self._front_end.shutdown(timeout)
            self.close_threads()
            self._die(EngineDeadError("the engine was shut down"))

    # On the event loop.

    def _bind_loop(self) -> asyncio.AbstractEventLoop:
        """Remember the running loop. A loop that was closed under its requests has left them to be aborted."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and self._num_unfinished:
                if not self._loop.is_closed():
                    raise RuntimeError("AsyncLLM serves requests of another event loop")
                for stream in list(self._streams.values()):
                    self._leave(stream)
                self._num_unfinished, self._preparations = 0, Preparations()
            self._loop = loop
            self._all_finished = asyncio.Event()
        return loop

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """One request more that `drain` waits for."""
        self._num_unfinished += 1
        try:
            yield
        finally:
            self._num_unfinished -= 1
            with self._lock:
                self._publish()
            if self._num_unfinished == 0:
                self._all_finished.set()

    async def _process(
        self, prompt: Prompt, params: SamplingParams, cache_salt: str, priority: int, request_id: str
    ) -> EngineRequest:
        def process() -> EngineRequest:
            return self.input_processor.process(request_id, prompt, params, cache_salt=cache_salt, priority=priority)

        if not self._front_end.is_ready:
            return await asyncio.to_thread(process)  # which waits for the core
        return await self.off_loop(num_units(prompt, params), process)

    def _submit(self, message: AddRequest, text: str | None, stream: OutputStream, delta: bool) -> None:
        request = message.request
        with self._lock:
            self._check_alive()
            if stream.request_id in self._keys:
                raise UserError(f"request id {stream.request_id!r} is already in use", param="request_id")
            self._front_end.output_processor.add_request(request, text, delta=delta)
            self._backlog.add(stream.key, len(request.prompt_token_ids))
            self._keys[stream.request_id] = stream.key
            self._streams[stream.key] = stream
            self._publish()
        for listener in self._listeners:
            listener.record_request(stream.request_id, request, text)
        self._outbox.put(message, partial(self._fail, stream))

    def _fail(self, stream: OutputStream, error: QuireError) -> None:
        self._leave(stream)
        stream.fail(error)

    def _leave(self, stream: OutputStream) -> RequestOutput | None:
        """Drop a request that is not finished: here, in the core and in the metrics. Returns its last output, or
        None when it is gone already or its output cannot be made, which its stream then says."""
        with self._lock:
            if not self._forget(stream.key):
                return None
            try:
                output = self._front_end.output_processor.abort(stream.key)
            except InternalError as error:
                stream.fail(error)
                output = None
        self._outbox.flush()  # an abort comes behind its request
        self._send_aborts([Abort(stream.key)])
        if output is not None:
            output.request_id = stream.request_id
            for listener in self._listeners:
                listener.record_outputs([output])
        return output

    def _forget(self, key: str) -> OutputStream | None:
        self._backlog.discard(key)
        stream = self._streams.pop(key, None)
        if stream is not None:
            del self._keys[stream.request_id]
        return stream

    def _send_aborts(self, aborts: list[Abort]) -> None:
        try:
            for abort in aborts:
                self._client.send(abort)
        except EngineDeadError:
            pass  # nothing is left to abort; the receiver thread reports the death

    async def _until_finished(self) -> None:
        while self._num_unfinished:
            self._all_finished.clear()
            await self._all_finished.wait()

    # On the receiver thread.

    def _take(self, outputs: EngineOutputs) -> None:
        """Turn what the core sent into what the loop delivers."""
        delivery = Delivery(stats=outputs.stats)
        with self._lock:
            if outputs.stats is not None and self._loads is None:
                self._control.num_running = outputs.stats.num_running
            self._backlog.note_progress(update.request_id for update in outputs.updates)
            processed = self._front_end.output_processor.process(outputs.updates)
            for output in processed.outputs:
                stream = self._streams[output.request_id]
                if output.finished:
                    self._forget(stream.key)
                output.request_id = stream.request_id
                delivery.outputs.append((stream, output))
            for failed in processed.failures:
                stream = self._streams[failed.request_id]
                self._forget(stream.key)
                failed.last.request_id = stream.request_id
                delivery.failures.append((stream, failed.error))
                delivery.last_outputs.append(failed.last)
            for rejected in outputs.rejections:
                waiting = self._forget(rejected.request_id)
                if waiting is not None:
                    self._front_end.output_processor.abort(waiting.key)
                    delivery.failures.append((waiting, rejected.error()))
                    delivery.rejected.append(waiting.request_id)
            for result in outputs.results:
                future = self._calls.pop(result.call_id, None)
                if future is not None:
                    delivery.results.append((future, result))
            self._publish()
        self._send_aborts(processed.aborts)
        self._post(delivery)

    def _die(self, cause: EngineDeadError) -> None:
        """Everything that waits fails now, and everything that comes later fails too. The first cause counts."""
        delivery = Delivery()
        with self._lock:
            if self._death is None:
                self._death = cause
            self._front_end.output_processor.fail_all()
            delivery.failures = [(stream, self._death.again()) for stream in self._streams.values()]
            delivery.results = [
                (future, CallResult(call_id, error=str(self._death))) for call_id, future in self._calls.items()
            ]
            self._backlog.clear()
            self._streams.clear()
            self._keys.clear()
            self._calls.clear()
        self._post(delivery)

    def _post(self, delivery: Delivery) -> None:
        if self._loop is None:
            return  # no request or call has come yet
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it every consumer
            self._loop.call_soon_threadsafe(delivery.hand_over, self._listeners)


async def _last_only(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if output.finished:
                yield output


def _starter(in_process: bool, restart_engine: bool | None, hung_engine_timeout: float) -> Callable[..., EngineClient]:
    if in_process and restart_engine:
        raise ConfigError("restart_engine needs the engine in a process of its own", param="restart_engine")
    if in_process:
        return InProcessClient

    def start(options: EngineOptions, executor: str) -> EngineClient:
        if restart_engine or options.data_parallel_size > 1:
            return open_fleet(options, executor, restarts=restart_engine, hung_engine_timeout=hung_engine_timeout)
        return ProcessClient(options, executor=executor)

    return start


def _receive(client: EngineClient, reference: weakref.ref[AsyncLLM]) -> None:
    """Body of the receiver thread. It holds the engine only while it has something for it, so that an engine that
    is referred to no more is collected, which shuts the client down and ends this thread."""
    while True:
        try:
            outputs = client.receive()
            engine = reference()
            if engine is None:
                return
            if outputs is not None:
                engine._take(outputs)
        except BaseException as error:  # a thread that ended in silence would leave every request waiting
            engine = reference()
            if engine is not None:
                engine._die(cause_of_death(error))
            client.shutdown()
            return
        del engine
