"""The device's memory for rows: every table that has a row for each live sequence, in one piece.

One piece, because whatever a step changes in any of the tables then goes up as one list of (offset, value) and is
written by one kernel.
"""

from __future__ import annotations

import torch

from quire.errors import ConfigError
from quire.kernels.triton.rows import RowTables

ROW_ALIGNMENT = 4
"""Words: rows begin at multiples of 16 bytes, so that kernels can load them by whole vectors."""
MAX_WORDS = 2**31 - 1
"""Offsets are 32-bit."""


class StateArena:
    """words: [N] int32, zero. token_ids: [num_rows, width] int32 (width >= max_model_len + 1: a sequence that has just
    reached its end may be run once more before the scheduler knows). block_tables: per KV group [num_rows, max_blocks]
    int32. parameters: [num_rows, parameter_words] int32. All three are views of `words`.

    Raises ConfigError when the tables are too large to be addressed.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        parameter_words: int,
        device: torch.device,
    ) -> None:
        max_blocks = -(-(max_model_len + 1) // block_size)
        token_width, block_width, parameter_width = map(_aligned, (max_model_len + 1, max_blocks, parameter_words))
        blocks = num_rows * token_width
        group_words = num_rows * block_width
        self.tables = RowTables(token_width, blocks, group_words, block_width)
        self._parameters = blocks + num_groups * group_words
        num_words = self._parameters + num_rows * parameter_width
        if num_words > MAX_WORDS:
            raise ConfigError(
                f"max_num_seqs={num_rows} sequences of max_model_len={max_model_len} tokens need tables of "
                f"{num_words} words on the device, more than {MAX_WORDS}; lower one of the two",
                param="max_num_seqs",
            )
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self.token_ids = self.words[:blocks].view(num_rows, token_width)
        self.block_tables = tuple(
            self.words[start : start + group_words].view(num_rows, block_width)[:, :max_blocks]
            for start in range(blocks, self._parameters, group_words)
        )
        self.parameters = self.words[self._parameters :].view(num_rows, parameter_width)[:, :parameter_words]

    def token_offset(self, row: int, position: int = 0) -> int:
        """Where in `words` a token of a row lies."""
        return row * self.tables.token_width + position

    def block_offset(self, row: int, group: int, logical_index: int = 0) -> int:
        """Where in `words` an entry of a row's block table lies."""
        tables = self.tables
        return tables.blocks + group * tables.group_words + row * tables.block_width + logical_index

    def parameters_offset(self, row: int) -> int:
        """Where in `words` the sampling parameters of a row start."""
        return self._parameters + row * self.parameters.stride(0)


def _aligned(words: int) -> int:
    return -(-words // ROW_ALIGNMENT) * ROW_ALIGNMENT
