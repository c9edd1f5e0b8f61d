"""The table of step columns: integers of a step's tokens that a model reads beside token ids and positions.

A column is one entry of `STEP_COLUMNS`, and a model that reads it names it (`CausalLM.columns`). The worker compiles
the columns of its model once: gathering (NumPy, native or on a device), upload, memory, warm-up, graphs and recorded
programs follow `ColumnValues`, and none of them names a column. A model that reads none pays nothing.

A request brings one 32-bit integer for each column that concerns it (`EngineRequest.columns`), which its row keeps; a
rule makes the values of its tokens from it. Where no rule gives them, as positions of an image's patches, the request
lists those of its tokens (`EngineRequest.token_columns`). Requests of equal values alone share blocks of the
prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import numpy as np
import torch

from quire.config.adapters import ADAPTER_SLOTS
from quire.layers.batch import NO_COLUMNS
from quire.multimodal.positions import ROTARY_COLUMNS
from quire.step import TokenValues
from quire.worker.input_batch import InputBatch
from quire.worker.listed_values import ListedValues

NO_LISTS: Mapping[str, TokenValues] = MappingProxyType({})


class Rule(IntEnum):
    """The rule by which a token's value follows from its row's value and its position. csrc/step_inputs.h and
    kernels/triton/rows.py have the same numbers."""

    ROW = 0
    """The row's value."""
    SHIFTED = 1
    """The position plus the row's value."""
    REACHED = 2
    """1 from the position on that the row's value names, before it 0; 0 throughout where that value is 0."""


@dataclass(frozen=True, slots=True)
class Column:
    """One entry. name: the one by which requests bring values and models read tokens' values."""

    name: str
    rule: Rule


STEP_COLUMNS = (
    Column("segments", Rule.REACHED),
    *(Column(name, Rule.SHIFTED) for name in ROTARY_COLUMNS),
    Column(ADAPTER_SLOTS, Rule.ROW),
)
"""`segments`: which text of a pair a token is in; a request brings the position of the second text's first token.
ROTARY_COLUMNS: positions for rotations alone, where they differ from those of the KV cache's slots. ADAPTER_SLOTS: the
scheduler gives it, with the request's row."""


class ColumnValues:
    """The columns that one model reads, C of them, and the rows' values.

    names: in the order of the model. rules: [C] int32. rows: [num_rows, C] int64. listed: values that no rule gives.
    """

    def __init__(self, table: Sequence[Column], names: Sequence[str], num_rows: int) -> None:
        """table: at least the columns in `names`, those that the model reads."""
        entries = {column.name: column for column in table}
        self.names = tuple(names)
        self.rules = np.array([entries[name].rule for name in names], np.int32)
        self.rows = np.zeros((num_rows, len(names)), np.int64)
        self.listed = ListedValues(num_rows)

    def set(self, row: int, values: Mapping[str, int], lists: Mapping[str, TokenValues] = NO_LISTS) -> None:
        """Set the values of a row; 0 for a column that `values` does not name. lists: `token_columns` of
        NewSequence."""
        if not self.names:
            return
        self.rows[row] = [values.get(name, 0) for name in self.names]
        named = [lists.get(name) for name in self.names]
        self.listed.set(row, named, lambda of_rows: self._ruled(of_rows, np.arange(len(of_rows))), self.rows[row])

    def copy(self, source: int, destination: int) -> None:
        self.rows[destination] = self.rows[source]
        self.listed.copy(source, destination)

    def of_tokens(self, batch: InputBatch) -> Mapping[str, torch.Tensor]:
        """The values of a batch's tokens, [T] int64 each."""
        if not self.names:
            return NO_COLUMNS
        values = self._ruled(np.repeat(self.rows[batch.rows], batch.counts, axis=0), batch.positions)
        listed = self.listed.of_batch(batch)
        if listed is not None:
            values[:, listed[0]] = listed[1]
        return dict(zip(self.names, torch.from_numpy(values), strict=True))

    def _ruled(self, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Values of tokens by the rules, [C, T]. values: the tokens' rows' values, [T, C]; positions: [T]."""
        found = np.ascontiguousarray(values.T)
        found[self.rules == Rule.SHIFTED] += positions
        reached = self.rules == Rule.REACHED
        found[reached] = (found[reached] > 0) & (positions >= found[reached])
        return found
