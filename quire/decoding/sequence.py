"""A request and its sequences as the scheduler knows them: tokens, counters, and handles to KV blocks."""

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
from quire.request import EngineRequest, FinishReason
from quire.step import SequenceSampling

if TYPE_CHECKING:
    from quire.decoding.beam import BeamSearch
    from quire.decoding.draft_numbers import DraftRecord
    from quire.decoding.masks import Constraint, Foreseen, Matcher

OrderKey = tuple[float, int]
PENDING_PREFIX = "pending prefix"
"""The reason of a deferral while a running sequence computes blocks of the request's prompt."""


class Deferral(NamedTuple):
    """Why a waiting request may not start yet, as a gate decided it (quire/scheduler/gates.py)."""

    reason: str
    """The gate's `reason`."""
    reserved_blocks: int
    """Blocks of the pool that are reserved for the request meanwhile."""
    is_pending: Callable[[], bool]
    """Whether the awaited event is still to come. Constant time: the scheduler asks in every pass."""
    deadline: float = math.inf
    """When the request goes on without the event."""
    cancel: Callable[[], object] = lambda: None
    """Ends the work that the gate began for the request. Called once, when the deferral ends for any reason."""
    reserves_slots: bool = True
    """Whether the request's slots are reserved meanwhile. Not for an event outside the engine, which may take seconds:
    the engine would idle when as many requests wait as it has slots."""


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """One completion being generated: tokens, counters, and the handle to its KV blocks.

    `num_computed_tokens` counts tokens whose KV is written by plans already made (executed or in flight);
    `num_pending_tokens` counts tokens that such plans sample but whose values have not come back. While
    `num_pending_drafts` (drafts of plans in flight, which both count) is not 0, both are upper bounds.
    The target of a step is `len(token_ids) + num_pending_tokens`; there is no prefill or decode phase.
    """

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
        """Drafts that the workers have for its next step, as far as results say."""
        self.draft_record: DraftRecord | None = None
        """What became of its drafts so far; None: it had none, or their number does not depend on it."""
        self.draft_step: tuple[int, int] | None = None
        """Drafts of the step whose tokens are to be reported next, and how many of them were accepted."""
        self.draft_token_ids: list[int] = []
        """These drafts, of a sequence under a constraint: its matcher is asked for masks behind them."""
        self.first_step_id = 0
        """The plan in which it last started (not resumed): what earlier plans computed of it is lost."""
        self.max_total_tokens = request.num_prompt_tokens + request.max_tokens
        reports_all = request.params.stop or request.each_step
        self.report_times_until = self.max_total_tokens if reports_all else request.num_prompt_tokens + 1
        """Updates report times up to this number of tokens. A stop string may end it at any token, which only the front
        end sees."""
        self.fast_path_until = 0
        """While fewer tokens than this are computed, every step computes the one that the step before sampled, and
        there is nothing to decide about it: its slot is allocated, no other sequence shares it, and it is not the last
        token."""
        self.blocks: BlockTable | None = None
        """Handle to the KV blocks; None while waiting or preempted."""
        self.swapped: BlockTable | None = None
        """The same handle while the blocks are in the host pool: their `num_computed_tokens` need not be recomputed."""
        self.chain: HashChain | None = None
        """Hashes of the known full blocks; outlives a preemption."""
        self.num_unsent_tokens = 0
        """Of the known tokens, the last ones that the workers have neither sampled nor been sent."""
        self.foreseen: Foreseen | None = None
        """One of `token_ids` that a plan in flight is still to sample. It is not pending: the sequence goes on from
        it, and the plan's result brings nothing new."""
        self.finish_reason: FinishReason | None = None
        self.matcher: Matcher | None = None
        """Follows the known tokens under the request's constraint, from its first mask until its end."""
        self.awaits_matcher = False
        """The matcher has not yet said whether the last token ends the sequence, and what is forced behind it: no step
        computes the token, unless the sequence `goes_ahead`, and nothing of it is reported."""
        self.goes_ahead = False
        """A step may compute the last token before the matcher has answered for it, and is sampled when it has."""

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens whose values are known."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}[{self.index}], tokens={len(self.token_ids)}"
            f"+{self.num_pending_tokens}, computed={self.num_computed_tokens})"
        )


