"""Encoders that two ranks share: vectors and logits of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BertConfig, BertForSequenceClassification, ModernBertConfig, ModernBertModel, PreTrainedModel

from quire.executors.local import LocalExecutor
from quire.executors.multiprocess import RankProcesses
from quire.executors.ranked import RankedExecutor
from tests.engine.test_pooling_models import PROMPTS, assert_near, pool, save_encoder
from tests.executors.test_multiprocess import configured
from tests.fakes.core import CoreClient
from tests.models.encoders import MODERN, SMALL
from tests.models.harness import randomize

TWO_HEADS = {"num_attention_heads": 2}
MODELS: dict[str, tuple[type[PreTrainedModel], object]] = {
    "bert": (BertForSequenceClassification, BertConfig(**{**SMALL, **TWO_HEADS}, num_labels=3)),
    "modernbert": (ModernBertModel, ModernBertConfig(**{**MODERN, **TWO_HEADS})),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_vectors_of_two_ranks(name: str, tmp_path: Path) -> None:
    made, settings = MODELS[name]
    path = save_encoder(randomize(made(settings)), tmp_path, None if name == "bert" else "mean_tokens")
    options = {"num_blocks_override": None, "max_num_batched_tokens": 256}
    config = configured(path, **options)
    client = CoreClient(config, LocalExecutor(config))
    expected = pool(client, PROMPTS, "alone")
    client.core.shutdown()
    config = configured(path, **options, tensor_parallel_size=2)
    client = CoreClient(config, RankedExecutor(RankProcesses(config)))
    try:
        assert_near(pool(client, PROMPTS, "together"), expected)
    finally:
        client.core.shutdown()
