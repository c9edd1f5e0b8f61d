"""`quire doctor`: kernels and back ends that an engine would use here, with reasons and problems. Loads no weights and
imports no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire import envs
from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.machine import Machine, find_machine
from quire.cli.parser import Parser
from quire.config.cuda import LEAST_CAPABILITY, CudaDevice, CudaFacts, find_cuda, has_triton
from quire.config.device import has_native_kernels
from quire.config.engine import EngineConfig
from quire.config.model import CACHE_DTYPE_BYTES, DTYPE_BYTES
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.config.toolchain import Toolchain, find_toolchain
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.triton.attention_tiles import (
    DeviceLimits,
    HeadShape,
    fixed_split_plan,
    fixed_tiles,
    split_plan,
    varlen_tiles,
)
from quire.utils.sizes import format_bytes
from quire.version import __version__
from quire.worker.graph_dispatch import Execution, choose_execution, execution_settings
from quire.worker.platform.host_memory import available_memory

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "pyzmq", "fastapi", "uvicorn")
SERVER_MODULES = ("zmq", "fastapi", "uvicorn")
DEVICE_NODE = Path("/dev/nvidiactl")
"""Device file of NVIDIA's kernel driver."""


@dataclass(frozen=True)
class TypicalStep:
    """Example step for the kernels' choices: num_decodes sequences with one new token each, and prompts, given by their
    new tokens."""

    num_decodes: int
    prompts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.prompts)

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + len(self.prompts)

    @property
    def max_query_len(self) -> int:
        return max(self.prompts, default=1)

    def __str__(self) -> str:
        parts = [f"{self.num_decodes} decoding"] if self.num_decodes else []
        parts += [f"a prompt of {tokens}" for tokens in self.prompts]
        return ", ".join(parts)


@dataclass
class DoctorReport:
    """Findings. choices, attention: (step, choice). problems: faults, worst first. can_start: an engine with these
    options would start, as far as known without loading."""

    versions: dict[str, str | None]
    cuda: CudaFacts
    native: str | None
    memory: int
    machine: Machine
    toolchain: Toolchain | None = None
    computes: dict[str, str] = field(default_factory=dict)
    ladder: tuple[int, ...] = ()
    choices: list[tuple[str, str]] = field(default_factory=list)
    attention: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    can_start: bool = True