class Request:
    """A request and its sequences, which are scheduled, preempted and resumed together.

    Until the prompt is computed only the first live sequence exists for the scheduler; the others fork from it at
    the prompt's end and share its blocks (paper §4.4). The sequences of a beam search are places for beams: which
    tokens one holds changes as beams die and fork, and those that hold no beam come last.
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
        """arrival_number: tells requests of one instant apart. order_time: when it counts as arrived among the others
        (quire/scheduler/fair_order.py); None: when it has. priority_seconds: see SchedulerConfig. constraint: the
        one that the request names."""
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.params = request.params
        self.max_tokens = request.max_tokens
        self.cache_salt = request.cache_salt
        self.text_scope = f"{request.client}\0{request.cache_salt}"
        self.prediction = request.prediction
        self.arrival_time = arrival_time
        self.priority = request.priority
        self.register_prefix = request.register_prefix
        self.pooling = request.pooling
        self.is_processed = request.is_processed
        self.columns, self.token_columns = request.columns, request.token_columns
        self.images = request.images
        self.images_end = request.images[-1].end if request.images else 0
        """The position behind the last image."""
        self.adapter = request.adapter
        self.adapter_slot = 0
        """Where the workers hold the adapter, from the request's start on; 0: it has none."""
        self.constraint = constraint
        self.constraint_start = request.constraint_start
        self.first_matcher: Matcher | None = None
        """The state of the constraint before the first generated token; None: there is no constraint."""
        self.max_pending_tokens = 0 if self.params.use_beam_search else math.inf if constraint is None else 1
        """Most sampled tokens of a sequence that may be unknown when its next one is planned. An update chooses a
        beam's next token, never the workers; a mask is made while the step runs, when the token before is known."""
        self.client = request.client
        self.each_step = request.each_step
        self.order_time = arrival_time if order_time is None else order_time
        self.order_key: OrderKey = (self.order_time + request.priority * priority_seconds, arrival_number)
        """The smallest is served first. A level of priority counts as `priority_seconds` of waiting, so requests age
        without being sorted again, and only requests that arrive soon enough can come before an earlier one."""
        self.first_scheduled_time: float | None = None
        self.status = RequestStatus.WAITING
        self.eos_token_ids = frozenset(request.eos_token_ids)
        self.stop_token_ids = frozenset(request.params.stop_token_ids or ())
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when first scheduled; None before."""
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        """Computed tokens given up by the last preemption, until the request resumes."""
        self.num_prompt_logprobs = 0 if request.resume_point is None else request.resume_point.num_prompt_logprobs
        """Prompt positions whose logprobs were already reported (recomputation does not report them again)."""
        self.bypass_prefix_cache = request.params.prompt_logprobs is not None
        self.sequences: list[Sequence] = []
        self.pending_forks: list[Sequence] = []
        """Live sequences with a reserved request slot: siblings that wait for the first sequence to compute what they
        share, and beam slots that hold no beam."""
        self.fork_position: int | None = None
        """Tokens after which siblings fork from the first sequence; None when none waits for that."""
        self.beam_search: BeamSearch | None = None
        self.deferral: Deferral | None = None
        """Set while a gate keeps the request from starting."""

    def extra_keys(self, block_size: int) -> Mapping[int, tuple[bytes, ...]]:
        """Keys that tell its blocks in the prefix cache from those of the same tokens, as HashChain takes them. A value
        counts from the block on in which it is first read."""
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
        """The handles of those of its sequences that are in the host pool; none: it is not swapped."""
        return [sequence.swapped for sequence in self.live_sequences if sequence.swapped is not None]

    def stop_waiting(self) -> None:
        """End the request's deferral, if it has one, and the work that was begun for it."""
        deferral, self.deferral = self.deferral, None
        if deferral is not None:
            deferral.cancel()
