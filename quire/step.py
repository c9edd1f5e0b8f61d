"""StepPlan, SamplingInputs and StepResult: the only contract between the scheduler and the workers.

A plan is data: integers, and sampling settings once per sequence. New sequences are sent in full once, then only
differences. Plans are executed strictly in order, on every rank alike; workers never ask back. A block freed while
an earlier plan is still running may be handed out again, because its new owner's plan runs later.

A block that left a sequence's sliding window may be handed out in the same plan: nothing reads it any more.

Drafts are tokens that a step computes behind a sequence's last token, before it is known whether they are the
sequence's own. Sampling accepts the leading ones that equal what it draws itself, and one token more, so such a step
yields at least one token and at most `num_drafts` + 1. How many, the scheduler learns with the result, which may come
when later plans are made: until then `start_positions` are upper bounds for that sequence. The workers' own count is
the truth: a step starts behind the tokens whose keys and values the worker has computed and kept, at the plan's start
at the latest, and the last of `num_tokens` are the drafts, of which the workers may compute fewer. The blocks of a plan
suffice for the bound, so they do for the truth.

A sample is a token or a vector: of a pooled one (`StepPlan.pooled`) the result brings what the model makes of the
sequence's last hidden states (`ModelConfig.pooling`; without it the last token's, after the final norm), and its row
gets no token.

Some samples need masks of allowed tokens that depend on tokens which earlier plans sample. Such a plan announces it
(`StepPlan.expects_sampling_inputs`) and starts without the masks: the forward pass does not wait for them. They come in
a second message, `SamplingInputs`, exactly once, before any later plan; the workers sample when they have it.

Order of effects of one plan: write `sampled`; release the slots of `released`; cut `trimmed_tables`; create
`new_sequences`; apply `beam_reorders`; write `token_overrides` and `appended`; drop and encode `images`; start
`transfers`; run `block_copies`; append `new_blocks` and apply `replaced_blocks`; run the model over the scheduled
tokens; create `forks`; sample.

Transfers may run beside the rest, as long as the results are the same. Of the copies between the pools of device and
host, those to the host come first. A block that is saved there may be allocated again by this very plan: a write to it
(`block_copies`, the model) waits until it is saved. This plan's copies and model neither read nor write a block that a
transfer fills: a sequence that is swapped in gets its request slot, and runs from the next plan on. All copies between
the pools are done before the next plan begins. Longer transfers, which are the KV connector's own, end when a result
reports it; until then no plan refers to the blocks that they fill.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from quire.adapter_orders import AdapterOrders
from quire.image_orders import ImageOrders, ImagePlace
from quire.sampling_params import SamplingParams

BlockKey: TypeAlias = tuple[int, bytes]
"""(KV group, block hash)."""


class HostTransfers(msgspec.Struct, tag="host", array_like=True):
    """Copies between the pools of device and host: of preempted sequences, and of cached blocks. The orders of every
    KV connector derive from it, because each engine with a host pool swaps; its reports are free. Both are listed in
    the unions below, by whose tags the decoder of another process tells them apart."""

    swap_out: list[tuple[int, int]] = []
    """(device block, host block): whole blocks, every page tensor. Destinations are distinct, also in `swap_in`."""
    swap_in: list[tuple[int, int]] = []
    """(host block, device block)"""
    awaits_report: bool = False
    """Nothing can be computed before transfers end: a plan without tokens, whose result comes when the connector's
    worker half has a report, or after a short while."""


class StoreTransfers(HostTransfers, tag="store"):
    """The orders of a KV connector that keeps copies of blocks in a store (quire/kv_cache/connectors/). They touch host
    memory only: loads begin with the plan, stores behind its copies."""

    stores: list[tuple[int, int, bytes]] = []
    """(host block, KV group, block hash): keep a copy, behind this plan's swap_out. The host block keeps its
    content until the result of this or a later plan names it as released."""
    loads: list[tuple[int, bytes, int]] = []
    """(KV group, block hash, host block): bring a block back. Until a result names the host block as loaded (or
    failed) no plan refers to it."""


class StoreReport(msgspec.Struct, tag="store", array_like=True):
    """The transfers to and from a store since the result before; each end is reported once, in any order."""

    found: list[BlockKey] = []
    """Blocks that the store has: stored now, or found there at the start."""
    gone: list[BlockKey] = []
    """Removed to make room."""
    loaded: list[int] = []
    """Host blocks that now hold the content asked for, checked."""
    failed: list[int] = []
    """Host blocks whose load failed (the file is gone, or is not what it should be); their content is void."""
    released: list[int] = []
    """Host blocks whose store has ended, one way or the other."""
    num_stored: int = 0
    """Files written."""
    num_store_failures: int = 0
    num_bytes: int = 0
    """In the directory, other models' and engines' files included, as far as known."""
    load_seconds: float = 0.0
    """What a block took to load lately, all loading threads at work; 0: not known."""
    token_seconds: float = 0.0
    """What a token of a long prompt took to compute lately; 0: not known."""
    is_scanning: bool = False
    """More of what the directory held at the start is to come."""


Transfers: TypeAlias = HostTransfers | StoreTransfers
"""Whatever a plan can order; a new connector adds its type."""
TransferReport: TypeAlias = StoreReport
"""Whatever a result can report; a new connector adds its type."""


class TokenValues(msgspec.Struct, array_like=True, frozen=True):
    """Values of a step column for successive tokens, 32 bits each, from position `start` on."""

    start: int
    values: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.values)


class NewSequence(msgspec.Struct, array_like=True):
    """A sequence that gets a request slot on the workers: just arrived, or resumed after a preemption."""

    seq_id: int
    token_ids: list[int]
    """Every token known so far: the prompt, then what was generated before a preemption."""
    num_prompt_tokens: int
    block_ids: list[list[int]]
    """Per KV group: the physical blocks in logical order (those of a prefix hit included)."""
    sampling: SequenceSampling
    columns: dict[str, int] = {}
    """Name of a step column -> the sequence's value, 32 bits; 0 for a column that is not here."""
    token_columns: dict[str, TokenValues] = {}
    """As that of EngineRequest."""
    images: list[ImagePlace] = []
    """A step computes no token of one that is not encoded (`StepPlan.images`)."""
    text_scope: str = ""
    """Drafts may come from the outputs of requests of the same scope."""
    prediction: list[int] = []
    """Tokens that the request expects: drafts may come from them."""


