"""How many devices share a model, and how."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import UserError


@dataclass(frozen=True)
class Layout:
    """tp: devices that share each layer (tensor parallelism; experts and vocabulary are shared out as well). pp: groups
    of them that share the layers (pipeline parallelism). dp: replicas of all that, with a router in front of them.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UserError(f"{name} must be at least 1, not {value}", param=name)

    @property
    def devices_per_replica(self) -> int:
        return self.tp * self.pp

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp} dp={self.dp}"
