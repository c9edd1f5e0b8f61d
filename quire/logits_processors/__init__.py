"""Logits processors: the operator's classes that change logits before a token is chosen, with vLLM's interface. An
engine loads them at its start; requests only give arguments (`extra_args`)."""

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
"""Torch.Tensor, not imported: front ends import processors without torch."""


class MoveDirectionality(Enum):
    """Kind of a move: a request to another row, or two rows swapped."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


RemovedRequest: TypeAlias = int
AddedRequest: TypeAlias = tuple[int, SamplingParams, list[int] | None, list[int]]
"""(row, parameters, prompt tokens, generated tokens); the last list grows with the sequence."""
MovedRequest: TypeAlias = tuple[int, int, MoveDirectionality]
"""(row before, row after, kind)."""


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a processor's batch, in order: rows are removed, added, then moved. batch_size: rows after the
    changes. A sequence that a step left out is removed, and added again with all its tokens."""

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Base of operators' processors: one object changes the logits of all rows that it concerns, in every step."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for wrong parameters. Called for every request."""
        return

    @classmethod
    def concerns(cls, sampling_params: SamplingParams) -> bool:
        """True if the processor sees such requests; others may have drafts and beams. Not in vLLM, where it sees
        all."""
        return True

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Processor of one worker. vllm_config: engine's configuration (quire/config/engine.py). device: logits'
        device."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Change logits, in place or not; returns them. logits: [R, vocab_size] float32, row i for row i of the
        batch."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if a row's best token stays the best. Such a processor gets logits divided by the temperature, after all
        rules, only for rows that draw."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Note new tokens and rows, before each `apply`. None: the batch has the same rows as before."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Processor of functions for one row each; subclasses choose the function of a request."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Tensor] | None:
        """Function of a new request: ([prompt tokens,] generated tokens, logits of its row) -> logits. None:
        unchanged."""

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
    """Keep a state for each row. new_state: function of (parameters, prompt, generated tokens); None: no state. True:
    `req_entries` changed."""
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
    """The "module:Class" by which every process of an engine imports the class. Raises ConfigError."""
    if isinstance(processor, str):
        return processor
    if not isinstance(processor, type) or "<locals>" in processor.__qualname__:
        raise ConfigError(
            f"logits_processors takes classes that a module defines, or 'module:Class', not {processor!r}",
            param="logits_processors",
        )
    return f"{processor.__module__}:{processor.__qualname__}"


def load_processors(names: Sequence[str]) -> list[type[LogitsProcessor]]:
    """Import processor classes by `name_of`. Raises ConfigError with the name of one that cannot be imported or
    used."""
    return [_load(name) for name in names]


def check_params(classes: Sequence[type[LogitsProcessor]], params: SamplingParams) -> bool:
    """Check a request's parameters; returns True if a class concerns it. Raises UserError."""
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
