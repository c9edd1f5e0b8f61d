"""Logits processors: classes of the operator's that change logits before a token is chosen, with vLLM's interface.

An engine loads them at its start (`logits_processors`), and no request can: a request gives arguments
(`SamplingParams.extra_args`). Each engine makes one instance of a class, in each process that samples.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from quire.errors import ConfigError, UserError
from quire.sampling_params import SamplingParams

State = TypeVar("State")
Tensor: TypeAlias = Any
"""A torch.Tensor. Front ends import processors too, and no torch."""


class MoveDirectionality(Enum):
    """The kind of a move: one request from a row to another one, or two that change places."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


RemovedRequest: TypeAlias = int
"""A row."""
AddedRequest: TypeAlias = tuple[int, SamplingParams, list[int] | None, list[int]]
"""(row, parameters, tokens of the prompt, generated tokens): the last list grows as the sequence does."""
MovedRequest: TypeAlias = tuple[int, int, MoveDirectionality]
"""(row before, row behind, kind)."""


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a processor's batch, in order: rows are removed, then added, then moved.

    batch_size: rows behind the changes. A sequence that another step left out is removed, and added again with all its
    tokens, as behind a preemption and a restart: a processor makes its state of those.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """A processor of all rows of a step that it concerns."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters that no request may have. Called for every request."""
        return

    @classmethod
    def concerns(cls, sampling_params: SamplingParams) -> bool:
        """Whether the processor sees such requests. Others have drafts, and beams. Quire's own: vLLM has no such
        method, and shows every request."""
        return True

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """vllm_config: the engine's configuration (quire/config/engine.py). device: of the logits."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Change logits, in place or not; returns them. logits: [R, vocab_size] float32, row i that of the sequence at
        row i of the batch."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the best token of a row stays the best. Such a processor is applied to logits that are divided by the
        temperature, behind all rules, and only where a row draws."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take note of new tokens and rows, before each `apply`. None: the batch has the same rows as before."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A processor made of functions of one row each: subclasses say which function a request has."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Tensor] | None:
        """The function of a new request: (generated tokens, logits of its row) -> logits, or with the prompt's tokens
        before these. None: its logits stay as they are."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: Tensor) -> Tensor:
        for row, function in self.req_info.items():
            before = logits[row]
            behind = function(before)
            if behind is not before:
                logits[row] = behind
        return logits

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        takes_prompt = len(inspect.signature(function).parameters) == 3
        return partial(function, prompt_ids, output_ids) if takes_prompt else partial(function, output_ids)


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Keep a state for each row that has one. new_state: of (parameters, prompt, generated tokens); None: that row has
    none. Returns whether `req_entries` changed."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for row in batch_update.removed:
        req_entries.pop(row, None)
    for row, params, prompt_ids, output_ids in batch_update.added:
        req_entries.pop(row, None)
        if (state := new_state(params, prompt_ids, output_ids)) is not None:
            req_entries[row] = state
    for source, target, kind in batch_update.moved:
        moved, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        if moved is not None:
            req_entries[target] = moved
        if replaced is not None and kind is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return before != req_entries


def name_of(processor: str | type) -> str:
    """The name under which every process of an engine can import a class: "module:Class". Raises ConfigError."""
    if isinstance(processor, str):
        return processor
    if not isinstance(processor, type) or "<locals>" in processor.__qualname__:
        raise ConfigError(
            f"logits_processors takes classes that a module defines, or 'module:Class', not {processor!r}",
            param="logits_processors",
        )
    return f"{processor.__module__}:{processor.__qualname__}"


def load_processors(names: Sequence[str]) -> list[type[LogitsProcessor]]:
    """Import the classes. Raises ConfigError with the name of one that cannot be imported or is none."""
    return [_load(name) for name in names]


def check_params(classes: Sequence[type[LogitsProcessor]], params: SamplingParams) -> bool:
    """Let the classes check a request's parameters; returns whether one of them concerns it. Raises UserError."""
    if not classes:
        if params.extra_args:
            raise UserError(
                "extra_args are for logits processors, and this engine has loaded none (logits_processors)",
                param="extra_args",
            )
        return False
    try:
        msgspec.msgpack.encode(params.extra_args)
    except (TypeError, OverflowError, ValueError) as error:
        raise UserError(f"extra_args must be plain values, as JSON has them: {error}", param="extra_args") from None
    for each in classes:
        try:
            each.validate_params(params)
        except ValueError as error:
            raise UserError(str(error), param="extra_args") from None
    concerned = [each for each in classes if each.concerns(params)]
    if concerned and params.use_beam_search:
        raise UserError(
            f"beam search is not supported for requests that {concerned[0].__name__} concerns", param="use_beam_search"
        )
    return bool(concerned)


def _load(name: str) -> type[LogitsProcessor]:
    module, _, path = name.partition(":")
    if not module or not path:
        raise _unusable(name, "it must be 'module:Class'")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _unusable(name, str(error)) from error
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise _unusable(name, "it must be a subclass of LogitsProcessor (quire.logits_processors)")
    if inspect.isabstract(found):
        raise _unusable(name, f"it lacks {', '.join(sorted(found.__abstractmethods__))}")
    return found


def _unusable(name: str, reason: str) -> ConfigError:
    return ConfigError(f"the logits processor {name!r} cannot be loaded: {reason}", param="logits_processors")
