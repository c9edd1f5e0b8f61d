"""`quire simulate`: the engine's scheduler and KV cache on a virtual clock, with step times from a cost model."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.parser import Parser, add_struct_flags, given
from quire.config.options import BUNDLED_MODEL, EngineOptions
from quire.errors import UserError, nearest_name

if TYPE_CHECKING:
    from quire.simulator.drafts import SimulatedDrafts
    from quire.simulator.replica import EngineSettings, MakeCore
    from quire.simulator.scenario import Scenario

SUBCOMMANDS: Mapping[str, str] = {"calibrate": "quire.cli.calibrate"}
SCHEDULING = (
    "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk", "queue_depth",
    "scheduling_policy", "priority_seconds", "kv_cache_memory", "gpu_memory_utilization", "num_blocks_override",
    "enable_prefix_caching", "state_snapshot_interval", "preemption_mode", "swap_space", "enable_lora", "max_loras",
    "max_lora_rank", "max_cpu_loras",
)  # fmt: skip
OTHERS = tuple(name for name in EngineOptions.__struct_fields__ if name not in SCHEDULING)
DEFAULTS = {
    "max_num_seqs": 256, "max_num_batched_tokens": 8192, "queue_depth": 2, "gpu_memory_utilization": 0.9,
}  # fmt: skip
"""Defaults of a GPU; the engine's depend on the device."""
LENGTH_HELP = {
    "kv_cache_memory": "memory of the KV cache on each device, such as 12GB (default: what the weights leave)",
    "gpu_memory_utilization": "share of a device's memory for weights, activations and KV cache",
    "max_model_len": "most tokens of one sequence (default: the model's limit)",
}
DURATIONS = {"run": 600.0, "rates": 300.0, "find_rate": 300.0, "sweep": 60.0}
"""Default duration of a workload in seconds, by question."""
MOST_REQUESTS = {"run": None, "rates": 20_000, "find_rate": 20_000, "sweep": 2_000}
"""Default limit of requests, by question."""
WORKLOAD_ONLY = {
    "duration": None, "num_requests": None, "n": 1, "beam_width": 0, "burstiness": 1.0, "seed": 0, "adapters": 0,
    "adapter_skew": 1.0,
}  # fmt: skip
"""Flags that shape a workload, not a trace: name -> default."""
SLO_PERCENTILE = 99.0
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in SUBCOMMANDS:
        return int(importlib.import_module(SUBCOMMANDS[arguments[0]]).main(arguments[1:]))
    return simulate(build_parser().parse(arguments))


def simulate(namespace: argparse.Namespace, make_core: MakeCore | None = None) -> int:
    """Answer the question that the flags ask. make_core: core of each replica, unless the engine's own."""
    # Imported here, so that --help needs none of it.
    from quire.cli import report, simulate_report

    report.check_writable(namespace.json)
    if namespace.plot is not None:
        simulate_report.prepare_plots(namespace.plot)
    scenario = make_scenario(namespace)
    if make_core is not None:
        scenario = replace(scenario, make_core=make_core)
    what = _question(namespace)
    if what == "sweep":
        return simulate_report.sweep(scenario, namespace)
    if what == "find_rate":
        return simulate_report.find_rate(scenario, namespace)
    if what == "rates":
        return simulate_report.rates(scenario, namespace)
    return simulate_report.run(scenario, namespace)


