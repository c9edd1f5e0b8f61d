"""The engine's side of the processes that render chat templates: they start with the first conversation, are reused,
and are killed and replaced when a rendering exceeds its limits."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from quire.errors import ChatTemplateProcessError, EngineDeadError, QuireError, UserError
from quire.tokenization.template_messages import (
    MAX_SETUP_BYTES,
    Deadline,
    Failed,
    Rendered,
    Setup,
    encode_frame,
    read_frame,
)
from quire.utils.fair_threads import FairThreads
from quire.utils.sizes import format_bytes

SHORT_CONVERSATION_BYTES = 64 * 2**10
"""Longer conversations have a process of their own, so that short ones do not wait for them."""
START_SECONDS = 60.0
"""For a start that hangs: an interpreter and Jinja take a tenth of a second."""
GRACE_SECONDS = 1.0
"""How long after its own timers a process is killed from here."""
MAX_BYTES_PER_CHARACTER = 4
REPLY_OVERHEAD_BYTES = 16 * 2**10

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from quire.tokenization.template_process import main; main()"
)
_DECODER = msgspec.msgpack.Decoder(Rendered | Failed)

T = TypeVar("T")


class TemplateProcess:
    """One process that renders. Used by one thread, except for `kill`.

    Raises ChatTemplateProcessError when it cannot be started, UserError for templates that cannot be sent.
    """

    def __init__(self, setup: Setup) -> None:
        self._limits = setup.limits
        self._start_seconds = START_SECONDS
        setup_frame = _encode_setup(setup)
        try:
            self._process, self._connection = _launch()
        except OSError as error:
            raise ChatTemplateProcessError(
                f"the process that renders chat templates cannot be started: {error.strerror}"
            ) from None
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection, os.getpid())
        self._setup_frame: bytearray | None = setup_frame

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, conversation: bytearray, max_characters: int) -> Rendered | Failed:
        """Render the conversation of a frame that holds Render.

        After the answer that a limit was exceeded the process has ended. Raises ChatTemplateProcessError when it ends
        for another reason.
        """
        max_bytes = max_characters * MAX_BYTES_PER_CHARACTER + REPLY_OVERHEAD_BYTES
        deadline = Deadline(self._start_seconds + self._limits.seconds + GRACE_SECONDS)
        try:
            for frame in filter(None, (self._setup_frame, conversation)):
                deadline.apply(self._connection)
                self._connection.sendall(frame)
            self._setup_frame = None
            reply = read_frame(self._connection, max_bytes, deadline)
            answer = None if reply is None else _DECODER.decode(reply)
        except TimeoutError:
            self.stop()
            return Failed("time")
        except ConnectionError:
            answer = None
        except (ValueError, msgspec.DecodeError) as error:
            self.stop()
            raise ChatTemplateProcessError(f"the process that renders chat templates sent {error}") from None
        if answer is None:
            return self._explain_exit()
        self._start_seconds = 0.0
        if isinstance(answer, Failed) and answer.kind == "memory":
            self.stop()  # what it still holds is not known
        return answer

    def kill(self) -> None:
        """End the process; `ask` of another thread finds the connection closed."""
        self._process.kill()

    def stop(self) -> None:
        """Leave nothing of the process. Idempotent."""
        self._finalizer()

    def _explain_exit(self) -> Failed:
        """Why the process closed its connection. Raises ChatTemplateProcessError when its timers are not the reason."""
        try:
            status = self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            if status in (-signal.SIGPROF, -signal.SIGALRM):
                self.stop()
                return Failed("time")
            killed = f"was killed by signal {-status} ({signal.strsignal(-status)})"
            how = killed if status < 0 else f"ended with status {status}"
        self.stop()
        raise ChatTemplateProcessError(f"the process that renders chat templates {how}")


class TemplateLane:
    """A process, its successors, and the conversations that wait for it, in turns by caller. Thread-safe.

    clock: seconds, for the time that conversations wait.
    """

    def __init__(self, setup: Setup, clock: Callable[[], float] = time.monotonic) -> None:
        self._setup = setup
        self._clock = clock
        self._process: TemplateProcess | None = None
        self._closed = False
        self._lock = threading.Lock()
        """Guards `_process` and `_closed`, which `close` changes from another thread."""
        self._threads = FairThreads(1, "quire-chat-template", long_size=math.inf)

    @property
    def pid(self) -> int | None:
        """Process id of the last process, or None before the first conversation."""
        return None if self._process is None else self._process.pid

    def submit(
        self, conversation: bytearray, max_characters: int, finish: Callable[[Rendered | Failed], T]
    ) -> Future[T]:
        """Render the conversation when its turn comes, and give the answer to `finish`, whose result is the future's.

        The future raises what `finish` raises; ChatTemplateProcessError when the process could not start or died;
        QuireError when the conversation waited too long; EngineDeadError after `close`, as this method does.
        """
        since = self._clock()

        def work() -> T:
            waited = self._clock() - since
            if waited > self._setup.limits.queue_seconds:
                raise QuireError(f"too many conversations are being rendered: this one has waited {waited:.0f} seconds")
            process = self._running_process()
            try:
                answer = process.ask(conversation, max_characters)
            except ChatTemplateProcessError:
                self._check_open()
                raise
            return finish(answer)

        with self._lock:
            self._check_open()
            return self._threads.submit(len(conversation), work)

    def close(self) -> None:
        """End the process, and fail what waits for it. Idempotent."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
        self._threads.shutdown(wait=True)
        if process is not None:
            process.stop()

    def _running_process(self) -> TemplateProcess:
        with self._lock:
            self._check_open()
            if self._process is None or not self._process.is_alive:
                if self._process is not None:
                    self._process.stop()
                self._process = TemplateProcess(self._setup)
            return self._process

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine was shut down")


def _encode_setup(setup: Setup) -> bytearray:
    try:
        frame = encode_frame(setup)
    except UnicodeEncodeError:
        raise UserError("the model's chat template is not valid: it is not valid Unicode", param="messages") from None
    if len(frame) > MAX_SETUP_BYTES:
        raise UserError(
            f"the model's chat template is not valid: it is larger than {format_bytes(MAX_SETUP_BYTES)}",
            param="messages",
        )
    return frame


def _launch() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process; return it and our end of the connection. Raises OSError.

    A fresh interpreter and not a fork, which would hold the caller's memory, files and locks. Its search path is ours,
    so that both run the same quire. A process group of its own keeps Ctrl-C away.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            command = [sys.executable, "-P", "-c", _BOOT, json.dumps([str(entry) for entry in sys.path])]
            process = subprocess.Popen(
                [*command, "quire-chat-template"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    """Also runs at the end of the interpreter."""
    if os.getpid() != owner:
        return  # a fork of the owner ends; the process is not its own
    process.kill()
    process.wait()
    connection.close()
