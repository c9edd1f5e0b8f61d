"""Watermark by green lists, and its detector: a stateless logits processor. A secret key gives each token part of the
vocabulary, its green list; a watermarked request gets a bonus for tokens of the preceding token's list; `z_score`
measures their number beyond chance (Kirchenbauer et al., 2023). Load it with `--logits-processors
quire.logits_processors.green_list:GreenList`, or a subclass with its own key. A request with `watermark` (true, or the
bonus) is marked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from quire.logits_processors import BatchUpdate, LogitsProcessor, Tensor, process_dict_updates
from quire.sampling_params import SamplingParams

ARGUMENT = "watermark"
MAX_BONUS = 20.0
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class GreenList(LogitsProcessor):
    KEY: ClassVar[int] = 15485863
    """Secret key of 64 bits. It allows finding and removing the mark."""
    SHARE: ClassVar[float] = 0.5
    """Share of the vocabulary in a list."""
    BONUS: ClassVar[float] = 4.0

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        given = (sampling_params.extra_args or {}).get(ARGUMENT, False)
        if not isinstance(given, bool | int | float) or not 0 <= given <= MAX_BONUS:
            raise ValueError(f"{ARGUMENT} must be true, false or a bonus from 0 to {MAX_BONUS:g}, not {given!r}")

    @classmethod
    def concerns(cls, sampling_params: SamplingParams) -> bool:
        return bool((sampling_params.extra_args or {}).get(ARGUMENT))

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: Tensor) -> Tensor:
        for number, (bonus, prompt, output) in self._rows.items():
            last = (output or prompt)[-1]
            logits[number] += logits.new_tensor(bonus * self.green(last, np.arange(logits.shape[1])))
        return logits

    @classmethod
    def green(cls, previous: int, token_ids: np.ndarray) -> np.ndarray:
        """[N] bool: True for tokens, [N] integers, on the list of the token before them."""
        numbers = np.bitwise_xor(_mixed(np.uint64(previous) ^ np.uint64(cls.KEY)), token_ids.astype(np.uint64))
        found: np.ndarray = _mixed(numbers) < np.uint64(cls.SHARE * 2**64)
        return found

    @classmethod
    def z_score(cls, token_ids: Sequence[int]) -> float:
        """Standard deviations (for a user's own check) by which a text's green tokens exceed chance; above 4 it is
        marked. 0 for fewer than two tokens."""
        pairs = sorted(set(itertools.pairwise(token_ids)))
        if not pairs:
            return 0.0
        num_green = sum(bool(cls.green(previous, np.array([token_id]))[0]) for previous, token_id in pairs)
        expected = cls.SHARE * len(pairs)
        return (num_green - expected) / math.sqrt(expected * (1 - cls.SHARE))

    @classmethod
    def _row(cls, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Row:
        given = (params.extra_args or {})[ARGUMENT]
        return (cls.BONUS if given is True else float(given)), prompt or [], output


_Row = tuple[float, list[int], list[int]]
"""(bonus, prompt, generated tokens)."""


def _mixed(numbers: Any) -> Any:
    first, second, third = map(np.uint64, _MIX)
    with np.errstate(over="ignore"):
        numbers = numbers + first
        numbers = (numbers ^ (numbers >> np.uint64(30))) * second
        numbers = (numbers ^ (numbers >> np.uint64(27))) * third
    return numbers ^ (numbers >> np.uint64(31))
