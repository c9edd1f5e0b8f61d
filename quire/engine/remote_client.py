"""Common half of the clients of another process: sockets, threads and signs of life."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from quire.engine.long_prompts import encode_message, send_parts
from quire.engine.messages import EngineOutputs, EngineReady, SessionMessage
from quire.errors import QuireError
from quire.utils.heartbeat import BEAT_SECONDS, Heartbeat

Other = TypeVar("Other")
"""Message types beside EngineReady and EngineOutputs."""


def pull_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Inbound socket of a front end, without a queue limit."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


def push_socket(context: zmq.Context[zmq.Socket[bytes]], address: str | None = None) -> zmq.Socket[bytes]:
    """Outbound socket that never blocks; unconnected without an address."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    if address is not None:
        socket.connect(address)
    return socket


class RemoteClient(ABC, Generic[Other]):
    """Client of another process. Any thread may send; one receives at a time and observes the signs of life."""

    def __init__(self, inbox: str, received: Any, watched: int) -> None:
        """Client over sockets. inbox: address of the inbound socket. received: type of its messages. watched: file
        descriptor that wakes the receiving thread; closed with the sockets."""
        self._prefix: list[bytes] = []
        """Message parts sent before every message, such as a session's name."""
        self._ready: EngineReady | None = None
        self._death: QuireError | None = None
        """Error that all further calls raise."""
        self._closed = False
        self._heartbeat = Heartbeat()
        self._sending, self._receiving, self._starting = threading.Lock(), threading.Lock(), threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[EngineReady | EngineOutputs | Other] = msgspec.msgpack.Decoder(received)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox, self._outbox, self._watched = pull_socket(context, inbox), push_socket(context), watched
        # Left to the garbage collector, a context waits for ever for a socket that is collected after it.
        self._close_sockets = weakref.finalize(self, _close, context, self._inbox, self._outbox, watched)
        self._close_sockets.atexit = False
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(watched, zmq.POLLIN)

    @property
    def ready(self) -> EngineReady:
        # A lock of its own: a caller of `ready` must not queue behind a `receive` that waits for outputs.
        with self._starting:
            if self._ready is None:
                with self._receiving:
                    self._ready = self._wait_until_ready()
            return self._ready

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        _ = self.ready
        with self._receiving:
            message = self._poll(timeout)
        assert not isinstance(message, EngineReady)
        return message

    def _send(self, *messages: SessionMessage) -> None:
        send_parts(self._outbox, self._prefix + [encode_message(self._encoder, message) for message in messages])

    def _wait_until_ready(self) -> EngineReady:
        message = self._poll(None)
        assert isinstance(message, EngineReady)
        return message

    def _poll(self, timeout: float | None) -> EngineReady | EngineOutputs | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._raise_if_dead()
            remaining = BEAT_SECONDS if deadline is None else min(BEAT_SECONDS, deadline - time.monotonic())
            events = dict(self._poller.poll(math.ceil(max(0.0, remaining) * 1000)))
            if self._listen(self._inbox in events, self._watched in events):
                message = self._decoder.decode(self._inbox.recv())
                if isinstance(message, EngineReady | EngineOutputs):
                    return message
                self._note(message)
            elif deadline is not None and time.monotonic() >= deadline:
                return None

    @abstractmethod
    def _listen(self, has_message: bool, is_woken: bool) -> bool:
        """Record a sign of life or its absence; returns whether a message is there. Raises the error that ended the
        other process."""

    @abstractmethod
    def _note(self, message: Other) -> None:
        """Handle a message that is neither readiness nor outputs."""

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise self._death.again()


def _close(
    context: zmq.Context[zmq.Socket[bytes]], inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], watched: int
) -> None:
    inbox.close(linger=0)
    outbox.close()
    context.term()
    os.close(watched)
