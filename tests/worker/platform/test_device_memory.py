"""The profiling pass on a device, and errors that say the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.attention.states import StateBackend
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import InsufficientMemoryError
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import layer_specs
from quire.sampling.parameters import NUM_WORDS
from quire.worker.cuda_graphs import DeviceBackends
from quire.worker.graph_dispatch import ExecutionSettings
from quire.worker.memory_profile import measure_memory
from quire.worker.platform.device_memory import HostMemory, allocate_device_pages, arithmetic, make_memory
from quire.worker.platform.device_meter import (
    COLUMNS_PER_SEQUENCE,
    CONTEXT_BYTES,
    GRAPH_BYTES_PER_LAYER,
    DeviceMeter,
    graph_bytes,
    table_bytes,
    upload_bytes,
)
from quire.worker.platform.interface import StepLimits
from quire.worker.platform.streams import HostStreams
from quire.worker.platform.upload import FIRST_CAPACITY, RowWrites, Upload
from quire.worker.preemption_costs import time_prompt
from tests.fakes.device_attention import TwinBackend
from tests.worker.platform.passes import BLOCK_SIZE, LONGEST, SETTINGS, Passes, tiny_config

CPU = torch.device("cpu")
LIMITS = StepLimits(BLOCK_SIZE, max_num_tokens=60, max_num_seqs=8, longest=LONGEST)
GIB = 2**30


@pytest.fixture
def config(bundled_model_path: Path) -> ModelConfig:
    return tiny_config(bundled_model_path)


class Card(HostMemory):
    """A device of 80 GiB with `in_use` of them taken, which measures: each pass a GiB more than the one before."""

    is_measured = True

    def __init__(self, in_use: int = 0, fails: bool = False) -> None:
        self.in_use = in_use
        self.fails = fails
        self.num_measured = 0

    def total(self) -> int:
        return 80 * GIB

    def free(self) -> int:
        return 80 * GIB - self.in_use

    def measure_peak(self, work: Callable[[], object]) -> int:
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        work()
        self.num_measured += 1
        return self.num_measured * GIB


def backend_factory(config: ModelConfig, made: list[TwinBackend]) -> Callable[..., DeviceBackends]:
    def make(layout: KVCacheLayout, pages: Sequence[torch.Tensor]) -> DeviceBackends:
        made.append(TwinBackend(config.num_layers, layout.num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim))
        return DeviceBackends(made[-1], StateBackend(layout, {}))

    return make


def test_the_largest_steps_are_run_and_everything_is_counted(config: ModelConfig) -> None:
    made: list[TwinBackend] = []
    passes, memory = Passes(config, SETTINGS["eager"]), Card(in_use=20 * GIB)
    with torch.inference_mode():
        meter = DeviceMeter(backend_factory(config, made), config, SETTINGS["both"], memory, 75 * GIB, CPU)
        profile = measure_memory(passes.model, config, LIMITS, meter)
    prompt, decode = made[0].planned[0], made[1].planned[0]
    assert (prompt.num_tokens, prompt.num_seqs, prompt.max_query_len) == (60, 3, LONGEST)
    assert prompt.query_start.tolist() == [0, LONGEST, 2 * LONGEST, 60]
    assert (decode.num_tokens, decode.num_seqs, decode.max_query_len, decode.max_seq_len) == (8, 8, 1, LONGEST)
    for batch in (prompt, decode):
        assert all(slots.eq(-1).all() for slots in batch.slot_mapping)
    assert profile.activations == 2 * GIB, "the larger of the two"
    assert profile.available == 60 * GIB
    assert profile.weights == passes.model.weight_bytes()
    assert profile.device is not None
    assert (profile.device.total, profile.device.used) == (80 * GIB, 15 * GIB + CONTEXT_BYTES)
    assert profile.device.graphs == graph_bytes(config, SETTINGS["both"], profile.activations, 60)
    assert profile.device.tables == table_bytes(LIMITS, 1)


def test_the_context_counts_as_this_engines(config: ModelConfig) -> None:
    """What was in use when the engine began to measure, up to what a context takes; more of it is others'."""
    passes = Passes(config, SETTINGS["eager"])

    def used(free_at_start: int) -> int:
        factory = backend_factory(config, [])
        with torch.inference_mode():
            meter = DeviceMeter(factory, config, SETTINGS["eager"], Card(20 * GIB), free_at_start, CPU)
            profile = measure_memory(passes.model, config, LIMITS, meter)
        assert profile.device is not None
        return profile.device.used

    assert used(80 * GIB) == 20 * GIB
    assert used(80 * GIB - 5 * 2**20) == 20 * GIB
    assert used(75 * GIB) == 15 * GIB + CONTEXT_BYTES


def test_a_step_that_does_not_fit_says_which(config: ModelConfig) -> None:
    passes = Passes(config, SETTINGS["eager"])
    meter = DeviceMeter(backend_factory(config, []), config, SETTINGS["both"], Card(fails=True), 0, CPU)
    with (
        torch.inference_mode(),
        pytest.raises(InsufficientMemoryError, match=r"a step of 60 tokens .* of its 80.0 GiB"),
    ):
        measure_memory(passes.model, config, LIMITS, meter)


