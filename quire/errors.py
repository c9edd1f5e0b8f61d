"""Every error that Quire raises on purpose, and the helper that suggests the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuireError(Exception):
    """Base of all errors that Quire raises on purpose."""


class UserError(QuireError, ValueError):
    """The caller asked for something that is wrong or not supported.

    `param` names the offending field (as the caller wrote it), so that the HTTP layer can fill OpenAI's `param`
    and the command line can name the option.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


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


class ChatTemplateProcessError(QuireError):
    """The process that renders chat templates could not start, or ended while it rendered this conversation; the next
    conversation gets a new one."""


class EngineDeadError(QuireError):
    """The engine core is gone; the message carries the root cause."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest of `known`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def reject_unknown(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise UserError for the first of `names` that is not in `known`, with the nearest name suggested."""
    known = list(known)
    for name in names:
        if name not in known:
            raise UserError(f"unknown {what} {name!r}{nearest_name(name, known)}", param=name)
