"""Device memory for all tables with a row per live sequence, in one allocation: one kernel writes a step's changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.errors import ConfigError
from quire.kernels.triton.drafts import DraftTables
from quire.kernels.triton.rows import RowTables
from quire.worker.block_tables import TableShape

ROW_ALIGNMENT = 4
"""Row alignment in words (16 bytes), for vector loads."""
MAX_WORDS = 2**31 - 1
"""Limit of 32-bit offsets."""
NO_RULES = np.zeros(0, np.int32)


class DraftRoom(NamedTuple):
    """Room for drafts. max_drafts: maximum drafts of a sequence per step. rules: [columns] int32, per step column of a
    draft model, whose values are 0. has_texts: True for texts that an oracle replays."""

    max_drafts: int = 0
    rules: np.ndarray = NO_RULES
    has_texts: bool = False


class StateArena:
    """Tables as views of `words`, [N] int32, zeroed. token_ids: [num_rows, width] int32, width >= max_model_len + 1.
    block_tables: per KV group [num_rows, entries] int32; token_tables and state_tables: those of groups with tokens and
    with states. parameters: [num_rows, parameter_words] int32. Step-column values are in `words` too. Raises
    ConfigError if the tables are too large to address."""

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        shapes: Sequence[TableShape],
        parameter_words: int,
        device: torch.device,
        rules: np.ndarray = NO_RULES,
        drafts: DraftRoom | None = None,
    ) -> None:
        """rules: [columns] int32, each step column's Rule. drafts: None means no drafts."""
        max_drafts, draft_rules, has_texts = drafts or DraftRoom()
        # A head reads the token behind each one.
        token_width = _aligned(max_model_len + 1 + (max_drafts > 0))
        parameter_width = _aligned(parameter_words)
        entries = [shape.width(max_model_len + 1) for shape in shapes]
        self._widths = [_aligned(count) for count in entries]
        ends = list(itertools.accumulate([num_rows * width for width in self._widths], initial=num_rows * token_width))
        *self._starts, self._parameters = ends
        values = self._parameters + num_rows * parameter_width
        computed = values + num_rows * len(rules)
        found = computed + num_rows
        zeros = found + num_rows * max_drafts
        texts = zeros + num_rows * len(draft_rules)
        num_words = texts + (num_rows * token_width if has_texts else 0)
        if num_words > MAX_WORDS:
            raise ConfigError(
                f"max_num_seqs={num_rows} sequences of max_model_len={max_model_len} tokens need tables of "
                f"{num_words} words on the device, more than {MAX_WORDS}; lower one of the two",
                param="max_num_seqs",
            )
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self.token_ids = self.words[: ends[0]].view(num_rows, token_width)
        self.block_tables = tuple(
            self.words[start:end].view(num_rows, -1)[:, :count]
            for (start, end), count in zip(itertools.pairwise(ends), entries, strict=True)
        )
        pairs = list(zip(shapes, self.block_tables, strict=True))
        self.token_tables = tuple(table for shape, table in pairs if shape.has_slots)
        self.state_tables = tuple(table for shape, table in pairs if not shape.has_slots)
        places = [place for shape, *place in zip(shapes, self._starts, self._widths, strict=True) if shape.has_slots]
        blocks = torch.tensor(places, dtype=torch.int32, device=device).view(-1, 2)
        self.tables = RowTables(token_width, blocks, values, torch.from_numpy(rules).to(device))
        self.draft_tables = RowTables(token_width, blocks, zeros, torch.from_numpy(draft_rules).to(device))
        """Tables for a draft model, which reads a sequence as a plain text."""
        self.parameters = self.words[self._parameters : values].view(num_rows, parameter_width)[:, :parameter_words]
        self.drafts = DraftTables(token_width, computed, found, max_drafts, texts if has_texts else -1)
        """Places of the rows' computed-token counts and found drafts."""

    def token_offset(self, row: int, position: int = 0) -> int:
        """Index in `words` of a row's token."""
        return row * self.tables.token_width + position

    def text_offset(self, row: int) -> int:
        """Index in `words` of the first token of a row's text for an oracle."""
        return self.drafts.texts + row * self.drafts.token_width

    def block_offset(self, row: int, group: int, logical_index: int = 0) -> int:
        return self._starts[group] + row * self._widths[group] + logical_index

    def parameters_offset(self, row: int) -> int:
        return self._parameters + row * self.parameters.stride(0)

    def values_offset(self, row: int) -> int:
        return self.tables.values + row * len(self.tables.rules)


def _aligned(words: int) -> int:
    return -(-words // ROW_ALIGNMENT) * ROW_ALIGNMENT
