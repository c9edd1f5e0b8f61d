"""The KV manager over groups of every kind, driven at random against an independent model of the worker.

The model keeps what each physical block holds, applies plans late (up to `depth` of them in flight) and in order, and
reads what a model's layers would read. After every rule it counts owners itself and compares.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from quire.kv_cache.block_table import BlockAllocation, BlockTable
from quire.kv_cache.coordinator import Coordinator
from quire.kv_cache.layout import NULL_BLOCK, KVCacheLayout, KVGroup
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.spec import AttentionSpec, ChunkedSpec, LatentSpec, LayerSpec, SlidingWindowSpec, StateSpec
from tests.machines import run_machine

FULL = AttentionSpec(num_kv_heads=4, key_dim=8, value_dim=8, dtype_bytes=2)
NARROW = AttentionSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype_bytes=2)
WINDOW = SlidingWindowSpec(num_kv_heads=4, key_dim=8, value_dim=8, dtype_bytes=2, window=40)
CHUNK = ChunkedSpec(num_kv_heads=4, key_dim=8, value_dim=8, dtype_bytes=2, window=56)
STATE = StateSpec(num_bytes=FULL.page_bytes(16))
LATENT = LatentSpec(width=32, dtype_bytes=2)
THIRD = LatentSpec(width=48, dtype_bytes=2)

LAYOUTS: dict[str, tuple[tuple[LayerSpec, int], ...]] = {
    "(16)": ((FULL, 16),),
    "(16, 64)": ((FULL, 16), (NARROW, 64)),
    "(16, window)": ((FULL, 16), (WINDOW, 16)),
    "(16, chunk)": ((FULL, 16), (CHUNK, 16)),
    "(16, state)": ((FULL, 16), (STATE, 32)),
    "(state)": ((STATE, 32),),
    "(64, state)": ((FULL, 64), (STATE, 64)),
    "(latent, full)": ((LATENT, 32), (FULL, 16)),
    "(64, 48)": ((LATENT, 48), (THIRD, 32)),
    "(latent, full, window, state)": ((LATENT, 32), (FULL, 16), (WINDOW, 16), (STATE, 32)),
}
"""Groups, each with the tokens of its blocks."""

MAX_CHUNK = 70
MAX_LENGTH = 280
FAMILIES = [[(31 * family + 7 * i) % 50 for i in range(300)] for family in range(2)]


@dataclass(eq=False)
class Lane:
    """One sequence: what the scheduler and the worker know of it."""

    token_ids: list[int]
    salt: str
    blocks: BlockTable
    num_planned: int
    num_computed: int
    rows: list[list[int]] | None = None
    """The worker's tables; None until the next plan brings them whole."""
    contents: list[int] = field(default_factory=list)
    """contents[i]: stands for the tokens up to position i, in this tenant."""
    num_in_flight: int = 0

    def content(self, num_tokens: int) -> int:
        last = self.contents[-1] if self.contents else hash(self.salt)
        for token in self.token_ids[len(self.contents) : num_tokens]:
            last = hash((last, token))
            self.contents.append(last)
        return self.contents[num_tokens - 1] if num_tokens else hash(self.salt)


@dataclass
class Plan:
    lane: Lane
    allocation: BlockAllocation
    tables: list[list[int]] | None
    start: int
    end: int
    is_alive: bool = True