class SequenceSampling(msgspec.Struct, array_like=True, frozen=True):
    """What the sampler must know of one sequence, resolved (no None that needs a tokenizer to interpret)."""

    params: SamplingParams
    seed: int
    """64-bit; differs between the `n` sequences of a request. Token i is drawn from a counter-based generator
    keyed by (seed, i), i counting generated tokens, so no generator state exists and nothing else has influence."""
    stop_token_ids: list[int]
    """End-of-sequence and stop tokens: banned while fewer than `min_tokens` were generated."""
    bad_token_sequences: list[list[int]]
    num_candidates: int = 0
    """Of a beam: the best next tokens to return with their scores. The first of them is the sequence's next token until
    `StepPlan.token_overrides` names another."""


class SequenceFork(msgspec.Struct, array_like=True):
    """`child` starts as a copy of `parent` (tokens, block table): in `StepPlan.forks` after this step's forward pass,
    before sampling; in `StepPlan.beam_reorders` before everything that this step computes.

    `token_ids` (not in beam reorders) is set when the child has a history of its own (resumed after a preemption): all
    its known tokens.
    """

    parent: int
    child: int
    sampling: SequenceSampling
    token_ids: list[int] | None = None


class StepPlan(msgspec.Struct, array_like=True):
    """One step. The three columns of the batch have one entry per scheduled sequence, in batch order."""

    step_id: int
    seq_ids: list[int]
    start_positions: list[int]
    """First position computed in this step = tokens computed before it; an upper bound of that while drafts of the
    sequence are in flight."""
    num_tokens: list[int]
    """Tokens computed in this step (>= 1), drafts included. A token not known to the scheduler yet is the row's last
    sampled one."""
    sample_seq_ids: list[int]
    """Sequences that get a token, or a vector (`pooled`), in result order."""
    sample_from: list[int]
    """For each of them the batch index whose last scheduled token's logits are read (a child reads its parent's)."""
    new_sequences: list[NewSequence] = []
    new_blocks: dict[int, list[list[int]]] = {}
    """seq_id -> per KV group the block ids appended to its table."""
    replaced_blocks: list[tuple[int, int, int, int]] = []
    """(seq_id, group, logical index, new block id): the table entry changes (copy-on-write)."""
    block_copies: list[tuple[int, int]] = []
    """(source, destination) physical blocks, every layer; one batched order, before the forward pass."""
    forks: list[SequenceFork] = []
    released: list[int] = []
    """Sequences whose rows are dropped before anything else: finished, aborted, preempted, or beams that died."""
    beam_reorders: list[SequenceFork] = []
    """Beams that begin as copies of others. A child may have the id of a sequence that this plan releases."""
    token_overrides: list[tuple[int, int]] = []
    """(seq_id, token): replaces the last known token of a row, which its step sampled and the scheduler overruled."""
    appended: dict[int, list[int]] = {}
    """seq_id -> tokens that follow a row's last one, which the step before may be sampling still, and that no step
    samples: a constraint forced them."""
    transfers: Transfers | None = None
    """Blocks that are moved beside the model: preempted sequences, and what the KV connector orders."""

    adapters: AdapterOrders | None = None
    images: ImageOrders | None = None

    num_drafts: list[int] = []
    """How many of `num_tokens` are drafts at most, the last ones; empty where no sequence has any. Only a sequence that
    is sampled from its own logits has drafts, behind its last token."""
    drafts: dict[int, list[int]] = {}
    """seq_id -> the drafts that the scheduler proposes. For a sequence with `num_drafts` that is not here the workers
    propose them."""
    trimmed_tables: dict[int, list[int]] = {}
    """seq_id -> per KV group the number of leading blocks that its table keeps: rejected drafts need the others no
    longer, and this plan may hand them out again."""
    pooled: list[int] = []
    """Indices into `sample_seq_ids`, ascending: samples that are vectors. Each reads its own sequence's last token."""

    expects_sampling_inputs: list[int] = []
    """Indices into `sample_seq_ids`, ascending: samples that need a mask. Empty: no SamplingInputs follow."""
    sampled: list[tuple[int, int]] = []
    """(seq_id, token): last tokens of rows, which earlier plans have sampled on the last stage of a pipeline: the other
    stages learn them so. The executor adds them."""

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


