"""Operator's logits processors in the sampler: their rows and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.logging import get_logger
from quire.logits_processors import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
    load_processors,
)
from quire.outputs import PROCESSOR_FAILED
from quire.sampling.batch import SampleBatch
from quire.sampling_params import SamplingParams
from quire.utils.failures import explain

logger = get_logger(__name__)


class ProcessorRows(Protocol):
    """Logits processors of one worker, and the rows that they concern."""

    def set(self, row: int, params: SamplingParams) -> bool:
        """Begin a sequence in a row. Returns True if a processor concerns it."""
        ...

    def apply(self, scores: Any, batch: SampleBatch[Any], temperature: np.ndarray | None) -> dict[int, str]:
        """Change the scores, [R, vocab_size] float32. temperature: [num_rows], for processors that keep the best token;
        None: for the others. Returns index of a row -> reason why its request must end."""
        ...


class NoProcessors:
    def set(self, row: int, params: SamplingParams) -> bool:
        return False

    def apply(self, scores: Any, batch: SampleBatch[Any], temperature: np.ndarray | None) -> dict[int, str]:
        return {}


NO_PROCESSORS = NoProcessors()


def make_processors(config: EngineConfig) -> ProcessorRows:
    """Engine's processors, for one worker. Raises ConfigError for one that cannot be made."""
    kinds = load_processors(config.logits_processors)
    if not kinds:
        return NO_PROCESSORS
    return LoadedProcessors(kinds, config, torch.device(config.device.platform))


class ProcessedRow:
    """Sequence in a row, with its tokens [0, n) in the token table. A sequence that lost tokens gets a new entry."""

    __slots__ = ("output", "params", "prompt")

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.prompt: list[int] | None = None
        self.output: list[int] = []


class _Processor:
    """Logits processor and its batch: entries by row."""

    def __init__(self, kind: type[LogitsProcessor], config: object, device: torch.device) -> None:
        self.kind = kind
        self._arguments = config, device
        self.start()

    def start(self) -> None:
        config, device = self._arguments
        try:
            self.processor = self.kind(config, device, False)
            self.is_invariant = self.processor.is_argmax_invariant()
        except Exception as error:
            reason = f"the logits processor {self.kind.__name__} cannot be made: {explain(error)}"
            raise ConfigError(reason, param="logits_processors") from error
        self._entries: list[ProcessedRow] = []

    def take(self, entries: Sequence[ProcessedRow]) -> list[int]:
        """Give the processor its next rows. Returns, for each row of its batch, the index among `entries`."""
        place = {id(entry): index for index, entry in enumerate(entries)}
        update = self._update(entries, place)
        self.processor.update_state(update)
        return [place[id(entry)] for entry in self._entries]

    def _update(self, entries: Sequence[ProcessedRow], place: dict[int, int]) -> BatchUpdate | None:
        rows = self._entries
        known = {id(entry) for entry in rows}
        new = [entry for entry in entries if id(entry) not in known]
        holes = [row for row, entry in enumerate(rows) if id(entry) not in place]
        if not new and not holes:
            return None
        added: list[AddedRequest] = []
        for number, entry in enumerate(new):
            row = holes[number] if number < len(holes) else len(rows)
            rows[row : row + 1] = [entry]
            added.append((row, entry.params, entry.prompt, entry.output))
        removed = holes[len(new) :]
        moved: list[MovedRequest] = []
        left = set(removed)
        for row in removed:
            while len(rows) - 1 in left:
                left.discard(len(rows) - 1)
                rows.pop()
            if row in left:
                moved.append((len(rows) - 1, row, MoveDirectionality.UNIDIRECTIONAL))
                rows[row] = rows.pop()
                left.discard(row)
        return BatchUpdate(len(rows), removed, added, moved)


class LoadedProcessors:
    """ProcessorRows of operators' classes. One that raises ends the requests of its rows and begins anew."""

    def __init__(self, kinds: Sequence[type[LogitsProcessor]], config: object, device: torch.device) -> None:
        self._processors = [_Processor(kind, config, device) for kind in kinds]
        self._entries: dict[int, ProcessedRow] = {}

    def set(self, row: int, params: SamplingParams) -> bool:
        if any(each.kind.concerns(params) for each in self._processors):
            self._entries[row] = ProcessedRow(params)
            return True
        self._entries.pop(row, None)
        return False

    def apply(self, scores: Any, batch: SampleBatch[Any], temperature: np.ndarray | None) -> dict[int, str]:
        logits = scores if isinstance(scores, torch.Tensor) else torch.from_numpy(scores)
        found = self._follow(batch)
        failed: dict[int, str] = {}
        for each in self._processors:
            if each.is_invariant != (temperature is not None):
                continue
            rows = batch.rows_host
            mine = [index for index, entry in found.items() if each.kind.concerns(entry.params)]
            if temperature is not None:
                mine = [index for index in mine if temperature[rows[index]] > 0]
            if not mine:
                continue
            divisor = None if temperature is None else torch.from_numpy(temperature[rows[mine]]).to(logits.device)
            try:
                _process(each, logits, mine, [found[index] for index in mine], divisor)
            except Exception as error:
                logger.exception("the logits processor %s has failed, and begins anew", each.kind.__name__)
                reason = f"{PROCESSOR_FAILED}{each.kind.__name__} has failed: {explain(error)}"
                failed |= dict.fromkeys(mine, reason)
                logits[mine] = 0.0  # whatever it has left there: their tokens count for nothing
                each.start()
        return failed

    def _follow(self, batch: SampleBatch[Any]) -> dict[int, ProcessedRow]:
        """Batch index -> entry of the rows that processors concern, with all tokens known so far."""
        lengths, prompts, table = batch.lengths.tolist(), batch.num_prompt_tokens.tolist(), batch.token_table
        found = {}
        for index, row in enumerate(batch.rows_host.tolist()):
            entry = self._entries.get(row)
            if entry is None:
                continue
            start, length = prompts[index], lengths[index]
            if entry.prompt is not None and start + len(entry.output) > length:
                entry = self._entries[row] = ProcessedRow(entry.params)
            if entry.prompt is None:
                entry.prompt = table[row, :start].tolist()
            entry.output += table[row, start + len(entry.output) : length].tolist()
            found[index] = entry
        return found


def _process(
    each: _Processor, logits: torch.Tensor, mine: list[int], entries: list[ProcessedRow], divisor: torch.Tensor | None
) -> None:
    """Let a processor change its rows of the logits. mine: their indices. divisor: temperatures to divide them by,
    [len(mine)]."""
    order = [mine[place] for place in each.take(entries)]
    is_whole = divisor is None and order == list(range(len(logits)))
    given = logits if is_whole else logits[order]
    if divisor is not None:
        divisor = divisor[[mine.index(index) for index in order], None]
        given = given / divisor
    changed = each.processor.apply(given)
    if not isinstance(changed, torch.Tensor) or changed.shape != given.shape:
        shape = tuple(changed.shape) if isinstance(changed, torch.Tensor) else type(changed).__name__
        raise ValueError(f"apply has returned {shape}, not logits of {tuple(given.shape)}")
    if changed is not logits:
        logits[order] = (changed if divisor is None else changed * divisor).to(logits.dtype)
