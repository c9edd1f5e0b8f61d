"""Options of the device: which one computes, what follows from that, what it refuses; and how CUDA is found."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config import cuda
from quire.config.cuda import CudaDevice, CudaFacts, find_cuda
from quire.config.device import LARGEST_SIZE, default_ladder
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.config.resolve_device import graph_options
from quire.errors import ConfigError
from quire.simulator.shape import find_shape
from tests.config.test_resolve import GPTQ, change

H200 = CudaDevice("NVIDIA H200", 141 * 10**9, (9, 0), 132)
TURING = CudaDevice("NVIDIA T4", 16 * 10**9, (7, 5), 40)
ABSENT = CudaFacts(None, None, (), "torch 2.13.0+cpu was built without CUDA")

Machine = Callable[..., None]


def with_device(device: CudaDevice) -> CudaFacts:
    return CudaFacts("13.0", (13, 0), (device,), None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets what the machine has: by default an H200 and Triton."""

    def set_up(
        facts: CudaFacts | None = None,
        *,
        triton: bool = True,
        interpret: bool = False,
        version: tuple[int, ...] = (3, 6, 0),
    ) -> None:
        monkeypatch.setattr("quire.config.resolve_device.find_cuda", lambda: facts or with_device(H200))
        monkeypatch.setattr("quire.config.resolve_device.has_triton", lambda: triton)
        monkeypatch.setattr("quire.config.resolve_device.triton_version", lambda: version)
        monkeypatch.setenv("TRITON_INTERPRET", "1" if interpret else "0")

    return set_up


def resolved(model: str, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(model=model, load_format="dummy", **options))


def rejected(model: str, **options: Any) -> tuple[str | None, str]:
    """The option that is blamed, and the message."""
    with pytest.raises(ConfigError) as caught:
        resolved(model, **options)
    assert "\n" not in caught.value.message
    return caught.value.param, caught.value.message


def test_defaults_on_a_device(model: str, machine: Machine) -> None:
    machine()
    for device in ("auto", "cuda"):
        config = resolved(change(model, torch_dtype="bfloat16"), device=device)
        assert (config.device.device, config.device.attention_backend) == ("cuda", "triton")
        assert (config.model.dtype, config.model.kv_cache_dtype) == ("bfloat16", "bfloat16")
        assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 8192)
        assert (config.scheduler.queue_depth, config.cache.memory_utilization) == (2, 0.9)
        assert config.device.matmul_precision == "bfloat16"
        assert config.device.cuda_graphs == "full_and_piecewise"
        assert config.device.cuda_graph_sizes == default_ladder(256, 8192)
        assert not config.device.batch_invariant


def test_the_cache_is_kept_in_the_dtype_of_the_weights(model: str, machine: Machine) -> None:
    machine()
    assert resolved(model, dtype="float16").model.kv_cache_dtype == "float16"
    assert resolved(model).model.kv_cache_dtype == "float32"
    assert resolved(model, dtype="float16", kv_cache_dtype="bfloat16").model.kv_cache_dtype == "bfloat16"
    assert resolved(model, dtype="float16", kv_cache_dtype="fp8_e4m3").model.kv_cache_dtype == "fp8"


def test_options_on_a_device_are_obeyed(model: str, machine: Machine) -> None:
    machine()
    config = resolved(
        model,
        queue_depth=1,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        gpu_memory_utilization=0.5,
        batch_invariant=True,
        cuda_graphs="full",
        cuda_graph_sizes=[8, 1, 8, 64],
    )
    assert (config.scheduler.queue_depth, config.cache.memory_utilization) == (1, 0.5)
    assert config.device.batch_invariant
    assert config.device.cuda_graph_sizes == (1, 8, 64)
    assert (config.device.has_full_graphs, config.device.has_piecewise_graphs) == (True, False)


def test_without_a_device_the_cpu_computes_as_ever(model: str, machine: Machine) -> None:
    for facts in (ABSENT, CudaFacts("13.0", None, (), "there is no CUDA driver (libcuda.so.1)")):
        machine(facts)
        config = resolved(model)
        assert (config.device.device, config.scheduler.queue_depth) == ("cpu", 1)
        assert (config.device.cuda_graphs, config.device.cuda_graph_sizes) == ("none", ())
        assert config.device.batch_invariant
        assert not config.device.is_accelerated
        param, message = rejected(model, device="cuda")
        assert param == "device"
        assert str(facts.trouble) in message


def test_a_cpu_can_be_chosen_beside_a_device(model: str, machine: Machine) -> None:
    machine()
    assert resolved(model, device="cpu").device.device == "cpu"
    for backend in ("native", "torch"):
        assert resolved(model, attention_backend=backend).device.device == "cpu"
        assert rejected(model, device="cuda", attention_backend=backend)[0] == "attention_backend"


