from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from math import prod

from quire.config.checks import choice, converted, positive
from quire.config.load import EXPERT_PLACEMENTS, ExpertBalance
from quire.config.model import ModelConfig
from quire.config.model_shape import ModelShape
from quire.config.options import EngineOptions
from quire.config.speculation import SpeculationConfig
from quire.config.speculation_keys import OPTION as SPECULATION
from quire.errors import ConfigError
from quire.utils.extras import how_to_install

MAX_RANKS = 64
"""Limit of processes on one host."""


RANK_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
"""Options whose product is the number of an engine's ranks."""
EXECUTORS = ("uni", "mp", "ray", "external_launcher")
RAY_PLACEMENTS = ("pack", "strict_spread")
EXPANDED = "expanded latents are those of whole prompts: choose mla_prompt='absorbed'"


@dataclass(frozen=True)
class ParallelConfig:
    """Layout of a model over devices; sizes of groups. tp: devices that share each layer (tensor parallelism). pp:
    stages, groups that share out the layers. dp: replicas behind a router. ep: devices over which whole experts are
    spread, a multiple of tp; if it spans several replicas, they exchange tokens in every layer. 1: tp shares each
    expert. dcp: neighbours among the tp devices that hold the same key head and share each sequence's tokens (decode
    context parallelism). interleave: successive tokens that one of them keeps. redundant_experts: further copies of a
    layer's experts, which move by load (None: experts stay). pcp: groups of tp devices that share the tokens of
    prompts, each with all keys (prefill context parallelism). Raises ConfigError for sizes that do not fit."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    dcp: int = 1
    interleave: int = 1
    redundant_experts: int | None = None
    pcp: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "redundant_experts" and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}", param=name)
        if self.ep > 1 and (self.ep % self.tp or self.dp % self.replicas_together):
            raise ConfigError(
                f"ep={self.ep} must be a multiple of tp={self.tp}, and take whole groups of the dp={self.dp} replicas",
                param="ep",
            )
        if self.tp % self.dcp:
            name = "decode_context_parallel_size"
            message = f"{name}={self.dcp} must divide tensor_parallel_size={self.tp}: it takes ranks of these"
            raise ConfigError(message, param=name)

    @property
    def devices_per_replica(self) -> int:
        return self.tp * self.pp * self.pcp

    @property
    def replicas_together(self) -> int:
        """Replicas that share one set of experts."""
        return max(1, self.ep // self.tp)

    @property
    def num_devices(self) -> int:
        return self.devices_per_replica * self.dp

    def __str__(self) -> str:
        copies = (self.redundant_experts or 0) + 1
        others = ("ep", self.ep), ("dcp", self.dcp), ("pcp", self.pcp), ("redundant_experts", copies)
        rest = "".join(f" {name}={value}" for name, value in others if value > 1)
        return f"tp={self.tp} pp={self.pp} dp={self.dp}{rest}"


@dataclass(frozen=True)
class ReplicaSet:
    """Replicas that share experts. memory: path of a file that all map. bells: paths of pipes that wake engines."""

    number: int
    memory: str
    bells: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.bells)


def share_experts(options: EngineOptions) -> bool:
    return options.enable_expert_parallel and options.data_parallel_size > 1


def parallel_config(options: EngineOptions) -> ParallelConfig:
    """Layout of one replica's ranks by the options. Raises ConfigError for sizes that do not fit."""
    for kind in ("tensor", "pipeline", "data", "decode_context", "prefill_context"):
        positive(f"{kind}_parallel_size", getattr(options, f"{kind}_parallel_size"))
    run = positive("cp_kv_cache_interleave_size", options.cp_kv_cache_interleave_size)
    tp, dcp = options.tensor_parallel_size, options.decode_context_parallel_size
    ep = tp if options.enable_expert_parallel else 1
    balance = read_balance(options)
    return ParallelConfig(
        tp,
        options.pipeline_parallel_size,
        ep=ep,
        dcp=dcp,
        interleave=run or 1,
        redundant_experts=None if balance is None else balance.num_redundant_experts,
        pcp=options.prefill_context_parallel_size,
    )


