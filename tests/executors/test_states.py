"""A model with full attention, a window and a state, through the whole engine below the text: what comes out does not
depend on how steps, blocks and memory are shared out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.executors.local import LocalExecutor
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.context import LayerContext
from quire.layers.device import DeviceOperations
from quire.layers.native import NativeOperations
from quire.models.interface import CausalLM
from quire.models.native import NativeModel
from quire.parallel.single import SINGLE_RANK
from quire.quantization.device import DeviceLinear
from quire.quantization.packed import PackedLinear
from quire.quantization.weight_format import WeightFormat
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.worker.platform.cpu import CpuPlatform
from quire.worker.platform.cuda import CudaPlatform
from tests.fakes.host_math import HostMathPlatform
from tests.layers.helpers import torch_context
from tests.long import all_but_long
from tests.models.families import llama
from tests.models.harness import random_prompts, save
from tests.models.toy import ToyModel

INTERVAL = 128
"""Tokens of a block, in each group."""
PREFIX = random_prompts([2 * INTERVAL + 5], 97, seed=1)[0]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "n": 2},
    {"use_beam_search": True, "n": 2, "best_of": 3},
]
NUM_BLOCKS = 60


def device_context() -> LayerContext:
    linear = DeviceLinear(torch.float32, batch_invariant=True)
    return LayerContext(
        torch.float32, torch.device("cpu"), "float32", SINGLE_RANK, DeviceOperations(), linear, linear, linear
    )


def native_context() -> LayerContext:
    linear = PackedLinear(WeightFormat("float32"))
    return LayerContext(
        torch.float32, torch.device("cpu"), "float32", SINGLE_RANK, NativeOperations(), linear, linear, linear
    )


def filled(context: LayerContext) -> ToyModel:
    model = ToyModel(context)
    model.fill()
    return model


class ToyOnCpu(CpuPlatform):
    def load_model(self, progress: object) -> CausalLM:
        if self._runtime is None:
            return filled(torch_context())
        return NativeModel(filled(native_context()), NativeRuntime("auto", 1))


class ToyOnDevice(CudaPlatform):
    def load_model(self, progress: object) -> CausalLM:
        return filled(device_context())


class PlainMathOnDevice(HostMathPlatform):
    def load_model(self, progress: object) -> CausalLM:
        return filled(torch_context())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with the toy's numbers of heads and tokens; its weights are not read."""
    model = llama(num_attention_heads=4, head_dim=16, max_position_embeddings=1024)
    return save(model, tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module", autouse=True)
def plain_torch(fixed_order_of_module: None, no_overflow_checks: None) -> None:
    """Bits are compared, and some steps interpreted."""


def request(number: int, prompt: list[int], max_tokens: int, **options: Any) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, **options)
    return AddRequest(
        EngineRequest(
            request_id=str(number), prompt_token_ids=prompt, params=params, max_tokens=max_tokens, seed=number
        )
    )


def requests() -> list[AddRequest]:
    """Prompts of which some begin alike, for more than two blocks, and some are short."""
    prompts = [PREFIX + own for own in random_prompts([3, 40, 9], 97)] + random_prompts([5, INTERVAL, 200], 97, seed=2)
    return [request(number, prompt, 8, **KINDS[number % 3]) for number, prompt in enumerate(prompts)]


class Engine:
    def __init__(self, make: Callable[[EngineConfig], Any], model_path: Path, **options: Any) -> None:
        settings = {"max_num_seqs": 16, "max_num_batched_tokens": 400, "num_blocks_override": NUM_BLOCKS}
        config = resolve(EngineOptions(model=str(model_path), state_snapshot_interval=1, **{**settings, **options}))
        self.core = EngineCore(config, LocalExecutor(config, make(config)), SystemClock())

    def run(self, added: list[AddRequest]) -> dict[Any, Any]:
        """Everything that comes out, by request and sequence."""
        for message in added:
            self.core.handle(message)
        found: dict[Any, Any] = {}
        while self.core.has_work:
            for update in self.core.step().updates:
                key = update.request_id, update.index
                found.setdefault(key, []).append((update.new_token_ids, update.logprobs, update.finish_reason))
        found = {key: regrouped(updates) for key, updates in found.items()}
        self.core.scheduler.kv.check()
        return found


def regrouped(updates: list[Any]) -> tuple[Any, ...]:
    tokens = [token for new, _, _ in updates for token in new]
    return tokens, [entry for _, logprobs, _ in updates for entry in logprobs or []], updates[-1][2]


CPU: dict[str, dict[str, Any]] = {
    "native": {"attention_backend": "native", "num_threads": 1},
    "torch": {"attention_backend": "torch", "num_threads": 1},
}
DEVICE = {"device": "cpu", "attention_backend": "triton", "dtype": "float32", "max_model_len": 400}


@pytest.fixture(scope="module")
def steady(model_path: Path) -> dict[str, dict[Any, Any]]:
    """Whole prompts, one request after the other, no prefix cache."""
    found = {}
    for name, options in CPU.items():
        engine = Engine(ToyOnCpu, model_path, **options, max_num_batched_tokens=512, enable_prefix_caching=False)
        found[name] = {}
        for message in requests():
            found[name] |= engine.run([message])
        engine.core.shutdown()
    return found


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_prefill_chunk": 7, "max_num_batched_tokens": 60},
    "queued": {"queue_depth": 2, "max_num_batched_tokens": 300},
    "recomputed": {"num_blocks_override": 26, "queue_depth": 2},
    "swapped": {"num_blocks_override": 26, "preemption_mode": "swap", "swap_space": "16MiB"},
}


