"""Log of a run's steps as JSON lines: a header (`StepLogHeader`), then one `StepRecord` per line, for fitting cost
models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from quire.clock import Clock
from quire.config.engine import EngineConfig
from quire.engine.observer import CoreObserver, StepEnd
from quire.errors import ConfigError, UserError
from quire.executors.interface import StepFuture
from quire.kv_cache.layout import KVCacheLayout
from quire.logging import get_logger
from quire.step import StepPlan

logger = get_logger(__name__)

VERSION = 1
FLUSH_SECONDS = 1.0
"""Least seconds between two writes of the step log's file."""


Entry = TypeVar("Entry")


class StepLogHeader(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """First line of a step log, which `quire calibrate` reads. weights: storage type of the layers' matrices. backend:
    executor's description of itself."""

    version: int
    model: str
    architecture: str
    weights: str
    kv_cache_dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    queue_depth: int
    num_threads: int
    backend: str


class StepRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One step in the log, times in seconds. at: hand-over of the plan, since the first one. seconds: from the
    hand-over, or the previous step's end if later, to this end. gap: from the previous end to the hand-over, at least
    0. num_carried: sequences that had a row before; if 0, `gap` may be idle time. starts, tokens: the plan's
    `start_positions` and `num_tokens`. Copies and swaps are in blocks."""

    step: int
    at: float
    seconds: float
    gap: float
    starts: list[int]
    tokens: list[int]
    num_sampled: int
    num_carried: int
    num_copies: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0


def read_step_log(path: Path) -> tuple[StepLogHeader, list[StepRecord]]:
    """Read a log; an incomplete last line is dropped. Raises UserError naming the file and line."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"cannot read the step log {str(path)!r}: {error.strerror}", param="log") from None
    if lines and not lines[-1].endswith(b"\n"):
        del lines[-1]
    header = _decoded(path, 1, lines[0] if lines else b"", StepLogHeader)
    if header.version != VERSION:
        raise UserError(f"{str(path)!r} is a step log of version {header.version}, not {VERSION}", param="log")
    return header, [_decoded(path, number, line, StepRecord) for number, line in enumerate(lines[1:], 2)]


def _decoded(path: Path, number: int, line: bytes, kind: type[Entry]) -> Entry:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:  # includes ValidationError
        raise UserError(f"{str(path)!r}, line {number}, is not of a step log: {error}", param="log") from None


class StepLog(CoreObserver):
    """Step log of an engine core (`step_log`): a line for each successful plan, buffered."""

    def __init__(self, config: EngineConfig, path: Path, clock: Clock) -> None:
        """Open and truncate the file. Raises ConfigError if it cannot be written."""
        self._config = config
        self._clock = clock
        self._lines = _Lines(path)
        self._unwritten: list[_EndedStep] = []
        self._last: _EndedStep | None = None
        self._began = 0.0
        self._next_flush = 0.0

    def allocated(self, layout: KVCacheLayout, backend: str) -> None:
        self._lines.write([_header(self._config, layout, backend)])

    def executes(self, plan: StepPlan) -> StepEnd:
        """Record the plan's hand-over and end."""
        handed_over = self._clock.now()

        def note(future: StepFuture) -> None:
            if future.exception() is not None:
                return
            now = self._clock.now()
            self._unwritten.append(_EndedStep(plan, handed_over, now))
            if now >= self._next_flush:
                self._next_flush = now + FLUSH_SECONDS
                self._write()

        return note

    def ends(self) -> None:
        self._write()
        self._lines.close()

    def _write(self) -> None:
        records = []
        unwritten, self._unwritten = self._unwritten, []
        for step in unwritten:
            if self._last is None:
                self._began = step.handed_over
            records.append(_record(step, self._began, self._began if self._last is None else self._last.ended))
            self._last = step
        self._lines.write(records)


class _EndedStep(NamedTuple):
    plan: StepPlan
    handed_over: float
    ended: float


class _Lines:
    """Step log's file of JSON lines. A full disk ends the log, not the engine."""

    def __init__(self, path: Path) -> None:
        self._encoder = msgspec.json.Encoder()
        try:
            self._file: BinaryIO | None = path.open("wb")
        except OSError as error:
            raise ConfigError(f"cannot write the step log {str(path)!r}: {error.strerror}", param="step_log") from None

    def write(self, entries: Sequence[StepLogHeader | StepRecord]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode_lines(entries))
            self._file.flush()
        except OSError as error:
            logger.warning("the step log ends here: %s", error.strerror)
            file, self._file = self._file, None
            with suppress(OSError):  # closing writes buffered data, which fails again
                file.close()

    def close(self) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            logger.warning("the end of the step log is lost: %s", error.strerror)
        self._file = None


def _record(step: _EndedStep, began: float, ended_before: float) -> StepRecord:
    plan, handed_over, ended = step
    transfers = plan.transfers
    return StepRecord(
        step=plan.step_id,
        at=handed_over - began,
        seconds=ended - max(handed_over, ended_before),
        gap=max(0.0, handed_over - ended_before),
        starts=plan.start_positions,
        tokens=plan.num_tokens,
        num_sampled=len(plan.sample_seq_ids) - len(plan.pooled),
        num_carried=_num_carried(plan),
        num_copies=len(plan.block_copies),
        num_swapped_out=0 if transfers is None else len(transfers.swap_out),
        num_swapped_in=0 if transfers is None else len(transfers.swap_in),
    )


def _header(config: EngineConfig, layout: KVCacheLayout, backend: str) -> StepLogHeader:
    model, scheduler = config.model, config.scheduler
    return StepLogHeader(
        version=VERSION,
        model=model.name,
        architecture=model.architecture,
        weights=model.dtype if model.quantization is None else model.quantization.stored_type,
        kv_cache_dtype=model.kv_cache_dtype,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        block_size=layout.sequence_block,
        num_blocks=layout.num_usable_blocks,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        queue_depth=scheduler.queue_depth,
        num_threads=config.device.num_threads,
        backend=backend,
    )


def _num_carried(plan: StepPlan) -> int:
    new = {new.seq_id for new in plan.new_sequences}
    return len(plan.seq_ids) - len(new.intersection(plan.seq_ids))
