"""How many devices share a model, and how."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True)
class ParallelConfig:
    """tp: devices that share each layer (tensor parallelism; experts and vocabulary are shared out as well). pp: groups
    of them that share the layers (pipeline parallelism). dp: replicas of all that, with a router in front of them.
    ep: devices over which whole experts are spread (expert parallelism), a multiple of tp; those of several replicas
    then exchange tokens in every layer and hold a share of the experts each. 1: experts are shared out by tp.
    cp: groups of tp devices that share the tokens of each sequence (context parallelism).

    Raises ConfigError for sizes that do not fit together. Which sizes the engine runs, `resolve` says.
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
