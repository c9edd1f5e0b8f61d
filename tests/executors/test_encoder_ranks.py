"""Encoders that two ranks or stages share: vectors and logits of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("name", MODELS)
def test_vectors_of_two_ranks(name: str, size: str, tmp_path: Path) -> None:
    """Stages have the bits of one rank."""
    made, settings = MODELS[name]
    path = save_encoder(randomize(made(settings)), tmp_path, None if name == "bert" else "mean_tokens")
    options = {"num_blocks_override": None, "max_num_batched_tokens": 256}
    config = configured(path, **options)
    client = CoreClient(config, LocalExecutor(config))
    expected = pool(client, PROMPTS, "alone")
    client.core.shutdown()
    config = configured(path, **options, **{size: 2})
    client = CoreClient(config, RankedExecutor(RankProcesses(config), config.parallel.pp))
    try:
        assert config.scheduler.max_prefill_chunk is None, "prompts are whole"
        found = pool(client, PROMPTS, "together")
        assert_near(found, expected)
        assert config.parallel.tp == 2 or all(map(torch.equal, found, expected))
    finally:
        client.core.shutdown()
