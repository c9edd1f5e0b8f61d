"""Models that pool on the device worker, in Triton's interpreter: as on a CPU, and the same bits in every batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3Model

from quire.executors.local import LocalExecutor
from tests.engine.test_pooling_models import assert_near, pool, save_encoder, start
from tests.long import all_but_long
from tests.models.encoders import CLASSIFIERS, ENCODERS, class_logits, hidden_states
from tests.models.harness import randomize

LENGTHS = [1, 70, 20]
PROMPTS = [[2 + (7 * length + 11 * i) % 95 for i in range(length)] for length in LENGTHS]
DEVICE = {"device": "cpu", "attention_backend": "triton", "dtype": "float32", "batch_invariant": True}
BATCH = {"max_num_batched_tokens": 256, "max_num_seqs": 3}


@pytest.fixture
def executors() -> Iterator[list[LocalExecutor]]:
    made: list[LocalExecutor] = []
    yield made
    for executor in made:
        executor.shutdown()


@pytest.mark.parametrize(
    ("name", "method"), all_but_long([("bert", "mean_tokens"), ("modernbert", "cls_token")], [("bert", "mean_tokens")])
)
def test_encoders(name: str, method: str, tmp_path: Path, executors: list[LocalExecutor]) -> None:
    model = randomize(ENCODERS[name]())
    client = start(save_encoder(model, tmp_path, method), executors, **DEVICE, **BATCH)
    together = pool(client, PROMPTS, "together")
    pick = {"mean_tokens": lambda h: h.mean(0), "cls_token": lambda h: h[0]}[method]
    assert_near(together, [pick(hidden_states(model, prompt)) for prompt in PROMPTS])
    (alone,) = pool(client, PROMPTS[1:2], "alone")
    assert torch.equal(alone, together[1]), "the batch has changed a vector"


@pytest.mark.long
@pytest.mark.parametrize("name", all_but_long(["bert", "modernbert-mean"], ["modernbert-mean"]))
def test_classifiers_and_pairs(name: str, tmp_path: Path, executors: list[LocalExecutor]) -> None:
    model = randomize(CLASSIFIERS[name]())
    client = start(save_encoder(model, tmp_path), executors, **DEVICE, **BATCH)
    assert_near(pool(client, PROMPTS, "text"), [class_logits(model, prompt) for prompt in PROMPTS])
    if name == "bert":
        found = pool(client, PROMPTS[2:], "pair", columns={"segments": 7})
        assert_near(found, [class_logits(model, PROMPTS[2], 7)])


@pytest.mark.parametrize("method", all_but_long(["mean_tokens", "lasttoken"], ["lasttoken"]))
def test_decoders(method: str, tmp_path: Path, executors: list[LocalExecutor]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=97, num_key_value_heads=1, head_dim=16, max_position_embeddings=256, **sizes)
    model: PreTrainedModel = randomize(Qwen3Model(config))
    path = save_encoder(model, tmp_path, method)
    client = start(path, executors, **DEVICE, **BATCH, num_blocks_override=40)
    pick = {"mean_tokens": lambda h: h.mean(0), "lasttoken": lambda h: h[-1]}[method]
    assert_near(pool(client, PROMPTS, "text"), [pick(hidden_states(model, prompt)) for prompt in PROMPTS])
