"""Models that ranks share, on native kernels: sums of ranks are calls inside the one program of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.attention.dealt import DealtTokens
from quire.attention.native_backend import NativeAttention
from quire.cli.speed_plan import bandwidth_alone
from quire.config.hf_config import load_model_config
from quire.config.load import ExpertBalance, LoadConfig
from quire.config.parallel import ParallelConfig
from quire.config.quantization import QuantizationConfig
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kv_cache.deal import Deal
from quire.layers.expert_balance import ExpertBalancer
from quire.layers.experts import ExpertCounters
from quire.models.loader import Extras, load_model
from quire.models.native import NativeModel
from quire.parallel.expert_placement import Placement
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.simulator.cost import CostModel, Precision
from tests.fakes.gguf_model import MIXED, WIDE, to_gguf
from tests.fakes.ranks import ThreadRank, run_ranks
from tests.long import all_but_long
from tests.models.conftest import SavedModel
from tests.models.families import deepseek_v3, llama, qwen3, qwen3_moe
from tests.models.harness import PagedRunner, chunked_logits, random_prompts, randomize, save
from tests.models.test_gguf import add_extras

SavedModels = Callable[[str], SavedModel]
PROMPTS = random_prompts([20, 7], 97)
FAMILIES = [
    "llama",
    "qwen3",
    "olmo2-one-kv-head",
    "gemma2",
    "mixtral",
    "gpt-oss",
    "deepseek-v3",
    "qwen3-next",
    "qwen3.5",
]
EXPERT_FAMILIES = ["mixtral", "qwen2-moe", "gpt-oss", "deepseek-v3", "qwen3-next"]
ERROR = 2**-17
"""Most that a logit differs from its value in float64, relative to the largest, on one rank or several."""


@dataclass
class NativeRunner(PagedRunner):
    num_heads: int = 0
    """This rank's."""
    group: ProcessGroup = SINGLE_RANK
    balancer: ExpertBalancer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        dealt = DealtTokens(self.deal, self.group) if self.deal.num_ranks > 1 else None
        self.backend = NativeAttention(self.layout, self.pages, "float32", self.num_heads, 1, dealt)

    def step(self, work: Sequence[tuple[int, int]], *, last_only: bool = False) -> list[torch.Tensor]:
        """Copies, because the next step overwrites the model's own."""
        if self.balancer is not None:
            self.balancer.before_step(lambda: None)
        return [logits.clone() for logits in super().step(work, last_only=last_only)]


def runner(
    directory: Path,
    group: ProcessGroup,
    quantization: str | None = None,
    dtype: str = "float32",
    placement: str | None = None,
    dealt_to: int = 1,
    run: int = 1,
    balance: ExpertBalance | None = None,
) -> NativeRunner:
    config = load_model_config(str(directory), dtype=dtype, max_model_len=None, revision=None, config_only=False)
    if quantization is not None:
        config = replace(config, quantization=QuantizationConfig(method=quantization, group_size=None))
    load, extras = LoadConfig("auto", 0, expert_placement=placement, dealt_to=dealt_to), Extras()
    if balance is not None:
        extras = Extras(ExpertCounters(), balancer=ExpertBalancer(balance))
    model = load_model(config, load, group, runtime=NativeRuntime("auto", 1), extras=extras)
    assert isinstance(model, NativeModel)
    if extras.balancer is not None:
        extras.balancer.begin()
    deal, num_heads = Deal(dealt_to, group.rank % dealt_to, run), config.num_heads // group.size
    return NativeRunner(model, num_heads=num_heads, deal=deal, group=group, balancer=extras.balancer)


def logits_of(directory: Path, group: ProcessGroup, chunk: int = 9, **options: Any) -> torch.Tensor:
    return torch.cat(chunked_logits(runner(directory, group, **options), PROMPTS, chunk))


