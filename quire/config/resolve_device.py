"""Resolution and checks of device options."""

from __future__ import annotations

from dataclasses import replace

from quire import envs
from quire.config.checks import choice
from quire.config.cuda import LEAST_CAPABILITY, CudaFacts, find_cuda, has_triton
from quire.config.device import CUDA_GRAPHS, default_ladder
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.scheduler import SchedulerConfig
from quire.config.toolchain import FENCED_TRITON, triton_version
from quire.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "native", "torch", "triton")
CPU_BACKENDS = ("native", "torch")
UNFENCED_CAPABILITY = (10, 0)
"""Lowest compute capability whose products need a fence behind asynchronous copies."""
FLOAT8_CAPABILITY = (8, 9)
"""Lowest compute capability whose tensor cores multiply 8-bit floats."""
DEVICE_RANK_LIMIT = 512
DEVICE_HEAD_LIMIT = 256
"""Largest head that the Triton kernels hold in registers."""


def choose_device(options: EngineOptions) -> tuple[str, bool]:
    """(device, True if the Triton back end computes): always on "cuda", on "cpu" only in Triton's interpreter, for
    tests. Raises ConfigError for a device that is missing or unusable, and for a back end of another device."""
    asked = choice("device", options.device, DEVICES)
    backend = choice("attention_backend", options.attention_backend, BACKENDS)
    if asked == "cuda" or (asked == "auto" and backend not in CPU_BACKENDS and not envs.triton_interpret()):
        facts = find_cuda()
        if asked == "cuda" or facts.is_present:
            _check_cuda(facts, backend)
            return "cuda", True
    if backend != "triton":
        return "cpu", False
    if not envs.triton_interpret():
        raise ConfigError(
            "attention_backend='triton' needs device='cuda' (on a CPU its kernels only run in Triton's "
            "interpreter, for tests: TRITON_INTERPRET=1)",
            param="attention_backend",
        )
    _require_triton("attention_backend")
    return "cpu", True


def triton_model(options: EngineOptions, model: ModelConfig) -> ModelConfig:
    """Model for the Triton back end, where "auto" keeps keys and values in the weights' dtype. Raises ConfigError
    for features that this back end lacks."""
    if options.kv_cache_dtype == "int8":
        raise ConfigError(
            "kv_cache_dtype='int8' is not available on this device yet: choose fp8, or device='cpu'",
            param="kv_cache_dtype",
        )
    attention = model.shape.attention
    if attention.kind == "latent" and attention.latent_rank > DEVICE_RANK_LIMIT:
        raise ConfigError(
            f"attention_backend='triton' is not possible: latents of {attention.latent_rank} elements are larger than "
            f"its kernels hold ({DEVICE_RANK_LIMIT})",
            param="attention_backend",
        )
    if model.head_dim > DEVICE_HEAD_LIMIT:
        raise ConfigError(
            f"attention_backend='triton' is not possible: heads of {model.head_dim} are larger than its kernels hold "
            f"({DEVICE_HEAD_LIMIT})",
            param="attention_backend",
        )
    return replace(model, kv_cache_dtype=model.dtype) if options.kv_cache_dtype == "auto" else model


def device_precision(asked: str, model: ModelConfig, device: str) -> str:
    """Resolved `matmul_precision`. Raises ConfigError for a precision that the Triton back end lacks."""
    has_float8 = model.quantization is not None and model.quantization.method == "fp8"
    capability = find_cuda().devices[0].capability if device == "cuda" else FLOAT8_CAPABILITY
    if asked == "fp8":
        if not has_float8:
            raise ConfigError(
                "matmul_precision='fp8' would change nothing: the weights are not FP8 (quantization='fp8')",
                param="matmul_precision",
            )
        if capability < FLOAT8_CAPABILITY:
            raise ConfigError(
                f"matmul_precision='fp8' is not possible: tensor cores multiply 8-bit floats from compute capability "
                f"{_dotted(FLOAT8_CAPABILITY)} on, and this device has {_dotted(capability)}",
                param="matmul_precision",
            )
        return "fp8"
    if asked not in ("auto", model.dtype):
        raise ConfigError(
            f"matmul_precision={asked!r} is not possible: triton multiplies in the dtype of the weights, {model.dtype}",
            param="matmul_precision",
        )
    if asked == "auto" and has_float8 and capability >= FLOAT8_CAPABILITY and model.dtype != "float32":
        return "fp8"
    return model.dtype