def check_ranks_available(options: EngineOptions, is_accelerated: bool) -> None:
    """Raise ConfigError for options that exclude several ranks."""
    sizes = {name: getattr(options, name) for name in RANK_SIZES if getattr(options, name) > 1}
    count = prod(sizes.values())
    if count > MAX_RANKS:
        message = f"{' times '.join(sizes)} must be at most {MAX_RANKS}, not {count}"
        raise ConfigError(message, param=_size_of_ranks(options))
    if is_accelerated:
        raise _refused(options, "runs on a CPU so far: choose device='cpu'", "device")


def choose_executor(options: EngineOptions, parallel: ParallelConfig, is_accelerated: bool) -> str:
    """Executor's name, one of EXECUTORS. Raises ConfigError for one that cannot run these ranks."""
    name = "distributed_executor_backend"
    asked = choice(name, options.distributed_executor_backend, ("auto", *EXECUTORS))
    count = parallel.num_devices
    if asked == "auto":
        return "mp" if count > 1 else "uni"
    reason = None
    if asked == "uni" and count > 1:
        reason = f"one process is one rank, and there are {count}: choose 'mp' or 'ray'"
    elif asked != "uni" and is_accelerated:
        reason = "ranks run on a CPU so far: choose device='cpu'"
    elif asked == "external_launcher":
        reason = _why_not_launched(options)
    elif asked == "ray" and find_spec("ray") is None:
        reason = f"Ray is not installed: {how_to_install('ray')}"
    if reason is not None:
        raise ConfigError(f"{name}={asked!r} is not possible: {reason}", param=name)
    return asked


def _why_not_launched(options: EngineOptions) -> str | None:
    if options.pipeline_parallel_size > 1 and (options.expert_counts or options.enable_eplb):
        return "an engine counts the rows of its own stage's experts: leave expert_counts and enable_eplb out"
    for name, is_on in (("kv_offload_dir", options.kv_offload_dir is not None), ("enable_lora", options.enable_lora)):
        if is_on:
            return f"{name} moves data beside the steps, whose ends differ from rank to rank"
    return None


def check_replicas(options: EngineOptions, is_accelerated: bool) -> None:
    """Raise ConfigError for options that exclude data_parallel_size > 1."""
    count = options.data_parallel_size
    if count > MAX_RANKS:
        raise ConfigError(f"data_parallel_size must be at most {MAX_RANKS}, not {count}", param="data_parallel_size")
    if count > 1 and is_accelerated:
        raise ConfigError(
            f"data_parallel_size={count} runs on a CPU so far: start one server a device, behind a load balancer",
            param="data_parallel_size",
        )


def check_ranks_fit(options: EngineOptions, model: ModelConfig) -> None:
    """Raise ConfigError for models that the ranks cannot share."""
    name = _size_of_ranks(options)
    if model.impl != "quire":
        reason = (
            f"does not share out {model.architecture}, which runs through Transformers: choose a family of Quire's own"
        )
        raise _refused(options, reason, name)
    pp = options.pipeline_parallel_size
    if pp > model.num_layers:
        message = f"pipeline_parallel_size={pp} is more than the model's {model.num_layers} layers"
        raise ConfigError(message, param="pipeline_parallel_size")
    tp = options.tensor_parallel_size
    if tp == 1:
        return
    if model.num_heads % tp:
        raise _refused(options, f"does not divide the model's {model.num_heads} heads", name)
    fewer, more = sorted((tp, model.num_kv_heads))
    if more % fewer:
        reason = f"neither divides the model's {model.num_kv_heads} key and value heads nor is a multiple of them"
        raise _refused(options, reason, name)