def exact_logits(saved: SavedModel) -> torch.Tensor:
    """Transformers' in float64."""
    reference = copy.deepcopy(saved.reference).double()
    reference.set_experts_implementation("eager")  # the quick ones have no float64
    with torch.inference_mode():
        return torch.cat([reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_are_as_exact_as_one(saved_model: SavedModels, family: str) -> None:
    saved = saved_model(family)
    first, second = run_ranks(2, lambda group: logits_of(saved.directory, group))
    assert torch.equal(first, second)
    exact = exact_logits(saved)
    bound = ERROR * float(exact.abs().max())
    for found in (first, logits_of(saved.directory, SINGLE_RANK)):
        torch.testing.assert_close(found.double(), exact, atol=bound, rtol=0)
    assert torch.equal(first.argmax(-1), exact.argmax(-1))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_same_bits_in_every_batch(saved_model: SavedModels, family: str) -> None:
    """In chunks, whole, and each prompt alone."""
    directory = saved_model(family).directory

    def compute(group: ProcessGroup) -> list[torch.Tensor]:
        alone = [torch.cat(chunked_logits(runner(directory, group), [prompt], 64)) for prompt in PROMPTS]
        return [logits_of(directory, group, 3), logits_of(directory, group, 64), torch.cat(alone)]

    for chunked, whole, alone in run_ranks(2, compute):
        assert torch.equal(chunked, whole)
        assert torch.equal(alone, whole)


@pytest.mark.parametrize("family", all_but_long(EXPERT_FAMILIES, ["mixtral"]))
@pytest.mark.parametrize("placement", all_but_long(["linear", "round_robin"], ["round_robin"]))
def test_whole_experts_on_each_rank(saved_model: SavedModels, family: str, placement: str) -> None:
    """As exact as one rank, and with the same bits in every batch."""
    saved = saved_model(family)

    def compute(group: ProcessGroup) -> list[torch.Tensor]:
        return [logits_of(saved.directory, group, chunk, placement=placement) for chunk in (3, 64)]

    (chunked, whole), second = run_ranks(2, compute)
    assert torch.equal(chunked, whole)
    assert torch.equal(whole, second[1])
    exact = exact_logits(saved)
    torch.testing.assert_close(whole.double(), exact, atol=ERROR * float(exact.abs().max()), rtol=0)
    assert torch.equal(whole.argmax(-1), exact.argmax(-1))


STAYING, MOVING = ExpertBalance(0, 1, 10**6), ExpertBalance(2, 3, 3)


@pytest.mark.parametrize("quantization", all_but_long([None, "int8", "fp8"], [None]))
@pytest.mark.parametrize("family", all_but_long(EXPERT_FAMILIES, ["gpt-oss"]))
def test_experts_that_move_between_steps(saved_model: SavedModels, family: str, quantization: str | None) -> None:
    """The bits of experts that stay, whatever the chunk; without quantisation as exact as one rank."""
    saved = saved_model(family)

    def compute(group: ProcessGroup) -> tuple[list[torch.Tensor], list[Placement]]:
        options: dict[str, Any] = {"placement": "linear", "quantization": quantization}
        whole = logits_of(saved.directory, group, 64, balance=STAYING, **options)
        moving = runner(saved.directory, group, balance=MOVING, **options)
        assert moving.balancer is not None
        before = [layer.placement for layer in moving.balancer.layers]
        single = torch.cat(chunked_logits(moving, PROMPTS, 1))
        after = [layer.placement for layer in moving.balancer.layers]
        assert before != after
        return [whole, single], after

    (found, placements), (others, of_other) = run_ranks(2, compute)
    assert placements == of_other
    assert all(torch.equal(found[0], each) for each in (*found, *others))
    if quantization is None:
        exact = exact_logits(saved)
        torch.testing.assert_close(found[0].double(), exact, atol=ERROR * float(exact.abs().max()), rtol=0)


def test_experts_in_different_formats_cannot_move(tmp_path: Path) -> None:
    model = randomize(qwen3_moe(hidden_size=64, moe_intermediate_size=32))
    directory = save(model, tmp_path)

    def compute(group: ProcessGroup) -> str:
        moving = runner(directory, group, placement="linear", balance=STAYING)
        assert moving.balancer is not None
        if group.rank == 1:
            layer = moving.balancer.layers[1]
            layer._stored = lambda slot: [torch.zeros(slot + 1)]  # type: ignore[method-assign]
        with pytest.raises(ModelLoadError) as caught:
            moving.balancer.begin()
        return str(caught.value)

    for message in run_ranks(2, compute):
        assert "the experts of layer 1 of those with experts are stored in different formats" in message


@pytest.mark.parametrize("redundant", [0, 3])
def test_the_memory_of_copies_is_planned(tmp_path: Path, redundant: int) -> None:
    directory = save(randomize(qwen3_moe()), tmp_path)
    shape = load_model_config(
        str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False
    ).resolved_shape()

    def held(balance: ExpertBalance) -> int:
        found = run_ranks(2, lambda group: runner(directory, group, placement="linear", balance=balance))
        return max(each.model.weight_bytes() for each in found)

    def planned(copies: int) -> float:
        layout = ParallelConfig(2, ep=2, redundant_experts=copies)
        device = bandwidth_alone(2**40, 1e12)
        return CostModel(shape, device, layout, Precision.of(shape, "float32", "float32")).weight_bytes_per_device

    assert held(ExpertBalance(redundant)) - held(STAYING) == planned(redundant) - planned(0)


def test_experts_of_a_gguf_file_that_ranks_hold_whole(tmp_path: Path) -> None:
    model = randomize(qwen3_moe(hidden_size=64, moe_intermediate_size=32))
    writer, _ = to_gguf(model, "qwen3moe", {"experts": "Q4_0"})
    add_extras(writer, "qwen3moe", model)
    path = writer.write(tmp_path / "model.gguf")
    whole = logits_of(path, SINGLE_RANK)
    first, second = run_ranks(2, lambda group: logits_of(path, group, placement="linear"))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, atol=1e-4 * float(whole.abs().max()), rtol=0)


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_fewer_kv_heads_than_ranks(num_kv_heads: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": num_kv_heads}
    directory = save(randomize(llama(**sizes)), tmp_path)
    expected = logits_of(directory, SINGLE_RANK)
    for logits in run_ranks(4, lambda group: logits_of(directory, group)):
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-4)


class SharedRank:
    """A ThreadRank whose programs record collectives over memory that the ranks share."""

    def __init__(self, memory: torch.Tensor, rank: ThreadRank) -> None:
        self._rank = rank
        self.native = _native.SharedRanks(memory.data_ptr(), rank.rank, rank.size, 100, 60.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)


@pytest.mark.parametrize("kept", ["keys", "latents"])
@pytest.mark.parametrize(("size", "dealt_to", "run"), all_but_long([(2, 2, 1), (4, 2, 4), (4, 4, 2)], [(2, 2, 1)]))
def test_ranks_with_the_same_keys_keep_a_part_of_the_tokens_each(
    tmp_path: Path, size: int, dealt_to: int, run: int, kept: str
) -> None:
    """The bits of the plain form, which merges the same parts in order, in every batch; as exact as one rank."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": size // dealt_to}
    reference = randomize(
        llama(**sizes) if kept == "keys" else deepseek_v3(num_attention_heads=8, num_key_value_heads=8)
    )
    directory = save(reference, tmp_path)
    memory = allocate(_native.SharedRanks.num_bytes(size))

    def compute(rank: ThreadRank) -> list[torch.Tensor]:
        shared: Any = SharedRank(memory, rank)
        found = [logits_of(directory, shared, chunk, dealt_to=dealt_to, run=run) for chunk in (1, 7, 64)]
        return [*found, logits_of(directory, rank, dealt_to=dealt_to, run=run)]

    first, *others = [torch.stack(each) for each in run_ranks(size, compute)]
    assert all(torch.equal(first, other) for other in others)
    assert all(torch.equal(first[0], other) for other in first[1:])
    exact = exact_logits(SavedModel(directory, reference))
    torch.testing.assert_close(first[0].double(), exact, atol=ERROR * float(exact.abs().max()), rtol=0)
    assert torch.equal(first[0].argmax(-1), exact.argmax(-1))


@pytest.mark.parametrize("method", ["int8", "w8a8"])
def test_weights_that_each_rank_quantizes(saved_model: SavedModels, method: str) -> None:
    """A matrix that is cut along its inputs has scales of its own on each rank, so the bits are not one rank's."""
    directory = saved_model("llama").directory
    plain = logits_of(directory, SINGLE_RANK)
    largest = float(plain.abs().max())
    first, second = run_ranks(2, lambda group: logits_of(directory, group, quantization=method))
    assert torch.equal(first, second)
    for found in (first, logits_of(directory, SINGLE_RANK, quantization=method)):
        assert 0 < float((found - plain).abs().max()) < 0.1 * largest


def test_a_token_id_outside_the_shared_vocabulary_is_refused(saved_model: SavedModels) -> None:
    directory = saved_model("llama").directory

    def compute(group: ProcessGroup) -> None:
        for token_id in (97, -1):
            with pytest.raises(ValueError, match="a token id lies outside the embedding"):
                chunked_logits(runner(directory, group), [[1, token_id]], 9)

    run_ranks(2, compute)


def test_a_vocabulary_with_fewer_rows_than_the_ranks_need(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 9}
    directory = save(randomize(llama(**sizes)), tmp_path)
    with pytest.raises(ConfigError, match="the last rank would hold none of 9 rows"):
        run_ranks(8, lambda group: runner(directory, group))


def test_the_ranks_of_a_gguf_file(tmp_path: Path) -> None:
    """Matrices are cut at the borders of their blocks: the numbers are one rank's, and the sums are cut."""
    path = to_gguf(randomize(qwen3(**WIDE)), "qwen3", MIXED)[0].write(tmp_path / "model.gguf")
    whole = logits_of(path, SINGLE_RANK)
    first, second = run_ranks(2, lambda group: logits_of(path, group))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, atol=1e-4 * float(whole.abs().max()), rtol=0)
