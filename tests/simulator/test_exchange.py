"""Bytes that a layout is said to exchange, counted in native ranks while they compute a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from quire.config.hf_config import load_model_config
from quire.config.load import ExpertBalance, LoadConfig
from quire.config.parallel import ParallelConfig
from quire.kernels.cpu.runtime import NativeRuntime
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from quire.parallel.stage import Stage
from quire.simulator.exchange import exchange_of
from quire.simulator.shape import find_shape
from tests.fakes.ranks import ThreadRank, run_ranks
from tests.models.families import deepseek_v3, llama, qwen2_moe, qwen3, qwen3_moe
from tests.models.harness import randomize, save
from tests.models.hybrid_families import qwen3_next
from tests.models.test_native_ranks import NativeRunner, runner

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": qwen3,
    "one key head": lambda: llama(hidden_size=64, num_attention_heads=8, num_key_value_heads=1),
    "latents": lambda: deepseek_v3(num_attention_heads=8, num_key_value_heads=8),
    "states": qwen3_next,
    "experts": qwen3_moe,
    "shared experts": lambda: qwen2_moe(decoder_sparse_step=1, mlp_only_layers=[]),
}


class CountingRank:
    """A ThreadRank that counts the bytes that it gives."""

    native = None

    def __init__(self, rank: ThreadRank) -> None:
        self._rank = rank
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += tensor.nbytes
        return self._rank.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self.num_bytes += tensor.nbytes
        return self._rank.all_gather(tensor, dim)


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("qwen3", ParallelConfig(2), {}),
        ("one key head", ParallelConfig(2, dcp=2), {"dealt_to": 2}),
        ("one key head", ParallelConfig(4, dcp=2), {"dealt_to": 2}),
        ("latents", ParallelConfig(2), {}),
        ("latents", ParallelConfig(2, dcp=2), {"dealt_to": 2}),
        ("latents", ParallelConfig(4, dcp=2), {"dealt_to": 2}),
        ("states", ParallelConfig(2), {}),
        ("experts", ParallelConfig(2, ep=2), {"placement": "linear"}),
        ("experts", ParallelConfig(2, ep=2, redundant_experts=1), {"placement": "linear", "balance": ExpertBalance(1)}),
        ("shared experts", ParallelConfig(2), {}),
    ],
    ids=str,
)
def test_bytes_are_those_of_a_token(tmp_path: Path, name: str, layout: ParallelConfig, options: dict[str, Any]) -> None:
    directory = save(randomize(MODELS[name]()), tmp_path)
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)

    def compute(rank: ThreadRank) -> int:
        group: Any = CountingRank(rank)
        model = runner(directory, group, **options)
        row = model.add([1, 2, 3])
        model.step([(row, 2)])
        before = group.num_bytes
        model.step([(row, 1)])
        return int(group.num_bytes - before)

    expected = exchange_of(config.resolved_shape(), layout)
    assert run_ranks(layout.tp, compute) == [expected.within] * layout.tp
    assert expected.between == 0


def test_bytes_of_replicas_that_share_experts() -> None:
    """A row with its routing, and results of the experts, shared by a replica's ranks; two sums of attention."""
    shape = find_shape("qwen3-30b-a3b")
    row, layers = 2048, 48
    exchanged = layers * (row + 16 + 8 * row)
    assert exchange_of(shape, ParallelConfig(dp=2, ep=2)).within == 4 * exchanged
    summed = layers * (row + row + 16 + 8 * row // 2) + row + shape.vocab // 2
    assert exchange_of(shape, ParallelConfig(2, dp=2, ep=4)).within == 4 * summed


class CountingLink:
    """A link that keeps the sizes of what is sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor.nbytes)


def test_bytes_between_stages(tmp_path: Path) -> None:
    directory = save(randomize(qwen3()), tmp_path)
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)
    shape, link = config.resolved_shape(), CountingLink()
    outgoing: Any = link
    stage = Stage(0, 2, shape.stages(2)[0], None, outgoing)
    model: Any = load_model(config, LoadConfig("auto", 0), SINGLE_RANK, runtime=NativeRuntime("auto", 1), stage=stage)
    model.compute_logits = lambda hidden: hidden  # this stage has none
    first = NativeRunner(model, num_heads=config.num_heads)
    first.step([(first.add([1, 2, 3]), 3)])
    assert link.sent == [3 * exchange_of(shape, ParallelConfig(1, 2)).between]
    assert str(exchange_of(shape, ParallelConfig(1, 2))).endswith("between stages")
    assert str(exchange_of(shape, ParallelConfig())) == "nothing"
