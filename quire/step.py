"""StepPlan, SamplingInputs and StepResult: the only contract between the scheduler and the workers.

A plan is data: new sequences in full, once, then differences. Every rank executes plans strictly in order; workers
never ask back. A freed block may be handed out again while an earlier plan still runs, because its new owner's plan
runs later. A block that left a sequence's sliding window may be handed out in the same plan.

Drafts are guessed tokens after a sequence's last token. Sampling accepts the leading ones that equal its own draws, and
adds one token: 1 to `num_drafts` + 1 tokens. Until the scheduler knows the number from the result, `start_positions`
are upper bounds, and a plan's blocks suffice for them. A step starts after the tokens whose keys and values the worker
has computed and kept. The workers may compute fewer drafts than planned.

A sample is a token or a vector. A vector (`StepPlan.pooled`) is made from the sequence's last hidden states
(`ModelConfig.pooling`; without it the last token's, after the final norm), and its row gets no token.

Masks of allowed tokens may depend on tokens that earlier plans sample. A plan names such samples in `masked_samples`,
and its forward pass does not wait for the masks. They follow in `SamplingInputs`, exactly once, before any later plan.

Order of effects of one plan: write `sampled`; release the slots of `released`; cut `trimmed_tables`; create
`new_sequences`; apply `beam_reorders`; write `token_overrides` and `appended`; drop and encode `images`; start
`transfers`; run `block_copies`; append `new_blocks` and apply `replaced_blocks`; run the model over the scheduled
tokens; create `forks`; sample.

Transfers may run beside the rest, as long as the results are the same. Copies from device to host come before copies
from host to device. Writes to a block that the same plan saves to the host (`block_copies`, the model) wait until it is
saved. A plan's copies and model neither read nor write a block that its transfers fill: a swapped-in sequence gets its
request slot and runs from the next plan on. All copies between the pools end before the next plan begins. The KV
connector's longer transfers end when a result reports them; until then no plan refers to the blocks that they fill.
"""

from __future__ import annotations

from operator import add, sub
from typing import TypeAlias

import msgspec

from quire.adapter_orders import AdapterOrders
from quire.image_orders import ImageOrders, ImagePlace
from quire.sampling_params import SamplingParams

BlockKey: TypeAlias = tuple[int, bytes]
"""(KV group, block hash)."""


class HostTransfers(msgspec.Struct, tag="host", array_like=True):
    """Copies between the pools of device and host, for preempted sequences and cached blocks. Part of a plan."""

    swap_out: list[tuple[int, int]] = []
    """(device block, host block): whole blocks, every page tensor. Destinations are distinct, also in `swap_in`."""
    swap_in: list[tuple[int, int]] = []
    """(host block, device block)."""
    awaits_report: bool = False
    """A transfer must end before anything can be computed. The plan has no tokens; its result comes with the
    connector's next report, or soon."""


class StoreTransfers(HostTransfers, tag="store"):
    """Orders of a KV connector that keeps copies of blocks in a store (quire/kv_cache/connectors/). Loads begin with
    the plan, stores after its copies."""

    stores: list[tuple[int, int, bytes]] = []
    """(host block, KV group, block hash): blocks to store, after this plan's swap_out. The host block keeps its content
    until a result lists it in `released`."""
    loads: list[tuple[int, bytes, int]] = []
    """(KV group, block hash, host block): blocks to load. No plan refers to the host block before a result lists it in
    `loaded` or `failed`."""


class StoreReport(msgspec.Struct, tag="store", array_like=True):
    """Ended transfers to and from a store since the last result, each once, in any order."""

    found: list[BlockKey] = []
    """Blocks that the store has: stored now, or found there at the start."""
    gone: list[BlockKey] = []
    """Blocks removed to make room."""
    loaded: list[int] = []
    """Host blocks that now hold the requested content, checked."""
    failed: list[int] = []
    """Host blocks whose load failed; their content is void."""
    released: list[int] = []
    """Host blocks whose store has ended, with success or not."""
    num_stored: int = 0
    num_store_failures: int = 0
    num_bytes: int = 0
    """Known bytes in the directory, all engines' files included."""
    load_seconds: float = 0.0
    """Recent seconds to load a block, all loading threads busy; 0: unknown."""
    token_seconds: float = 0.0
    """Recent seconds to compute a token of a long prompt; 0: unknown."""
    is_scanning: bool = False
    """True while the scan of the directory that began at the start goes on."""


