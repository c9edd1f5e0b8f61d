"""EngineClient for an engine of another process that several front ends share (quire/engine/shared_engine.py)."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from quire.engine.messages import Ask, Ended, EngineFailed, EngineOutputs, EngineReady, QuestionAnswer, SessionMessage
from quire.engine.questions import Questions
from quire.engine.remote_client import RemoteClient
from quire.engine.shared_engine import INBOX, SESSION
from quire.engine.shared_state import SharedState
from quire.errors import EngineDeadError


class SharedClient(RemoteClient[EngineFailed | Ask | QuestionAnswer | Ended]):
    def __init__(self, directory: Path, session: int, state: SharedState) -> None:
        wake_reader, self._wake_writer = os.pipe()
        received = EngineReady | EngineOutputs | EngineFailed | Ask | QuestionAnswer | Ended
        super().__init__(f"ipc://{directory / SESSION.format(session)}", received, wake_reader)
        self._outbox.connect(f"ipc://{directory / INBOX}")
        self._prefix = [str(session).encode()]
        self.session, self.state = session, state
        self.questions = Questions(self.send)
        """Questions to the parent and to other sessions."""
        self._num_ticks = -1

    @property
    def silence(self) -> float:
        self._hear_ticks()
        return self._heartbeat.silence

    @property
    def stopped(self) -> int | None:
        code = self.state.engine.stopped_code
        return code - 2 if code else None

    @property
    def is_restarting(self) -> bool:
        return self.state.engine.is_restarting

    @property
    def num_restarts(self) -> int:
        return self.state.engine.num_restarts

    def send(self, *messages: SessionMessage) -> None:
        with self._sending:
            self._raise_if_dead()
            self._send(*messages)

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the session; the engine keeps running."""
        with self._sending:
            if self._closed:
                return
            self._closed = True
            if self._death is None:
                self._death = EngineDeadError("the engine was shut down")
        os.close(self._wake_writer)
        with self._receiving:
            self._outbox.setsockopt(zmq.LINGER, int(timeout * 1000))
            self._close_sockets()

    def _listen(self, has_message: bool, is_woken: bool) -> bool:
        self._hear_ticks()
        return has_message

    def _note(self, message: EngineFailed | Ask | QuestionAnswer | Ended) -> None:
        if not isinstance(message, EngineFailed):
            self.questions.hear(message)
            return
        death = message.error()
        assert isinstance(death, EngineDeadError)
        with self._sending:
            self._death = death
        self.questions.hear(death)

    def _hear_ticks(self) -> None:
        num_ticks = self.state.engine.num_ticks
        if num_ticks == self._num_ticks:
            self._heartbeat.look()
        else:
            self._num_ticks = num_ticks
            self._heartbeat.beat(self.state.engine.silence)
