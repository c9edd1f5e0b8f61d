"""An EngineClient whose core runs in a process of its own: msgpack over two one-way sockets in a private directory."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
import weakref
from typing import NoReturn

import msgspec
import zmq

from quire import envs, errors
from quire.config.options import EngineOptions
from quire.engine.client import DEFAULT_EXECUTOR
from quire.engine.engine_process import EngineProcess
from quire.engine.long_prompts import encode_message, send_parts
from quire.engine.messages import ClientMessage, EngineFailed, EngineOutputs, EngineReady, Shutdown
from quire.errors import EngineDeadError, QuireError
from quire.logging import get_logger
from quire.utils.child_process import describe_exit, kill, wait_or_kill
from quire.utils.heartbeat import BEAT_SECONDS, SILENCE_LIMIT, Heartbeat, decode_beats
from quire.utils.runtime_directory import LAST_WORDS_FILE, RuntimeDirectory

logger = get_logger(__name__)

DEFAULT_STARTUP_TIMEOUT = 1800.0
"""Seconds. Generous, since a death is noticed at once: it is for a start that hangs."""
CRASH_FILE = "crash"
"""File of the runtime directory where a fatal signal leaves the Python stack of the process."""

_LAST_WORDS_MILLISECONDS = 50
"""What a process sent just before its end can arrive a moment after the end is noticed."""
_EXIT_SECONDS = 5.0


class LaunchSpec(msgspec.Struct):
    """What the process is told: the second line of its standard input, which then stays open while we live."""

    options: EngineOptions
    executor: str
    directory: str
    alive_fd: int
    """Write end of a pipe: beats come through it (quire/utils/heartbeat.py), and it closes when the process ends,
    however it ends."""


class ProcessClient:
    """Starts the process at once and returns; `ready` waits for it."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        executor: str = DEFAULT_EXECUTOR,
        startup_timeout: float = DEFAULT_STARTUP_TIMEOUT,
        name: str = "engine",
        process: EngineProcess | None = None,
    ) -> None:
        """executor: `"module:attribute"` of a callable from EngineConfig to Executor, imported by the process. name: of
        the process, behind "quire: ". process: one that waits for its options; None: it is started here."""
        self._directory = RuntimeDirectory.create(envs.runtime_directory())
        process = EngineProcess(name) if process is None else process
        process.tell(msgspec.json.encode(LaunchSpec(options, executor, str(self._directory.path), process.child_fd)))
        self._process, self._alive_fd = process.popen, process.alive_fd
        self._abandon = weakref.finalize(self, _abandon, self._process, self._directory, os.getpid())
        self._startup_deadline = time.monotonic() + startup_timeout
        self._startup_timeout = startup_timeout
        self._ready: EngineReady | None = None
        self._death: EngineFailed | None = None
        self._error_id = errors.new_error_id()
        """Of the death, however often it is raised."""
        self._died = threading.Event()
        self._closed = False
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._starting = threading.Lock()
        self._heartbeat = Heartbeat()
        self._is_silent = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineReady | EngineFailed | EngineOutputs)
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(self._directory.address("outputs"))
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        # Left to the garbage collector, a context waits for ever for a socket that is collected after it.
        self._close_sockets = weakref.finalize(
            self, _close_sockets, self._context, self._inbox, self._outbox, self._alive_fd
        )
        self._close_sockets.atexit = False
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._alive_fd, zmq.POLLIN)

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def ready(self) -> EngineReady:
        # A lock of its own: a caller of `ready` must not queue behind a `receive` that waits for outputs.
        with self._starting:
            if self._ready is None:
                with self._receiving:
                    self._ready = self._wait_until_ready()
            return self._ready

    @property
    def silence(self) -> float:
        return self._heartbeat.silence

    @property
    def is_restarting(self) -> bool:
        return False

    @property
    def num_restarts(self) -> int:
        return 0

    def send(self, *messages: ClientMessage) -> None:
        _ = self.ready
        with self._sending:
            self._raise_if_dead()
            # Not left to the socket, told not to connect again (RECONNECT_IVL): closed a moment after its peer is
            # gone, such a one may keep libzmq 4.3.5 waiting for ever in `Context.term`.
            if self._process.poll() is not None:
                self._raise_cause()
            # The parts of one message: the engine's process is woken once, and reads them one by one.
            send_parts(self._outbox, [encode_message(self._encoder, message) for message in messages])

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        _ = self.ready
        with self._receiving:
            message = self._poll(timeout)
        assert not isinstance(message, EngineReady)
        return message

    def shutdown(self, timeout: float = 5.0) -> None:
        asked = False
        with self._sending:
            if self._closed:
                return
            self._closed = True
            if self._death is None:
                self._death = EngineFailed("the engine was shut down")
                if self._ready is not None and timeout > 0:
                    self._outbox.send(self._encoder.encode(Shutdown()), zmq.NOBLOCK)
                    asked = True
        if asked:
            wait_or_kill(self._process, timeout)
        self._abandon()
        # The end of the process wakes a thread that waits in `receive`; only then may the sockets be closed under it.
        with self._receiving:
            self._close_sockets()

    def _wait_until_ready(self) -> EngineReady:
        while True:
            remaining = self._startup_deadline - time.monotonic()
            message = self._poll(max(0.0, remaining))
            if isinstance(message, EngineReady):
                self._outbox.connect(self._directory.address("messages"))
                self._heartbeat.beat()
                return message
            if remaining <= 0:
                self._process.kill()
                self._die(EngineFailed(f"the engine process was not ready after {self._startup_timeout:g} s"))

    def _poll(self, timeout: float | None) -> EngineReady | EngineOutputs | None:
        """The next message; None when time is up. Raises what `_die` raises when the process has ended."""
        self._raise_if_dead()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            remaining = BEAT_SECONDS if deadline is None else min(BEAT_SECONDS, deadline - time.monotonic())
            events = dict(self._poller.poll(math.ceil(max(0.0, remaining) * 1000)))
            beats = os.read(self._alive_fd, 65536) if self._alive_fd in events else None
            has_ended = beats == b""
            self._listen(0.0 if self._inbox in events else decode_beats(beats) if beats else None)
            if self._inbox in events or (has_ended and self._inbox.poll(_LAST_WORDS_MILLISECONDS)):
                break
            if has_ended:
                self._die(self._explain_exit())
            if deadline is not None and time.monotonic() >= deadline:
                return None
        message: EngineReady | EngineFailed | EngineOutputs = self._decoder.decode(self._inbox.recv())
        if isinstance(message, EngineFailed):
            self._die(message)
        return message

    def _listen(self, stalled: float | None) -> None:
        """Take note of a sign of life (`stalled`: seconds for which the process has not got on), or of its absence
        (None); the log says when the process falls silent and when it is back."""
        if stalled is None:
            self._heartbeat.look()
        else:
            self._heartbeat.beat(stalled)
            if self._is_silent and stalled < SILENCE_LIMIT:
                logger.warning("the engine process answers again")
                self._is_silent = False
        if not self._is_silent and self._ready is not None and self._heartbeat.silence >= SILENCE_LIMIT:
            self._is_silent = True
            logger.warning("the engine process has not answered for %.0f s", self._heartbeat.silence)

    def _die(self, failed: EngineFailed) -> NoReturn:
        """Remember the first cause, take the process and its directory away, and raise."""
        if self._death is None:
            self._death = failed
        self._died.set()
        wait_or_kill(self._process, _EXIT_SECONDS)
        self._abandon()
        raise _error_from(self._death, self._error_id)

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise _error_from(self._death, self._error_id)

    def _raise_cause(self) -> NoReturn:
        """The process does not listen any more: find out why, here or in the thread that waits in `receive`."""
        if self._receiving.acquire(blocking=False):
            try:
                while self._poll(_EXIT_SECONDS) is not None:
                    pass  # outputs that no caller will ask for any more
            finally:
                self._receiving.release()
        else:
            self._died.wait(_EXIT_SECONDS)
            self._raise_if_dead()
        raise EngineDeadError("the engine process does not listen any more", error_id=self._error_id)

    def _explain_exit(self) -> EngineFailed:
        wait_or_kill(self._process, _EXIT_SECONDS)
        status = self._process.returncode
        last_words = self._read(LAST_WORDS_FILE)
        if last_words:
            return EngineFailed(f"the engine process failed: {last_words}", summary="the engine process failed")
        when = "" if self._ready else " while it started (its own messages are on standard error)"
        if status is None:
            return EngineFailed(f"the engine process closed its connection{when}")
        text = f"the engine process {describe_exit(status)}{when}"
        if status >= 0:
            return EngineFailed(text)
        if -status == signal.SIGKILL:
            return EngineFailed(f"{text}: out of memory?")
        return EngineFailed(text + self._crash_report(), summary=text)

    def _read(self, name: str) -> str:
        """A file that the process may have left in the runtime directory; empty if it has not."""
        try:
            return (self._directory.path / name).read_text(errors="replace")
        except OSError:
            return ""

    def _crash_report(self) -> str:
        """The first lines that the fault handler left, as one line."""
        lines = self._read(CRASH_FILE).splitlines()
        frames = [line.strip() for line in lines if line.strip().startswith("File ")]
        return f": in {'; '.join(frames[:3])}" if frames else ""


def _abandon(process: subprocess.Popen[bytes], directory: RuntimeDirectory, owner: int) -> None:
    """Make sure that nothing is left of the process. Also runs at the end of the interpreter."""
    if os.getpid() != owner:
        return  # a fork of the owner ends; the engine is not its own
    kill(process)
    directory.remove()


def _close_sockets(
    context: zmq.Context[zmq.Socket[bytes]], inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], alive_fd: int
) -> None:
    inbox.close(linger=0)
    outbox.close(linger=0)
    context.term()
    os.close(alive_fd)


def _error_from(failed: EngineFailed, error_id: str) -> QuireError:
    """The exception that the process failed with, as far as its class is one of ours."""
    if not failed.is_user_error or failed.error_type == EngineDeadError.__name__:
        return EngineDeadError(failed.message, summary=failed.summary, error_id=error_id)
    return errors.named_error(failed.error_type, failed.message, failed.param)