Transfers: TypeAlias = HostTransfers | StoreTransfers
"""Transfer orders of a plan; a new connector adds its type."""
TransferReport: TypeAlias = StoreReport
"""Transfer reports of a result; a new connector adds its type."""


class TokenValues(msgspec.Struct, array_like=True, frozen=True):
    """32-bit values of a step column for successive tokens from position `start`."""

    start: int
    values: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.values)


class NewSequence(msgspec.Struct, array_like=True):
    """Sequence that gets a request slot: new, or resumed after a preemption."""

    seq_id: int
    token_ids: list[int]
    """Every known token: the prompt, then tokens generated before a preemption."""
    num_prompt_tokens: int
    block_ids: list[list[int]]
    """Physical blocks in logical order, one list per KV group, a prefix hit included."""
    sampling: SequenceSampling
    columns: dict[str, int] = {}
    """Step column -> the sequence's 32-bit value; missing columns are 0."""
    token_columns: dict[str, TokenValues] = {}
    """See `EngineRequest.token_columns`."""
    images: list[ImagePlace] = []
    """Images; a step computes none of an image's tokens before it is encoded (`StepPlan.images`)."""
    text_scope: str = ""
    """Drafts may come from outputs of requests of the same scope."""
    prediction: list[int] = []
    """Tokens that the request expects; drafts may come from them."""


class SequenceSampling(msgspec.Struct, array_like=True, frozen=True):
    """Sampling settings of one sequence, resolved: no None needs a tokenizer to interpret."""

    params: SamplingParams
    seed: int
    """64-bit seed, different for each of a request's `n` sequences; token i is drawn from a counter-based generator
    keyed by (seed, i)."""
    stop_token_ids: list[int]
    """End-of-sequence and stop tokens, banned before `min_tokens` are generated."""
    bad_token_sequences: list[list[int]]
    num_candidates: int = 0
    """Best next tokens that a beam's step returns with scores. The first is the sequence's next token until
    `StepPlan.token_overrides` names another."""


class SequenceFork(msgspec.Struct, array_like=True):
    """`child` starts as a copy of `parent` (tokens, block table): in `StepPlan.forks` after this step's forward pass,
    before sampling; in `StepPlan.beam_reorders` before everything else. token_ids: all known tokens of a child with a
    history of its own (resumed after a preemption); None in beam reorders."""

    parent: int
    child: int
    sampling: SequenceSampling
    token_ids: list[int] | None = None


class StepPlan(msgspec.Struct, array_like=True):
    """One step. The batch's three columns have one entry per scheduled sequence, in batch order."""

    step_id: int
    seq_ids: list[int]
    start_positions: list[int]
    """First position computed in this step; an upper bound while drafts of the sequence are in flight."""
    num_tokens: list[int]
    """Tokens computed in this step (>= 1), drafts included. A token that the scheduler does not know yet is the row's
    last sampled one."""
    sample_seq_ids: list[int]
    """Sequences that get a token, or a vector (`pooled`), in result order."""
    sample_from: list[int]
    """Batch index, per sample, whose last scheduled token's logits are read (a child reads its parent's)."""
    new_sequences: list[NewSequence] = []
    new_blocks: dict[int, list[list[int]]] = {}
    """seq_id -> per KV group the block ids appended to its table."""
    replaced_blocks: list[tuple[int, int, int, int]] = []
    """(seq_id, group, logical index, new block id): changed table entries (copy-on-write)."""
    block_copies: list[tuple[int, int]] = []
    """(source, destination): copies of physical blocks in every layer, one batch before the forward pass."""
    forks: list[SequenceFork] = []
    released: list[int] = []
    """Sequences whose rows are dropped first: finished, aborted, preempted, or dead beams."""
    beam_reorders: list[SequenceFork] = []
    """Beams that begin as copies of others. A child may reuse the id of a sequence in `released`."""
    token_overrides: list[tuple[int, int]] = []
    """(seq_id, token): replacements of a row's last known token, where the scheduler overruled the sampled one."""
    appended: dict[int, list[int]] = {}
    """seq_id -> tokens that a constraint forces, to append after a row's last one, which the step before may still
    sample."""
    transfers: Transfers | None = None

    adapters: AdapterOrders | None = None
    images: ImageOrders | None = None

    num_drafts: list[int] = []
    """Drafts among the last of `num_tokens`, at most, per scheduled sequence; empty: no drafts. Only a sequence
    sampled from its own logits has drafts."""
    drafts: dict[int, list[int]] = {}
    """seq_id -> drafts that the scheduler proposes. The workers propose those of other sequences with `num_drafts`."""
    trimmed_tables: dict[int, list[int]] = {}
    """seq_id -> per KV group the number of leading blocks that stay in its table after drafts were rejected."""
    pooled: list[int] = []
    """Indices into `sample_seq_ids`, ascending, of samples that are vectors. Each reads its own sequence's last
    token."""

    masked_samples: list[int] = []
    """Indices into `sample_seq_ids`, ascending, of samples that need a mask. Empty: no SamplingInputs follow."""
    sampled: list[tuple[int, int, list[int]]] = []
    """(seq_id, position, tokens): rows' last tokens, sampled on a pipeline's last stage. The executor adds them, and
    all drafts, for the other stages."""
    is_dummy: bool = False
    """Compute nothing but this engine's experts for a step of other replicas; everything else is empty."""

    @property
    def masked_seq_ids(self) -> set[int]:
        return {self.sample_seq_ids[index] for index in self.masked_samples}

    @property
    def sampled_positions(self) -> list[int]:
        """Position of each sample's first new token."""
        ends = map(add, self.start_positions, self.num_tokens)
        firsts = list(map(sub, ends, self.num_drafts) if self.num_drafts else ends)
        return [firsts[source] for source in self.sample_from]

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


