"""Models that pool, from the engine core to the vector: against Transformers, and the same bits in every batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.executors.local import LocalExecutor
from tests.fakes.core import CoreClient
from tests.models.encoders import CLASSIFIERS, ENCODERS, class_logits, hidden_states
from tests.models.harness import randomize

LENGTHS = [1, 2, 37, 5, 100, 16, 130, 64, 17]
PROMPTS = [[2 + (7 * length + 11 * i) % 95 for i in range(length)] for length in LENGTHS]
TOLERANCE = 1e-5
"""Of the largest element."""


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        pytest.importorskip("quire.kernels.cpu._native")
    return str(request.param)


@pytest.fixture
def executors() -> Iterator[list[LocalExecutor]]:
    made: list[LocalExecutor] = []
    yield made
    for executor in made:
        executor.shutdown()


def save_encoder(model: PreTrainedModel, directory: Path, pooling: str | None = None) -> Path:
    """Write the model, and where `pooling` names a method the files of sentence-transformers."""
    model.save_pretrained(directory)
    if pooling is not None:
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        listed = [{"idx": i, "path": path, "type": f"st.models.{name}"} for i, (name, path) in enumerate(modules)]
        (directory / "modules.json").write_text(json.dumps(listed))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return directory


def start(path: Path, executors: list[LocalExecutor], **options: object) -> CoreClient:
    config = resolve(EngineOptions.from_keywords({"model": str(path), "num_threads": 1, **options}))
    executors.append(LocalExecutor(config))
    return CoreClient(config, executors[-1])


def pool(client: CoreClient, prompts: list[list[int]], name: str, **fields: int) -> list[torch.Tensor]:
    for index, prompt in enumerate(prompts):
        client.add(f"{name} {index}", prompt, pooling=True, max_tokens=1, **fields)
    client.run()
    return [torch.tensor(client.pooled[f"{name} {index}"]) for index in range(len(prompts))]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for vector, reference in zip(found, expected, strict=True):
        assert float((vector - reference).abs().max()) < TOLERANCE * max(1.0, float(reference.abs().max()))


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "mean_tokens") for name in ENCODERS), ("bert", "cls_token"), ("bert", "lasttoken")]
)
def test_an_encoder_like_transformers_in_every_batch(
    name: str, method: str, backend: str, tmp_path: Path, executors: list[LocalExecutor]
) -> None:
    model = randomize(ENCODERS[name]())
    path = save_encoder(model, tmp_path, method)
    client = start(path, executors, attention_backend=backend, max_num_batched_tokens=256, max_num_seqs=4)
    pick = {"mean_tokens": lambda h: h.mean(0), "cls_token": lambda h: h[0], "lasttoken": lambda h: h[-1]}[method]
    together = pool(client, PROMPTS, "together")
    assert_near(together, [pick(hidden_states(model, prompt)) for prompt in PROMPTS])
    alone = [pool(client, [prompt], f"alone {index}")[0] for index, prompt in enumerate(PROMPTS)]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True)), "the batch has changed a vector"
    backwards = pool(client, PROMPTS[::-1], "backwards")
    assert all(torch.equal(*pair) for pair in zip(together, backwards[::-1], strict=True))
    client.core.scheduler.check()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_like_transformers(
    name: str, backend: str, tmp_path: Path, executors: list[LocalExecutor]
) -> None:
    model = randomize(CLASSIFIERS[name]())
    client = start(save_encoder(model, tmp_path), executors, attention_backend=backend)
    logits = pool(client, PROMPTS, "text")
    assert_near(logits, [class_logits(model, prompt) for prompt in PROMPTS])
    if name == "bert":
        pairs = [prompt for prompt in PROMPTS if len(prompt) > 5]
        found = pool(client, pairs, "pair", second_segment=5)
        assert_near(found, [class_logits(model, prompt, 5) for prompt in pairs])
        assert not torch.equal(found[0], logits[2]), "token types matter"


def test_a_prompt_that_no_step_holds_is_refused(tmp_path: Path, executors: list[LocalExecutor]) -> None:
    path = save_encoder(randomize(ENCODERS["bert"]()), tmp_path)
    client = start(path, executors, attention_backend="torch", max_num_batched_tokens=32)
    client.add("long", list(range(2, 40)), pooling=True, max_tokens=1)
    client.add("short", [2, 3, 4], pooling=True, max_tokens=1)
    client.run()
    assert (
        "the prompt has 38 tokens, and this model computes prompts in one step, of up to 32" in client.refused["long"]
    )
    assert list(client.pooled) == ["short"]


def test_weights_of_eight_bits(tmp_path: Path, executors: list[LocalExecutor]) -> None:
    pytest.importorskip("quire.kernels.cpu._native")
    model = randomize(ENCODERS["bert"]())
    path = save_encoder(model, tmp_path, "mean_tokens")
    expected = [hidden_states(model, prompt).mean(0) for prompt in PROMPTS]
    for method in ("int8", "w8a8"):
        client = start(path, executors, quantization=method)
        found = pool(client, PROMPTS, method)
        for vector, reference in zip(found, expected, strict=True):
            assert float(torch.cosine_similarity(vector, reference, dim=0)) > 0.98
