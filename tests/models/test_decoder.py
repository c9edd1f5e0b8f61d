"""A model as a list of layers: stages of it, hidden states in and out, rows put over embeddings and behind layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quire.kv_cache.spec import LayerSpec
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.layers.overlay import RowOverlay
from tests.models.harness import PagedRunner, random_prompts
from tests.models.test_toy import RUNNERS
from tests.models.toy import SIZE, VOCABULARY

ORDER = "full state window"
Forward = Callable[[Any, ForwardBatch], ForwardResult[torch.Tensor]]
PROMPTS = random_prompts([13, 6], VOCABULARY, seed=4)


@dataclass
class Through:
    """A model whose steps go another way through it."""

    model: Any
    way: Forward

    def cache_specs(self) -> list[LayerSpec]:
        return self.model.cache_specs()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)

    def forward(self, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        return self.way(self.model, batch)


def run(name: str, way: Forward, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of chunks: of their last tokens, then of all tokens."""
    runner: PagedRunner = RUNNERS[name](ORDER)
    runner.model = Through(runner.model, way)  # type: ignore[assignment]
    rows = [runner.add(prompt) for prompt in prompts]
    read = [part.clone() for part in runner.step([(row, 5) for row in rows], last_only=True)]
    return read + [part.clone() for part in runner.step([(row, len(runner.rows[row].token_ids) - 5) for row in rows])]


def whole(model: Any, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
    return model.forward(batch)


def stages(*cuts: int) -> Forward:
    def forward(model: Any, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        first, *between, last = (model.stage(range(*pair)) for pair in zip((0, *cuts), (*cuts, 3), strict=True))
        hidden = first.forward(batch).hidden
        assert hidden.shape == (len(batch.token_ids), SIZE), "a stage passes on all rows"
        for each in between:
            hidden = each.forward(batch.having(hidden)).hidden
        given = hidden.clone()
        result = last.forward(batch.having(hidden))
        assert torch.equal(hidden, given), "a stage's input is not used up"
        return result

    return forward


def taps(model: Any, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
    """What is tapped goes on as what it is."""
    hidden, tapped = model.forward(batch.having(taps=(1, 0)))
    assert {layer: len(rows) for layer, rows in tapped.items()} == dict.fromkeys((0, 1), len(batch.token_ids))
    hidden, tapped = hidden.clone(), {layer: rows.clone() for layer, rows in tapped.items()}
    assert torch.equal(model.stage(range(1)).forward(batch).hidden, tapped[0])
    again = model.stage(range(2, 3)).forward(batch.having(tapped[1])).hidden
    assert torch.equal(again, hidden)
    return ForwardResult(hidden)


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize("way", [stages(1), stages(2), stages(1, 2), taps], ids=["1", "2", "1-2", "taps"])
def test_a_model_in_parts_computes_the_bits_of_the_whole(name: str, way: Forward) -> None:
    for part, expected in zip(run(name, way, PROMPTS), run(name, whole, PROMPTS), strict=True):
        assert torch.equal(part, expected)


PLACES = {4: 0, 5: 1, 6: 2, 11: 3}
"""Positions that have rows, in both chunks."""
EMBEDDINGS, BEHIND = torch.randn(2, 4, SIZE, generator=torch.Generator().manual_seed(8)).unbind(0)


def overlay_of(batch: ForwardBatch) -> RowOverlay:
    assert isinstance(batch.slot_positions, torch.Tensor)
    rows = [row for row, place in enumerate(batch.slot_positions.tolist()) if place in PLACES]
    of = [PLACES[int(batch.slot_positions[row])] for row in rows]
    return RowOverlay(torch.tensor(rows), EMBEDDINGS[of], {1: BEHIND[of]})


def overlaid(model: Any, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
    return model.forward(batch.having(overlay=overlay_of(batch)))


def by_hand(embed: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    """The same by stages, between which rows are set here."""

    def forward(model: Any, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        overlay, x = overlay_of(batch), embed(batch.token_ids).clone()
        x[overlay.rows] = overlay.embeddings
        x = model.stage(range(2)).forward(batch.having(x)).hidden.clone()
        x[overlay.rows] += overlay.behind[1]
        return model.stage(range(2, 3)).forward(batch.having(x))

    return forward


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("name", ["torch", "native"])
def test_rows_over_embeddings_and_behind_a_layer(name: str) -> None:
    """Steps without rows, before and behind, have the bits of a model that never had any."""
    embed = RUNNERS["torch"](ORDER).model.embed
    prompt = PROMPTS[:1]
    for part, expected in zip(run(name, overlaid, prompt), run(name, by_hand(embed), prompt), strict=True):
        assert torch.equal(part, expected)

    def alternating(model: Any, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        return model.forward(batch) if int(batch.slot_positions[0]) else overlaid(model, batch)

    other = run(name, alternating, prompt)
    assert torch.equal(other[0], run(name, overlaid, prompt)[0])
    assert not torch.equal(other[1], run(name, whole, prompt)[1]), "what is in the cache has the rows"