def build_parser() -> Parser:
    from quire.engine.router import ROUTERS
    from quire.simulator.hardware import profiles
    from quire.simulator.shape import built_in
    from quire.simulator.workloads import WORKLOADS

    parser = Parser(
        prog="quire simulate",
        usage="quire simulate (TRACE | --workload NAME --rate R) --model M --gpu NAME [options]",
        description=(
            "Serve a trace by the engine's own scheduler and KV cache on simulated devices, and print latencies,\n"
            "throughput, batch size, KV use and preemptions. `quire simulate calibrate` fits a device's factors."
        ),
    )
    group = parser.add_argument_group("what arrives")
    group.add_argument("trace", metavar="TRACE", nargs="?", type=Path, help=".jsonl or .csv: arrival, input_tokens, output_tokens, optionally prefix_group, prefix_tokens, n, beam_width, priority, images, adapter")  # fmt: skip  # noqa: E501
    group.add_argument("--workload", metavar="NAME", choices=list(WORKLOADS), help=f"instead of a trace: {', '.join(WORKLOADS)}")  # fmt: skip  # noqa: E501
    group.add_argument("--rate", metavar="R", type=float, help="requests per second (inf: all at once); a trace is stretched to it; where --find-rate begins (1)")  # fmt: skip  # noqa: E501
    group.add_argument("--burstiness", metavar="X", type=float, default=1.0, help="1 is Poisson, below 1 burstier (1)")
    group.add_argument("--duration", metavar="S", type=float, help="seconds of arrivals of a workload (default: 600; to compare rates 300; in a sweep 60)")  # fmt: skip  # noqa: E501
    group.add_argument("--num-requests", metavar="N", type=int, help="requests of a workload, instead or besides")
    group.add_argument("--n", metavar="N", type=int, default=1, help="sequences of each request of a workload (1)")
    group.add_argument("--beam-width", metavar="N", type=int, default=0, help="beams of each request of a workload")
    group.add_argument("--adapters", metavar="N", type=int, default=0, help="adapters of which each request of a workload has one (0)")  # fmt: skip  # noqa: E501
    group.add_argument("--adapter-skew", metavar="S", type=float, default=1.0, help="the k-th adapter's share is proportional to k ** -S (1)")  # fmt: skip  # noqa: E501
    group.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of the workload, and of the device's jitter (0)"
    )
    group = parser.add_argument_group("what serves")
    group.add_argument("--model", metavar="M", required=True, help=f"a config.json, its directory, or one of {', '.join(built_in())}")  # fmt: skip  # noqa: E501
    group.add_argument("--gpu", metavar="NAME", default="h100", help=f"a profile's JSON file, or one of {', '.join(profiles())} (h100)")  # fmt: skip  # noqa: E501
    for name, text in (("tp", "devices that share each layer"), ("pp", "pipeline stages"), ("dp", "replicas"), ("ep", "devices over which experts are spread"), ("dcp", "devices of tp with the same keys that share a context's tokens"), ("pcp", "groups of devices that share prompts")):  # fmt: skip  # noqa: E501
        group.add_argument(f"--{name}", metavar="N", type=int, default=1, help=f"{text} (1)")
    group.add_argument("--router", metavar="NAME", default="round-robin", help=f"of the replicas: {', '.join(ROUTERS)} (round-robin)")  # fmt: skip  # noqa: E501
    group.add_argument("--adapter-load", metavar="T", help="time to load an adapter, such as 80ms (a copy over PCIe)")
    group.add_argument("--draft-acceptance", metavar="P,P", help="speculation: chance that a draft is right if those before it are, by place; the last one holds behind it, too")  # fmt: skip  # noqa: E501
    group.add_argument("--draft-tokens", metavar="N", type=int, help="most drafts of a sequence in a step (4)")
    group.add_argument("--draft-time", metavar="T", help="time that a step's drafts take, such as 1ms (0)")
    group.add_argument("--dtype", metavar="NAME", help="of the weights (auto: as stored)")
    group.add_argument("--kv-cache-dtype", metavar="NAME", help="of keys and values (auto: what is computed in)")
    _question_flags(parser)
    add_struct_flags(parser, EngineOptions, LENGTH_HELP, title="engine options", skip=OTHERS, defaults=DEFAULTS)
    return parser


def _question_flags(parser: Parser) -> None:
    group = parser.add_argument_group("what is asked")
    group.add_argument("--rates", metavar="R,R", help="serve at each of these rates")
    group.add_argument("--find-rate", action="store_true", help="find the highest rate that keeps the objectives")
    group.add_argument("--slo", metavar="X=T,X=T", help="objectives, such as ttft=1s,tpot=50ms (also latency, normalized_latency)")  # fmt: skip  # noqa: E501
    group.add_argument("--slo-percentile", metavar="P", type=float, default=SLO_PERCENTILE, help="of the requests that must keep them (99)")  # fmt: skip  # noqa: E501
    group.add_argument("--sweep", action="store_true", help="compare the layouts of --gpus devices at rising rates")
    group.add_argument("--gpus", metavar="N", type=int, help="devices of a sweep (default: tp * pp * dp)")
    group.add_argument("--processes", metavar="N", type=int, default=1, help="for replicas, rates and layouts side by side (1)")  # fmt: skip  # noqa: E501
    group.add_argument("--json", metavar="FILE", type=Path, help="write the results there, too")
    group.add_argument("--plot", metavar="DIR", type=Path, help="write PNG plots there (needs matplotlib)")


