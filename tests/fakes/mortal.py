"""An EngineClient that dies when a test wants it to, with whatever its core had not told yet."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire.config.options import EngineOptions
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import AddRequest, ClientMessage, EngineOutputs, EngineReady
from quire.errors import EngineDeadError

FAKE = "tests.fakes.factories:plain"


class MortalClient:
    """is_due: asked before each step, with the ids of the requests that this engine has got; true ends it, before the
    step or, with `loses`, behind it, before its tokens are told."""

    def __init__(
        self, options: EngineOptions, executor: str, is_due: Callable[[set[str]], bool], *, loses: bool
    ) -> None:
        self.core = InProcessClient(options, executor=executor)
        self._is_due = is_due
        self._loses = loses
        self._death: EngineDeadError | None = None
        self.request_ids: set[str] = set()
        self.silence = 0.0
        self.stopped: int | None = None
        """Seconds; while it is not 0, nothing is received."""
        self.was_shut_down = False

    @property
    def ready(self) -> EngineReady:
        return self.core.ready

    def send(self, *messages: ClientMessage) -> None:
        self._raise_if_dead()
        for message in messages:
            if isinstance(message, AddRequest):
                # As over a socket: nothing that the caller keeps and changes reaches the core.
                message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=AddRequest)
                self.request_ids.add(message.request.request_id)
            self.core.send(message)

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        self._raise_if_dead()
        if self.silence:
            return None
        is_due = self._is_due(self.request_ids)
        if not is_due or self._loses:
            outputs = self.core.receive(timeout)
            if not is_due:
                return outputs
        self._death = EngineDeadError("killed by the test")
        raise self._death.again()

    def shutdown(self, timeout: float = 5.0) -> None:
        self.was_shut_down = True
        self.core.shutdown(timeout)

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise self._death.again()