def test_the_triton_back_end_on_a_cpu_is_for_the_interpreter(model: str, machine: Machine) -> None:
    machine(ABSENT, interpret=True)
    config = resolved(model, attention_backend="triton", dtype="bfloat16")
    assert (config.device.device, config.device.attention_backend) == ("cpu", "triton")
    assert (config.scheduler.queue_depth, config.scheduler.max_num_seqs) == (2, 256)
    assert config.model.kv_cache_dtype == "bfloat16"
    assert config.device.cuda_graphs == "none"
    assert not config.device.batch_invariant
    machine(ABSENT)
    assert "TRITON_INTERPRET=1" in rejected(model, attention_backend="triton")[1]
    assert "TRITON_INTERPRET=1" in rejected(model, attention_backend="triton", device="cpu")[1]
    machine(ABSENT, triton=False, interpret=True)
    assert "Triton is not installed" in rejected(model, attention_backend="triton", device="cpu")[1]


def test_a_device_does_not_compute_in_the_interpreter(model: str, machine: Machine) -> None:
    machine(interpret=True)
    assert resolved(model).device.device == "cpu"
    param, message = rejected(model, device="cuda")
    assert (param, "TRITON_INTERPRET" in message) == ("device", True)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_device_that_cannot_be_used_is_refused_and_not_passed_over(model: str, machine: Machine, device: str) -> None:
    machine(with_device(TURING))
    assert "NVIDIA T4 has compute capability 7.5, and 8.0 is needed" in rejected(model, device=device)[1]
    machine(triton=False)
    assert "Triton is not installed" in rejected(model, device=device)[1]


BLACKWELL = CudaDevice("NVIDIA B200", 180 * 2**30, (10, 0), 148)


def test_batch_invariant_needs_fences(model: str, machine: Machine) -> None:
    """From capability 10.0 on, and only before Triton 3.7.1; other modes are not refused."""
    machine(with_device(BLACKWELL))
    param, message = rejected(model, batch_invariant=True)
    assert param == "batch_invariant"
    assert "NVIDIA B200 (compute capability 10.0) with Triton 3.6.0" in message
    assert not resolved(model).device.batch_invariant
    assert resolved(model, device="cpu", batch_invariant=True).device.batch_invariant
    machine(with_device(BLACKWELL), version=(3, 7, 1))
    assert resolved(model, batch_invariant=True).device.batch_invariant
    machine()
    assert resolved(model, batch_invariant=True).device.batch_invariant


def test_what_a_device_cannot_do_yet(model: str, machine: Machine) -> None:
    machine()
    assert rejected(model, kv_cache_dtype="int8")[0] == "kv_cache_dtype"
    assert rejected(model, matmul_precision="bfloat16")[0] == "matmul_precision"
    change(model, head_dim=320)
    assert "heads of 320" in rejected(model)[1]


AMPERE = CudaDevice("NVIDIA A100", 80 * 2**30, (8, 0), 108)


def test_quantised_weights_and_what_they_are_multiplied_in(model: str, machine: Machine) -> None:
    """Activations are rounded to FP8 by default where tensor cores multiply it, and the dtype names the other way."""
    machine()
    plain = change(model, torch_dtype="bfloat16")
    for method in ("int4", "w8a8"):
        assert resolved(plain, quantization=method).device.matmul_precision == "bfloat16"
    assert resolved(plain, quantization="fp8").device.matmul_precision == "fp8"
    assert resolved(plain, quantization="fp8", matmul_precision="bfloat16").device.matmul_precision == "bfloat16"
    assert resolved(plain, quantization="fp8", dtype="float32").device.matmul_precision == "float32"
    param, message = rejected(plain, matmul_precision="fp8")
    assert (param, "not FP8" in message) == ("matmul_precision", True)
    assert "a GPU's" in rejected(plain, matmul_precision="fp8", device="cpu")[1]
    machine(with_device(AMPERE))
    assert resolved(plain, quantization="fp8").device.matmul_precision == "bfloat16"
    assert "8.9 on, and this device has 8.0" in rejected(plain, quantization="fp8", matmul_precision="fp8")[1]
    change(model, quantization_config=GPTQ)
    for options, method in (({}, "int4"), ({"quantization": "w4a8"}, "w4a8")):
        quantization = resolved(model, **options).model.quantization
        assert quantization is not None
        assert (quantization.method, quantization.rounds_activations) == (method, bool(options))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "full_and_piecewise"),
        ({"enforce_eager": True}, "none"),
        ({"enforce_eager": True, "cuda_graphs": "none"}, "none"),
        ({"cuda_graphs": "none"}, "none"),
        ({"cuda_graphs": "full"}, "full"),
        ({"cuda_graphs": "piecewise"}, "piecewise"),
    ],
)
def test_kinds_of_graphs(model: str, machine: Machine, options: dict[str, Any], kind: str) -> None:
    machine()
    device = resolved(model, **options).device
    assert device.cuda_graphs == kind
    assert bool(device.cuda_graph_sizes) == (kind != "none")