def graph_options(
    options: EngineOptions, scheduler: SchedulerConfig, device: str, model: ModelConfig
) -> tuple[str, tuple[int, ...]]:
    """Values of `cuda_graphs` and `cuda_graph_sizes` in DeviceConfig. Raises ConfigError for contradictions, and for
    graphs on a CPU or of layers that cannot be captured."""
    asked = choice("cuda_graphs", options.cuda_graphs, ("auto", *CUDA_GRAPHS))
    if options.enforce_eager and asked not in ("auto", "none"):
        raise ConfigError(f"enforce_eager and cuda_graphs={asked!r} contradict each other", param="enforce_eager")
    kind, why_not = asked, _why_no_graphs(model)
    if options.enforce_eager:
        kind = "none"
    elif asked == "auto":
        kind = "full_and_piecewise" if device == "cuda" and why_not is None else "none"
    if kind != "none" and device != "cuda":
        raise ConfigError(f"cuda_graphs={asked!r} needs device='cuda'", param="cuda_graphs")
    if kind != "none" and why_not is not None:
        raise ConfigError(f"{model.architecture} {why_not}: leave cuda_graphs out", param="cuda_graphs")
    sizes = options.cuda_graph_sizes
    if kind == "none":
        if sizes is not None:
            raise ConfigError("cuda_graph_sizes is given, and there are no CUDA graphs", param="cuda_graph_sizes")
        return kind, ()
    if sizes is None:
        return kind, default_ladder(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    return kind, checked_sizes(sizes, scheduler.max_num_batched_tokens)


def _why_no_graphs(model: ModelConfig) -> str | None:
    if model.impl != "quire":
        return "runs through Transformers, whose code cannot be captured"
    if model.is_encoder:
        return "computes whole texts and no single tokens"
    return None


def check_batch_invariant(options: EngineOptions, device: str) -> bool:
    """Value of `DeviceConfig.batch_invariant` on an accelerator. Raises ConfigError where the installed Triton compiles
    kernels whose bits vary."""
    version = triton_version()
    if not options.batch_invariant or device != "cuda" or version is None or version >= FENCED_TRITON:
        return options.batch_invariant
    found = find_cuda().devices[0]
    if found.capability >= UNFENCED_CAPABILITY:
        raise ConfigError(
            f"batch_invariant is not possible on {found.name} (compute capability {_dotted(found.capability)}) with "
            f"Triton {'.'.join(map(str, version))}: before {'.'.join(map(str, FENCED_TRITON))} it puts no proxy fence "
            "between asynchronous copies and matrix products, and there bits were seen to change from run to run",
            param="batch_invariant",
        )
    return True


def checked_sizes(sizes: list[int], max_num_batched_tokens: int) -> tuple[int, ...]:
    """Graph sizes in tokens, sorted and distinct. Raises ConfigError for a size that no step can have."""
    if not sizes or min(sizes) < 1 or max(sizes) > max_num_batched_tokens:
        raise ConfigError(
            f"cuda_graph_sizes must be numbers from 1 to max_num_batched_tokens ({max_num_batched_tokens}), not "
            f"{sizes}",
            param="cuda_graph_sizes",
        )
    return tuple(sorted(set(sizes)))


def _check_cuda(facts: CudaFacts, backend: str) -> None:
    if not facts.is_present:
        raise ConfigError(f"device='cuda' is not possible: {facts.trouble}", param="device")
    if backend in CPU_BACKENDS:
        raise ConfigError(
            f"attention_backend={backend!r} is for device='cpu'; on device='cuda' choose auto or triton",
            param="attention_backend",
        )
    device = facts.devices[0]
    if device.capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"{device.name} has compute capability {_dotted(device.capability)}, and {_dotted(LEAST_CAPABILITY)} is "
            "needed: choose device='cpu'",
            param="device",
        )
    if envs.triton_interpret():
        raise ConfigError(
            "device='cuda' is not possible while TRITON_INTERPRET=1 is set: kernels would run on the host, "
            "thousands of times slower",
            param="device",
        )
    _require_triton("device")


def _require_triton(param: str) -> None:
    if not has_triton():
        raise ConfigError(
            "Triton is not installed, which the kernels for devices are written in: `pip install triton`, or choose "
            "device='cpu'",
            param=param,
        )


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