class SamplingInputs(msgspec.Struct, array_like=True):
    step_id: int
    masks: dict[int, bytes]
    """Index of a sample -> its allowed tokens: packed bits, [ceil(vocab size / 32)] little-endian uint32. A sample
    whose sequence has ended meanwhile has none."""
    discarded: list[int] = []
    """Indices of samples whose masks come too late: their sequences compute their last known tokens again."""
    draft_masks: dict[int, list[bytes]] = {}
    """Index of a sample with drafts in `StepPlan.masked_samples` -> the masks after each of its first drafts;
    empty bytes allow all tokens. At most this many of its drafts are accepted: after the others its constraint has
    ended or is unknown."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: of the chosen (or prompt) token, of the top ones, best first, and of
    `num_listed` tokens that the request names, in its order (they may repeat earlier ones). rank: 1-based rank of the
    chosen token in the vocabulary."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    num_listed: int = 0


class Candidates(msgspec.Struct, array_like=True):
    """Next tokens of a beam with scores, best first, without tokens that the request's rules forbid. A score is the
    log-probability, changed by the rules (penalties, bias) and not normalised again."""

    token_ids: list[int]
    scores: list[float]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of the prompt tokens at positions `start`, `start + 1`, ... (position 0 has none)."""

    start: int
    entries: list[TokenLogprobs]


class StepResult(msgspec.Struct, array_like=True):
    step_id: int
    token_ids: list[list[int]]
    """New tokens of each of `sample_seq_ids`: the accepted drafts and one more. Empty for a vector and a discarded
    sample."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """Index into `token_ids` -> logprobs, one entry per token, where requested."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """seq_id -> logprobs of the prompt positions computed in this step."""
    candidates: dict[int, Candidates] = {}
    """Index into `token_ids` -> candidates, for sequences with `num_candidates`."""
    num_drafts: int = 0
    """Drafts that the workers computed."""
    found_drafts: dict[int, int] = {}
    """Index into `token_ids` -> drafts that the workers have for the sequence's next step, where above 0."""
    draft_token_ids: dict[int, list[int]] = {}
    """Index into `token_ids` -> those drafts, for samples in `StepPlan.masked_samples`: the scheduler asks for
    masks after them, and proposes them itself."""
    transfers: TransferReport | None = None
    """Report of the KV connector's worker half."""
    adapters: list[tuple[int, str]] = []
    """(slot, error): ended loads. "": the slot now holds the adapter, else it is empty."""
    nonfinite: list[int] = []
    """Sequences with NaN or infinite logits, or such a vector. Their tokens mean nothing, and their other results are
    left out."""
    failed: dict[int, str] = {}
    """Index into `token_ids` -> message of a logits processor's failure, which ends the sequence."""
    pooled: dict[int, list[float]] = {}
    """Index into `token_ids` -> float32 values of a pooled sample: an embedding, or logits of labels."""
    encoder_seconds: float = 0.0
    """Seconds that the step's layers of images took."""
    checksum: int = 0
    """Checksum of tokens and vectors, which all ranks but one send in their place (quire/executors/rank.py)."""