def make_scenario(namespace: argparse.Namespace) -> Scenario:
    """Scenario of the flags. Raises UserError for contradictions."""
    from quire.config.parallel import ParallelConfig
    from quire.simulator.cost import CostModel, Precision
    from quire.simulator.hardware import find
    from quire.simulator.scenario import Scenario
    from quire.simulator.shape import find_shape, find_vision

    shape = find_shape(namespace.model)
    sizes = {name: getattr(namespace, name) for name in ("tp", "pp", "dp", "ep", "dcp", "pcp")}
    layout = ParallelConfig(**sizes)
    stored, kept = (None if name == "auto" else name for name in (namespace.dtype, namespace.kv_cache_dtype))
    precision = Precision.of(shape, stored, kept)
    if not 0 < namespace.slo_percentile <= 100:
        raise UserError(f"--slo-percentile must be in (0, 100], not {namespace.slo_percentile:g}")
    if namespace.processes < 1:
        raise UserError(f"--processes must be at least 1, not {namespace.processes}", param="processes")
    settings = engine_settings(given(namespace, EngineOptions, skip=OTHERS))
    if settings.adapters.is_on and (namespace.pp > 1 or namespace.sweep):
        raise UserError("--enable-lora is not possible with --pp or --sweep yet", param="enable_lora")
    if namespace.adapters and not settings.adapters.is_on:
        raise UserError("--adapters needs --enable-lora", param="enable_lora")
    given_load = namespace.adapter_load
    load = None if given_load is None else _seconds(given_load, given_load, "adapter-load")
    objectives = parse_objectives(namespace.slo)
    if namespace.beam_width and "tpot" in objectives:
        raise UserError("--slo tpot is not for beams, whose tokens all come at the end: take latency", param="slo")
    return Scenario(
        source=_source(namespace),
        cost=CostModel(shape, find(namespace.gpu), layout, precision, vision=find_vision(namespace.model)),
        settings=replace(settings, seed=namespace.seed, adapter_load_seconds=load, drafts=_drafts(namespace)),
        router=namespace.router,
        objectives=objectives,
        percentile=namespace.slo_percentile,
    )


def _drafts(namespace: argparse.Namespace) -> SimulatedDrafts:
    from quire.config.speculation import MAX_DRAFTS
    from quire.simulator.drafts import DRAFT_TOKENS, NO_DRAFTS, SimulatedDrafts

    given, number, time = namespace.draft_acceptance, namespace.draft_tokens, namespace.draft_time
    if given is None:
        if number is not None or time is not None:
            raise UserError("--draft-tokens and --draft-time need --draft-acceptance", param="draft_acceptance")
        return NO_DRAFTS
    try:
        chances = tuple(map(float, given.split(",")))
    except ValueError:
        chances = ()
    if not chances or not all(0 <= chance <= 1 for chance in chances):
        raise UserError(f"--draft-acceptance must be numbers from 0 to 1, not {given!r}", param="draft_acceptance")
    number = DRAFT_TOKENS if number is None else number
    if not 1 <= number <= MAX_DRAFTS:
        raise UserError(f"--draft-tokens must be from 1 to {MAX_DRAFTS}, not {number}", param="draft_tokens")
    if namespace.pp > 1:
        raise UserError("--draft-acceptance is not possible with --pp", param="draft_acceptance")
    return SimulatedDrafts(number, chances, 0.0 if time is None else _seconds(time, time, "draft-time"))


def engine_settings(chosen: Mapping[str, Any], usual: Mapping[str, Any] = DEFAULTS) -> EngineSettings:
    """Scheduling options, checked and completed by the engine's rules (with the bundled model). usual: defaults. Raises
    ConfigError."""
    from quire.config.resolve import batch_limits, resolve
    from quire.simulator.replica import SWAP_SPACE, EngineSettings

    values = {**usual, **chosen}
    max_model_len = values.pop("max_model_len", None)
    if max_model_len is not None and max_model_len < 2:
        raise UserError(f"max_model_len must be at least 2, not {max_model_len}", param="max_model_len")
    values["max_num_seqs"], values["max_num_batched_tokens"] = batch_limits(
        EngineOptions.from_keywords(dict(chosen)), usual["max_num_seqs"], usual["max_num_batched_tokens"]
    )
    config = resolve(
        EngineOptions.from_keywords({"model": BUNDLED_MODEL, "load_format": "dummy", "device": "cpu", **values})
    )
    cache, scheduler = config.cache, config.scheduler
    return EngineSettings(
        max_model_len=max_model_len,
        block_size=cache.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_prefill_chunk=scheduler.max_prefill_chunk,
        queue_depth=scheduler.queue_depth,
        scheduling_policy=scheduler.scheduling_policy,
        priority_seconds=scheduler.priority_seconds,
        kv_cache_memory=cache.memory,
        gpu_memory_utilization=cache.memory_utilization,
        num_blocks_override=cache.num_blocks_override,
        enable_prefix_caching=cache.enable_prefix_caching,
        state_snapshot_interval=cache.state_snapshot_interval,
        preemption_mode=scheduler.preemption_mode,
        swap_space=cache.swap_space or SWAP_SPACE,
        adapters=config.adapters,
    )


