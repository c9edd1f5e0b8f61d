"""Step columns: integers per token that a model reads beside token ids and positions (`CausalLM.columns`). A request
brings an integer per column (`EngineRequest.columns`), from which a rule derives its tokens' values, or lists them
(`EngineRequest.token_columns`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import numpy as np
import torch

from quire.config.adapters import ADAPTER_SLOTS
from quire.layers.batch import NO_COLUMNS
from quire.multimodal.positions import LAST_SEEN, ROTARY_COLUMNS
from quire.step import TokenValues
from quire.worker.input_batch import InputBatch
from quire.worker.listed_values import ListedValues

NO_LISTS: Mapping[str, TokenValues] = MappingProxyType({})


class Rule(IntEnum):
    """Rule for a token's value from its row's value and its position. The numbers match csrc/step_inputs.h and
    kernels/triton/rows.py."""

    ROW = 0
    """Row's value."""
    SHIFTED = 1
    """Position plus the row's value."""
    REACHED = 2
    """1 from the position given by the row's value on, 0 before; always 0 if that value is 0."""


@dataclass(frozen=True, slots=True)
class Column:
    """One step column. name: used by requests and models."""

    name: str
    rule: Rule


STEP_COLUMNS = (
    Column("segments", Rule.REACHED),
    *(Column(name, Rule.SHIFTED) for name in (*ROTARY_COLUMNS, LAST_SEEN)),
    Column(ADAPTER_SLOTS, Rule.ROW),
)
"""Known columns. `segments`: text of a pair; a request brings the position of the second text's first token.
ROTARY_COLUMNS: positions for rotation, where they differ from cache positions. LAST_SEEN: where tokens see later ones.
ADAPTER_SLOTS: set by the scheduler."""


class ColumnValues:
    """C columns that one model reads, and the rows' values. names: in the model's order. rules: [C] int32. rows:
    [num_rows, C] int64. listed: values without a rule."""

    def __init__(self, table: Sequence[Column], names: Sequence[str], num_rows: int) -> None:
        """table: known columns, a superset of `names`."""
        entries = {column.name: column for column in table}
        self.names = tuple(names)
        self.rules = np.array([entries[name].rule for name in names], np.int32)
        self.rows = np.zeros((num_rows, len(names)), np.int64)
        self.listed = ListedValues(num_rows)

    def set(self, row: int, values: Mapping[str, int], lists: Mapping[str, TokenValues] = NO_LISTS) -> None:
        """Set a row's values; missing ones are 0. lists: `NewSequence.token_columns`. As a sequence takes the row."""
        if not self.names:
            return
        self.rows[row] = [values.get(name, 0) for name in self.names]
        named = [lists.get(name) for name in self.names]
        self.listed.set(row, named, lambda of_rows: self._ruled(of_rows, np.arange(len(of_rows))), self.rows[row])

    def copy(self, source: int, destination: int) -> None:
        self.rows[destination] = self.rows[source]
        self.listed.copy(source, destination)

    def has(self, name: str, rows: np.ndarray) -> bool:
        """True if the model reads the column and one of the rows has a value other than 0. rows: [S] int64."""
        return name in self.names and bool(self.rows[rows, self.names.index(name)].any())

    def of_rows(self, name: str, rows: np.ndarray) -> torch.Tensor | None:
        """Values of a column for rows, [R] int64; None if `has` is False."""
        if name not in self.names:
            return None
        values = self.rows[rows, self.names.index(name)]
        return torch.from_numpy(values) if values.any() else None

    def of_tokens(self, batch: InputBatch) -> Mapping[str, torch.Tensor]:
        """Values of a batch's tokens, [T] int64 per column."""
        if not self.names:
            return NO_COLUMNS
        values = self._ruled(np.repeat(self.rows[batch.rows], batch.counts, axis=0), batch.positions)
        listed = self.listed.of_batch(batch)
        if listed is not None:
            values[:, listed[0]] = listed[1]
        return dict(zip(self.names, torch.from_numpy(values), strict=True))

    def _ruled(self, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Values by the rules, [C, T]. values: row values per token, [T, C]; positions: [T]."""
        found = np.ascontiguousarray(values.T)
        found[self.rules == Rule.SHIFTED] += positions
        reached = self.rules == Rule.REACHED
        found[reached] = (found[reached] > 0) & (positions >= found[reached])
        return found
