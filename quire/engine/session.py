"""Asyncio side of one engine: request streams and calls between an event loop and an EngineClient. A receiver
thread turns tokens into text."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from functools import partial

import msgspec

from quire.engine.client import EngineClient, cause_of_death
from quire.engine.heartbeat import check_responsive, wait_for_answer
from quire.engine.long_prompts import encode_pieces
from quire.engine.messages import Abort, AddRequest, Call, CallResult, EngineOutputs
from quire.engine.output_processor import OutputProcessor
from quire.engine.output_stream import Delivery, OutputStream, StatsListener
from quire.engine.request_part import (
    CLIENT_NAME,
    EACH_STEP,
    IN_BACKGROUND,
    Backlog,
    Preparations,
    RequestPart,
    turn_of,
)
from quire.engine.shared_state import ControlState, EngineState, Loads
from quire.engine.texts import FrontEndTexts
from quire.errors import EngineAsleepError, EngineDeadError, InternalError, QuireError, UserError
from quire.outputs import RequestOutput, raise_if_nonfinite
from quire.request import EngineRequest
from quire.utils.failures import explain

_PARAMETERS = {
    "unregister_prefix": "prefix_id",
    "sleep": "level",
    "wake_up": "tags",
    "pause": "mode",
    "stop_replica": "replica",
}
"""Parameter name of a method's argument, for errors."""


Unsent = tuple[AddRequest, Callable[[QuireError], None]]
"""Request, and the callback for an error in sending it."""


class Outbox:
    """Sends all requests of one event-loop turn together, which wakes the engine process once."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._unsent: list[Unsent] = []

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def put(self, message: AddRequest, fail: Callable[[QuireError], None]) -> None:
        """Send a request at this turn's end; `fail` is called if that fails."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append((message, fail))

    def flush(self) -> None:
        """Send the waiting requests to the engine now."""
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._send(unsent)

    def _send(self, unsent: list[Unsent]) -> None:
        try:
            self._client.send(*(message for message, _ in unsent))
        except EngineDeadError as error:
            for _, fail in unsent:
                fail(error.again())
        except Exception as error:
            if len(unsent) > 1:  # nothing was sent: send one by one to find the invalid request
                for one in unsent:
                    self._send([one])
                return
            failure = InternalError(f"the request could not be sent to the engine: {explain(error)}")
            failure.__cause__ = error
            unsent[0][1](failure)


