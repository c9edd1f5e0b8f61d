"""EngineClient whose core runs in its own process: msgpack over two one-way sockets in a private directory."""

from __future__ import annotations

import contextlib
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
from quire.config.parallel import ReplicaSet
from quire.engine.client import DEFAULT_EXECUTOR, EngineClient
from quire.engine.engine_process import EngineProcess
from quire.engine.heartbeat import ENGINE_STOPPED, name_stopped
from quire.engine.messages import ClientMessage, EngineFailed, EngineOutputs, EngineReady, Shutdown
from quire.engine.remote_client import RemoteClient
from quire.errors import EngineDeadError
from quire.logging import get_logger
from quire.utils.child_process import describe_exit, is_stopped, kill, wait_or_kill
from quire.utils.heartbeat import SILENCE_LIMIT, decode_beats, decode_stopped
from quire.utils.runtime_directory import LAST_WORDS_FILE, RuntimeDirectory

logger = get_logger(__name__)

DEFAULT_STARTUP_TIMEOUT = 1800.0
"""Time limit in seconds for a start that hangs; a death is noticed at once."""
CRASH_FILE = "crash"
"""File in the runtime directory with the Python stack after a fatal signal."""

_LAST_WORDS_MILLISECONDS = 50
"""Milliseconds to wait for a dead process's last messages."""
_EXIT_SECONDS = 5.0


class LaunchSpec(msgspec.Struct):
    """Orders to the engine process: second line of its stdin, which stays open while the parent lives."""

    options: EngineOptions
    executor: str
    directory: str
    alive_fd: int
    """Write end of the pipe for heartbeats (quire/utils/heartbeat.py); it closes when the process ends."""
    replicas: ReplicaSet | None = None


class ProcessClient(RemoteClient[EngineFailed], EngineClient):
    """Client of an engine process. The constructor does not wait; `ready` does."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        executor: str = DEFAULT_EXECUTOR,
        startup_timeout: float = DEFAULT_STARTUP_TIMEOUT,
        name: str = "engine",
        process: EngineProcess | None = None,
        replicas: ReplicaSet | None = None,
    ) -> None:
        """Client of an engine process. executor: `"module:attribute"` of a callable from EngineConfig to Executor,
        imported by the process. name: process title after "quire: ". process: waiting process; None: start one.
        replicas: see EngineConfig."""
        self._directory = RuntimeDirectory.create(envs.runtime_directory())
        with contextlib.ExitStack() as undo:
            undo.callback(self._directory.remove)
            process = EngineProcess(name) if process is None else process
            undo.callback(kill, process.popen)
            spec = LaunchSpec(options, executor, str(self._directory.path), process.child_fd, replicas)
            process.tell(msgspec.json.encode(spec))
            self._process, self._alive_fd = process.popen, process.alive_fd
            self._abandon = weakref.finalize(self, _abandon, self._process, self._directory, os.getpid())
            undo.pop_all()
        self._startup_deadline = time.monotonic() + startup_timeout
        self._startup_timeout = startup_timeout
        self._error_id = errors.new_error_id()
        """Error id of the process's death, the same at every raise."""
        self._died = threading.Event()
        self._closing = threading.RLock()
        self._is_silent = False
        self._stopped_rank: int | None = None
        received = EngineReady | EngineFailed | EngineOutputs
        super().__init__(self._directory.address("outputs"), received, self._alive_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def silence(self) -> float:
        return self._heartbeat.silence

    @property
    def stopped(self) -> int | None:
        return ENGINE_STOPPED if is_stopped(self._process) else self._stopped_rank

    def send(self, *messages: ClientMessage) -> None:
        _ = self.ready
        with self._sending:
            self._raise_if_dead()
            # Check the process here instead of disabling reconnection of the socket (RECONNECT_IVL): with that, closing
            # it just after its peer is gone can block libzmq 4.3.5 for ever in `Context.term`.
            if self._process.poll() is not None:
                self._raise_cause()
            self._send(*messages)

    def shutdown(self, timeout: float = 5.0) -> None:
        with self._closing:  # a second caller returns when the process has ended, too
            self._shut_down(timeout)

    def _shut_down(self, timeout: float) -> None:
        asked = False
        with self._sending:
            if self._closed:
                return
            self._closed = True
            if self._death is None:
                self._death = EngineDeadError("the engine was shut down", error_id=self._error_id)
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

    def _listen(self, has_message: bool, is_woken: bool) -> bool:
        beats = os.read(self._alive_fd, 65536) if is_woken else None
        has_ended = beats == b""
        if beats:
            self._stopped_rank = decode_stopped(beats)
        stalled = 0.0 if has_message else decode_beats(beats) if beats else None
        if stalled is None:
            self._heartbeat.look()
        else:
            self._heartbeat.beat(stalled)
            if self._is_silent and stalled < SILENCE_LIMIT:
                logger.warning("the engine process answers again")
                self._is_silent = False
        if not self._is_silent and self._ready is not None and self._heartbeat.silence >= SILENCE_LIMIT:
            self._is_silent = True
            name = name_stopped(self.stopped)
            reason = f": {name}" if name else ""
            logger.warning("the engine process has not answered for %.0f s%s", self._heartbeat.silence, reason)
        if not has_message and has_ended and not self._inbox.poll(_LAST_WORDS_MILLISECONDS):
            self._die(self._explain_exit())
        return has_message or has_ended

    def _note(self, message: EngineFailed) -> None:
        self._die(message)

    def _die(self, failed: EngineFailed) -> NoReturn:
        if self._death is None:
            self._death = failed.error(self._error_id)
        self._died.set()
        wait_or_kill(self._process, _EXIT_SECONDS)
        self._abandon()
        raise self._death.again()

    def _raise_cause(self) -> NoReturn:
        if self._receiving.acquire(blocking=False):
            try:
                while self._poll(_EXIT_SECONDS) is not None:
                    pass  # discard outputs: no caller reads them any more
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
        try:
            return (self._directory.path / name).read_text(errors="replace")
        except OSError:
            return ""

    def _crash_report(self) -> str:
        lines = self._read(CRASH_FILE).splitlines()
        frames = [line.strip() for line in lines if line.strip().startswith("File ")]
        return f": in {'; '.join(frames[:3])}" if frames else ""


def _abandon(process: subprocess.Popen[bytes], directory: RuntimeDirectory, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner ends; the engine is not its own
    kill(process)
    directory.remove()
