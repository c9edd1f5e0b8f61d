"""Ranks and their groups: arithmetic, without processes.

Ranks are numbered with tensor parallelism fastest, then prompt sharing, pipeline and data parallelism: a replica is a
run of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.config.parallel import ParallelConfig

KINDS = ("tp", "dcp", "pcp", "pp", "dp", "ep")


@dataclass(frozen=True)
class Place:
    """Rank's coordinates in the mesh, each from 0."""

    dp: int
    pp: int
    tp: int
    pcp: int = 0


@dataclass(frozen=True)
class Mesh:
    """Arrangement of one model's ranks, 0 <= rank < num_ranks, in groups."""

    sizes: ParallelConfig

    @property
    def num_ranks(self) -> int:
        return self.sizes.num_devices

    def place(self, rank: int) -> Place:
        rest, tp = divmod(rank, self.sizes.tp)
        rest, pcp = divmod(rest, self.sizes.pcp)
        dp, pp = divmod(rest, self.sizes.pp)
        return Place(dp, pp, tp, pcp)

    def rank(self, place: Place) -> int:
        sizes = self.sizes
        return ((place.dp * sizes.pp + place.pp) * sizes.pcp + place.pcp) * sizes.tp + place.tp

    def groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        """Groups of a kind of `KINDS`, ascending. Every rank is in exactly one. A group of "tp", "pcp", "pp" or "dp"
        has that coordinate from 0 on and shares the others. A group of "dcp" has `dcp` neighbours of a group of "tp". A
        group of "ep" has `ep` ranks of one stage: the tp ranks of neighbouring replicas."""
        return tuple(sorted(self._groups(kind)))

    def group_of(self, rank: int, kind: str) -> tuple[int, ...]:
        return next(group for group in self.groups(kind) if rank in group)

    def _groups(self, kind: str) -> Iterator[tuple[int, ...]]:
        shared: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            place = self.place(rank)
            if kind == "ep":
                key: tuple[int, ...] = (place.pp,)
            else:
                varying = "tp" if kind == "dcp" else kind
                key = tuple(value for name, value in vars(place).items() if name != varying)
            shared.setdefault(key, []).append(rank)
        for ranks in shared.values():
            size = {"ep": self.sizes.ep, "dcp": self.sizes.dcp}.get(kind, len(ranks))
            yield from (tuple(ranks[start : start + size]) for start in range(0, len(ranks), size))