def _question(namespace: argparse.Namespace) -> str:
    """Question: run, rates, find_rate or sweep. Raises UserError for conflicting flags."""
    asked = [name for name in ("rates", "find_rate", "sweep") if getattr(namespace, name)]
    if len(asked) > 1:
        raise UserError(f"--{asked[0].replace('_', '-')} and --{asked[1].replace('_', '-')} are two questions: ask one")
    question = asked[0] if asked else "run"
    if namespace.gpus is not None and question != "sweep":
        raise UserError("--gpus is for --sweep: a run has tp * pp * dp of them", param="gpus")
    if namespace.ep > 1 and question == "sweep":
        raise UserError("--sweep tries what experts can be spread over: leave --ep out", param="ep")
    if namespace.dcp > 1 and question == "sweep":
        raise UserError("--sweep tries what a context can be shared by: leave --dcp out", param="dcp")
    if namespace.pcp > 1 and question == "sweep":
        raise UserError("--sweep tries what prompts can be shared by: leave --pcp out", param="pcp")
    if namespace.slo is None and namespace.slo_percentile != SLO_PERCENTILE:
        raise UserError("--slo-percentile needs objectives: --slo ttft=1s,tpot=50ms", param="slo_percentile")
    if question == "find_rate" and namespace.slo is None:
        raise UserError("--find-rate needs objectives: --slo ttft=1s,tpot=50ms", param="slo")
    if question in ("rates", "sweep") and namespace.rate is not None:
        raise UserError(f"--{question} sets the rates: leave --rate out", param="rate")
    return question


def _source(namespace: argparse.Namespace) -> Any:
    from quire.simulator.scenario import SyntheticSource, TraceSource
    from quire.simulator.workloads import Arrivals

    question = _question(namespace)
    if (namespace.trace is None) == (namespace.workload is None):
        raise UserError("give a TRACE or a --workload", param="trace")
    if namespace.trace is not None:
        for name, default in WORKLOAD_ONLY.items():
            if getattr(namespace, name) != default:
                raise UserError(f"--{name.replace('_', '-')} shapes a workload: not with a TRACE", param=name)
        if namespace.rate is not None and not 0 < namespace.rate < math.inf:
            raise UserError(f"--rate of a trace must be above 0 and finite, not {namespace.rate:g}", param="rate")
        return TraceSource(namespace.trace)
    if question == "run" and namespace.rate is None:
        raise UserError("a workload needs --rate (or --rates, --find-rate, --sweep)", param="rate")
    duration = namespace.duration
    num_requests = namespace.num_requests
    if duration is None and num_requests is None:
        duration, num_requests = DURATIONS[question], MOST_REQUESTS[question]
    if namespace.n < 1 or namespace.beam_width < 0 or (namespace.beam_width and namespace.n > 1):
        raise UserError("--n must be at least 1, --beam-width at least 0, and one of them only", param="n")
    arrivals = Arrivals(
        rate=1.0 if namespace.rate is None else namespace.rate,
        burstiness=namespace.burstiness,
        duration=duration,
        num_requests=num_requests,
    )
    if namespace.adapters < 0 or namespace.adapter_skew < 0:
        raise UserError("--adapters and --adapter-skew must be at least 0", param="adapters")
    return SyntheticSource(
        namespace.workload,
        arrivals,
        namespace.seed,
        namespace.n,
        namespace.beam_width,
        namespace.adapters,
        namespace.adapter_skew,
    )


def parse_objectives(text: str | None) -> dict[str, float]:
    """Parse `ttft=1s,tpot=50ms` to seconds by name of LATENCIES."""
    from quire.simulator.metrics import LATENCIES

    found: dict[str, float] = {}
    for term in text.split(",") if text else []:
        name, _, value = term.partition("=")
        if name not in LATENCIES:
            known = ", ".join(LATENCIES)
            raise UserError(f"--slo knows {known}, not {name!r}{nearest_name(name, LATENCIES)}", param="slo")
        found[name] = _seconds(value, term)
    return found


def _seconds(text: str, term: str, flag: str = "slo") -> float:
    for unit in sorted(UNITS, key=len, reverse=True):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * UNITS[unit]
            except ValueError:
                break
            if 0 < value < math.inf:
                return value
            break
    raise UserError(f"--{flag} {term!r}: expected a time with its unit, such as 1s or 50ms", param=flag)
