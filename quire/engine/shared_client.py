"""An EngineClient whose engine is another process's, which several front ends share (quire/engine/shared_engine.py)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import zmq

from quire.engine.long_prompts import encode_message, send_parts
from quire.engine.messages import (
    Answer,
    ClientMessage,
    EngineDied,
    EngineOutputs,
    EngineReady,
    Question,
    SessionMessage,
)
from quire.engine.questions import Questions
from quire.engine.shared_engine import INBOX, session_address
from quire.engine.shared_state import SharedState
from quire.errors import EngineDeadError
from quire.utils.heartbeat import BEAT_SECONDS, Heartbeat

Received = EngineReady | EngineOutputs | EngineDied | Answer | Question


class SharedClient:
    """One session."""

    def __init__(self, directory: Path, session: int, state: SharedState) -> None:
        """directory: of the sockets."""
        self.session = session
        self.state = state
        self._sender = str(session).encode()
        self._ready: EngineReady | None = None
        self._death: EngineDeadError | None = None
        self._is_closed = False
        self.questions = Questions(self._send)
        """To the parent and to other sessions."""
        self._num_ticks = -1
        self._heartbeat = Heartbeat()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._starting = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Received)
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._outbox.connect(f"ipc://{directory / INBOX}")
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(f"ipc://{directory / session_address(session)}")
        self._wake_reader, self._wake_writer = os.pipe()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)

    @property
    def ready(self) -> EngineReady:
        # A lock of its own: a caller of `ready` must not queue behind a `receive` that waits for outputs.
        with self._starting:
            while self._ready is None:
                with self._receiving:
                    message = self._poll(None)
                if isinstance(message, EngineReady):
                    self._ready = message
            return self._ready

    @property
    def silence(self) -> float:
        self._listen()
        return self._heartbeat.silence

    @property
    def is_restarting(self) -> bool:
        return self.state.engine.is_restarting

    @property
    def num_restarts(self) -> int:
        return self.state.engine.num_restarts

    def send(self, *messages: ClientMessage) -> None:
        self._send(*messages)

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        _ = self.ready
        with self._receiving:
            message = self._poll(timeout)
        assert not isinstance(message, EngineReady)
        return message

    def shutdown(self, timeout: float = 5.0) -> None:
        """Leave the session. The engine goes on."""
        with self._sending:
            if self._is_closed:
                return
            self._is_closed = True
            if self._death is None:
                self._death = EngineDeadError("the engine was shut down")
        os.write(self._wake_writer, b"\0")
        with self._receiving:
            self._inbox.close(linger=0)
            self._outbox.close(linger=int(timeout * 1000))
            self._context.term()
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _send(self, *messages: SessionMessage) -> None:
        with self._sending:
            self._raise_if_dead()
            parts = [encode_message(self._encoder, message) for message in messages]
            send_parts(self._outbox, [self._sender, *parts])

    def _poll(self, timeout: float | None) -> EngineReady | EngineOutputs | None:
        """The next message for the front end; None when time is up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._raise_if_dead()
            remaining = BEAT_SECONDS if deadline is None else min(BEAT_SECONDS, deadline - time.monotonic())
            events = dict(self._poller.poll(int(max(0.0, remaining) * 1000)))
            self._listen()
            if self._inbox in events:
                message = self._decoder.decode(self._inbox.recv())
                if isinstance(message, EngineReady | EngineOutputs):
                    return message
                self._note(message)
            elif deadline is not None and time.monotonic() >= deadline:
                return None

    def _note(self, message: EngineDied | Answer | Question) -> None:
        if isinstance(message, Answer | Question):
            self.questions.take(message)
            return
        with self._sending:
            self._death = EngineDeadError(message.message, summary=message.summary, error_id=message.error_id)
        self.questions.fail(self._death)

    def _listen(self) -> None:
        """Take note of what the parent says of the engine's silence, or that it says nothing."""
        num_ticks = self.state.engine.num_ticks
        if num_ticks == self._num_ticks:
            self._heartbeat.look()
        else:
            self._num_ticks = num_ticks
            self._heartbeat.beat(self.state.engine.silence)

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise self._death.again()
