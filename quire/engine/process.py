"""Engine process, started by ProcessClient: reads messages, drives the core, sends outputs, sleeps when idle."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from quire.clock import SystemClock
from quire.config.resolve import resolve
from quire.engine.core import BLOCKED_SECONDS, EngineCore
from quire.engine.heartbeat import EngineBeats, takes_long
from quire.engine.long_prompts import ArrivingPrompts
from quire.engine.loop import advance, build_core
from quire.engine.messages import ClientMessage, EngineFailed, EngineOutputs, EngineReady, Shutdown
from quire.engine.output_window import OutputWindow
from quire.engine.process_client import CRASH_FILE, LaunchSpec
from quire.engine.remote_client import pull_socket, push_socket
from quire.engine.steps import OWN_STEPS
from quire.errors import ConfigError, QuireError, UserError
from quire.logging import configure_logging, get_logger
from quire.parallel.replica_memory import CommonSteps
from quire.utils.child_process import watch_parent
from quire.utils.failures import explain
from quire.utils.heartbeat import Progress, start_beating
from quire.utils.runtime_directory import RuntimeDirectory

logger = get_logger(__name__)

_LINGER_MILLISECONDS = 2000
_IDLE_SECONDS = 1.0
"""Seconds between two checks of the workers while idle."""


class Channel:
    """An engine process's two sockets to its parent and its wake-up for signals, for the main thread only."""

    def __init__(self, directory: RuntimeDirectory) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = pull_socket(self._context, directory.address("messages"))
        self._outbox = push_socket(self._context, directory.address("outputs"))
        self._decoder = msgspec.msgpack.Decoder(ClientMessage)
        self._arrivals = ArrivingPrompts()
        self._encoder = msgspec.msgpack.Encoder()
        self._wakeup, wakeup_writer = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_writer.setblocking(False)
        self._wakeup_writer = wakeup_writer
        signal.set_wakeup_fd(wakeup_writer.fileno())
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wakeup, zmq.POLLIN)
        self._steps: CommonSteps | None = None

    def watch(self, steps: CommonSteps) -> None:
        self._steps = steps
        self._poller.register(steps.bell, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Sleep until a message, a signal or another replica's step arrives, at most `seconds`; returns at once while
        parts of a long prompt wait to be decoded."""
        ready = dict(self._poller.poll(0 if self._arrivals else int(1000 * seconds)))
        if self._wakeup.fileno() in ready:
            self._wakeup.recv(64)
        if self._steps is not None and self._steps.bell in ready:
            self._steps.hush()

    def has_arrival(self) -> bool:
        """True if `wait` would return at once."""
        return bool(self._arrivals or self._poller.poll(0))

    def read(self) -> list[ClientMessage]:
        """All available messages, without waiting. A long prompt takes several calls."""
        messages = []
        if self._poller.poll(0):  # a poll costs a third of an empty receive while a model runs
            with contextlib.suppress(zmq.Again):
                while True:
                    messages.append(self._decoder.decode(self._inbox.recv(zmq.NOBLOCK)))
        return self._arrivals.turn(messages)

    def send(self, message: EngineOutputs | EngineReady | EngineFailed) -> None:
        self._outbox.send(self._encoder.encode(message))

    def close(self) -> None:
        """Close after the parent has been sent everything."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=_LINGER_MILLISECONDS)
        self._context.term()


class StopFlag:
    """Flag that SIGTERM sets: the process finishes its work and exits."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._set)
        # Ctrl-C and the end of a terminal may reach all processes; the parent decides what they mean.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _set(self, _signum: int, _frame: object) -> None:
        self.is_set = True


def main(line: bytes) -> None:
    """Run the process. line: LaunchSpec as JSON."""
    stop = StopFlag()
    stop.install()
    spec = msgspec.json.decode(line, type=LaunchSpec)
    os.set_inheritable(spec.alive_fd, False)
    beats = EngineBeats()
    start_beating(spec.alive_fd, beats.byte)
    directory = RuntimeDirectory.join(Path(spec.directory))
    crash_file = (directory.path / CRASH_FILE).open("w")
    faulthandler.enable(crash_file, all_threads=False)
    watch_parent(directory.remove)
    channel = Channel(directory)
    failed = run_engine(spec, channel, stop, beats)
    if failed is not None:
        channel.send(failed)
    channel.close()
    # Interpreter shutdown would tear down thread pools and freed gigabytes one by one; nothing is left to save.
    with contextlib.suppress(OSError):  # output that cannot be written is lost
        sys.stdout.flush()
    os._exit(0 if failed is None else 1)


def run_engine(spec: LaunchSpec, channel: Channel, stop: StopFlag, beats: EngineBeats) -> EngineFailed | None:
    """Build the core and serve. Returns the failure that ends the process, if any."""
    try:
        configure_logging()
        if spec.options.distributed_executor_backend == "external_launcher":
            raise ConfigError(
                "distributed_executor_backend='external_launcher' is for LLM, whose engine runs in its caller's thread",
                param="distributed_executor_backend",
            )
        config, steps = resolve(spec.options), OWN_STEPS
        if spec.replicas is not None:
            config = replace(config, replicas=spec.replicas)
            steps = common = CommonSteps(spec.replicas)
            channel.watch(common)
        core = build_core(spec.options, spec.executor, config=config, steps=steps)
    except QuireError as error:
        param = error.param if isinstance(error, UserError) else None
        return EngineFailed(str(error), True, type(error).__name__, param)
    except BaseException as error:  # the parent's last line says why; a native extension's panic is no Exception
        logger.debug("the engine could not start", exc_info=True)
        return EngineFailed(f"the engine could not start: {explain(error)}", summary="the engine could not start")
    try:
        # Objects made by the start live for ever: exempt them from garbage collection.
        gc.collect()
        gc.freeze()
        channel.send(core.ready)
        beats.vital_signs = core.vital_signs
        with core.computing():
            serve(core, channel, stop, beats.progress)
    except BaseException as error:
        logger.exception("the engine failed")
        return EngineFailed(f"the engine process failed: {explain(error)}", summary="the engine process failed")
    finally:
        core.shutdown()
    return EngineFailed("the engine process was terminated (SIGTERM)") if stop.is_set else None


def serve(core: EngineCore, channel: Channel, stop: StopFlag, progress: Progress) -> None:
    """Run until Shutdown, or until SIGTERM with no work left: one turn of the core per wake-up or step."""
    window = OutputWindow(core.output_window, SystemClock())
    while True:
        progress.turn()
        if not core.has_work:
            if stop.is_set:
                return
            core.check_when_idle()
            while core.idle() and not channel.has_arrival():
                pass
            channel.wait(_IDLE_SECONDS)
        elif core.is_blocked:
            channel.wait(BLOCKED_SECONDS)
        messages = channel.read()
        if messages:
            if any(isinstance(message, Shutdown) for message in messages):
                return
            if held := window.release():
                # Send held outputs now: the next step may be a long prompt.
                channel.send(EngineOutputs(held))
        if any(map(takes_long, messages)):
            with progress.exempt():
                outputs = advance(core, messages, window)
        else:
            outputs = advance(core, messages, window)
        if outputs is not None:
            channel.send(outputs)
