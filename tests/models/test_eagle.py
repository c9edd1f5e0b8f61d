"""Heads for drafts with checkpoints of their own, against their definition in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.attention.native_backend import NativeAttention
from quire.config.load import LoadConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ModelLoadError
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.models.loader import load_head, load_model
from quire.parallel.single import SINGLE_RANK
from tests.models.eagle_heads import HEADS, HeadTwin, states_of
from tests.models.families import llama, qwen3
from tests.models.harness import PagedRunner, random_prompts, randomize, save

SIZE = 48
CASES: dict[str, tuple[Callable[..., Any], HeadTwin]] = {
    "eagle": (llama, HeadTwin(SIZE, SIZE, 97, has_tables=False)),
    "eagle-own-logits": (qwen3, HeadTwin(SIZE, SIZE, 97)),
    "eagle3": (llama, HeadTwin(SIZE, SIZE, 97, (1, 2, 3), [96, 5, 6, 40, 7])),
    "eagle3-wide": (llama, HeadTwin(32, SIZE, 97, (3, 1), flags={"norm_before_fc": True, "norm_output": True})),
    "eagle3-shared": (qwen3, HeadTwin(SIZE, SIZE, 97, (2, 3), has_tables=False, flags={"fc_norm": True})),
    "speculators": (
        qwen3,
        HeadTwin(SIZE, SIZE, 97, (1, 3), [3, 1], flags={"norm_before_residual": True}, kind="qwen3", authors=False),
    ),
}


def options(model: Path, head: Path, twin: HeadTwin, **keys: object) -> EngineOptions:
    method = {"method": "eagle3" if twin.layers else "eagle"}
    config = {**method, "model": str(head), "num_speculative_tokens": 3, **keys}
    return EngineOptions.from_keywords({"model": str(model), "dtype": "float32", "speculative_config": config})


def saved(name: str, directory: Path) -> tuple[Any, HeadTwin, EngineOptions]:
    make, twin = CASES[name]
    model = randomize(make(num_hidden_layers=4))
    save(model, directory / "model")
    twin.save(directory / "head", directory / "model")
    return model, twin, options(directory / "model", directory / "head", twin)


class Reading:
    """A model for a runner that keeps what a head reads of it."""

    def __init__(self, model: Any, taps: tuple[int, ...]) -> None:
        self.model, self.taps = model, taps
        self.cache_specs = model.cache_specs
        self.states = torch.zeros(0)

    def forward(self, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        result = self.model.forward(batch.having(taps=self.taps))
        read = [result.tapped[layer] for layer in self.taps] if self.taps else [result.hidden]
        self.states = torch.cat(read, 1)
        return result

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), 1)


class Guessing:
    """A head for a runner, which is given what it reads."""

    def __init__(self, head: Any) -> None:
        self.head = head
        self.cache_specs, self.compute_logits = head.cache_specs, head.compute_logits
        self.states = self.results = torch.zeros(0)

    def forward(self, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        result = self.head.forward(batch.having(hidden=self.states))
        self.results = result.hidden.clone()
        return result


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("name", CASES)
def test_guesses_are_those_of_the_definition(name: str, native: bool, tmp_path: Path) -> None:
    """Of a prompt in two chunks, and a further guess that follows from results of the head."""
    hf, twin, given = saved(name, tmp_path)
    config = resolve(given)
    chosen = config.speculation.draft_model
    assert chosen is not None
    assert chosen.head is not None
    assert chosen.model is not None
    runtime, load = NativeRuntime("auto", 2) if native else None, LoadConfig("auto", 0)
    model = load_model(config.model, load, SINGLE_RANK, runtime=runtime)
    head, token_ids = load_head(chosen.model, chosen.head, load, SINGLE_RANK, model, runtime)
    reading, guessing = Reading(model, chosen.head.taps), Guessing(head)
    prompt = random_prompts([23], 97)[0]
    followers, rows, found = [*prompt[1:], 3], [], []
    for part, heads, tokens in ((reading, hf.config.num_attention_heads, prompt), (guessing, HEADS, [*followers, 9])):
        runner = PagedRunner(part)  # type: ignore[arg-type]
        if native:
            runner.backend = NativeAttention(runner.layout, runner.pages, "float32", heads, 2)  # type: ignore
        rows.append((runner, runner.add(tokens)))
    (of_model, row), (of_head, own) = rows
    for count in (13, 10):
        of_model.step([(row, count)])
        guessing.states = reading.states
        found.append(of_head.step([(own, count)])[0].clone())
    guessing.states = guessing.results[-1:]
    found.append(of_head.step([(own, 1)])[0].clone())
    hf.double()
    hidden = twin.join(states_of(hf, twin, prompt))
    results, logits = twin.run(hf, hidden, followers)
    _, further = twin.run(hf, torch.cat((hidden, results[-1:])), [*followers, 9])
    expected = torch.cat((logits, further[-1:]))[:, twin.ids]
    torch.testing.assert_close(torch.cat(found).double(), expected, atol=3e-4, rtol=3e-4)
    assert (twin.ids if token_ids is None else token_ids.tolist()) == twin.ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": torch.full((5,), 95)}, "'d2t' names tokens that are not among the 97"),
        ({"d2t": torch.zeros(4, dtype=torch.int64)}, "'d2t' must be 5 whole numbers"),
        ({"d2t": None}, "'d2t' missing"),
        ({"lm_head.weight": None}, "'lm_head.weight' missing: the model's does not fit"),
        ({"midlayer.hidden_norm.weight": None}, r"'layers\.0\.hidden_norm\.weight' missing"),
        ({"fc.weight": torch.zeros(SIZE, SIZE)}, r"'fc\.weight' has shape \[48, 48\]"),
        ({"other.weight": torch.zeros(1)}, "'other.weight' does not belong"),
    ],
    ids=str,
)
def test_damaged_checkpoints(change: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    _, _, given = saved("eagle3", tmp_path)
    path = tmp_path / "head" / "model.safetensors"
    tensors = {name: value for name, value in {**load_file(path), **change}.items() if value is not None}
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=message):
        load_of(given)


def load_of(given: EngineOptions) -> None:
    config = resolve(given)
    chosen, load = config.speculation.draft_model, LoadConfig("auto", 0)
    assert chosen is not None
    assert chosen.head is not None
    assert chosen.model is not None
    load_head(chosen.model, chosen.head, load, SINGLE_RANK, load_model(config.model, load, SINGLE_RANK))
