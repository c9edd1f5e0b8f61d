"""No n-gram twice: a logits processor, and an example of one with a state for each row. Load it with
`--logits-processors quire.logits_processors.no_repeated_ngram:NoRepeatedNgram`. A request with `no_repeat_ngram_size`
gets no token that completes an n-gram of its tokens, prompt included."""

from __future__ import annotations

from typing import Any

from quire.logits_processors import BatchUpdate, LogitsProcessor, Tensor, process_dict_updates
from quire.sampling_params import SamplingParams

ARGUMENT = "no_repeat_ngram_size"


class NoRepeatedNgram(LogitsProcessor):
    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        size = _size(sampling_params)
        if size is not None and (type(size) is not int or not 1 <= size <= 64):
            raise ValueError(f"{ARGUMENT} must be an integer from 1 to 64, not {size!r}")

    @classmethod
    def concerns(cls, sampling_params: SamplingParams) -> bool:
        return _size(sampling_params) is not None

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _Row)

    def apply(self, logits: Tensor) -> Tensor:
        for number, row in self._rows.items():
            if banned := row.banned():
                logits[number, banned] = float("-inf")
        return logits


def _size(params: SamplingParams) -> Any:
    return (params.extra_args or {}).get(ARGUMENT)


class _Row:
    """N-grams of one batch row: tokens that followed each n - 1 tokens."""

    def __init__(self, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> None:
        self._size = int(_size(params))
        self._prompt, self._output = prompt or [], output
        self._followers: dict[tuple[int, ...], set[int]] = {}
        self._num_read = 0
        self._recent: tuple[int, ...] = ()
        for token_id in self._prompt:
            self._read(token_id)

    def banned(self) -> list[int]:
        """Token ids that followed the last n - 1 tokens before."""
        while self._num_read < len(self._output):
            self._read(self._output[self._num_read])
            self._num_read += 1
        return sorted(self._followers.get(self._recent, ()))

    def _read(self, token_id: int) -> None:
        if len(self._recent) == self._size - 1:
            self._followers.setdefault(self._recent, set()).add(token_id)
        self._recent = (*self._recent, token_id)[len(self._recent) + 2 - self._size :] if self._size > 1 else ()
