"""A step column that only a test knows: the worker is handed its table, and a model adds it to what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import pytest
import torch

from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.executors.local import LocalExecutor
from quire.kernels.rotation import RotationTable
from quire.kernels.value import ReadRows, Value
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.embedding import Embedding
from quire.models.interface import CausalLM
from quire.models.native import NativeModel
from quire.step import TokenValues
from quire.worker.columns import STEP_COLUMNS, Column, Rule
from quire.worker.platform.cpu import CpuPlatform
from tests.executors.test_states import DEVICE, device_context, native_context, request
from tests.fakes.graph_worker import SIZES, GraphPlatform
from tests.layers.helpers import torch_context
from tests.long import all_but_long
from tests.models.families import llama
from tests.models.harness import random_prompts, save
from tests.models.toy import SIZE, AttentionLayer, ToyModel

LONGEST = 64
TABLE = (*STEP_COLUMNS, Column("tone", Rule.SHIFTED))
NUM_TOKENS = 4
FIRST, *OTHERS = random_prompts([9, 13, 4], 97, seed=3)
PROMPTS = (FIRST, FIRST, *OTHERS)
VALUES: tuple[dict[str, int], ...] = ({"tone": 3}, {"tone": 21, "rotary_positions": 2}, {"tone": 7}, {})
LISTS: tuple[dict[str, TokenValues], ...] = (
    {"tone": TokenValues(2, [8, 1, 60])},
    {},
    {"rotary_positions": TokenValues(0, [3, *[5] * 10])},
    {},
)
"""They begin and end in the middle of a chunk and of a block."""


class ToneLayer:
    """x plus a vector for the token's tone, in front of another layer."""

    def __init__(self, layer: AttentionLayer, context: LayerContext) -> None:
        self._layer = layer
        self._tones = Embedding(LONGEST + 32, SIZE, context.positions, context)

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        return self._layer(self._tones(batch.columns["tone"], onto=x), rotation, batch, rows)

    def slots(self) -> WeightSlots:
        return {**self._layer.slots(), **prefixed("tones", self._tones.slots())}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class ToneModel(ToyModel):
    """Rotations by a column of their own, and a tone that differs at each position of each request."""

    columns = ("tone", "rotary_positions")

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context, "full window")
        self._layers[0] = ToneLayer(self.full, context)  # type: ignore[index]
        self.slots |= prefixed("layers.0", self._layers[0].slots())

    def cache_specs(self) -> list[Any]:
        return super().cache_specs()[:2]


def filled(model_class: type[ToneModel], context: LayerContext) -> ToneModel:
    model = model_class(context)
    model.fill()
    return model


class ToneOnCpu(CpuPlatform):
    def load_model(self, progress: object) -> CausalLM:
        if self._runtime is None:
            return filled(ToneModel, torch_context())
        return NativeModel(filled(ToneModel, native_context()), self._runtime)


class ToneOnDevice(GraphPlatform):
    def load_model(self, progress: object) -> CausalLM:
        return filled(ToneModel, device_context())


class FixedTone(ToneModel):
    """The same without columns: each request needs a model of its own."""

    columns = ()
    values: ClassVar[dict[str, int]] = {}
    lists: ClassVar[dict[str, TokenValues]] = {}

    def forward(self, batch: ForwardBatch) -> ForwardResult[Value]:
        return super().forward(batch._replace(columns={name: self.column(name, batch) for name in ToneModel.columns}))

    def column(self, name: str, batch: ForwardBatch) -> torch.Tensor:
        assert isinstance(batch.slot_positions, torch.Tensor)
        own, shift = self.lists.get(name, TokenValues(0, [])), self.values.get(name, 0)
        values = [at + shift * (at >= own.end) for at in batch.slot_positions.tolist()]
        for index, at in enumerate(batch.slot_positions.tolist()):
            if own.start <= at < own.end:
                values[index] = own.values[at - own.start]
        return torch.tensor(values)


class FixedOnCpu(CpuPlatform):
    values: ClassVar[dict[str, int]] = {}
    lists: ClassVar[dict[str, TokenValues]] = {}

    def load_model(self, progress: object) -> CausalLM:
        model = filled(FixedTone, torch_context())
        model.values, model.lists = self.values, self.lists  # type: ignore[misc]
        return cast("CausalLM", model)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with the toy's numbers of heads and tokens; its weights are not read."""
    model = llama(num_attention_heads=4, head_dim=16, max_position_embeddings=LONGEST)
    return save(model, tmp_path_factory.mktemp("tone"))