class GroupMachine(RuleBasedStateMachine):
    name = ""
    totals: ClassVar[Counter[str]] = Counter()
    """What happened in all machines of this layout."""

    @initialize(
        percent=st.integers(105, 180), depth=st.sampled_from([1, 1, 2]), caching=st.sampled_from([True] * 4 + [False])
    )
    def build(self, percent: int, depth: int, caching: bool) -> None:
        groups = tuple(
            KVGroup(spec, (layer,), size, spec.page_bytes(size))
            for layer, (spec, size) in enumerate(LAYOUTS[self.name])
        )
        self.groups = groups
        # In per cent of what a sequence of full length holds.
        num_blocks = Coordinator(groups).most_blocks(MAX_LENGTH, MAX_CHUNK) * percent // 100
        layout = KVCacheLayout(16, num_blocks + 1, groups, 1, num_host_blocks=30)
        self.kv = KVCacheManager(layout, enable_prefix_caching=caching)
        self.depth = depth
        self.lanes: list[Lane] = []
        self.swapped: list[Lane] = []
        self.registered: dict[str, Lane] = {}
        self.plans: deque[Plan] = deque()
        self.memory: list[dict[int, dict[int, int]]] = [{} for _ in groups]
        """Per group: block -> offset -> content; a state has offset 0 alone."""
        self.host: list[dict[int, dict[int, int]]] = [{} for _ in groups]
        self.start(0, 150, [50], "")
        for _ in range(9):
            self.step(self.lanes[0], 32, to_boundary=True, undo=False)

    # -- the model -----------------------------------------------------------------------------------------------------

    def first_read(self, group: int, position: int) -> int:
        """The first position that a query at `position` reads."""
        spec = self.groups[group].spec
        if spec.kind == "chunked":
            return position // spec.window * spec.window
        return 0 if spec.window is None else max(0, position - spec.window + 1)

    def is_state(self, group: int) -> bool:
        return self.groups[group].spec.token_bytes == 0

    def check_content(self, lane: Lane, group: int, table: list[int], num_tokens: int) -> None:
        """What a query at position `num_tokens` reads is there."""
        size, memory = self.groups[group].block_size, self.memory[group]
        if self.is_state(group):
            read = table[(num_tokens - 1) // size] if num_tokens else NULL_BLOCK
            assert not num_tokens or memory[read] == {0: lane.content(num_tokens)}, "another state"
            return
        lane.content(num_tokens)
        for position in range(self.first_read(group, num_tokens), num_tokens):
            block = table[position // size]
            assert block != NULL_BLOCK, f"position {position} was given up"
            assert memory[block][position % size] == lane.contents[position], f"other tokens at position {position}"

    def brute_force_hit(self, lane: Lane, max_tokens: int) -> int:
        """The longest hit by its definition, tried from the longest down."""
        chain = lane.blocks.chain
        if chain is None:
            return 0
        unit = self.kv.hash_block_size
        for hit in range(max_tokens // unit * unit, 0, -unit):
            if any(hit % group.block_size for group in self.groups):
                continue
            for group, index in enumerate(self.kv._indexes):
                size = self.groups[group].block_size
                first = hit // size - 1 if self.is_state(group) else self.first_read(group, hit) // size
                ends = range((first + 1) * size, hit + 1, size)
                if any(index.find(chain.hashes[end // unit]) is None for end in ends):
                    break
            else:
                return hit
        return 0

    def execute(self) -> None:
        """The oldest plan's copies, tables, reads and writes; then what `update` does."""
        plan = self.plans.popleft()
        lane, sizes = plan.lane, [group.block_size for group in self.groups]
        copied = [
            (memory, target, memory[source].copy())
            for memory in self.memory
            for source, target in plan.allocation.copies
            if source in memory
        ]
        for memory, target, content in copied:
            memory[target] = content
        if plan.tables is not None:
            lane.rows = plan.tables
        else:
            assert lane.rows is not None
            for row, new in zip(lane.rows, plan.allocation.new_blocks, strict=True):
                row += new
            for group, index, block in plan.allocation.replaced:
                lane.rows[group][index] = block
        for group, row in enumerate(lane.rows):
            self.check_content(lane, group, row, plan.start)
            lane.content(plan.end)
            if self.is_state(group):
                size = sizes[group]
                for block in range(plan.start // size, (plan.end - 1) // size + 1):
                    self.memory[group][row[block]] = {0: lane.content(min(plan.end, (block + 1) * size))}
                continue
            for position in range(plan.start, plan.end):
                block = self.memory[group].setdefault(row[position // sizes[group]], {})
                block[position % sizes[group]] = lane.contents[position]
        lane.num_in_flight -= 1
        if plan.is_alive:
            lane.num_computed = plan.end
            self.kv.cache_blocks(lane.blocks, lane.token_ids, plan.end)

    def settle(self) -> None:
        while self.plans:
            self.execute()

    def pick(self, which: int, lanes: list[Lane]) -> Lane:
        return lanes[which % len(lanes)]

    # -- rules ---------------------------------------------------------------------------------------------------------

    @rule(
        family=st.sampled_from([0, 0, 1]),
        shared=st.integers(0, 220),
        own=st.lists(st.integers(50, 53), min_size=1, max_size=40),
        salt=st.sampled_from(["", "", "tenant"]),
        bypass=st.sampled_from([False] * 5 + [True]),
        behind=st.booleans(),
    )
    def start(
        self, family: int, shared: int, own: list[int], salt: str, *, bypass: bool = False, behind: bool = False
    ) -> None:
        tokens = FAMILIES[family][:shared] + own
        if behind and self.registered:
            prefix = next(iter(self.registered.values()))
            tokens, salt = prefix.token_ids[: prefix.num_computed] + own, prefix.salt
        chain = self.kv.new_chain(salt)
        hit = 0 if bypass else self.kv.match_prefix(chain, tokens, len(tokens) - 1)
        free, held = self.kv.room_after_match(chain, hit, tokens)
        blocks = self.kv.allocate_prefix(chain, hit, tokens)
        lane = Lane(tokens, salt, blocks, hit, hit)
        assert self.kv.pool.num_allocatable <= free
        assert held == sum(
            block != NULL_BLOCK
            for table, group in zip(blocks.tables, self.groups, strict=True)
            for block in table[: hit // group.block_size]
        )
        if not bypass:
            expected = self.brute_force_hit(lane, len(tokens) - 1)
            assert hit == expected or (self.registered and hit > expected)
        for group, table in enumerate(blocks.tables):
            self.check_content(lane, group, table, hit)
        self.lanes.append(lane)
        self.totals["hits"] += hit > 0
        self.totals["partial hits"] += hit % self.kv.groups.hit_size > 0

    @precondition(lambda self: self.lanes)
    @rule(
        which=st.integers(0, 9),
        chunks=st.lists(st.integers(1, MAX_CHUNK), min_size=1, max_size=12),
        to_boundary=st.booleans(),
        undo=st.sampled_from([False] * 5 + [True]),
    )
    def run(self, which: int, chunks: list[int], *, to_boundary: bool, undo: bool) -> None:
        """A step of each chunk, for the sequences in turns; the last one is undone."""
        for number, num_tokens in enumerate(chunks):
            lane = self.lanes[(which + number) % len(self.lanes)]
            is_last = number == len(chunks) - 1
            self.step(lane, num_tokens, to_boundary=to_boundary, undo=undo and is_last)

    def step(self, lane: Lane, num_tokens: int, *, to_boundary: bool, undo: bool) -> None:
        start = lane.num_planned
        if start == len(lane.token_ids):
            if start > MAX_LENGTH:
                return
            # What it generates, one token at a time.
            lane.token_ids.append(num_tokens % 3)
        end = min(start + num_tokens, len(lane.token_ids))
        if to_boundary and end // 32 * 32 > start:
            end = end // 32 * 32
        if lane.blocks.tail_shared or end > lane.blocks.capacity:
            before, used = [list(table) for table in lane.blocks.tables], self.kv.pool.num_used
            allocation = self.kv.allocate_slots(lane.blocks, start, end)
            if allocation is None:
                assert [len(table) for table in lane.blocks.tables] == [len(table) for table in before]
                assert self.kv.pool.num_used <= used
                self.totals["refused"] += 1
                return
            self.totals["copies on write"] += len(allocation.replaced)
            self.totals["crossed blocks"] += any(len(new) > 1 for new in allocation.new_blocks)
            if undo:
                self.totals["undone"] += 1
                self.kv.rollback(lane.blocks, allocation)
                for table, old in zip(lane.blocks.tables, before, strict=True):
                    assert [now == was for now, was in zip(table, old, strict=True) if now != NULL_BLOCK].count(
                        False
                    ) == 0
                return
        else:
            allocation = BlockAllocation([[] for _ in self.groups], False)
        assert self.kv.groups.fits(lane.blocks.tables, end)
        self.check_owners_of_written(lane, start, end)
        if not lane.num_in_flight:
            held = sum(block != NULL_BLOCK for table in lane.blocks.tables for block in table)
            assert held <= self.kv.most_blocks(end, MAX_CHUNK)
        is_known = lane.rows is not None or lane.num_in_flight
        tables = None if is_known else [list(table) for table in lane.blocks.tables]
        self.plans.append(Plan(lane, allocation, tables, start, end))
        lane.num_planned, lane.num_in_flight = end, lane.num_in_flight + 1
        while len(self.plans) >= self.depth:
            self.execute()

    def check_owners_of_written(self, lane: Lane, start: int, end: int) -> None:
        for group, table in enumerate(lane.blocks.tables):
            size = self.groups[group].block_size
            for block in table[start // size : -(-end // size)]:
                assert block != NULL_BLOCK
                assert self.kv.pool.ref_counts[block] == 1, "a block that is written has two owners"
                if block in self.kv._indexes[group]:
                    raise AssertionError("a block that is written can be hit")

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        self.settle()
        parent = self.pick(which, self.lanes)
        if not parent.num_computed or not parent.rows:
            return
        blocks = self.kv.fork(parent.blocks, parent.num_computed)
        tokens = parent.token_ids[: parent.num_computed]
        child = Lane(tokens, parent.salt, blocks, parent.num_computed, parent.num_computed)
        self.lanes.append(child)
        self.totals["forks"] += 1
        for lane in (child, parent):
            self.step(lane, 3, to_boundary=False, undo=False)

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 9))
    def free(self, which: int) -> None:
        lane = self.pick(which, self.lanes)
        self.lanes.remove(lane)
        self.kv.free(lane.blocks)
        for plan in self.plans:
            plan.is_alive &= plan.lane is not lane

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 9))
    def evict(self, which: int) -> None:
        self.kv.evict(self.pick(which, self.lanes).blocks.chain)

    @rule(really=st.sampled_from([False] * 5 + [True]))
    def reset(self, really: bool) -> None:
        if really:
            self.kv.reset_prefix_cache()

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 9))
    def swap_out(self, which: int) -> None:
        self.settle()
        lane = self.pick(which, self.lanes)
        if not lane.num_computed or not self.kv.groups.fits(lane.blocks.tables, lane.num_computed):
            return
        footprint = self.kv.footprint([lane.blocks])
        copies = self.kv.swap_out([lane.blocks], [lane.num_computed])
        if copies is None:
            return
        assert len(copies) <= footprint.num_blocks_out
        self.move(copies, self.memory, self.host)
        self.lanes.remove(lane)
        self.swapped.append(lane)
        self.totals["swaps"] += 1

    @precondition(lambda self: self.swapped)
    @rule(which=st.integers(0, 9))
    def swap_in(self, which: int) -> None:
        self.settle()
        lane = self.pick(which, self.swapped)
        if self.kv.room_after_swap_in([lane.blocks])[0] < 0:
            return
        self.move(self.kv.swap_in([lane.blocks]), self.host, self.memory)
        self.kv.cache_blocks(lane.blocks, lane.token_ids, lane.num_computed)
        self.swapped.remove(lane)
        self.lanes.append(lane)
        lane.rows = None
        for group, table in enumerate(lane.blocks.tables):
            self.check_content(lane, group, table, lane.num_computed)

    @staticmethod
    def move(copies: list[tuple[int, int]], sources: list[dict], targets: list[dict]) -> None:
        for source_memory, target_memory in zip(sources, targets, strict=True):
            found = [(target, source_memory[source].copy()) for source, target in copies if source in source_memory]
            target_memory.update(found)

    @precondition(lambda self: self.lanes and self.kv.enable_prefix_caching)
    @rule(which=st.integers(0, 9), number=st.integers(0, 2))
    def register(self, which: int, number: int) -> None:
        self.settle()
        lane, name = self.pick(which, self.lanes), f"prefix-{number}"
        if name in self.registered:
            self.kv.unregister_prefix(name)
            del self.registered[name]
        elif lane.num_computed and self.kv.groups.fits(lane.blocks.tables, lane.num_computed):
            self.lanes.remove(lane)
            self.registered[name] = lane
            self.kv.register_prefix(name, lane.blocks, lane.token_ids[: lane.num_computed])

    # -- after each rule -----------------------------------------------------------------------------------------------

    @invariant()
    def owners_are_counted(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        owners = Counter(
            block
            for lane in (*self.lanes, *self.registered.values())
            for table in lane.blocks.tables
            for block in table
            if block != NULL_BLOCK
        )
        assert {block: count for block, count in enumerate(self.kv.pool.ref_counts) if count} == owners
        groups_of: dict[int, set[int]] = {}
        for lane in (*self.lanes, *self.registered.values()):
            for group, table in enumerate(lane.blocks.tables):
                for block in table:
                    groups_of.setdefault(block, set()).add(group)
        assert all(len(groups) == 1 for block, groups in groups_of.items() if block != NULL_BLOCK), (
            "two groups, one block"
        )

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.settle()
        self.totals["evictions"] += self.kv.pool.num_evictions
        for lane in (*self.lanes, *self.swapped):
            self.kv.free(lane.blocks)
        for name in self.registered:
            self.kv.unregister_prefix(name)
        self.kv.check()
        assert self.kv.pool.num_used == self.kv.host.blocks.num_used == 0, "a block is lost"
        assert self.kv.pool.num_allocatable == self.kv.pool.num_usable


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_sequences_over_groups(name: str) -> None:
    run_machine(type("Machine", (GroupMachine,), {"name": name}), examples=9, steps=30)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_event_happens(name: str) -> None:
    """The same rules in a drawn order that does not depend on Hypothesis: each kind of event is met."""
    machine = type("Machine", (GroupMachine,), {"name": name, "totals": Counter()})
    rng = random.Random(3)
    for caching, depth in ((True, 1), (True, 2), (True, 2), (False, 2)):
        model = machine()
        model.build(rng.randint(105, 180), depth, caching)
        for _ in range(100):
            _any_rule(model, rng)
            model.owners_are_counted()
        model.teardown()
    events = ["hits", "partial hits", "copies on write", "undone", "forks", "swaps", "refused", "evictions"]
    events += ["crossed blocks"]
    assert all(machine.totals[event] for event in events), machine.totals


def _any_rule(model: GroupMachine, rng: random.Random) -> None:
    which, draw = rng.randrange(10), rng.random()
    if len(model.lanes) > 2:
        model.free(which)
    if draw < 0.15 or not model.lanes:
        own, salt = [rng.randint(50, 53) for _ in range(rng.randint(1, 40))], rng.choice(["", "", "tenant"])
        model.start(rng.choice([0, 0, 1]), rng.randrange(220), own, salt, behind=rng.random() < 0.5)
    elif draw < 0.65:
        chunks = [rng.randint(1, MAX_CHUNK) for _ in range(rng.randint(1, 12))]
        model.run(which, chunks, to_boundary=rng.random() < 0.5, undo=rng.random() < 0.2)
    elif draw < 0.72:
        model.fork(which)
    elif draw < 0.82:
        model.free(which)
    elif draw < 0.88:
        model.swap_out(which)
    elif draw < 0.94 and model.swapped:
        model.swap_in(which)
    elif draw < 0.98 and model.kv.enable_prefix_caching:
        model.register(which, 0)
    elif draw < 0.99:
        model.evict(which)
    else:
        model.reset(True)
