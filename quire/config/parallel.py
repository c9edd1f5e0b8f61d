"""Distribution of a model over devices, and its checks."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from quire.config.checks import choice
from quire.config.load import EXPERT_PLACEMENTS
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.speculation import SpeculationConfig
from quire.config.speculation_keys import OPTION as SPECULATION
from quire.errors import ConfigError
from quire.utils.extras import how_to_install

MAX_RANKS = 64
"""Limit of processes on one host."""


EXECUTORS = ("uni", "mp", "ray", "external_launcher")
RAY_PLACEMENTS = ("pack", "strict_spread")


@dataclass(frozen=True)
class ParallelConfig:
    """tp: devices that share each layer, experts and vocabulary (tensor parallelism). pp: groups of them that share the
    layers (pipeline parallelism). dp: replicas behind a router. ep: devices over which whole experts are spread (expert
    parallelism), a multiple of tp. If it spans several replicas, they exchange tokens in every layer and each holds a
    share of the experts. 1: tp shares each expert. cp: groups of tp devices that share the tokens of each sequence
    (context parallelism).

    Raises ConfigError for sizes that do not fit together. `resolve` decides which sizes the engine runs.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}", param=name)
        if self.ep > 1 and (self.ep % self.tp or self.dp % self.replicas_together):
            raise ConfigError(
                f"ep={self.ep} must be a multiple of tp={self.tp}, and take whole groups of the dp={self.dp} replicas",
                param="ep",
            )

    @property
    def devices_per_replica(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def replicas_together(self) -> int:
        """Replicas that share one set of experts."""
        return max(1, self.ep // self.tp)

    @property
    def num_devices(self) -> int:
        return self.devices_per_replica * self.dp

    def __str__(self) -> str:
        rest = "".join(f" {name}={value}" for name, value in (("ep", self.ep), ("cp", self.cp)) if value > 1)
        return f"tp={self.tp} pp={self.pp} dp={self.dp}{rest}"


def check_ranks_available(options: EngineOptions, is_accelerated: bool) -> None:
    """Raise ConfigError for options that exclude several ranks."""
    tp, pp = options.tensor_parallel_size, options.pipeline_parallel_size
    if tp * pp > MAX_RANKS:
        many = f"pipeline_parallel_size times tensor_parallel_size must be at most {MAX_RANKS}, not {tp * pp}"
        message = many if pp > 1 else f"tensor_parallel_size must be at most {MAX_RANKS}, not {tp}"
        raise ConfigError(message, param="tensor_parallel_size" if tp > 1 else "pipeline_parallel_size")
    if is_accelerated:
        raise _refused(options, "runs on a CPU so far: choose device='cpu'", "device")


def choose_executor(options: EngineOptions, parallel: ParallelConfig, is_accelerated: bool) -> str:
    """One of EXECUTORS. Raises ConfigError for one that cannot run these ranks."""
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
    elif asked in ("ray", "external_launcher") and parallel.pp > 1:
        reason = "stages of a pipeline are processes of one host so far: choose 'mp', or tensor_parallel_size"
    elif asked == "external_launcher":
        reason = _why_not_launched(options)
    elif asked == "ray" and find_spec("ray") is None:
        reason = f"Ray is not installed: {how_to_install('ray')}"
    if reason is not None:
        raise ConfigError(f"{name}={asked!r} is not possible: {reason}", param=name)
    return asked


def _why_not_launched(options: EngineOptions) -> str | None:
    """Reason why ranks of an external launcher would plan different steps, or None."""
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
    name = "tensor_parallel_size" if options.tensor_parallel_size > 1 else "pipeline_parallel_size"
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


def expert_placement(options: EngineOptions, model: ModelConfig) -> str | None:
    """Placement of whole experts on the ranks; None: each rank has a slice of every expert. Raises ConfigError for a
    model whose experts cannot be placed so."""
    strategy = choice("expert_placement_strategy", options.expert_placement_strategy, EXPERT_PLACEMENTS)
    if not options.enable_expert_parallel:
        return None
    tp, experts = options.tensor_parallel_size, model.shape.experts
    reason = None
    if experts is None:
        reason = f"{model.architecture} has no experts"
    elif experts.num_experts < tp:
        reason = f"the model's {experts.num_experts} experts are fewer than tensor_parallel_size={tp}"
    elif options.data_parallel_size > 1:
        reason = "the ranks of one replica share experts out so far, and data_parallel_size is more than 1"
    if reason is not None:
        raise ConfigError(f"enable_expert_parallel is not possible: {reason}", param="enable_expert_parallel")
    return strategy if tp > 1 else None


def check_stages_fit(options: EngineOptions, speculation: SpeculationConfig) -> None:
    """Raise ConfigError for features that pipeline stages do not compute yet."""
    if speculation.max_drafts:
        stages = f"pipeline_parallel_size={options.pipeline_parallel_size}"
        raise ConfigError(f"{SPECULATION} does not go together with {stages} yet", param=SPECULATION)


def _refused(options: EngineOptions, reason: str, param: str) -> ConfigError:
    name = "tensor_parallel_size" if options.tensor_parallel_size > 1 else "pipeline_parallel_size"
    return ConfigError(f"{name}={getattr(options, name)} {reason}", param=param)
