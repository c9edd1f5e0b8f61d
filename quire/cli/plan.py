"""`quire plan`: what a model needs and what fits, without loading its weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.cli.devices import DEVICES, GB, Device
from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.memory_plan import Concurrency, MemoryPlan, make_plan, pool_bytes, weight_format
from quire.cli.parser import Parser
from quire.config.engine import EngineConfig
from quire.config.model import DTYPE_BYTES
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import UserError, nearest_name
from quire.utils.sizes import format_bytes, parse_bytes
from quire.worker.memory import available_memory

GPU_MEMORY_UTILIZATION = 0.9
IRRELEVANT_OPTIONS = (
    "tokenizer", "device", "seed", "load_format", "max_prefill_chunk", "queue_depth", "enable_prefix_caching",
    "attention_backend", "matmul_precision", "num_threads", "enforce_eager", "cuda_graphs", "cuda_graph_sizes",
    "batch_invariant", "step_log",
)  # fmt: skip


def build_parser() -> Parser:
    parser = Parser(
        prog="quire plan",
        usage="quire plan [MODEL] [--gpu NAME | --memory SIZE] [options]",
        description="Memory, KV blocks, concurrency and bounds on speed, from the configuration alone.",
    )
    group = parser.add_argument_group("plan options")
    group.add_argument("--gpu", metavar="NAME", help=f"plan for this device: {', '.join(DEVICES)}")
    group.add_argument(
        "--memory", metavar="SIZE", help="memory for weights and KV cache, such as 24GiB (default: the device's)"
    )
    group.add_argument(
        "--bandwidth", metavar="SIZE", help="memory bandwidth per second, such as 20GB, for the bounds on speed"
    )
    group.add_argument(
        "--tokens", metavar="N", type=int, action="append", default=[], help="length to report; may be repeated"
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_engine_flags(parser, skip=IRRELEVANT_OPTIONS)
    return parser


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    target = _target(namespace)
    config = _resolve(engine_options(namespace), for_gpu=namespace.gpu is not None)
    plan = make_plan(config, target.memory, target.device, _lengths(namespace.tokens, config))
    if namespace.json:
        import json

        json.dump(as_dict(plan, target), sys.stdout, indent=2)
        print()
    else:
        print(as_text(plan, target))
    return 0


@dataclass(frozen=True)
class Target:
    """Where the model would run. device: None when no bandwidth is known."""

    title: str
    memory: int
    device: Device | None


def _target(namespace: argparse.Namespace) -> Target:
    memory = None if namespace.memory is None else parse_bytes(namespace.memory, param="memory")
    bandwidth = None if namespace.bandwidth is None else parse_bytes(namespace.bandwidth, param="bandwidth")
    if namespace.gpu is not None:
        if namespace.gpu.lower() not in DEVICES:
            nearest = nearest_name(namespace.gpu.lower(), DEVICES)
            raise UserError(f"unknown device {namespace.gpu!r}{nearest} (known: {', '.join(DEVICES)})", param="gpu")
        device = DEVICES[namespace.gpu.lower()]
        if bandwidth is not None:
            device = replace(device, bandwidth=bandwidth)
        return Target(device.title, int(device.memory) if memory is None else memory, device)
    title = "this machine, memory available now" if memory is None else "memory as given"
    memory = available_memory() if memory is None else memory
    given = None if bandwidth is None else Device(title, memory, bandwidth, peak=float("inf"))
    return Target(title, memory, given)


def _resolve(options: EngineOptions, *, for_gpu: bool) -> EngineConfig:
    """The engine's configuration, from config.json only. On a GPU `auto` means the checkpoint's dtype, and the share
    of memory is the one that is usual there."""
    options = replace_options(options, load_format="dummy", device="cpu")
    if for_gpu and options.preemption_mode != "recompute":
        raise UserError(
            "swap space is host memory, and a plan for --gpu is about the device's: leave preemption_mode out",
            param="preemption_mode",
        )
    if for_gpu and options.gpu_memory_utilization is None:
        options = replace_options(options, gpu_memory_utilization=GPU_MEMORY_UTILIZATION)
    config = resolve(options)
    if for_gpu and options.dtype == "auto":
        stored = config.model.hf.get("dtype") or config.model.hf.get("torch_dtype")
        dtype = stored if stored in DTYPE_BYTES else "float32"
        config = resolve(replace_options(options, dtype=dtype))
    return config


def replace_options(options: EngineOptions, **changes: Any) -> EngineOptions:
    values = {name: getattr(options, name) for name in options.__struct_fields__}
    return EngineOptions.from_keywords(values | changes)


def _lengths(tokens: Sequence[int], config: EngineConfig) -> list[int]:
    longest = config.model.max_model_len
    for num_tokens in tokens:
        if not 1 <= num_tokens <= longest:
            raise UserError(f"--tokens must be between 1 and max_model_len ({longest}), not {num_tokens}")
    return sorted({*tokens, longest})


def as_text(plan: MemoryPlan, target: Target) -> str:
    """The report for people."""
    model, cache, layout = plan.config.model, plan.config.cache, plan.layout
    weights = ", ".join(f"{name} {format_bytes(plan.weight_bytes_as(name))}" for name in DTYPE_BYTES)
    kinds = ", ".join(f"{len(group.layers)} layers {_kind(group.spec)}" for group in layout.groups)
    rows = [
        ("model", f"{model.name} ({model.architecture}, {model.num_layers} layers, {model.dtype})"),
        ("parameters", f"{plan.parameters.total:,}"),
        ("weights", f"{format_bytes(plan.weight_bytes)} as {weight_format(model)} ({weights})"),
    ]
    if plan.checkpoint is not None:
        stored = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.checkpoint.bytes.items())
        rows.append(("checkpoint", f"{stored} in {plan.checkpoint.num_files} {plan.checkpoint.format} file(s)"))
    rows += [
        ("memory", f"{format_bytes(plan.total_memory)} ({target.title})"),
        ("activations", f"{format_bytes(plan.activation_bytes)} (estimate; the engine measures when it starts)"),
        ("KV per token", f"{format_bytes(plan.kv_bytes_per_token)} over all layers"),
        ("KV per block", f"{format_bytes(layout.block_bytes)} ({layout.block_size} tokens of one group)"),
        ("KV groups", f"{len(layout.groups)}: {kinds}"),
        ("KV cache", f"{format_bytes(pool_bytes(layout))} = {layout.num_usable_blocks:,} blocks, {_rule(plan)}"),
    ]
    if layout.num_host_blocks:
        swap_space = format_bytes(layout.num_host_blocks * layout.block_bytes)
        rows.append(("swap space", f"{swap_space} of host memory = {layout.num_host_blocks:,} blocks"))
    lines = [f"{name:<14}{value}" for name, value in rows]
    lines += ["", f"Concurrency (share of free memory for the cache: {cache.memory_utilization:g})"]
    lines += [_concurrency_line(entry, plan.config.scheduler.max_num_seqs) for entry in plan.lengths]
    lines += ["", *_bound_lines(plan, target)]
    return "\n".join(lines)


def _kind(spec: object) -> str:
    window = getattr(spec, "window", None)
    return "of full attention" if window is None else f"with a window of {window} tokens"


def _rule(plan: MemoryPlan) -> str:
    cache, scheduler = plan.config.cache, plan.config.scheduler
    if cache.num_blocks_override is not None:
        return "as num_blocks_override says"
    if cache.memory is not None:
        return "as kv_cache_memory says"
    if plan.num_blocks_memory > plan.layout.num_usable_blocks:
        return (
            f"all that {scheduler.max_num_seqs} sequences of {plan.config.model.max_model_len:,} tokens can use "
            f"(memory for {plan.num_blocks_memory:,})"
        )
    return "all that fits"


def _concurrency_line(entry: Concurrency, max_num_seqs: int) -> str:
    limit = f", of which {entry.batch_size} run at once (max_num_seqs)" if entry.max_sequences > max_num_seqs else ""
    return (
        f"  {entry.num_tokens:>9,} tokens: {entry.max_sequences:,} sequences{limit}; each "
        f"{entry.blocks_per_sequence:,} blocks, {format_bytes(entry.bytes_per_sequence)}"
    )


def _bound_lines(plan: MemoryPlan, target: Target) -> list[str]:
    if target.device is None:
        return ["No bound on the decode speed: the memory bandwidth is not known (give --gpu or --bandwidth)."]
    lines = [
        f"Upper bound on the decode speed from a bandwidth of {target.device.bandwidth / GB:,.0f} GB/s: what reading "
        "weights and KV once a step allows.",
        "It is arithmetic, not a measurement; real engines stay below it.",
    ]
    for entry in plan.lengths:
        for bound in entry.bounds:
            lines.append(
                f"  {bound.num_tokens:>9,} tokens, batch {bound.batch_size:>5,}: <= {bound.tokens_per_second:,.1f} "
                f"tokens/s ({format_bytes(bound.step_bytes)} a step, limited by {bound.limit})"
            )
    return lines


def as_dict(plan: MemoryPlan, target: Target) -> dict[str, Any]:
    """The report for programs. Bytes, tokens and tokens per second."""
    model, layout, checkpoint = plan.config.model, plan.layout, plan.checkpoint
    return {
        "model": model.name,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "num_parameters": plan.parameters.total,
        "weight_bytes": plan.weight_bytes,
        "weight_bytes_by_dtype": {name: plan.weight_bytes_as(name) for name in DTYPE_BYTES},
        "checkpoint_bytes_by_dtype": None if checkpoint is None else dict(checkpoint.bytes),
        "checkpoint_elements_by_dtype": None if checkpoint is None else dict(checkpoint.elements),
        "target": target.title,
        "memory_bytes": plan.total_memory,
        "memory_utilization": plan.config.cache.memory_utilization,
        "activation_bytes_estimate": plan.activation_bytes,
        "max_model_len": model.max_model_len,
        "max_num_seqs": plan.config.scheduler.max_num_seqs,
        "block_size": layout.block_size,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_bytes_per_block": layout.block_bytes,
        "kv_groups": [
            {"num_layers": len(group.layers), "window": getattr(group.spec, "window", None)} for group in layout.groups
        ],
        "num_blocks": layout.num_usable_blocks,
        "num_blocks_memory": plan.num_blocks_memory,
        "kv_cache_bytes": pool_bytes(layout),
        "swap_space_bytes": layout.num_host_blocks * layout.block_bytes,
        "bandwidth_bytes_per_second": None if target.device is None else target.device.bandwidth,
        "concurrency": [_length_dict(entry) for entry in plan.lengths],
    }


def _length_dict(entry: Concurrency) -> dict[str, Any]:
    return {
        "num_tokens": entry.num_tokens,
        "blocks_per_sequence": entry.blocks_per_sequence,
        "bytes_per_sequence": entry.bytes_per_sequence,
        "max_sequences": entry.max_sequences,
        "decode_bounds": [
            {
                "batch_size": bound.batch_size,
                "step_bytes": bound.step_bytes,
                "max_tokens_per_second": bound.tokens_per_second,
                "limit": bound.limit,
            }
            for bound in entry.bounds
        ],
    }
