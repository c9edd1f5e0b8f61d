"""Configuration of one engine: its slices. Components take the slice they use, not the whole. Fields of slices with an
option's name have its meaning (`EngineOptions`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from quire.config.adapters import NO_ADAPTERS, AdaptersConfig
from quire.config.cache import CacheConfig
from quire.config.device import DeviceConfig
from quire.config.load import LoadConfig
from quire.config.media import MediaConfig
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig, ReplicaSet
from quire.config.scheduler import SchedulerConfig
from quire.config.speculation import SpeculationConfig
from quire.config.structured_outputs import StructuredOutputsConfig
from quire.errors import ConfigError
from quire.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True)
class EngineConfig:
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    load: LoadConfig
    device: DeviceConfig
    seed: int
    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: str = "raw_logprobs"
    output_window: float = 0.0
    step_log: Path | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    executor: str = "uni"
    """One of EXECUTORS, which starts the ranks and carries calls to them."""
    ray_placement: str = "pack"
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    adapters: AdaptersConfig = NO_ADAPTERS
    logits_processors: tuple[str, ...] = ()
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    replicas: ReplicaSet | None = None

    def __post_init__(self) -> None:
        if self.logits_processors and self.model.pooling is not None:
            raise ConfigError("Pooling models do not support custom logits processors.", param="logits_processors")
        if self.logits_processors and self.parallel.pp > 1:
            raise ConfigError(
                "logits_processors is not possible with pipeline_parallel_size > 1", param="logits_processors"
            )

    @property
    def takes_predictions(self) -> bool:
        """True if drafts may come from a chat request's `prediction` text."""
        return bool(self.speculation.max_drafts) and self.speculation.reads_texts