class Session:
    """Open requests and calls of one AsyncLLM: sends them to its engine and hands out the outputs, on one event loop at
    a time."""

    def __init__(self, client: EngineClient, outputs: OutputProcessor, texts: FrontEndTexts) -> None:
        """outputs: output processor, used under the lock."""
        self.client = client
        self.control: ControlState | EngineState = ControlState()
        self.namespace = ""
        """Part of the request keys that distinguishes them from other processes'."""
        self.loads: Loads | None = None
        """Loads of all processes that share the engine; None if it is not shared."""
        self.listeners: list[StatsListener] = []
        self.is_draining = False
        self.num_unfinished = 0
        """Number of requests that have not ended (AsyncLLM.num_unfinished)."""
        self.death: EngineDeadError | None = None
        self._processor = outputs
        self._texts = texts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        """Guards the output processor and everything below."""
        self._streams: dict[str, OutputStream] = {}
        """Streams by key; `_keys` maps a request's id to its key."""
        self._keys: dict[str, str] = {}
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._numbers = itertools.count(1)
        self._outbox = Outbox(client)
        self._lines: set[str] = set()
        """Keys of streams of background requests."""
        self._preparations, self._line_preparations = Preparations(), Preparations()
        self._backlog = Backlog()
        self._all_finished = asyncio.Event()

    def start(self) -> None:
        threading.Thread(
            target=_receive, args=(self.client, weakref.ref(self)), name="quire-receiver", daemon=True
        ).start()

    def check_health(self) -> None:
        self.check_alive()
        check_responsive(self.client.silence, self.client.stopped)

    def check_alive(self) -> None:
        """Raise a new EngineDeadError if the engine is dead."""
        if self.death is not None:
            raise self.death.again()

    def check_awake(self) -> None:
        if self.control.is_asleep:
            raise EngineAsleepError("the engine is asleep: wake it up first")

    # Load.

    @property
    def num_pending(self) -> int:
        return self._own_num_pending if self.loads is None else self.loads.num_pending

    @property
    def num_waiting(self) -> int:
        num_live = self._own_num_live if self.loads is None else self.loads.num_live
        return num_live - self.control.num_running_live

    @property
    def num_queued_tokens(self) -> int:
        return self._backlog.num_tokens if self.loads is None else self.loads.num_tokens

    @property
    def queue_seconds(self) -> float:
        return self._backlog.seconds if self.loads is None else self.loads.queue_seconds

    @property
    def _own_num_pending(self) -> int:
        return len(self._preparations) + len(self._line_preparations) + len(self._streams)

    @property
    def _own_num_live(self) -> int:
        return len(self._preparations) + len(self._streams) - len(self._lines)

    def _publish(self) -> None:
        if self.loads is not None:
            backlog = self._backlog
            num_pending, num_live = self._own_num_pending, self._own_num_live
            self.loads.publish(self.num_unfinished, num_pending, num_live, backlog.num_tokens, backlog.progress)

    # Requests.

    async def run_request(
        self,
        process: Callable[[str], Awaitable[EngineRequest]],
        text: str | None,
        request_id: str | None,
        *,
        delta: bool = False,
        part: RequestPart | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request of any kind and yield its outputs. process: makes the EngineRequest for an internal id. text:
        text of the prompt, for outputs. Others: see AsyncLLM.generate."""
        self._check_open()
        self.check_awake()
        self._bind_loop()
        with self._counted():
            name = request_id or uuid.uuid4().hex
            stream = OutputStream(name, f"{name}#{self.namespace}{next(self._numbers)}", delta=delta)
            async with contextlib.AsyncExitStack() as stack:
                with (self._line_preparations if IN_BACKGROUND.get() else self._preparations).count(part):
                    with self._lock:
                        self._publish()
                    request = await process(stream.key)
                    request = msgspec.structs.replace(
                        request,
                        client=CLIENT_NAME.get(),
                        each_step=EACH_STEP.get(),
                        is_background=IN_BACKGROUND.get(),
                    )
                    token_ids = request.prompt_token_ids
                    pieces = await self._texts.off_loop(len(token_ids), partial(encode_pieces, token_ids))
                    request = await stack.enter_async_context(turn_of(part, request))
                # After the counting above: another process must not count the request twice and reject its own.
                self._submit(AddRequest(request, pieces), text, stream, delta)
                try:
                    finished = False
                    while not finished:
                        output = await stream.get()
                        finished = output.finished
                        yield output
                finally:
                    self._leave(stream)

    async def run_prefix(self, process: Callable[[str], EngineRequest]) -> str:
        """Compute and keep a prefix; returns its id. process: makes the request from the id, on another thread."""
        self._check_open()
        self._bind_loop()
        name = f"prefix-{uuid.uuid4().hex}"
        stream = OutputStream(name, name, delta=True)
        with self._counted():
            with self._preparations.count(None):
                request = await asyncio.to_thread(process, name)
            self._submit(AddRequest(request), None, stream, True)
            computing = asyncio.ensure_future(stream.last())
            try:
                raise_if_nonfinite(await wait_for_answer(computing, "register_prefix", lambda: self.client.silence))
            except BaseException:
                computing.cancel()
                self._leave(stream)
                with contextlib.suppress(EngineDeadError):
                    self.client.send(Call(next(self._numbers), "unregister_prefix", name))
                raise
        return name

    def abort(self, request_id: str | Iterable[str]) -> None:
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            stream = self._streams.get(self._keys.get(name, ""))
            if stream is not None:
                self._leave(stream, is_told=True)

    def knows(self, request_ids: Iterable[str]) -> bool:
        return any(name in self._keys for name in request_ids)

    async def ask(self, method: str, argument: str = "") -> CallResult:
        """Send a control call; see AsyncLLM.call."""
        self.check_health()
        loop = self._bind_loop()
        call_id = next(self._numbers)
        future: asyncio.Future[CallResult] = loop.create_future()
        with self._lock:
            self.check_alive()
            self._calls[call_id] = future
        try:
            self._outbox.flush()
            self.client.send(Call(call_id, method, argument))
            result = await wait_for_answer(future, method, lambda: self.client.silence)
        finally:
            with self._lock:
                self._calls.pop(call_id, None)
        self.check_alive()
        result.raise_error(_PARAMETERS.get(method, "method"))
        return result

    async def drain(self, timeout: float | None = None) -> bool:
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout):
                while self.num_unfinished:
                    self._all_finished.clear()
                    await self._all_finished.wait()
            self.check_alive()
            return True
        except TimeoutError:
            self.abort(list(self._keys))
            return False

    # On the event loop.

    def _bind_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and self.num_unfinished:
                if not self._loop.is_closed():
                    raise RuntimeError("AsyncLLM serves requests of another event loop")
                self._loop = loop  # which tells the listeners
                for stream in list(self._streams.values()):
                    self._leave(stream)
                self.num_unfinished, self._preparations = 0, Preparations()
            self._loop = loop
            self._all_finished = asyncio.Event()
        return loop

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_unfinished += 1
        try:
            yield
        finally:
            self.num_unfinished -= 1
            with self._lock:
                self._publish()
            if self.num_unfinished == 0:
                self._all_finished.set()

    def _check_open(self) -> None:
        self.check_health()
        if self.is_draining:
            raise QuireError("the engine is draining and takes no new requests")

    def _submit(self, message: AddRequest, text: str | None, stream: OutputStream, delta: bool) -> None:
        request = message.request
        with self._lock:
            self.check_alive()
            if stream.request_id in self._keys:
                raise UserError(f"request id {stream.request_id!r} is already in use", param="request_id")
            self._processor.add_request(request, text, delta=delta)
            if request.is_background:  # nothing waits for its tokens
                self._lines.add(stream.key)
            else:
                self._backlog.add_request(stream.key, len(request.prompt_token_ids))
            self._keys[stream.request_id] = stream.key
            self._streams[stream.key] = stream
            self._publish()
        for listener in self.listeners:
            listener.record_request(stream.request_id, request, text)
        self._outbox.put(message, partial(self._fail, stream))

    def _fail(self, stream: OutputStream, error: QuireError) -> None:
        self._leave(stream)
        with self._lock:
            self._post(Delivery(failures=[(stream, error)]))

    def _leave(self, stream: OutputStream, *, is_told: bool = False) -> None:
        """Drop an unfinished request here, in the core and in the metrics. is_told: the stream gets its last output
        (its error, if making the output fails)."""
        with self._lock:
            if not self._forget(stream.key):
                return
            last = Delivery()
            try:
                output = self._processor.abort(stream.key)
            except InternalError as error:
                last.failures.append((stream, error))
            else:
                if output is not None:
                    output.request_id = stream.request_id
                    if is_told:
                        last.outputs.append((stream, output))
                    else:
                        last.last_outputs.append(output)
            self._post(last)
        self._outbox.flush()  # the request must be sent before its abort
        self._send_aborts([Abort(stream.key)])

    def _forget(self, key: str) -> OutputStream | None:
        self._backlog.discard(key)
        self._lines.discard(key)
        stream = self._streams.pop(key, None)
        if stream is not None:
            del self._keys[stream.request_id]
        return stream

    def _send_aborts(self, aborts: list[Abort]) -> None:
        try:
            for abort in aborts:
                self.client.send(abort)
        except EngineDeadError:
            pass  # nothing is left to abort; the receiver thread reports the death

    # On the receiver thread.

    def _take(self, outputs: EngineOutputs) -> None:
        delivery = Delivery(stats=outputs.stats)
        with self._lock:
            if outputs.stats is not None and self.loads is None:
                self.control.num_running = outputs.stats.num_running
                self.control.num_running_live = outputs.stats.num_running - outputs.stats.num_running_in_background
            self._backlog.note_progress(update.request_id for update in outputs.updates)
            processed = self._processor.process(outputs.updates)
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
                    self._processor.abort(waiting.key)
                    delivery.failures.append((waiting, rejected.error()))
                    delivery.rejected.append(waiting.request_id)
            for result in outputs.results:
                future = self._calls.pop(result.call_id, None)
                if future is not None:
                    delivery.results.append((future, result))
            self._publish()
            self._post(delivery)
        self._send_aborts(processed.aborts)

    def die(self, cause: EngineDeadError) -> None:
        """Fail all open requests and calls, and later ones, with EngineDeadError. The first cause counts."""
        delivery = Delivery()
        with self._lock:
            if self.death is None:
                self.death = cause
            self._processor.fail_all()
            delivery.failures = [(stream, self.death.again()) for stream in self._streams.values()]
            delivery.results = [
                (future, CallResult(call_id, error=str(self.death))) for call_id, future in self._calls.items()
            ]
            self._backlog.clear()
            self._streams.clear()
            self._keys.clear()
            self._lines.clear()
            self._calls.clear()
            self._post(delivery)

    def _post(self, delivery: Delivery) -> None:
        """Hand over on the event loop, behind earlier deliveries. Call under the lock: what it guards changes in the
        same order."""
        if self._loop is None:
            return  # no request or call has come yet
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it every consumer
            self._loop.call_soon_threadsafe(delivery.hand_over, self.listeners)


def _receive(client: EngineClient, reference: weakref.ref[Session]) -> None:
    """Body of the receiver thread. It holds only a weak reference between messages: an unused engine is collected."""
    while True:
        try:
            outputs = client.receive()
            session = reference()
            if session is None:
                return
            if outputs is not None:
                session._take(outputs)
        except BaseException as error:  # a thread that ended in silence would leave every request waiting
            session = reference()
            if session is not None:
                session.die(cause_of_death(error))
            client.shutdown()
            return
        del session
