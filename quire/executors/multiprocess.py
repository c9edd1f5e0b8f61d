"""Ranks as processes of this host, each with a socket to the engine core."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

import msgspec

from quire import envs
from quire.config.engine import EngineConfig
from quire.executors.calls import RankCalls
from quire.executors.interface import Executor, VitalSigns
from quire.executors.rank import JOIN, RankLaunch
from quire.executors.ranked import RankedExecutor
from quire.parallel.link_files import LinkFiles
from quire.parallel.mesh import Mesh
from quire.utils.child_process import describe_exit, is_stopped, kill, start_interpreter, wait_or_kill
from quire.utils.heartbeat import Heartbeat, decode_beats
from quire.utils.runtime_directory import RuntimeDirectory

EXIT_SECONDS = 5.0
MEETING_POINT = "ranks"
LINK_ELEMENT_BYTES = 4
"""Largest size in bytes of an element that passes from stage to stage."""


def make_multiprocess_executor(config: EngineConfig) -> Executor:
    """Start one process for each rank of the configuration. Raises ConfigError, or a rank's error."""
    return RankedExecutor(RankProcesses(config), config.parallel.pp)


class Links:
    """Links between ranks of neighbouring stages while the ranks start and inherit their descriptors."""

    def __init__(self, mesh: Mesh, config: EngineConfig) -> None:
        slot_bytes = LINK_ELEMENT_BYTES * config.scheduler.max_num_batched_tokens * config.model.hidden_size
        self._mesh = mesh
        stages = [group for group in mesh.groups("pp") if len(group) > 1]
        self._behind = {rank: LinkFiles.create(slot_bytes) for group in stages for rank in group[:-1]}

    def of_rank(self, rank: int) -> tuple[LinkFiles | None, LinkFiles | None]:
        """Files of the links from the pipeline stage before and to the next one; None at the ends."""
        group = self._mesh.group_of(rank, "pp")
        place = group.index(rank)
        return (self._behind[group[place - 1]] if place else None), self._behind.get(rank)

    def close(self) -> None:
        while self._behind:
            self._behind.popitem()[1].close()


class RankPulse:
    """Signs of life of one rank. fd: read end of the pipe of its beats."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._heartbeat = Heartbeat()
        self._has_begun = False
        self._stalled: float | None = None

    def feel(self) -> VitalSigns:
        try:
            beats = os.read(self._fd, 65536)
        except BlockingIOError:
            beats = b""
        if beats:
            self._has_begun = True
            self._stalled = decode_beats(beats)
            self._heartbeat.beat()
        elif self._has_begun:  # until the first beat the interpreter starts
            self._heartbeat.look()
        stalled = math.inf if self._stalled is None else self._stalled
        return VitalSigns(self._heartbeat.silence if self._has_begun else 0.0, stalled)

    def close(self) -> None:
        os.close(self._fd)


class RankProcesses(RankCalls):
    def __init__(self, config: EngineConfig) -> None:
        """Start the processes; return when they have met. Raises a rank's error."""
        mesh = Mesh(config.parallel)
        super().__init__(mesh.num_ranks)
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory = RuntimeDirectory.create(envs.runtime_directory())
        self._abandon = weakref.finalize(self, _abandon, self._processes, self._directory, os.getpid())
        links = Links(mesh, config)
        try:
            for rank in range(self._num_ranks):
                self._start(rank, links)
            links.close()
            self._reader.start()
            self.call(JOIN, config)
            self._directory.remove()  # all have met; a killed process could not do it later
        except BaseException:
            links.close()
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def vital_signs(self) -> VitalSigns:
        stopped = (rank for rank, process in enumerate(self._processes) if is_stopped(process))
        return super().vital_signs()._replace(stopped=next(stopped, None))

    def _start(self, rank: int, links: Links) -> None:
        ours, theirs = socket.socketpair()
        pulse_fd, beats_fd = os.pipe()
        self._pulses.append(RankPulse(pulse_fd))
        try:
            meeting_point = str(self._directory.path / MEETING_POINT)
            incoming, outgoing = links.of_rank(rank)
            launch = RankLaunch(rank, theirs.fileno(), meeting_point, beats_fd, incoming, outgoing)
            line = msgspec.json.encode(launch)
            descriptors = [theirs.fileno(), beats_fd, *(incoming or ()), *(outgoing or ())]
            process = start_interpreter("quire.executors.rank", f"quire: rank {rank}", line, descriptors)
        finally:
            theirs.close()
            os.close(beats_fd)
        self._connections.append(Connection(ours.detach()))
        self._processes.append(process)

    def _send(self, message: bytes) -> None:
        for connection in self._connections:
            with suppress(OSError):  # if the rank has ended, the reader notices and fails every call
                connection.send_bytes(message)

    def _arrived(self, seconds: float | None) -> Iterator[tuple[int, bytes | None]]:
        for ready in wait(self._connections, seconds):
            assert isinstance(ready, Connection), "nothing else was given"
            try:
                message = ready.recv_bytes()
            except (EOFError, OSError):
                message = None
            yield self._connections.index(ready), message

    def _end_ranks(self) -> None:
        for process in self._processes:
            kill(process)

    def _close(self) -> None:
        for connection in self._connections:
            _hang_up(connection)  # the rank and our reader see the end of the stream
        for process in self._processes:
            wait_or_kill(process, EXIT_SECONDS)
        if self._reader.is_alive():
            self._reader.join()
        with self._sending:
            for connection in self._connections:
                connection.close()
        self._abandon()

    def _explain_exit(self, rank: int) -> str:
        process = self._processes[rank]
        try:
            status = process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"rank {rank} of {self._num_ranks} (process {process.pid}) closed its connection"
        hint = ", perhaps for lack of memory" if status == -signal.SIGKILL else ""
        return f"rank {rank} of {self._num_ranks} (process {process.pid}) {describe_exit(status)}{hint}"


def _hang_up(connection: Connection) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as same, suppress(OSError):  # the rank may have ended
        same.shutdown(socket.SHUT_RDWR)


def _abandon(processes: Sequence[subprocess.Popen[bytes]], directory: RuntimeDirectory, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner ends; the ranks are not its own
    for process in processes:
        kill(process)
    directory.remove()
