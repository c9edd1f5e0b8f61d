"""The batches of logits processors: which rows they see, with which tokens, whatever the steps sample."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.sampling.batch import SampleBatch
from quire.sampling.processors import LoadedProcessors
from quire.sampling_params import SamplingParams
from tests.logits_processors.samples import Batched, Coldest, Target

CPU = torch.device("cpu")
NUM_ROWS, WIDTH, VOCAB_SIZE = 8, 64, 16


class Witness(Batched):
    """Notes, for each row, the number in its first logit and its tokens; adds one to it."""

    seen: list[tuple[float, list[int], list[int]]]

    @classmethod
    def concerns(cls, sampling_params: SamplingParams) -> bool:
        return sampling_params.extra_args is not None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        super().apply(logits)
        self.seen = [(logits[row, 0].item(), list(p or []), list(o)) for row, (_, p, o) in self.rows.items()]
        logits[:, 0] += 1
        return logits


class Fragile(Witness):
    """Fails where a row is numbered 3, in the midst of its work."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        super().apply(logits)
        if any(number == 3 for number, _, _ in self.seen):
            raise RuntimeError("three")
        return logits


class Rows:
    """Request slots with tokens, as a worker has them."""

    def __init__(self, processors: LoadedProcessors) -> None:
        self.processors = processors
        self.table = np.zeros((NUM_ROWS, WIDTH), np.int32)
        self.prompts = np.zeros(NUM_ROWS, np.int64)
        self.lengths = np.zeros(NUM_ROWS, np.int64)

    def begin(self, row: int, prompt: list[int], output: list[int], extra_args: dict[str, Any] | None) -> bool:
        tokens = prompt + output
        self.table[row, : len(tokens)] = tokens
        self.prompts[row], self.lengths[row] = len(prompt), len(tokens)
        return self.processors.set(row, SamplingParams(extra_args=extra_args))

    def tokens(self, row: int) -> tuple[list[int], list[int]]:
        found = self.table[row, : self.lengths[row]].tolist()
        return found[: self.prompts[row]], found[self.prompts[row] :]

    def apply(self, rows: list[int], temperature: np.ndarray | None = None) -> tuple[np.ndarray, dict[int, str]]:
        where = np.array(rows, np.int64)
        scores = np.zeros((len(rows), VOCAB_SIZE), np.float32)
        scores[:, 0] = rows
        batch = SampleBatch(where, where, self.lengths[where], self.prompts[where], self.table)
        return scores, self.processors.apply(scores, batch, temperature)


def test_random_batches() -> None:
    """Rows begin, are handed on, lose their last tokens (until they are sampled again) and get several; steps sample
    some of them in any order."""
    draw = random.Random(5)
    processors = LoadedProcessors([Witness], None, CPU)
    witness = processors._processors[0].processor
    assert isinstance(witness, Witness)
    rows, live = Rows(processors), dict[int, bool]()
    for _ in range(300):
        for row in draw.sample(range(NUM_ROWS), draw.randrange(3)):
            prompt, output = ([draw.randrange(99) for _ in range(draw.randrange(low, 5))] for low in (1, 0))
            is_mine = draw.random() < 0.8
            assert rows.begin(row, prompt, output, {} if is_mine else None) == is_mine
            live[row] = is_mine
            num_known = len(prompt + output)
            rows.table[row, num_known:] = [draw.randrange(99) for _ in range(num_known, WIDTH)]
        sampled = draw.sample(sorted(live), draw.randint(0, len(live)))
        scores, failed = rows.apply(sampled)
        mine = {row for row in sampled if live[row]}
        assert not failed
        assert scores[:, 0].tolist() == [row + (row in mine) for row in sampled]
        if mine:
            assert {int(number): (prompt, output) for number, prompt, output in witness.seen} == {
                row: rows.tokens(row) for row in mine
            }
        for row in live:
            change = draw.choice([-1, 0, 1, 1, 1, 3])
            rows.lengths[row] = max(rows.prompts[row], min(WIDTH - 4, rows.lengths[row] + change))


def test_one_that_fails_ends_its_own_rows_and_begins_anew() -> None:
    rows = Rows(LoadedProcessors([Fragile, Target], None, CPU))
    rows.begin(1, [5], [6], {"a": 1})
    rows.begin(2, [5], [], None)
    rows.begin(4, [5], [], {"target_token": 9})
    assert rows.apply([1, 2, 4])[1] == {}
    rows.begin(3, [7], [], {"a": 1})
    scores, failed = rows.apply([4, 1, 2, 3])
    reason = "the logits processor Fragile has failed: RuntimeError: three"
    assert failed == dict.fromkeys((0, 1, 3), reason)
    assert scores[2].tolist() == [2.0] + [0.0] * 15
    scores, failed = rows.apply([1, 2])
    assert not failed
    assert scores[:, 0].tolist() == [2, 2]


def test_what_leaves_the_best_token_alone_sees_drawn_rows_by_temperature() -> None:
    rows = Rows(LoadedProcessors([Coldest], None, CPU))
    for row in (0, 5):
        rows.begin(row, [1], [], None)
    temperature = np.zeros(NUM_ROWS, np.float32)
    temperature[5] = 0.5
    before, _ = rows.apply([0, 5])
    assert before[:, 0].tolist() == [0, 5], "it is not among the others"
    scores, _ = rows.apply([0, 5], temperature)
    assert scores[0].tolist() == [0.0] * 16
    assert scores[1].tolist() == [5.0] + [-np.inf] * 15


class WrongShape(Batched):
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, :3]


class NotMade(Batched):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        raise KeyError("no key")


def test_results_and_makers_are_checked() -> None:
    rows = Rows(LoadedProcessors([WrongShape], None, CPU))
    rows.begin(0, [1], [], None)
    assert "has returned (1, 3), not logits of (1, 16)" in rows.apply([0])[1][0]
    with pytest.raises(ConfigError, match="NotMade cannot be made"):
        LoadedProcessors([NotMade], None, CPU)
