"""Every error that Quire raises on purpose, and the helper that suggests the nearest name."""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from quire.utils.failures import explain


class QuireError(Exception):
    """Base of all errors that Quire raises on purpose."""

    def again(self) -> QuireError:
        """The exception to raise once more."""
        return self


class UserError(QuireError, ValueError):
    """The caller asked for something that is wrong or not supported.

    `param` names the offending field (as the caller wrote it), so that the HTTP layer can fill OpenAI's `param`
    and the command line can name the option.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def named(self, names: Mapping[str, str]) -> Self:
        """The error in the terms of an API with other names of fields (`in_terms`)."""
        message, param = in_terms(self.message, self.param, names)
        return type(self)(message, param=param)


def in_terms(message: str, param: str | None, names: Mapping[str, str]) -> tuple[str, str | None]:
    """What an error says, and the path of its field, for callers who know fields by other names. names: our name of a
    field -> the caller's path. A name that is a plain word means the field only where the message begins with it."""
    head = re.split(r"[.\[]", param or "", maxsplit=1)[0]
    if head in names and message.startswith(head):
        message = names[head] + message[len(head) :]
    if known := [name for name in names if "_" in name]:
        message = re.sub(rf"\b(?:{'|'.join(known)})\b", lambda found: names[found[0]], message)
    return message, names.get(head, param)


class ConfigError(UserError):
    """An engine option is wrong, or options contradict one another."""


class ModelLoadError(UserError):
    """The model directory is missing, incomplete, corrupt or of an unknown architecture."""


class UnknownModelError(UserError):
    """A request names a model that this server does not serve (HTTP 404)."""


class PromptTooLongError(UserError):
    """The prompt (with at least one new token) exceeds the model's context or the whole KV cache."""


class InsufficientMemoryError(QuireError):
    """The KV cache does not fit: the message carries the arithmetic."""


class EngineAsleepError(QuireError):
    """The engine has given its memory back, and takes no requests before it is woken."""


class ModelOutputError(QuireError):
    """The model computed NaN or infinite logits for a request, which has ended; the engine goes on."""


class InternalError(QuireError):
    """One request or one call failed through no fault of its caller; the engine goes on.

    The message may carry paths and details of the cause: it is for the log and for callers in this process. What a
    client may read is `summary`; `error_id` leads from there to the record in the log.
    """

    def __init__(self, message: str, *, summary: str = "internal error", error_id: str | None = None) -> None:
        super().__init__(message)
        self.summary = summary
        self.error_id = error_id or new_error_id()


class ChatTemplateProcessError(QuireError):
    """The process that renders chat templates could not start, or ended while it rendered this conversation; the next
    conversation gets a new one."""


class EngineDeadError(QuireError):
    """The engine core is gone; the message carries the root cause, with the details that `InternalError` tells of.

    summary: what a client may read of it; None: the message itself, which then has neither paths nor stack frames.
    """

    def __init__(self, message: str, *, summary: str | None = None, error_id: str | None = None) -> None:
        super().__init__(message)
        self.summary = message if summary is None else summary
        self.error_id = error_id or new_error_id()

    def again(self) -> EngineDeadError:
        """A new exception that says the same: each raise has a traceback of its own."""
        return EngineDeadError(str(self), summary=self.summary, error_id=self.error_id)


class EngineUnresponsiveError(QuireError):
    """The engine process gives no sign of life, or a call to the engine was not answered in its time. Requests that the
    engine has already go on once it answers again."""


def named_error(name: str, message: str, param: str | None = None) -> QuireError:
    """An exception of the class `name` of this module, as another process raised it. param: of a UserError."""
    error_type: type[QuireError] = globals()[name]
    if issubclass(error_type, UserError):
        return error_type(message, param=param)
    return error_type(message)


def new_error_id() -> str:
    """Twelve hexadecimal digits by which one failure is found in the log."""
    return secrets.token_hex(6)


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception asks the thread to stop, and says nothing about what ran there. Everything else is a
    failure, also what is no `Exception`: the panic of a native extension derives from BaseException."""
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


@contextmanager
def panics_are_errors(what: str) -> Iterator[None]:
    """Around calls into a native extension: raise InternalError for its panics, which no `except Exception` catches.
    what: names the callee."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise InternalError(f"{what} failed: {explain(error)}", summary=f"{what} failed") from error


MAX_SUGGESTED_CHARACTERS = 100


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest of `known`, or an empty string: also for a name too long to
    be a typing mistake, because comparing takes time and memory for each of its characters."""
    if len(name) > MAX_SUGGESTED_CHARACTERS:
        return ""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def reject_unknown(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise UserError for the first of `names` that is not in `known`, with the nearest name suggested."""
    known = list(known)
    for name in names:
        if name not in known:
            raise UserError(f"unknown {what} {name!r}{nearest_name(name, known)}", param=name)