def check_tokens_dealt(options: EngineOptions, model: ModelConfig, backend: str) -> None:
    """Raise ConfigError for a model whose tokens the ranks cannot share."""
    count, tp = options.decode_context_parallel_size, options.tensor_parallel_size
    run = options.cp_kv_cache_interleave_size
    if options.block_size % run:
        message = f"cp_kv_cache_interleave_size={run} must divide block_size={options.block_size}"
        raise ConfigError(message, param="cp_kv_cache_interleave_size")
    if count == 1:
        return
    reason = why_not_dealt(model.shape, tp, count)
    if backend != "native":
        reason = f"attention_backend={backend!r} attends to the tokens of one rank"
    elif model.is_encoder:
        reason = f"{model.architecture} keeps no tokens"
    elif model.expands_prompts:
        reason = EXPANDED
    if reason is not None:
        name = "decode_context_parallel_size"
        raise ConfigError(f"{name}={count} is not possible: {reason}", param=name)


def why_not_dealt(shape: ModelShape, tp: int, count: int) -> str | None:
    """Reason why `count` of `tp` ranks cannot keep a part of each sequence's tokens each; None: they can."""
    kept = [layer.attention for layer in shape.layers if layer.attention.kind != "none"]
    others = {each.kind for each in kept} - {"full", "latent"}
    if others:
        other = ", ".join(sorted(others))
        return f"tokens are dealt in layers of full attention and latents alone, and {shape.name} has others ({other})"
    if any(each.index_top for each in kept):
        return f"the indexer of {shape.name} chooses among all keys of a token, which no rank would have"
    most = min((tp // (1 if each.kind == "latent" else each.num_kv_heads) for each in kept), default=0)
    if most < 2:
        heads = max((each.num_kv_heads for each in kept), default=0)
        return f"tensor_parallel_size={tp} leaves no key head on two ranks: {shape.name} has {heads}"
    if most % count:
        sizes = " or ".join(str(size) for size in range(2, most + 1) if most % size == 0)
        return f"{most} of {tp} ranks hold the same key head, which {count} does not divide: choose {sizes}"
    return None


def expert_placement(options: EngineOptions, model: ModelConfig) -> str | None:
    """Placement of whole experts; None: each rank has a slice of every expert. Raises ConfigError for a model whose
    experts cannot be placed so."""
    strategy = choice("expert_placement_strategy", options.expert_placement_strategy, EXPERT_PLACEMENTS)
    if not options.enable_expert_parallel:
        return None
    tp, dp, experts = options.tensor_parallel_size, options.data_parallel_size, model.shape.experts
    reason = None
    if experts is None:
        reason = f"{model.architecture} has no experts"
    elif experts.num_experts < tp * dp:
        sizes = f"tensor_parallel_size={tp}" + (f" times data_parallel_size={dp}" if dp > 1 else "")
        reason = f"the model's {experts.num_experts} experts are fewer than {sizes}"
    if reason is not None:
        raise ConfigError(f"enable_expert_parallel is not possible: {reason}", param="enable_expert_parallel")
    return strategy if tp * dp > 1 else None


def check_experts_shared(
    options: EngineOptions, model: ModelConfig, speculation: SpeculationConfig, backend: str
) -> None:
    """Raise ConfigError for what replicas that share experts do not compute yet."""
    if not share_experts(options):
        return
    asked = options.distributed_executor_backend
    refused = (
        (backend != "native", f"attention_backend={backend!r} computes with the experts of one replica"),
        (asked not in ("auto", "uni", "mp"), f"distributed_executor_backend={asked!r}: replicas share a host's memory"),
        (options.prefill_context_parallel_size > 1, "prefill_context_parallel_size deals out a replica's own rows"),
        (options.enable_eplb, "enable_eplb moves experts among the ranks of one replica"),
        (options.enable_lora, "enable_lora: rows of other replicas come without their adapters"),
        (
            speculation.has_layers or options.load_draft_head,
            f"{SPECULATION}: a model that makes drafts has other steps",
        ),
    )
    reason = next((reason for is_on, reason in refused if is_on), None)
    if reason is not None:
        sizes = f"enable_expert_parallel with data_parallel_size={options.data_parallel_size}"
        raise ConfigError(f"{sizes} is not possible: {reason}", param="enable_expert_parallel")


def read_balance(options: EngineOptions) -> ExpertBalance | None:
    """Options `enable_eplb` and `eplb_config`; None: experts stay. Raises ConfigError for a wrong name or value."""
    name, given = "eplb_config", options.eplb_config or {}
    balance = converted(name, given, ExpertBalance, ExpertBalance.__dataclass_fields__)
    for field in ("window_size", "step_interval"):
        positive(f"{name}.{field}", getattr(balance, field))
    if given and not options.enable_eplb:
        raise ConfigError(f"{name} has no effect without enable_eplb", param=name)
    return balance if options.enable_eplb else None


def expert_balance(options: EngineOptions, model: ModelConfig) -> ExpertBalance | None:
    """Balancing of experts by `--enable-eplb` (see `read_balance`). Raises ConfigError for a model, ranks or copies
    that do not go together."""
    balance, tp, experts = read_balance(options), options.tensor_parallel_size, model.shape.experts
    if balance is None:
        return None
    if experts is None or not options.enable_expert_parallel or tp == 1:
        needs = "enable_expert_parallel and a tensor_parallel_size of at least 2"
        raise ConfigError(f"enable_eplb needs whole experts on several ranks: {needs}", param="enable_eplb")
    reason = why_no_copies(balance.num_redundant_experts, experts.num_experts, tp)
    if reason is not None:
        raise ConfigError(f"eplb_config.num_redundant_experts {reason}", param="eplb_config")
    return balance


def why_no_copies(redundant: int, num_experts: int, num_ranks: int) -> str | None:
    """Reason why ranks cannot hold as many copies of a layer's experts; None: they can."""
    most = num_experts * (num_ranks - 1)
    if 0 <= redundant <= most:
        return None
    each = f"each of {num_ranks} ranks holds each of {num_experts} experts once at most"
    return f"must be from 0 to {most}, not {redundant}: {each}"


def check_stages_fit(options: EngineOptions, speculation: SpeculationConfig) -> None:
    """Raise ConfigError for features that pipeline stages do not compute yet."""
    if speculation.has_layers and speculation.method != "draft_model":
        stages = f"pipeline_parallel_size={options.pipeline_parallel_size}"
        message = f"{SPECULATION}.method {speculation.method!r} does not go together with {stages} yet"
        raise ConfigError(message, param=SPECULATION)


def check_prompts_dealt(
    options: EngineOptions, model: ModelConfig, speculation: SpeculationConfig, backend: str
) -> None:
    """Raise ConfigError for what ranks that share prompts do not compute yet."""
    count = options.prefill_context_parallel_size
    if count == 1:
        return
    refused = (
        (backend != "native", f"attention_backend={backend!r} attends to the rows of one rank"),
        (model.expands_prompts, EXPANDED),
        (model.is_encoder, f"{model.architecture} attends in both directions"),
        (options.expert_counts, "expert_counts needs the rows of all tokens on one rank"),
        (options.enable_eplb, "enable_eplb needs the rows of all tokens on one rank"),
        (model.vision is not None and not options.language_model_only, "images are put into the rows of one rank"),
    )
    reason = next((reason for is_on, reason in refused if is_on), None) or why_prompts_not_dealt(model.shape)
    if reason is not None:
        name = "prefill_context_parallel_size"
        raise ConfigError(f"{name}={count} is not possible: {reason}", param=name)


def why_prompts_not_dealt(shape: ModelShape) -> str | None:
    """Reason why ranks cannot compute a part of a prompt's tokens each; None: they can."""
    if any(layer.attention.kind == "state" for layer in shape.layers):
        return f"a rank's states would wait for those of the tokens before, and {shape.name} has layers with states"
    return None


def _size_of_ranks(options: EngineOptions) -> str:
    return next((name for name in RANK_SIZES if getattr(options, name) > 1), RANK_SIZES[0])


def _refused(options: EngineOptions, reason: str, param: str) -> ConfigError:
    name = _size_of_ranks(options)
    return ConfigError(f"{name}={getattr(options, name)} {reason}", param=param)
