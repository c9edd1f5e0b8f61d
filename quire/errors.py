"""The errors that Quire raises on purpose, and suggestions for misspelt names."""

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
        """Exception to raise for a further caller of the same failure."""
        return self


class UserError(QuireError, ValueError):
    """The caller asked for something wrong or unsupported. `param`: the field as the caller wrote it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def named(self, names: Mapping[str, str]) -> Self:
        """A copy with the field names of another API (see `in_terms`)."""
        message, param = in_terms(self.message, self.param, names)
        return type(self)(message, param=param)


def in_terms(message: str, param: str | None, names: Mapping[str, str]) -> tuple[str, str | None]:
    """(message, `param`) of an error, with fields renamed for another API. names: our field name -> the caller's path.
    A name without an underscore is replaced only at the message's beginning."""
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
    """A request names a model that this server lacks (HTTP 404)."""


class PromptTooLongError(UserError):
    """The prompt (with at least one new token) exceeds the context; in the engine's process also the KV cache, of
    which callers get a UserError. num_tokens: if counted."""

    def __init__(self, message: str, *, param: str | None = None, num_tokens: int | None = None) -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens

    def named(self, names: Mapping[str, str]) -> Self:
        found = super().named(names)
        found.num_tokens = self.num_tokens
        return found


class InsufficientMemoryError(QuireError):
    """The KV cache does not fit. The message shows the arithmetic."""


class EngineAsleepError(QuireError):
    """The engine sleeps: its memory is released, and it rejects requests."""


class ModelOutputError(QuireError):
    """The model computed NaN or infinite logits for a request, which has ended; the engine goes on."""


class InternalError(QuireError):
    """A request or call failed through no fault of its caller; the engine goes on. The message may hold paths; clients
    get `summary`. `error_id` finds the record in the log."""

    def __init__(self, message: str, *, summary: str = "internal error", error_id: str | None = None) -> None:
        super().__init__(message)
        self.summary = summary
        self.error_id = error_id or new_error_id()


class ChatTemplateProcessError(QuireError):
    """The process that renders chat templates could not start, or ended during this conversation. The next one gets a
    new process."""


class EngineDeadError(QuireError):
    """The engine core has died. The message holds the root cause, with details as in `InternalError`. summary: text for
    clients; None: the message has neither paths nor stack frames."""

    def __init__(self, message: str, *, summary: str | None = None, error_id: str | None = None) -> None:
        super().__init__(message)
        self.summary = message if summary is None else summary
        self.error_id = error_id or new_error_id()

    def again(self) -> EngineDeadError:
        """See QuireError.again: each raise needs its own traceback."""
        return EngineDeadError(str(self), summary=self.summary, error_id=self.error_id)


class EngineUnresponsiveError(QuireError):
    """The engine process shows no sign of life, or did not answer a call in time. Its requests go on when it answers
    again."""


def named_error(name: str, message: str, param: str | None = None) -> QuireError:
    """An error that another process raised, as this module's class `name`."""
    error_type: type[QuireError] = globals()[name]
    if issubclass(error_type, UserError):
        return error_type(message, param=param)
    return error_type(message)


def new_error_id() -> str:
    """Twelve hexadecimal digits that identify one failure in the log."""
    return secrets.token_hex(6)


def is_interrupt(error: BaseException) -> bool:
    """True for exceptions that ask the thread to stop."""
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


@contextmanager
def panics_are_errors(what: str) -> Iterator[None]:
    """Context for calls into a native extension `what`: its panics, which `except Exception` misses, become
    InternalError."""
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
    """`; did you mean 'x'?` for the closest of `known`, or ""."""
    if len(name) > MAX_SUGGESTED_CHARACTERS:
        return ""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def reject_unknown(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise UserError, with the nearest name, for the first of `names` that is not known."""
    known = list(known)
    for name in names:
        if name not in known:
            raise UserError(f"unknown {what} {name!r}{nearest_name(name, known)}", param=name)
