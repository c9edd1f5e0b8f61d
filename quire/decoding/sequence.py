from __future__ import annotations

import enum
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from quire.config.scheduler import PRIORITY_SECONDS
from quire.kv_cache.block_hash import NO_KEYS, ROOT, HashChain
from quire.kv_cache.block_table import BlockTable
from quire.multimodal.positions import add_image_keys
from quire.request import BACKGROUND_SECONDS, EngineRequest, FinishReason
from quire.step import SequenceSampling

if TYPE_CHECKING:
    from quire.decoding.beam import BeamSearch
    from quire.decoding.draft_numbers import DraftRecord
    from quire.decoding.masks import Constraint, Foreseen, Matcher

OrderKey = tuple[float, int]
PENDING_PREFIX = "pending prefix"
"""Deferral reason while a running sequence computes blocks of the request's prompt."""


class Deferral(NamedTuple):
    """Gate's decision that a waiting request may not start yet (quire/scheduler/gates.py). Holds its reason and
    reserved blocks."""

    reason: str
    """Name of the reason to wait, the gate's `reason`, for stats and messages."""
    reserved_blocks: int
    """Blocks of the pool reserved for the request meanwhile."""
    is_pending: Callable[[], bool]
    """True until the awaited event has come. Constant time: the scheduler asks in every pass."""
    deadline: float = math.inf
    """Time, on the engine's clock, at which the wait ends."""
    cancel: Callable[[], object] = lambda: None
    """Ends the work that the gate began; called once, at the deferral's end."""
    reserves_slots: bool = True
    """True to reserve the request's slots meanwhile; False for an event outside the engine."""


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """Completion being generated: tokens, counters, and the handle to its KV blocks. `num_computed_tokens` counts
    tokens whose KV is written by plans already made, `num_pending_tokens` those that such plans sample but whose values
    have not come back; with `num_pending_drafts` (drafts of plans in flight, part of both) they are upper bounds. The
    target of a step is `len(token_ids) + num_pending_tokens`."""

    __slots__ = (
        "awaits_matcher",
        "blocks",
        "chain",
        "draft_record",
        "draft_step",
        "draft_token_ids",
        "fast_path_until",
        "finish_reason",
        "first_step_id",
        "foreseen",
        "goes_ahead",
        "index",
        "matcher",
        "max_total_tokens",
        "num_computed_tokens",
        "num_found_drafts",
        "num_pending_drafts",
        "num_pending_tokens",
        "num_unsent_tokens",
        "report_times_until",
        "request",
        "sampling",
        "seq_id",
        "swapped",
        "token_ids",
    )

    def __init__(self, seq_id: int, index: int, request: Request, sampling: SequenceSampling) -> None:
        self.seq_id = seq_id
        self.index = index
        self.request = request
        self.sampling = sampling
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_pending_drafts = 0
        self.num_found_drafts = 0
        """Drafts for its next step on the workers, according to their last result."""
        self.draft_record: DraftRecord | None = None
        """Acceptance of its drafts so far; None: no drafts, or their number does not depend on it."""
        self.draft_step = b""
        """Drafts of the step whose tokens are reported next, and the number accepted."""
        self.draft_token_ids: list[int] = []
        """These drafts of a constrained sequence: its matcher makes masks after them."""
        self.first_step_id = 0
        """Plan in which it last started (not resumed): work of earlier plans is lost."""
        self.max_total_tokens = request.num_prompt_tokens + request.max_tokens
        reports_all = request.params.stop or request.each_step
        self.report_times_until = self.max_total_tokens if reports_all else request.num_prompt_tokens + 1
        """Updates report times up to this number of tokens."""
        self.fast_path_until = 0
        """Number of computed tokens below which each step computes the last step's sample, without a decision."""
        self.blocks: BlockTable | None = None
        """Handle to the KV blocks; None while waiting or preempted."""
        self.swapped: BlockTable | None = None
        """KV blocks in the host pool: their `num_computed_tokens` need not be recomputed."""
        self.chain: HashChain | None = None
        """Hashes of the known full blocks; kept through a preemption."""
        self.num_unsent_tokens = 0
        """Last known tokens that the workers have neither sampled nor received."""
        self.foreseen: Foreseen | None = None
        """One of `token_ids` that a plan in flight is still to sample."""
        self.finish_reason: FinishReason | None = None
        self.matcher: Matcher | None = None
        """Follows the known tokens under the request's constraint, from the first mask on."""
        self.awaits_matcher = False
        """True while the matcher has not judged the last token, then not reported."""
        self.goes_ahead = False
        """True if a step may compute the last token before the matcher's answer, and be sampled after it."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}[{self.index}], tokens={len(self.token_ids)}"
            f"+{self.num_pending_tokens}, computed={self.num_computed_tokens})"
        )


class Request:
    """Request and its sequences, which are scheduled, preempted and resumed together.

    Until the prompt is computed the scheduler has only the first live sequence, from which the others fork (paper
    §4.4); those of a beam search are beam slots, of which empty ones come last.
    """

    __slots__ = (
        "adapter",
        "adapter_slot",
        "arrival_time",
        "beam_search",
        "bypass_prefix_cache",
        "cache_salt",
        "client",
        "columns",
        "constraint",
        "constraint_start",
        "deferral",
        "each_step",
        "end_token_ids",
        "eos_token_ids",
        "first_matcher",
        "first_scheduled_time",
        "fork_position",
        "images",
        "images_end",
        "is_background",
        "is_processed",
        "max_pending_tokens",
        "max_tokens",
        "num_cached_tokens",
        "num_lost_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "order_key",
        "order_time",
        "params",
        "pending_forks",
        "pooling",
        "prediction",
        "priority",
        "prompt_token_ids",
        "register_prefix",
        "request_id",
        "sequences",
        "status",
        "stop_token_ids",
        "text_scope",
        "token_columns",
    )

    def __init__(
        self,
        request: EngineRequest,
        arrival_time: float,
        *,
        arrival_number: int = 0,
        order_time: float | None = None,
        priority_seconds: float = PRIORITY_SECONDS,
        constraint: Constraint | None = None,
    ) -> None:
        """arrival_time: seconds of the engine's Clock. arrival_number: orders requests of the same instant. order_time:
        arrival time for the fair order (quire/scheduler/fair_order.py); None: `arrival_time`. priority_seconds: see
        SchedulerConfig. constraint: on the generated tokens; None: none."""
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.params = request.params
        self.max_tokens = request.max_tokens
        self.cache_salt = request.cache_salt
        self.text_scope = f"{request.client}\0{request.cache_salt}"
        self.prediction = request.prediction
        self.arrival_time = arrival_time
        self.priority = request.level
        self.is_background = request.is_background
        self.register_prefix = request.register_prefix
        self.pooling = request.pooling
        self.is_processed = request.is_processed
        self.columns, self.token_columns = request.columns, request.token_columns
        self.images = request.images
        self.images_end = request.images[-1].end if request.images else 0
        """Position after the last image."""
        self.adapter = request.adapter
        self.adapter_slot = 0
        """Adapter slot on the workers, from the request's start on; 0: no adapter."""
        self.constraint = constraint
        self.constraint_start = request.constraint_start
        self.first_matcher: Matcher | None = None
        """State of the constraint before the first generated token; None: no constraint."""
        self.max_pending_tokens = 0 if self.params.use_beam_search else math.inf if constraint is None else 1
        """Maximum unknown sampled tokens of a sequence when its next one is planned."""
        self.client = request.client
        self.each_step = request.each_step
        self.order_time = arrival_time if order_time is None else order_time
        lateness = request.priority * priority_seconds + (BACKGROUND_SECONDS if request.is_background else 0.0)
        self.order_key: OrderKey = (self.order_time + lateness, arrival_number)
        """Smallest is served first; a level of priority counts as `priority_seconds` of waiting."""
        self.first_scheduled_time: float | None = None
        self.status = RequestStatus.WAITING
        self.eos_token_ids = frozenset(request.eos_token_ids)
        self.stop_token_ids = frozenset(request.params.stop_token_ids or ())
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when first scheduled; None before."""
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        """Computed tokens lost by the last preemption, until the request resumes."""
        self.num_prompt_logprobs = 0 if request.resume_point is None else request.resume_point.num_prompt_logprobs
        """Prompt positions with reported logprobs, which a recomputation does not report again."""
        self.bypass_prefix_cache = request.params.prompt_logprobs is not None
        self.sequences: list[Sequence] = []
        self.pending_forks: list[Sequence] = []
        """Sequences with a reserved slot: siblings that wait for shared tokens, and beam slots without a beam."""
        self.fork_position: int | None = None
        """Tokens after which siblings fork from the first sequence; None: none waits."""
        self.beam_search: BeamSearch | None = None
        self.deferral: Deferral | None = None

    def extra_keys(self, block_size: int) -> Mapping[int, tuple[bytes, ...]]:
        """Keys that separate its blocks in the prefix cache from those of the same tokens, in HashChain's format. A
        value counts from the block that first reads it."""
        if not self.columns and not self.token_columns and not self.images and self.adapter is None:
            return NO_KEYS
        keys: defaultdict[int, tuple[bytes, ...]] = defaultdict(tuple)
        if self.adapter is not None:
            keys[ROOT] += (b"adapter=" + self.adapter.digest,)
        for name, value in sorted(self.columns.items()):
            first = self.token_columns[name].end if name in self.token_columns else 0
            keys[first // block_size] += (f"{name}={value}".encode(),)
        for name, listed in sorted(self.token_columns.items()):
            for block in range(listed.start // block_size, -(-listed.end // block_size)):
                start = max(block * block_size, listed.start)
                own = listed.values[start - listed.start : (block + 1) * block_size - listed.start]
                keys[block] += (f"{name}@{start}=".encode() + struct.pack(f"<{len(own)}i", *own),)
        add_image_keys(keys, self.images, block_size)
        return keys

    @property
    def live_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def swapped_blocks(self) -> list[BlockTable]:
        """Handles of its sequences in the host pool; empty: not swapped."""
        return [sequence.swapped for sequence in self.live_sequences if sequence.swapped is not None]

    def stop_waiting(self) -> None:
        """End the request's deferral, if any, and the load begun for it. At its start or end."""
        deferral, self.deferral = self.deferral, None
        if deferral is not None:
            deferral.cancel()
