"""What crosses the boundary between front end and engine core: typed structs, msgpack on the wire, never pickle."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.errors import EngineAsleepError, EngineDeadError, InternalError, QuireError, UserError, named_error
from quire.kv_cache.stats import EngineStats
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest
from quire.scheduler.snapshot import KVSnapshot


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    request: EngineRequest
    pieces: list[bytes] = []
    """The tokens of a long prompt, encoded (quire/engine/long_prompts.py). As it is sent, the request is without them;
    for the engine core they mean nothing."""


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """End a request, or one of its sequences (`index`). Unknown ids are ignored: the request may just have ended.

    An aborted request is not reported back: the front end has dropped it already.
    """

    request_id: str
    index: int | None = None


class Call(msgspec.Struct, tag="call", array_like=True):
    """A control call answered by a CallResult. Methods: `stats`, `check`, `kv_snapshot`, `reset_prefix_cache`,
    `unregister_prefix` (of which `argument` is the id), `sleep` (`argument`: the level), `wake_up` (`argument`: a part,
    or all), `is_sleeping`, `pause` (`argument`: "new" or "all"), `resume`, `is_paused` (0; 1: "new", 2: "all"),
    `abort_all`; of a fleet `stop_replica`, `start_replica` (`argument`: its number; 1: its engine is up)."""

    call_id: int
    method: str
    argument: str = ""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """Leave the loop. Live requests are dropped: to drain, a front end stops adding requests and waits first."""


ClientMessage = AddRequest | Abort | Call | Shutdown


class CallResult(msgspec.Struct, array_like=True):
    call_id: int
    value: EngineStats | int | None = None
    error: str | None = None
    kv: KVSnapshot | None = None
    """Answers `kv_snapshot`; a field of its own, because msgspec tells no two plain structs of a union apart."""
    is_internal: bool = False
    """Whether `error` is no mistake of the caller: it may then carry paths."""

    def raise_error(self, param: str | None = None) -> None:
        """Raise what the call failed with, if it did: UserError about `param`, or InternalError."""
        if self.error is None:
            return
        if self.is_internal:
            raise InternalError(self.error, summary="the engine could not do what was asked")
        raise UserError(self.error, param=param)


class RequestRejected(msgspec.Struct, array_like=True):
    """A request that the core did not take: only it knows that the KV cache can never hold it, or that it sleeps.
    Nothing was queued.
    is_culprit: it has ended one core after the other (quire/engine/culprit_search.py)."""

    request_id: str
    message: str
    param: str | None = None
    is_asleep: bool = False
    is_culprit: bool = False

    def error(self) -> QuireError:
        """What the caller gets."""
        if self.is_culprit:
            summary = "the engine died whenever it ran this request, which is not tried again"
            return InternalError(self.message, summary=summary)
        return EngineAsleepError(self.message) if self.is_asleep else UserError(self.message, param=self.param)


class EngineOutputs(msgspec.Struct, tag="outputs", array_like=True):
    """What one step (or one idle wake-up) of the core produced."""

    updates: list[SequenceUpdate] = []
    stats: EngineStats | None = None
    """Attached to every message but some that tell nothing but tokens (quire/engine/loop.py)."""
    results: list[CallResult] = []
    rejections: list[RequestRejected] = []
    """Answer the caller with `RequestRejected.error`; the front end drops its state of the request."""


class EngineReady(msgspec.Struct, tag="ready", array_like=True):
    """First message of an engine process: facts found at start that the front end needs."""

    max_model_len: int
    num_blocks: int
    block_size: int
    seconds: dict[str, float]
    """Phase of the start-up -> seconds."""
    backend: str
    """What computes, for people to read (`Executor.describe_backend`)."""
    max_concurrency: float = 0.0
    """Sequences of `max_model_len` tokens that the KV cache holds; 0 without one."""

    @staticmethod
    def of_all(each: Sequence[EngineReady]) -> EngineReady:
        """Facts of several engines of one configuration together: their blocks, and the longest phases of their
        starts."""
        return EngineReady(
            max_model_len=min(ready.max_model_len for ready in each),
            num_blocks=sum(ready.num_blocks for ready in each),
            block_size=each[0].block_size,
            seconds={phase: max(ready.seconds[phase] for ready in each) for phase in each[0].seconds},
            backend=f"{each[0].backend}, {len(each)} replicas",
            max_concurrency=sum(ready.max_concurrency for ready in each),
        )


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """A question among the processes of a server (quire/engine/questions.py). number: the asker's. peer: as it is
    sent, who is asked: a service of the parent, by name, or a session; as it arrives, the session that asks."""

    number: int
    peer: str | int
    payload: bytes


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """An answer to the asker's question of that number. payload: None when the one that was asked has failed."""

    number: int
    asker: int
    payload: bytes | None


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """A session has ended, and answers nothing more."""

    session: int


SessionMessage = ClientMessage | Ask | Answer
"""What one of several front ends sends."""


class EngineFailed(msgspec.Struct, tag="failed", array_like=True):
    """Last message of an engine process that cannot go on, and to the front ends that share an engine. `is_user_error`:
    the message alone is enough to print."""

    message: str
    """Everything that is known, for the log and for callers in the front end's process."""
    is_user_error: bool = False
    error_type: str = "EngineDeadError"
    """The class in quire.errors that the front end raises."""
    param: str | None = None
    summary: str | None = None
    """What clients of a server may read, without paths and stack frames. None: the message itself."""
    error_id: str = ""
    """Finds the failure in the log; empty: none has been written yet."""

    def error(self, error_id: str = "") -> QuireError:
        """The exception that the process failed with, as far as its class is one of ours. error_id: the death's, where
        it has none yet."""
        if not self.is_user_error or self.error_type == EngineDeadError.__name__:
            return EngineDeadError(self.message, summary=self.summary, error_id=self.error_id or error_id)
        return named_error(self.error_type, self.message, self.param)
