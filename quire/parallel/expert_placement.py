"""Distribution of whole experts over ranks: arithmetic, alike on every rank.

An expert may be on several ranks (its copies), at most once on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias

ELSEWHERE = -1
Placement: TypeAlias = tuple[tuple[int, ...], ...]
"""Expert in each slot of each rank."""


class Move(NamedTuple):
    """A slot of rank `to` takes the expert in a slot of rank `source`. is_swap: the source's slot takes the other,
    which no third rank has."""

    source: int
    source_slot: int
    to: int
    to_slot: int
    is_swap: bool

    def applied(self, placement: Placement) -> Placement:
        slots = [list(rank) for rank in placement]
        lost = slots[self.to][self.to_slot]
        slots[self.to][self.to_slot] = slots[self.source][self.source_slot]
        if self.is_swap:
            slots[self.source][self.source_slot] = lost
        return tuple(tuple(rank) for rank in slots)


def first_placement(num_experts: int, num_ranks: int, num_redundant: int, strategy: str) -> Placement:
    """Placement before any load is known: runs of neighbours ("linear") or every n-th expert ("round_robin"), then
    copies of the first experts a rank lacks. First ranks take any remainder."""
    slots = _shares(num_experts + num_redundant, num_ranks)
    placed: list[list[int]] = []
    start = 0
    for rank, length in enumerate(_shares(num_experts, num_ranks)):
        linear = range(start, start + length)
        placed.append(list(linear if strategy == "linear" else range(rank, num_experts, num_ranks)))
        start += length
    copies = [1] * num_experts
    for own, count in zip(placed, slots, strict=True):
        while len(own) < count:
            added = min((number for number in range(num_experts) if number not in own), key=lambda each: copies[each])
            copies[added] += 1
            own.append(added)
    return tuple(tuple(own) for own in placed)


def balanced(load: Sequence[int], placement: Placement) -> Placement:
    """Placement of as many slots for experts with these rows. Further copies go to experts with the most rows a copy;
    copies, busiest first, to the rank with the fewest rows."""
    num_ranks, num_experts = len(placement), len(load)
    copies = [1] * num_experts
    for _ in range(sum(map(len, placement)) - num_experts):
        extended = max(
            (number for number in range(num_experts) if copies[number] < num_ranks),
            key=lambda each: (Fraction(load[each], copies[each]), -each),
        )
        copies[extended] += 1
    shares = [Fraction(rows, count) for rows, count in zip(load, copies, strict=True)]
    ranks: list[set[int]] = [set() for _ in placement]
    rows = [Fraction(0)] * num_ranks
    for number in sorted(range(num_experts), key=lambda each: (-shares[each], each)):
        for _ in range(copies[number]):
            rank = _rank_for(number, ranks, rows, placement)
            ranks[rank].add(number)
            rows[rank] += shares[number]
    return tuple(tuple(sorted(rank)) for rank in _renumbered(ranks, placement))


def busiest(load: Sequence[int], placement: Placement) -> Fraction:
    """Rows of the rank with the most, if an expert's copies share its rows equally: decides whether moving pays."""
    copies = num_copies(placement, len(load))
    return max(sum((Fraction(load[each], copies[each]) for each in own), Fraction(0)) for own in placement)


def num_copies(placement: Placement, num_experts: int) -> list[int]:
    """Number of ranks that hold each expert, [num_experts]."""
    counts = [0] * num_experts
    for own in placement:
        for number in own:
            counts[number] += 1
    return counts


def places_of(placement: Placement, rank: int, num_experts: int) -> list[tuple[int, int, int]]:
    """For each expert its slot on the rank, or ELSEWHERE, its copies' number, and the rank's turn among them."""
    holders: list[list[int]] = [[] for _ in range(num_experts)]
    for holder, own in enumerate(placement):
        for number in own:
            holders[number].append(holder)
    slots = {number: slot for slot, number in enumerate(placement[rank])}
    return [
        (slots.get(number, ELSEWHERE), len(ranks), ranks.index(rank) if rank in ranks else 0)
        for number, ranks in enumerate(holders)
    ]


def moves_between(current: Placement, wanted: Placement) -> list[Move]:
    """Moves, one after the other, after which each rank has the experts of `wanted`, in any order of slots."""
    moves: list[Move] = []
    while True:
        move = _next_copy(current, wanted) or _next_swap(current, wanted)
        if move is None:
            return moves
        moves.append(move)
        current = move.applied(current)


def _next_copy(current: Placement, wanted: Placement) -> Move | None:
    for rank, (own, target) in enumerate(zip(current, wanted, strict=True)):
        missing = sorted(set(target) - set(own))
        for slot, number in enumerate(own):
            if number in target or not any(number in other for at, other in enumerate(current) if at != rank):
                continue
            source = next(at for at, other in enumerate(current) if missing[0] in other)
            return Move(source, current[source].index(missing[0]), rank, slot, is_swap=False)
    return None


def _next_swap(current: Placement, wanted: Placement) -> Move | None:
    for source, (own, target) in enumerate(zip(current, wanted, strict=True)):
        for slot, number in enumerate(own):
            if number in target:
                continue
            to = next(rank for rank, there in enumerate(wanted) if number in there)
            over = next(at for at, each in enumerate(current[to]) if each not in wanted[to])
            return Move(source, slot, to, over, is_swap=True)
    return None


def _shares(count: int, num_ranks: int) -> list[int]:
    each, more = divmod(count, num_ranks)
    return [each + (rank < more) for rank in range(num_ranks)]


def _rank_for(number: int, ranks: list[set[int]], rows: list[Fraction], placement: Placement) -> int:
    free = [rank for rank, own in enumerate(ranks) if len(own) < len(placement[rank])]
    open_ranks = [rank for rank in free if number not in ranks[rank]]
    if open_ranks:
        return min(open_ranks, key=lambda rank: (rows[rank], number not in placement[rank], rank))
    taker = free[0]
    giver = next(rank for rank, own in enumerate(ranks) if number not in own)
    given = min(ranks[giver] - ranks[taker])
    ranks[giver].remove(given)
    ranks[taker].add(given)
    return giver


def _renumbered(ranks: list[set[int]], placement: Placement) -> list[set[int]]:
    pairs = sorted(
        (
            (rank, own)
            for rank in range(len(ranks))
            for own in range(len(ranks))
            if len(ranks[own]) == len(placement[rank])
        ),
        key=lambda pair: (-len(ranks[pair[1]] & set(placement[pair[0]])), pair),
    )
    chosen: dict[int, int] = {}
    for rank, own in pairs:
        if rank not in chosen and own not in chosen.values():
            chosen[rank] = own
    return [ranks[chosen[rank]] for rank in range(len(ranks))]
