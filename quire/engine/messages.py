"""Messages between front end and engine core: typed structs, encoded as msgpack, never pickle."""

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
    """Encoded tokens of a long prompt (quire/engine/long_prompts.py), which the request then lacks."""


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Order to the engine core: end a request, or its sequence `index`; unknown ids are ignored. No update follows."""

    request_id: str
    index: int | None = None


class Call(msgspec.Struct, tag="call", array_like=True):
    """Control call, answered by a CallResult. Methods (with `argument`): `stats`, `check`, `kv_snapshot`,
    `reset_prefix_cache`, `unregister_prefix` (id), `sleep` (level), `wake_up` (part; empty: all), `is_sleeping`,
    `pause` ("new" or "all"), `resume`, `is_paused` (0; 1: "new"; 2: "all"), `abort_all`; of a fleet also `stop_replica`
    and `start_replica` (number; 1: its engine is up)."""

    call_id: int
    method: str
    argument: str = ""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """Order to the engine process: leave the loop and drop live requests."""


ClientMessage = AddRequest | Abort | Call | Shutdown


class CallResult(msgspec.Struct, array_like=True):
    call_id: int
    value: EngineStats | int | None = None
    error: str | None = None
    kv: KVSnapshot | None = None
    """Result of `kv_snapshot`."""
    is_internal: bool = False
    """True if `error` is not the caller's mistake; it may then contain paths."""

    def raise_error(self, param: str | None = None) -> None:
        """Raise the call's error, if any: UserError about `param`, or InternalError."""
        if self.error is None:
            return
        if self.is_internal:
            raise InternalError(self.error, summary="the engine could not do what was asked")
        raise UserError(self.error, param=param)


class RequestRejected(msgspec.Struct, array_like=True):
    """Request that the core rejects: it can never fit in the KV cache, or the core sleeps. is_culprit: it has killed
    one core after the other (quire/engine/culprit_search.py)."""

    request_id: str
    message: str
    param: str | None = None
    is_asleep: bool = False
    is_culprit: bool = False

    def error(self) -> QuireError:
        """Exception to raise in the call that made the request."""
        if self.is_culprit:
            summary = "the engine died whenever it ran this request, which is not tried again"
            return InternalError(self.message, summary=summary)
        return EngineAsleepError(self.message) if self.is_asleep else UserError(self.message, param=self.param)


class EngineOutputs(msgspec.Struct, tag="outputs", array_like=True):
    """Message from the core to its front ends: updates, rejections, results of calls and statistics of one step, or of
    a turn without a step."""

    updates: list[SequenceUpdate] = []
    stats: EngineStats | None = None
    """Statistics; some messages that hold only tokens lack them (quire/engine/loop.py)."""
    results: list[CallResult] = []
    rejections: list[RequestRejected] = []
    """Rejected requests, for the front end to drop."""


class EngineReady(msgspec.Struct, tag="ready", array_like=True):
    """First message of an engine process: facts found at the start."""

    max_model_len: int
    num_blocks: int
    block_size: int
    seconds: dict[str, float]
    """Seconds by phase of the start."""
    backend: str
    """Description of the backend, for people (`Executor.describe_backend`)."""
    max_concurrency: float = 0.0
    """Sequences of `max_model_len` tokens that fit in the KV cache; 0 without one."""

    @staticmethod
    def of_all(each: Sequence[EngineReady]) -> EngineReady:
        """Combined facts of several engines of one configuration: summed blocks, longest phases."""
        return EngineReady(
            max_model_len=min(ready.max_model_len for ready in each),
            num_blocks=sum(ready.num_blocks for ready in each),
            block_size=each[0].block_size,
            seconds={phase: max(ready.seconds[phase] for ready in each) for phase in each[0].seconds},
            backend=f"{each[0].backend}, {len(each)} replicas",
            max_concurrency=sum(ready.max_concurrency for ready in each),
        )


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Question between processes of a server (quire/engine/questions.py). number: chosen by the asker. peer: when sent,
    the recipient (name of a parent's service, or a session); as delivered, the asking session."""

    number: int
    peer: str | int
    payload: bytes


class QuestionAnswer(msgspec.Struct, tag="answer", array_like=True):
    """Message between API processes: answer to the asker's question `number`. payload: None if the answering side
    failed."""

    number: int
    asker: int
    payload: bytes | None


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """Notice that a session has ended and answers no more questions."""

    session: int


SessionMessage = ClientMessage | Ask | QuestionAnswer
"""Messages of one of several front ends."""


class EngineFailed(msgspec.Struct, tag="failed", array_like=True):
    """Last message of a failing engine process, or to the front ends that share it. is_user_error: the message alone is
    enough to print."""

    message: str
    """Full text, for log and callers."""
    is_user_error: bool = False
    error_type: str = "EngineDeadError"
    """Class in quire.errors that the front end raises."""
    param: str | None = None
    summary: str | None = None
    """Text for a server's clients, without paths and frames; None: the message."""
    error_id: str = ""
    """Identifies the failure in the log; empty if it was not logged."""

    def error(self, error_id: str = "") -> QuireError:
        """Exception to raise, of the failure's own class if quire.errors has it. error_id: used if the message has
        none."""
        if not self.is_user_error or self.error_type == EngineDeadError.__name__:
            return EngineDeadError(self.message, summary=self.summary, error_id=self.error_id or error_id)
        return named_error(self.error_type, self.message, self.param)