def build_parser() -> Parser:
    parser = Parser(
        prog="quire doctor",
        usage="quire doctor [MODEL] [options]",
        description="What would compute here, how and why, and what is wrong. Exit status 1 if no engine would start.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    report = examine(engine_options(namespace))
    if namespace.json:
        import json

        json.dump(as_dict(report), sys.stdout, indent=2)
        print()
    else:
        print(as_text(report))
    return 0 if report.can_start else 1


def examine(options: EngineOptions) -> DoctorReport:
    """Examine this machine, and how an engine with `options` would run on it."""
    cuda = find_cuda()
    versions: dict[str, str | None] = {"quire": __version__, "python": platform.python_version()}
    report = DoctorReport(versions, cuda, _native(), available_memory(), find_machine())
    report.versions |= {name: _version(name) for name in PACKAGES}
    try:
        config = resolve(options)
    except (ConfigError, ModelLoadError) as error:
        report.can_start = False
        report.problems.append(error.message)
    else:
        _describe_computation(report, config)
        report.problems += report.machine.problems(config, report.memory)
        if config.device.is_accelerated:
            _describe_steps(report, config, _limits(cuda))
    if cuda.is_present:
        report.toolchain = find_toolchain()
        report.problems += report.toolchain.problems()
    report.problems += _problems(cuda)
    return report


def typical_steps(max_num_seqs: int, max_num_batched_tokens: int) -> list[TypicalStep]:
    """Decode batches of all sizes, with and without part of a prompt, and prompts alone."""
    sizes = [size for size in (1, 3, 16, 100, 256, 1000) if size < max_num_seqs] + [max_num_seqs]
    steps = [TypicalStep(size) for size in sizes]
    steps += [TypicalStep(1, (31,)), TypicalStep(min(64, max_num_seqs - 1), (500,)), TypicalStep(0, (100,))]
    steps += [TypicalStep(0, (2000,)), TypicalStep(0, (max_num_batched_tokens,))]
    return [step for step in steps if step.num_tokens <= max_num_batched_tokens and step.num_seqs <= max_num_seqs]


def _describe_computation(report: DoctorReport, config: EngineConfig) -> None:
    model, device = config.model, config.device
    graphs = "none (a CPU has none)"
    if device.is_accelerated:
        graphs = f"{device.cuda_graphs}, {len(device.cuda_graph_sizes)} sizes"
    report.computes = {
        "model": f"{model.name} ({model.architecture}, {model.num_layers} layers)",
        "device": _why_device(report.cuda, config),
        "attention backend": _why_backend(report, config),
        "weights": model.weight_format,
        "KV cache": model.cache_format.replace(" KV cache", ""),
        "batch invariant": "yes" if device.batch_invariant else "no (batch_invariant=True makes it so)",
        "steps in flight": str(config.scheduler.queue_depth),
        "largest step": f"{config.scheduler.max_num_batched_tokens} tokens, {config.scheduler.max_num_seqs} sequences",
        "CUDA graphs": graphs,
    }
    if device.attention_backend == "native":
        report.computes["instruction sets"] = _why_instructions(device.cpu_isa)
    report.ladder = device.cuda_graph_sizes


def _why_device(cuda: CudaFacts, config: EngineConfig) -> str:
    if config.device.device == "cuda":
        return cuda.devices[0].name
    if cuda.is_present:
        return "the CPU, as the options say"
    return f"the CPU: {cuda.trouble}"


def _why_backend(report: DoctorReport, config: EngineConfig) -> str:
    backend = config.device.attention_backend
    if backend == "native":
        return f"native: kernels for {report.native}, {config.device.num_threads} threads{_why_products(config)}"
    if backend == "torch":
        reason = "the native kernels are not built" if report.native is None else "as the options or the heads want it"
        return f"torch: plain operators ({reason})"
    where = "" if config.device.device == "cuda" else ", in Triton's interpreter (for tests: very slow)"
    return f"triton: kernels for heads of {config.model.head_dim}{where}"


def _why_instructions(asked: str) -> str:
    from quire.kernels.cpu import _native

    reason = "the best" if asked == "auto" else "as QUIRE_CPU_ISA says"
    return f"{', '.join(_native.available_isas())}: {_native.resolve_isa(asked)} is used, {reason}"


def _why_products(config: EngineConfig) -> str:
    if config.device.matmul_precision != "auto":
        return ""
    from quire.kernels.cpu import _native
    from quire.kernels.cpu.precision import choose_precision

    choice = choose_precision(_native.resolve_isa(config.device.cpu_isa))
    return f", {choice.precision} products ({choice.reason})"


def _describe_steps(report: DoctorReport, config: EngineConfig, limits: DeviceLimits) -> None:
    scheduler, model = config.scheduler, config.model
    settings = execution_settings(config.device, scheduler.max_num_seqs, config.speculation.max_drafts)
    itemsize = max(DTYPE_BYTES[model.dtype], CACHE_DTYPE_BYTES[model.kv_cache_dtype])
    shape = HeadShape(model.num_heads, model.num_kv_heads, model.head_dim, itemsize)
    for step in typical_steps(scheduler.max_num_seqs, scheduler.max_num_batched_tokens):
        execution = choose_execution(step.num_tokens, step.num_seqs, step.max_query_len, settings)
        report.choices.append((str(step), _choice(step, execution)))
        # A CUDA graph's grids are sized for the longest possible sequence.
        longest = model.max_model_len if execution.kind == "full" else max(1, model.max_model_len // 2)
        report.attention.append((str(step), _tiles(step, longest, shape, limits, config)))


def _choice(step: TypicalStep, execution: Execution) -> str:
    padding = execution.num_tokens - step.num_tokens
    padded = f", {padding} of them padding" if padding else ""
    match execution.kind:
        case "full":
            return f"one graph of {execution.num_tokens} tokens{padded}"
        case "piecewise":
            return f"graphs of {execution.num_tokens} tokens{padded}, attention between them"
    return f"kernel by kernel, {execution.num_tokens} tokens"


def _tiles(step: TypicalStep, longest: int, shape: HeadShape, limits: DeviceLimits, config: EngineConfig) -> str:
    invariant = config.device.batch_invariant
    plan = None
    if step.max_query_len == 1 and invariant:
        plan = fixed_split_plan(shape, step.num_seqs, longest, None, limits)
    elif step.max_query_len == 1:
        plan = split_plan(shape, step.num_seqs, longest, limits)
    if plan is not None:
        tiles, kind = plan.tiles, f"decode, a sequence and key head cut in {plan.num_programs}"
    else:
        lengths = step.max_query_len, longest
        tiles = fixed_tiles(shape, limits) if invariant else varlen_tiles(shape, *lengths, limits)
        kind = "varlen"
    return f"{kind}: tiles of {tiles.block_m} x {tiles.block_n}, {tiles.num_warps} warps, {tiles.num_stages} stages"


def _limits(cuda: CudaFacts) -> DeviceLimits:
    if not cuda.devices:
        return DeviceLimits()
    return DeviceLimits(cuda.devices[0].capability, cuda.devices[0].num_multiprocessors)


def _problems(cuda: CudaFacts) -> list[str]:
    problems = []
    if not cuda.is_present and DEVICE_NODE.exists():
        problems.append(f"there is an NVIDIA driver, and no device can be used: {cuda.trouble}")
    for device in cuda.devices:
        if device.capability < LEAST_CAPABILITY:
            problems.append(f"{device.name} is too old: compute capability {_dotted(device.capability)}, 8.0 is needed")
    if cuda.is_present and not has_triton():
        problems.append("Triton is not installed: the device cannot be used")
    if cuda.is_present and envs.triton_interpret():
        problems.append("TRITON_INTERPRET=1 is set: the device is not used while it is")
    if not has_native_kernels():
        problems.append("the native CPU kernels are not built: plain operators compute on the CPU, many times slower")
    missing = [name for name in SERVER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        problems.append(f"`quire serve` is not possible: {', '.join(missing)} is not installed (LLM works in process)")
    return problems


def _native() -> str | None:
    if not has_native_kernels():
        return None
    from quire.kernels.cpu import _native

    try:
        isa: str = _native.resolve_isa(envs.cpu_isa())
    except ValueError as error:
        return f"nothing ({error})"
    return isa


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def as_text(report: DoctorReport) -> str:
    cuda = report.cuda
    versions = [f"{name} {version or 'not installed'}" for name, version in report.versions.items()]
    rows = [("versions", ", ".join(versions))]
    rows.append(("CUDA of torch", cuda.torch_cuda or "none"))
    rows.append(("CUDA driver", "none" if cuda.driver is None else _dotted(cuda.driver)))
    rows += [("CUDA device", _device_line(device)) for device in cuda.devices]
    if report.toolchain is not None:
        rows.append(("C compiler", report.toolchain.compiler or "none"))
        rows.append(("Python's headers", report.toolchain.headers or "none"))
        rows.append(("libcuda", report.toolchain.driver_library or "not found"))
    rows.append(("CPU kernels", f"for {report.native}" if report.native else "not built"))
    rows.append(("host memory", f"{format_bytes(report.memory)} available"))
    rows += report.machine.rows()
    rows += list(report.computes.items())
    lines = [_row(*row) for row in rows]
    if report.ladder:
        lines += ["", "Sizes of CUDA graphs", "  " + " ".join(map(str, report.ladder))]
    for title, found in (("How typical steps run", report.choices), ("Their attention", report.attention)):
        if found:
            lines += ["", title, *(f"  {what:<32}{how}" for what, how in found)]
    lines += ["", "Problems" if report.problems else "No problems."]
    return "\n".join(lines + [f"  - {problem}" for problem in report.problems])


def _row(name: str, value: str) -> str:
    return f"{name:<18}{value}"


def _device_line(device: CudaDevice) -> str:
    return (
        f"{device.name}, {format_bytes(device.memory)}, compute capability {_dotted(device.capability)}, "
        f"{device.num_multiprocessors} multiprocessors"
    )


def as_dict(report: DoctorReport) -> dict[str, Any]:
    return asdict(report)