class SamplingInputs(msgspec.Struct, array_like=True):
    """What a step needs to sample besides its plan."""

    step_id: int
    masks: dict[int, bytes]
    """Index of a sample -> its allowed tokens: packed bits, [ceil(vocab size / 32)] little-endian uint32. A sample that
    has ended meanwhile has none."""
    discarded: list[int] = []
    """Indices of samples whose masks come too late: what the result has for them means nothing, and their sequences
    compute their last known tokens again."""
    draft_masks: dict[int, list[bytes]] = {}
    """Index of a sample that `StepPlan.expects_sampling_inputs` names and that has drafts -> the masks behind each of
    its first drafts; empty bytes allow all tokens. As many of its drafts are accepted at most: behind the others
    its constraint has ended, or is not known."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position. Entry 0 is the chosen (or prompt) token; then the top ones, best first.

    `rank` is the 1-based rank of the chosen token in the vocabulary. The last `num_listed` entries are tokens that the
    request names, in its order; some may be among the entries before.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    num_listed: int = 0


class Candidates(msgspec.Struct, array_like=True):
    """What a beam can go on with: tokens with their scores, best first; tokens that the rules forbid are left out.

    A score is the token's log-probability, changed by the request's rules (penalties, bias) and not normalised again.
    """

    token_ids: list[int]
    scores: list[float]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of the prompt tokens at positions `start`, `start + 1`, ... (position 0 has none)."""

    start: int
    entries: list[TokenLogprobs]


class StepResult(msgspec.Struct, array_like=True):
    """What came out of one plan."""

    step_id: int
    token_ids: list[list[int]]
    """Aligned with the plan's `sample_seq_ids`: per sample the new tokens, one and those drafts before it that were
    accepted. Empty for a pooled one, and for one that the workers discard: the sequence then computes its last known
    token again."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """Index into `token_ids` -> logprobs, one entry per token, where asked for."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """seq_id -> logprobs of the prompt positions that became known in this step, where asked for."""
    candidates: dict[int, Candidates] = {}
    """Index into `token_ids` -> candidates, for sequences with `num_candidates`."""
    num_drafts: int = 0
    """Drafts that the workers computed in the step."""
    found_drafts: dict[int, int] = {}
    """Index into `token_ids` -> drafts that the workers have for the sequence's next step, where they have any."""
    draft_token_ids: dict[int, list[int]] = {}
    """Index into `token_ids` -> these drafts, of samples that `StepPlan.expects_sampling_inputs` names: the scheduler
    asks for masks behind them, and proposes them itself."""
    transfers: TransferReport | None = None
    """Set when the worker half of the KV connector has a report."""
    adapters: list[tuple[int, str]] = []
    """(slot, error): loads that have ended; "": the slot holds the adapter now, else it holds none."""
    nonfinite: list[int] = []
    """Sequences for which the model computed NaN or infinite logits, or such a vector. Their tokens here mean nothing,
    and what they asked for besides is left out, their vector too."""
    failed: dict[int, str] = {}
    """Index into `token_ids` -> why a sequence cannot go on: a logits processor has failed at it."""
    pooled: dict[int, list[float]] = {}
    """Index into `token_ids` -> the vector of a pooled sample, of float32 values: an embedding or logits of labels."""
    checksum: int = 0
    """Of tokens and vectors, where several ranks computed them (quire/executors/rank.py). Of all ranks but one a result
    has this in their place."""
