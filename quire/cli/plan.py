"""`quire plan`: memory, capacity and speed of a model, without loading its weights."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.cli.checkpoint import read_checkpoint
from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.kv_waste import as_table, hybrid_models, kv_waste
from quire.cli.memory_plan import Concurrency, MemoryPlan, TowerPlan, plan_devices, plan_engine, pool_bytes
from quire.cli.parser import Parser, given
from quire.cli.simulate import DEFAULTS, engine_settings
from quire.cli.simulate import OTHERS as NOT_SCHEDULING
from quire.cli.speed_plan import Decoding, Speed, bandwidth_alone, bounds, predict
from quire.config.eagle import with_verifier
from quire.config.families import RUNNABLE
from quire.config.hf_config import find_model, read_config
from quire.config.mla_prompt import expands_prompts
from quire.config.model import DTYPE_BYTES
from quire.config.options import BUNDLED_MODEL, EngineOptions
from quire.config.parallel import ParallelConfig, parallel_config, share_experts
from quire.config.resolve import CPU_DEFAULTS, resolve
from quire.errors import ConfigError, UserError
from quire.kv_cache.layout import KVGroup
from quire.simulator.cost import CostModel, Precision
from quire.simulator.exchange import ELEMENT_BYTES, RankTraffic, exchange_of
from quire.simulator.hardware import Hardware, find, profiles
from quire.simulator.replica import SIMULATED
from quire.simulator.shape import built_in, find_shape, find_vision
from quire.utils.sizes import format_bytes, parse_bytes
from quire.worker.platform.host_memory import available_memory

GB = 10**9
IRRELEVANT_OPTIONS = (
    "tokenizer", "device", "seed", "load_format", "attention_backend", "matmul_precision", "num_threads", "step_log",
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "decode_context_parallel_size", "prefill_context_parallel_size", "cp_kv_cache_interleave_size",
    "expert_placement_strategy",
    "distributed_executor_backend", "ray_placement",
    "skip_tokenizer_init", "enforce_eager", "cuda_graphs", "cuda_graph_sizes", "batch_invariant", "expert_counts",
    "activation_bits",
)  # fmt: skip
KINDS = {
    "full": "of full attention",
    "sliding": "of attention",
    "chunked": "of attention in chunks",
    "latent": "of latent attention",
    "state": "of state",
}
STORED_AS = {"int8": "int8", "w8a8": "int8", "int4": "int4", "w4a8": "int4", "fp8": "float8", "mxfp4": "mxfp4"}
"""Quantization -> name in the cost model."""
USUAL_ON_CPUS = {
    "max_num_seqs": CPU_DEFAULTS.max_num_seqs,
    "max_num_batched_tokens": CPU_DEFAULTS.max_num_batched_tokens,
    "queue_depth": CPU_DEFAULTS.queue_depth,
    "gpu_memory_utilization": CPU_DEFAULTS.memory_utilization,
}


def build_parser() -> Parser:
    parser = Parser(
        prog="quire plan",
        usage="quire plan [MODEL] [--gpu NAME | --memory SIZE] [--tp N] [--pp N] [options]",
        description="Memory, KV blocks, concurrency and predicted speed, from the configuration alone.",
    )
    group = parser.add_argument_group("plan options")
    group.add_argument(
        "--gpu", metavar="NAME", help=f"plan for this device: a profile's JSON file, or {', '.join(profiles())}"
    )
    group.add_argument(
        "--memory", metavar="SIZE", help="memory of a device, such as 24GiB (default: the device's, or what is free)"
    )
    group.add_argument(
        "--bandwidth", metavar="SIZE", help="memory bandwidth per second, such as 20GB (default: the device's)"
    )
    for flags, text in ((("--tp", "--tensor-parallel-size"), "devices that share each layer"),
                        (("--pp", "--pipeline-parallel-size"), "pipeline stages"),
                        (("--dcp", "--decode-context-parallel-size"), "of tp, share a context's tokens"),
                        (("--dp", "--data-parallel-size"), "replicas, of interest if they share experts"),
                        (("--pcp", "--prefill-context-parallel-size"), "groups that share prompts")):  # fmt: skip
        group.add_argument(*flags, metavar="N", type=int, default=1, help=f"{text} (1)")
    group.add_argument(
        "--tokens", metavar="N", type=int, action="append", default=[], help="length to report; may be repeated"
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of text")
    group.add_argument(
        "--kv-waste", action="store_true", help="print what of the KV pool no layer can write (default: hybrid models)"
    )
    add_engine_flags(parser, skip=IRRELEVANT_OPTIONS)
    return parser


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    options = engine_options(namespace)
    names = {"tensor": namespace.tp, "pipeline": namespace.pp, "decode_context": namespace.dcp}
    names |= {"prefill_context": namespace.pcp, "data": namespace.dp}
    sizes = {f"{name}_parallel_size": size for name, size in names.items()}
    sized = _replace_options(options, **sizes)
    layout = parallel_config(sized)
    if share_experts(sized):
        layout = replace(layout, dp=namespace.dp, ep=namespace.tp * namespace.dp)
    if namespace.kv_waste:
        print(_kv_waste(namespace, options, layout))
        return 0
    if _is_directory(options.model):
        options = with_verifier(options)
    target = _target(namespace)
    if target.is_profile or max(layout.devices_per_replica, layout.ep) > 1 or not _runs_here(options):
        chosen = given(namespace, EngineOptions, skip=NOT_SCHEDULING)
        plan, cost = _plan_for_devices(options, chosen, target, layout, namespace.tokens)
    else:
        config = resolve(_replace_options(options, load_format="dummy", device="cpu"))
        if config.model.is_encoder:
            raise UserError(f"quire plan sizes KV caches, and {config.model.architecture} keeps none", param="model")
        plan = plan_engine(config, target.memory, _lengths(namespace.tokens, config.model.max_model_len))
        quantization = config.model.quantization
        stored = None if quantization is None else quantization.stored_type
        precision = Precision.of(plan.shape, stored or config.model.dtype, config.model.kv_cache_dtype)
        cost = CostModel(plan.shape, target.device, layout, precision, expands_prompts=config.model.expands_prompts)
    speeds: tuple[Speed, ...] = ()
    if target.knows_speed:
        speeds = predict(plan, cost) if target.is_profile else bounds(plan, cost)
    report = PlanReport(plan, target, layout, speeds)
    if namespace.json:
        import json

        json.dump(as_dict(report), sys.stdout, indent=2)
        print()
    else:
        print(as_text(report))
    return 0


def _kv_waste(namespace: argparse.Namespace, options: EngineOptions, layout: ParallelConfig) -> str:
    models = hybrid_models() if options.model == BUNDLED_MODEL else [options.model]
    kv_dtype = "bfloat16" if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    cache = engine_settings(given(namespace, EngineOptions, skip=NOT_SCHEDULING), USUAL_ON_CPUS)
    return as_table(kv_waste(models, kv_dtype, layout, cache.block_size, cache.state_snapshot_interval))


@dataclass(frozen=True)
class Target:
    """Target machine. is_profile: device is a profile whose factors predict speed; otherwise a given bandwidth yields
    bounds."""

    title: str
    memory: int
    device: Hardware
    is_profile: bool

    @property
    def knows_speed(self) -> bool:
        return self.device.bandwidth < float("inf")


@dataclass(frozen=True)
class PlanReport:
    plan: MemoryPlan
    target: Target
    layout: ParallelConfig
    speeds: tuple[Speed, ...]


def _target(namespace: argparse.Namespace) -> Target:
    memory = None if namespace.memory is None else parse_bytes(namespace.memory, param="memory")
    bandwidth = None if namespace.bandwidth is None else parse_bytes(namespace.bandwidth, param="bandwidth")
    if namespace.gpu is not None:
        device = find(namespace.gpu)
        device = replace(device, memory=memory or device.memory, bandwidth=bandwidth or device.bandwidth)
        return Target(device.title, int(device.memory), device, is_profile=True)
    title = "this machine, memory available now" if memory is None else "memory as given"
    memory = available_memory() if memory is None else memory
    return Target(title, memory, bandwidth_alone(memory, bandwidth or float("inf")), is_profile=False)


def _is_directory(model: str) -> bool:
    return model.lower() not in built_in() and not model.endswith(".json")


def _runs_here(options: EngineOptions) -> bool:
    if not _is_directory(options.model):
        return False
    names = read_config(options.model, options.revision).get("architectures")
    return not isinstance(names, list) or any(name in RUNNABLE for name in names)


def _plan_for_devices(
    options: EngineOptions, chosen: Mapping[str, Any], target: Target, layout: ParallelConfig, tokens: Sequence[int]
) -> tuple[MemoryPlan, CostModel]:
    if options.preemption_mode != "recompute" or options.kv_offload_dir is not None:
        raise ConfigError(
            "swap space is host memory, and this plan is about that of the devices: leave preemption_mode and "
            "kv_offload_dir out",
            param="preemption_mode",
        )
    shape = find_shape(options.model, options.revision)
    if options.quantization is not None and options.quantization not in STORED_AS:
        raise ConfigError(f"quantization must be one of {', '.join(STORED_AS)}", param="quantization")
    checkpoint = None
    if _is_directory(options.model):
        checkpoint = read_checkpoint(find_model(options.model, revision=options.revision, config_only=True))
    dtype = STORED_AS.get(options.quantization or "") or (None if options.dtype == "auto" else options.dtype)
    if dtype is None and checkpoint is not None and checkpoint.format == "GGUF" and target.device.kind != "cpu":
        dtype = "float32"  # GGUF files state no dtype; a GPU widens their types to float32
    kv_dtype = None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    precision = Precision.of(shape, dtype, kv_dtype)
    is_invariant = options.batch_invariant or target.device.kind == "cpu"
    expands = expands_prompts(options, shape.attention, options.model, is_invariant=is_invariant)
    vision = None if options.language_model_only else find_vision(options.model, options.revision)
    cost = CostModel(shape, target.device, layout, precision, expands_prompts=expands, vision=vision)
    usual = USUAL_ON_CPUS if target.device.kind == "cpu" else DEFAULTS
    config = engine_settings(chosen, usual).config(cost)
    given_memory = options.kv_cache_memory is not None
    config = replace(config, cache=replace(config.cache, memory=config.cache.memory if given_memory else None))
    return plan_devices(cost, config, _lengths(tokens, config.model.max_model_len), checkpoint), cost


def _replace_options(options: EngineOptions, **changes: Any) -> EngineOptions:
    values = {name: getattr(options, name) for name in options.__struct_fields__}
    return EngineOptions.from_keywords(values | changes)


def _lengths(tokens: Sequence[int], longest: int) -> list[int]:
    for num_tokens in tokens:
        if not 1 <= num_tokens <= longest:
            raise UserError(f"--tokens must be between 1 and max_model_len ({longest}), not {num_tokens}")
    return sorted({*tokens, longest})


def as_text(report: PlanReport) -> str:
    plan, target, devices = report.plan, report.target, report.layout
    model, cache, layout = plan.config.model, plan.config.cache, plan.layout
    weights = ", ".join(f"{name} {format_bytes(plan.weight_bytes_as(name))}" for name in DTYPE_BYTES)
    kinds = ", ".join(f"{count} x {text}" for text, count in Counter(map(_group, layout.groups)).items())
    tokens = " or ".join(str(size) for size in sorted({group.block_size for group in layout.groups}))
    rows = [
        ("model", f"{model.name} ({_architecture(plan)}, {model.num_layers} layers, {model.dtype})"),
        ("parameters", _parameters(plan)),
        ("weights", f"{format_bytes(plan.weight_bytes)} as {plan.weight_format} ({weights})"),
    ]
    if plan.draft_weight_bytes:
        share = f"{format_bytes(plan.draft_weight_bytes)} of the weights"
        rows.append(("draft model", f"{share}, and layers behind the model's {model.num_layers}"))
    if plan.checkpoint is not None:
        stored = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.checkpoint.bytes.items())
        rows.append(("checkpoint", f"{stored} in {plan.checkpoint.num_files} {plan.checkpoint.format} file(s)"))
    if plan.tower is not None:
        tower, beside = format_bytes(plan.tower.weight_bytes), format_bytes(plan.tower.working_bytes)
        text = f"{tower} as {model.dtype}, {beside} for images"
        if plan.tower.checkpoint is not None:
            sizes = plan.tower.checkpoint.bytes
            text += f" (file: {', '.join(f'{name} {format_bytes(size)}' for name, size in sizes.items())})"
        rows.append(("vision tower", text))
    if max(devices.devices_per_replica, devices.ep) > 1:
        share = format_bytes(plan.device_weight_bytes)
        rows.append(("devices", f"{devices.devices_per_replica} ({devices}); each, at most, {share} of weights"))
        of = "" if devices.pcp > 1 else " (a token that is sampled)"
        rows.append(("sent a token", f"{_exchange(report)}, by each device to others{of}"))
    if adapters := plan.config.adapters.num_slots:
        rows.append(
            ("adapters", f"{format_bytes(plan.adapter_bytes)} for {adapters} of rank {plan.config.adapters.max_rank}")
        )
    rows += [
        ("memory", f"{format_bytes(plan.total_memory)} ({target.title})"),
        ("activations", f"{format_bytes(plan.activation_bytes)} (estimate; the engine measures when it starts)"),
        ("KV per token", f"{format_bytes(plan.kv_bytes_per_token)} over all layers"),
        ("KV per block", f"{format_bytes(layout.block_bytes)} ({tokens} tokens of one group)"),
        ("KV groups", f"{len(layout.groups)}: {kinds}"),
        ("KV padding", f"{100 * plan.kv_padding:.1f} % of a sequence of {model.max_model_len:,} tokens"),
        ("KV cache", f"{format_bytes(pool_bytes(layout))} = {layout.num_usable_blocks:,} blocks, {_rule(plan)}"),
    ]
    if layout.num_host_blocks:
        swap_space = format_bytes(layout.num_host_blocks * layout.block_bytes)
        rows.append(("swap space", f"{swap_space} of host memory = {layout.num_host_blocks:,} blocks"))
    lines = [f"{name:<14}{value}" for name, value in rows]
    of_what = "the memory for weights, activations and" if target.is_profile else "free memory for"
    lines += ["", f"Concurrency (share of {of_what} the cache: {cache.memory_utilization:g})"]
    lines += [_concurrency_line(entry, plan.config.scheduler.max_num_seqs) for entry in plan.lengths]
    lines += ["", *_speed_lines(report)]
    return "\n".join(lines)


def _exchange(report: PlanReport) -> RankTraffic:
    size = ELEMENT_BYTES if report.target.device.kind == "cpu" else 2
    config = report.plan.config
    return exchange_of(report.plan.shape, report.layout, size, config.speculation.head_width(config.model.hidden_size))


def _architecture(plan: MemoryPlan) -> str:
    return plan.shape.family if plan.config.model.architecture == SIMULATED else plan.config.model.architecture


def _parameters(plan: MemoryPlan) -> str:
    shape = plan.shape
    text = f"{shape.parameters():,}"
    if shape.experts is not None:
        text += f", of which each token is multiplied by {shape.active_parameters():,}"
    if shape.draft_parameters:
        text += f"; {shape.draft_parameters:,} of them are the head for drafts"
    return text if shape.is_known else text + " (of a family that is not known: norms and biases are guessed)"


def _group(group: KVGroup) -> str:
    window = "" if group.spec.window is None else f" with a window of {group.spec.window} tokens"
    return (
        f"{len(group.layers)} layers {KINDS[group.spec.kind]}{window} (blocks of {group.block_size} tokens, "
        f"pages of {format_bytes(group.page_bytes)})"
    )


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


def _speed_lines(report: PlanReport) -> list[str]:
    target = report.target
    if not target.knows_speed:
        return ["No prediction of the speed: the memory bandwidth is not known (give --gpu or --bandwidth)."]
    if target.is_profile:
        source = target.device.source or "data sheets, and usual shares of their limits"
        lines = [
            f"Predicted speed ({source}).",
            "It is a calculation, not a measurement; `quire simulate` adds queues to it.",
        ]
    else:
        lines = [
            f"Upper bound on the decode speed from a bandwidth of {target.device.bandwidth / GB:,.0f} GB/s: what "
            "reading weights and KV once a step allows.",
            "It is arithmetic, not a measurement; real engines stay below it.",
        ]
    for speed in report.speeds:
        if speed.ttft_seconds is not None:
            lines.append(f"  {speed.num_tokens:>9,} tokens of prompt: first token after {_seconds(speed.ttft_seconds)}")
        lines += [_decoding_line(entry, target) for entry in speed.decoding]
    return lines


def _decoding_line(entry: Decoding, target: Target) -> str:
    start = f"  {entry.num_tokens:>9,} tokens, batch {entry.batch_size:>5,}: "
    if not target.is_profile:
        return f"{start}<= {entry.tokens_per_second:,.1f} tokens/s"
    return (
        f"{start}{entry.tokens_per_second:>10,.1f} tokens/s, {_seconds(entry.step_seconds)} a token "
        f"(limited by {entry.limit})"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.2f} ms"


def _tower_fields(tower: TowerPlan) -> dict[str, Any]:
    stored = None if tower.checkpoint is None else dict(tower.checkpoint.bytes)
    sizes = {"weight_bytes": tower.weight_bytes, "working_bytes": tower.working_bytes}
    return {**sizes, "checkpoint_bytes_by_dtype": stored}


def as_dict(report: PlanReport) -> dict[str, Any]:
    """Report as JSON, in bytes, tokens and seconds; device values are for one device."""
    plan, target = report.plan, report.target
    model, layout, checkpoint = plan.config.model, plan.layout, plan.checkpoint
    return {
        "model": model.name,
        "architecture": _architecture(plan),
        "dtype": model.dtype,
        "num_parameters": plan.shape.parameters(),
        "num_active_parameters": plan.shape.active_parameters(),
        "weight_bytes": plan.weight_bytes,
        "draft_weight_bytes": plan.draft_weight_bytes,
        "vision_tower": None if plan.tower is None else _tower_fields(plan.tower),
        "weight_bytes_by_dtype": {name: plan.weight_bytes_as(name) for name in DTYPE_BYTES},
        "weight_bytes_per_device": plan.device_weight_bytes,
        "checkpoint_bytes_by_dtype": None if checkpoint is None else dict(checkpoint.bytes),
        "checkpoint_elements_by_dtype": None if checkpoint is None else dict(checkpoint.elements),
        "target": target.title,
        "num_devices": report.layout.devices_per_replica,
        "tensor_parallel_size": report.layout.tp,
        "pipeline_parallel_size": report.layout.pp,
        "decode_context_parallel_size": report.layout.dcp,
        "prefill_context_parallel_size": report.layout.pcp,
        "num_redundant_experts": report.layout.redundant_experts,
        "exchanged_bytes_per_token": _exchange(report)._asdict(),
        "memory_bytes": plan.total_memory,
        "memory_utilization": plan.config.cache.memory_utilization,
        "activation_bytes_estimate": plan.activation_bytes,
        "max_model_len": model.max_model_len,
        "max_num_seqs": plan.config.scheduler.max_num_seqs,
        "block_size": layout.block_size,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_bytes_per_block": layout.block_bytes,
        "kv_groups": [
            {
                "num_layers": len(group.layers),
                "kind": group.spec.kind,
                "window": group.spec.window,
                "block_size": group.block_size,
                "page_bytes": group.page_bytes,
            }
            for group in layout.groups
        ],
        "kv_page_bytes": layout.page_bytes,
        "kv_padding": plan.kv_padding,
        "num_blocks": layout.num_usable_blocks,
        "num_blocks_memory": plan.num_blocks_memory,
        "kv_cache_bytes": pool_bytes(layout),
        "swap_space_bytes": layout.num_host_blocks * layout.block_bytes,
        "bandwidth_bytes_per_second": target.device.bandwidth if target.knows_speed else None,
        "is_bound": not target.is_profile,
        "concurrency": [_length_dict(entry) for entry in plan.lengths],
        "speed": [_speed_dict(speed) for speed in report.speeds],
    }


def _length_dict(entry: Concurrency) -> dict[str, Any]:
    return {
        "num_tokens": entry.num_tokens,
        "blocks_per_sequence": entry.blocks_per_sequence,
        "bytes_per_sequence": entry.bytes_per_sequence,
        "max_sequences": entry.max_sequences,
    }


def _speed_dict(speed: Speed) -> dict[str, Any]:
    return {
        "num_tokens": speed.num_tokens,
        "ttft_seconds": speed.ttft_seconds,
        "decoding": [
            {
                "batch_size": entry.batch_size,
                "step_seconds": entry.step_seconds,
                "tokens_per_second": entry.tokens_per_second,
                "limit": entry.limit,
            }
            for entry in speed.decoding
        ],
    }