@pytest.fixture(scope="module", autouse=True)
def plain_torch(fixed_order_of_module: None, no_overflow_checks: None) -> None:
    """Tokens are compared, and steps interpreted."""


def engine(
    model_path: Path,
    make: Callable[[EngineConfig], Any],
    table: Sequence[Column] = TABLE,
    graphs: str = "none",
    **options: Any,
) -> EngineCore:
    settings = {"max_num_seqs": 8, "num_blocks_override": 40, "block_size": 4, **options, "max_model_len": LONGEST}
    config = resolve(EngineOptions(model=str(model_path), **settings))
    if graphs != "none":
        config = replace(config, device=replace(config.device, cuda_graphs=graphs, cuda_graph_sizes=SIZES))
    return EngineCore(config, LocalExecutor(config, make(config), table), SystemClock())


def run(core: EngineCore, requests: Sequence[AddRequest]) -> dict[tuple[str, int], list[int]]:
    """The tokens of each sequence."""
    for message in requests:
        core.handle(message)
    found: dict[tuple[str, int], list[int]] = {}
    while core.has_work:
        for update in core.step().updates:
            found.setdefault((update.request_id, update.index), []).extend(update.new_token_ids)
    core.scheduler.kv.check()
    return found


def requests() -> list[AddRequest]:
    """Of two that differ in their columns alone, one with siblings, which fork; and one without values."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0}, {"temperature": 1.0, "n": 2}, {}]
    added = [request(number, PROMPTS[number], NUM_TOKENS, **kinds[number]) for number in range(4)]
    return [with_values(*each) for each in zip(added, VALUES, LISTS, strict=True)]


def with_values(message: AddRequest, values: dict[str, int], lists: dict[str, TokenValues]) -> AddRequest:
    return AddRequest(msgspec.structs.replace(message.request, columns=values, token_columns=lists))


CPU = {"attention_backend": "torch", "num_threads": 1}


@pytest.fixture(scope="module")
def expected(model_path: Path) -> dict[tuple[str, int], list[int]]:
    """Each request alone, its prompt at once, by a model that knows its values."""
    found: dict[tuple[str, int], list[int]] = {}
    for message, values, lists in zip(requests(), VALUES, LISTS, strict=True):
        make = type("Fixed", (FixedOnCpu,), {"values": values, "lists": lists})
        found |= run(engine(model_path, make, STEP_COLUMNS, **CPU), [with_values(message, {}, {})])
        if lists:
            without = type("Fixed", (FixedOnCpu,), {"values": values})
            other = run(engine(model_path, without, STEP_COLUMNS, **CPU), [with_values(message, {}, {})])
            assert any(found[key] != tokens for key, tokens in other.items()), "the lists matter"
    assert found["0", 0] != found["1", 0], "the values matter"
    return found


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_column_on_a_cpu(
    model_path: Path, expected: dict[tuple[str, int], list[int]], backend: str, queue_depth: int
) -> None:
    """Prompts in chunks, beside decodes; again with everything in the prefix cache."""
    options = {**CPU, "attention_backend": backend, "queue_depth": queue_depth}
    core = engine(model_path, ToneOnCpu, max_num_batched_tokens=8, **options)
    assert run(core, requests()) == expected
    hits = core.stats().prefix_cache_hits_total
    assert run(core, requests()) == expected
    assert core.stats().prefix_cache_hits_total > hits, "of equal tokens and values"


@pytest.mark.parametrize("graphs", all_but_long(["none", "full", "piecewise"], ["full"]))
def test_a_column_on_a_device(model_path: Path, expected: dict[tuple[str, int], list[int]], graphs: str) -> None:
    core = engine(model_path, ToneOnDevice, graphs=graphs, max_num_batched_tokens=8, **DEVICE)
    while core.idle():
        pass
    assert run(core, requests()) == expected
    captures = core._executor._live_worker().platform.captures  # type: ignore[attr-defined]
    assert (graphs != "none") == any(graph.num_replays for capture in captures for graph in capture.graphs)