@pytest.mark.parametrize(
    ("backend", "way"),
    all_but_long(
        [*(("native", way) for way in WAYS), ("torch", "chunks"), ("torch", "recomputed")],
        [("native", "queued"), ("native", "swapped"), ("torch", "recomputed")],
    ),
)
def test_the_same_bits_whatever_the_steps(
    model_path: Path, steady: dict[str, dict[Any, Any]], backend: str, way: str
) -> None:
    engine = Engine(ToyOnCpu, model_path, **CPU[backend], **WAYS[way])
    assert {group.block_size for group in engine.core._executor._worker._layout.groups} == {INTERVAL}
    assert engine.run(requests()) == steady[backend]
    stats = engine.core.stats()
    assert (stats.preemptions_total > 0) == ("num_blocks_override" in WAYS[way])
    assert (stats.swapped_in_blocks_total > 0) == (way == "swapped")
    engine.core.shutdown()


def of(steady: dict[str, dict[Any, Any]], *numbers: int) -> dict[Any, Any]:
    """What some requests give."""
    return {key: value for key, value in steady["native"].items() if int(key[0]) in numbers}


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_hit_ends_at_the_last_snapshot_that_a_step_crossed(
    model_path: Path, steady: dict[str, dict[Any, Any]], queue_depth: int
) -> None:
    """Also at one that no sequence needed any more when the step that crossed it had its result."""
    engine = Engine(ToyOnCpu, model_path, **CPU["native"], queue_depth=queue_depth, max_num_batched_tokens=150)
    core, (first, second, third, *_) = engine.core, requests()
    assert engine.run([first]) == of(steady, 0)
    assert core.stats().prefix_cache_hits_total == 0
    engine.run([request(7, PREFIX[: INTERVAL + 9], 2)])
    assert core.stats().prefix_cache_hits_total == INTERVAL
    assert engine.run([second, third]) == of(steady, 1, 2)
    assert core.stats().prefix_cache_hits_total == 5 * INTERVAL
    core.shutdown()


def test_a_registered_prefix_with_tokens_behind_its_last_snapshot(
    model_path: Path, steady: dict[str, dict[Any, Any]]
) -> None:
    """Sequences go on behind it with a copy of its last state each."""
    engine = Engine(ToyOnCpu, model_path, **CPU["native"])
    core, (first, second, third, *_) = engine.core, requests()
    prefix = EngineRequest(
        request_id="prefix", prompt_token_ids=PREFIX, params=SamplingParams(max_tokens=1), max_tokens=1, seed=0,
        register_prefix=True,
    )  # fmt: skip
    engine.run([AddRequest(prefix)])
    assert engine.run([first, second, third]) == of(steady, 0, 1, 2)
    assert core.stats().prefix_cache_hits_total == 3 * len(PREFIX)
    core.shutdown()


def test_states_lie_on_disk_like_all_that_is_cached(
    model_path: Path, steady: dict[str, dict[Any, Any]], tmp_path: Path
) -> None:
    options = {**CPU["native"], "kv_offload_dir": str(tmp_path), "swap_space": "16MiB"}
    for added, expected in ((0, of(steady, 0)), (1, of(steady, 1))):
        engine = Engine(ToyOnCpu, model_path, **options)
        assert engine.run([requests()[added]]) == expected
        assert (engine.core.stats().offload_loaded_blocks_total > 0) == (added == 1)
        assert engine.core.stats().prefix_cache_hits_total == added * 2 * INTERVAL
        engine.core.shutdown()


@pytest.mark.long
def test_the_request_state_of_a_device_brings_the_same_states(model_path: Path) -> None:
    """Sequences that reach a snapshot while they generate, of which one forks and some are swapped, computed by torch
    from what lies "on the device"."""
    prompts = random_prompts([INTERVAL - 3] * 4, 97, seed=3)
    added = [request(number, prompt, 6, temperature=0, n=1 + number % 2) for number, prompt in enumerate(prompts)]
    host = Engine(ToyOnCpu, model_path, **CPU["torch"])
    options = {"num_blocks_override": 16, "preemption_mode": "swap", "swap_space": "16MiB", "queue_depth": 2}
    device = Engine(PlainMathOnDevice, model_path, **DEVICE, **options)
    assert device.run(added) == host.run(added)
    assert device.core.stats().swapped_in_blocks_total > 0
    for engine in (device, host):
        engine.core.shutdown()


@pytest.mark.long
def test_the_device_computes_the_same_tokens(model_path: Path, steady: dict[str, dict[Any, Any]]) -> None:
    engine = Engine(ToyOnDevice, model_path, **DEVICE, max_num_seqs=2)
    (number,) = [number for number, each in enumerate(requests()) if len(each.request.prompt_token_ids) == 5]
    prompt = requests()[number].request.prompt_token_ids
    ((tokens, _, _),) = engine.run([request(number, prompt, 4, temperature=0)]).values()
    assert tokens == steady["torch"][str(number), 0][0][:4]
    engine.core.shutdown()