def test_layers_with_states_have_graphs(model: str, machine: Machine) -> None:
    machine()
    config = resolved(model)
    stateful = replace(config.model, shape=find_shape("qwen3-next-80b-a3b"))
    assert graph_options(EngineOptions(), config.scheduler, "cuda", stateful)[0] == "full_and_piecewise"


def test_encoders_have_no_graphs(model: str, machine: Machine) -> None:
    machine()
    config = resolved(model)
    shape = config.model.shape
    layers = tuple(replace(layer, attention=replace(layer.attention, kind="none")) for layer in shape.layers)
    encoder = replace(config.model, shape=replace(shape, layers=layers))
    assert graph_options(EngineOptions(), config.scheduler, "cuda", encoder) == ("none", ())
    with pytest.raises(ConfigError, match="computes whole texts"):
        graph_options(EngineOptions(cuda_graphs="full"), config.scheduler, "cuda", encoder)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"enforce_eager": True, "cuda_graphs": "full"}, "enforce_eager"),
        ({"enforce_eager": True, "cuda_graph_sizes": [1]}, "cuda_graph_sizes"),
        ({"cuda_graph_sizes": []}, "cuda_graph_sizes"),
        ({"cuda_graph_sizes": [0, 1]}, "cuda_graph_sizes"),
        ({"cuda_graph_sizes": [8193]}, "cuda_graph_sizes"),
        ({"cuda_graphs": "some"}, "cuda_graphs"),
        ({"device": "cpu", "cuda_graphs": "full"}, "cuda_graphs"),
        ({"device": "cpu", "cuda_graph_sizes": [1]}, "cuda_graph_sizes"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_contradictions_are_refused(model: str, machine: Machine, options: dict[str, Any], param: str) -> None:
    machine()
    assert rejected(model, **options)[0] == param


def test_eager_is_what_a_cpu_does(model: str) -> None:
    assert resolved(model, enforce_eager=True, device="cpu").device.cuda_graphs == "none"


def test_the_ladder() -> None:
    for max_num_seqs, budget in [(256, 8192), (3, 50), (1, 1), (100, 100), (5000, 8192), (7, 2048)]:
        sizes = default_ladder(max_num_seqs, budget)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[0] == 1
        assert max_num_seqs in sizes
        assert sizes[-1] == min(budget, max(LARGEST_SIZE, max_num_seqs)) or budget - sizes[-1] < 16
        # Beyond the first rungs little is padded.
        assert all(b - a <= max(8, a / 4) for a, b in itertools.pairwise(sizes))
    assert len(default_ladder(256, 8192)) < 50


# How CUDA is found


def torch_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """A torch whose version.py is `version`; None: no torch."""

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    if version is not None:
        (tmp_path / "version.py").write_text(version)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda _: None if version is None else Spec)


VERSION_FILE = "__version__ = '2.11.0'\ndebug = False\ncuda: Optional[str] = '13.0'\ngit_version = 'x'\nhip = None\n"


class FakeDriver:
    """libcuda with one H200, or an error."""

    def __init__(self, status: int = 0, count: int = 1, version: int = 13010) -> None:
        self.status, self.count, self.version = status, count, version

    def cuInit(self, _: int) -> int:  # noqa: N802
        return self.status

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:  # noqa: N802
        handle._obj.value = 100 + index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:  # noqa: N802
        assert handle.value == 100
        name.value = H200.name.encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, _: Any) -> int:  # noqa: N802
        memory._obj.value = H200.memory
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, _: Any) -> int:  # noqa: N802
        value._obj.value = {16: 132, 75: 9, 76: 0}[number]
        return 0


def driver_is(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None) -> None:
    def load(_: str) -> FakeDriver:
        if driver is None:
            raise OSError
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_a_device_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_at(tmp_path, monkeypatch, VERSION_FILE)
    driver_is(monkeypatch, FakeDriver())
    assert find_cuda() == CudaFacts("13.0", (13, 1), (H200,), None)


@pytest.mark.parametrize(
    ("version", "driver", "trouble"),
    [
        (None, FakeDriver(), "torch is not installed"),
        (
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n",
            FakeDriver(),
            "torch 2.13.0+cpu was built without",
        ),
        (VERSION_FILE, None, "no CUDA driver"),
        (VERSION_FILE, FakeDriver(status=999), "error 999"),
        (VERSION_FILE, FakeDriver(count=0), "no device"),
        (VERSION_FILE, FakeDriver(version=12080), "torch was built for CUDA 13.0, and the driver knows CUDA 12.8 only"),
    ],
)
def test_why_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, driver: FakeDriver | None, trouble: str
) -> None:
    torch_at(tmp_path, monkeypatch, version)
    driver_is(monkeypatch, driver)
    facts = find_cuda()
    assert not facts.is_present
    assert trouble in str(facts.trouble)


@pytest.mark.long
def test_this_installation_of_torch_is_read_right_and_not_imported() -> None:
    program = (
        "import sys; from quire.config.cuda import _torch_build; found = _torch_build();"
        "assert 'torch' not in sys.modules;"
        "import torch; assert found == (str(torch.__version__), torch.version.cuda), found"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