def test_in_the_interpreter_nothing_is_run(config: ModelConfig) -> None:
    made: list[TwinBackend] = []
    passes = Passes(config, SETTINGS["eager"])
    meter = DeviceMeter(backend_factory(config, made), config, ExecutionSettings(), make_memory(CPU), 0, CPU)
    profile = measure_memory(passes.model, config, LIMITS, meter)
    assert made == []
    assert profile.activations > 0
    assert profile.device is not None
    assert profile.device.graphs == 0


def test_what_graphs_and_tables_take(config: ModelConfig) -> None:
    """Arithmetic by hand: 4 full and 3 piecewise graphs of 2 layers, results for 32 tokens of 32 + 32 float32."""
    driver, shared, results = 7 * 2 * GRAPH_BYTES_PER_LAYER, 100 * 32 // 60, 32 * (32 + 32) * 4
    assert graph_bytes(config, SETTINGS["both"], 100, 60) == driver + shared + results
    assert graph_bytes(config, ExecutionSettings(), 100, 60) == 0
    assert table_bytes(LIMITS, 2) == 4 * 8 * (25 + 2 * 7) + 8 * 60 * 5 + upload_bytes(LIMITS, 2)


def test_what_drafts_take(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of logits, as many as a sequence has and no more than a step's tokens, and graphs of their own."""
    assert replace(LIMITS, max_drafts=9).max_num_rows == 60
    passes, num_rows = Passes(config, SETTINGS["eager"]), []
    compute = passes.model.compute_logits

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(passes.model, "compute_logits", noted)
    factory = backend_factory(config, [])
    with torch.inference_mode():
        for num_drafts in (0, 2):
            meter = DeviceMeter(factory, config, SETTINGS["eager"], Card(), 0, CPU)
            measure_memory(passes.model, config, replace(LIMITS, max_drafts=num_drafts), meter)
    assert num_rows == [8, 24]
    driver, shared, results = 8 * 2 * GRAPH_BYTES_PER_LAYER, 100 * 24 // 60, 24 * (32 + 32) * 4
    assert graph_bytes(config, SETTINGS["drafts"], 100, 60) == driver + shared + results


def test_uploads_are_counted_twice_for_they_have_two_buffers_on_the_device() -> None:
    assert upload_bytes(LIMITS, 2) == 2 * 4 * FIRST_CAPACITY
    large = StepLimits(16, max_num_tokens=8192, max_num_seqs=256, longest=40960)
    # Tokens, block numbers and parameters as pairs, then columns: 2 x (49,152 + 3,328 + 4,096) + 1,792 < 2**17 words.
    assert upload_bytes(large, 1) == 2 * 4 * 2**17


def test_an_upload_of_the_largest_counted_step_has_the_counted_size() -> None:
    """The buffers that were counted are those that a step of new prompts takes."""
    upload, limits = Upload(HostStreams(), 2), StepLimits(16, max_num_tokens=8192, max_num_seqs=256, longest=131072)
    writes, arena_width = RowWrites(), NUM_WORDS
    for row in range(256):
        length = 131072 if row == 0 else 32
        for values in (np.zeros(length, np.int32), np.zeros(length // 16, np.int32), np.zeros(arena_width, np.int32)):
            writes.write(row, values)
    for _ in range(2):
        upload.begin()
        writes.add_to(upload)
        for _ in range(COLUMNS_PER_SEQUENCE):
            upload.add(np.zeros(256))
        upload.send()
    assert sum(buffer.nbytes for buffer in upload._devices) == upload_bytes(limits, 1)


def test_a_prompt_is_timed_to_its_end(config: ModelConfig) -> None:
    passes, waits = Passes(config, SETTINGS["eager"]), []
    with torch.inference_mode():
        meter = DeviceMeter(backend_factory(config, []), config, SETTINGS["eager"], make_memory(CPU), 0, CPU)
        seconds = time_prompt(passes.model, LIMITS, meter, lambda: waits.append(None))
    assert seconds > 0
    assert len(waits) == 3


def test_pools_that_do_not_fit_say_the_arithmetic() -> None:
    def fail() -> None:
        with arithmetic(Card(in_use=70 * GIB), "the KV cache of 9 blocks", 12 * GIB):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    with pytest.raises(InsufficientMemoryError) as caught:
        fail()
    assert str(caught.value) == (
        "no memory on the device for the KV cache of 9 blocks: 12.0 GiB are needed, "
        "and of its 80.0 GiB 10.0 GiB were free"
    )


def test_pages_of_a_host_are_only_reserved(bundled_model_path: Path) -> None:
    model = resolve(EngineOptions(model=str(bundled_model_path), device="cpu")).model
    groups, layers_per_group = group_layers(layer_specs(model), 16)
    layout = KVCacheLayout(16, 100_000, groups, layers_per_group)
    pages = allocate_device_pages(layout, make_memory(CPU), CPU)
    assert len(pages) == layers_per_group
    assert pages[0].shape == (100_000, layout.block_bytes // layers_per_group)
