from __future__ import annotations

from typing import Protocol


class StepCount(Protocol):
    """Count of an engine's steps. The n-th steps of all replicas that share experts (`are_common`) run together: one
    that `is_behind` joins those of others, and none steps while all are idle."""

    are_common: bool

    @property
    def may_begin(self) -> bool:
        """True once all replicas have arrived."""
        ...

    @property
    def is_behind(self) -> bool: ...

    def arrive(self) -> None:
        """Promise to join the others' steps from now on."""
        ...

    def count_step(self) -> None: ...

    def close(self) -> None: ...


class OwnStepCount:
    are_common = False
    may_begin = True
    is_behind = False

    def arrive(self) -> None: ...

    def count_step(self) -> None: ...

    def close(self) -> None: ...


OWN_STEPS: StepCount = OwnStepCount()
