"""Predicted seconds of a step: for each operator the longer of its operations at the peak and its bytes at the
bandwidth, each limit times its factor (`hardware.Factors`), added up (docs/decisions/0016-simulator.md):

- matrix products: 2 operations per weight and row; weights are read once a step. A mixture reads the expected number
  of distinct experts under even routing.
- attention: operations per pair of query and key, bytes of the real contexts. Latent attention expands keys and values
  for chunks.
- the rest of a layer and the sampler move bytes.
- tp > 1: two all-reduces a layer. ep > 1: in place of the second one, tokens go to their experts' devices and back.
- pp > 1: micro-batches pass the stages (`step_seconds`).
- kernels, tokens and sequences cost overheads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from quire.config.model_shape import DTYPE_BYTES, QUANTIZED, STATE_BORDER, AttentionShape, Matrix, ModelShape
from quire.config.parallel import ParallelConfig, why_no_copies, why_not_dealt, why_prompts_not_dealt
from quire.config.vision import EncoderCosts, VisionConfig
from quire.errors import UserError
from quire.simulator.hardware import Hardware
from quire.simulator.tower import TowerCost
from quire.simulator.work import ChunkTokens, StepWork, Windows

KERNELS_PER_LAYER = 10
KERNELS_PER_STEP = 12
"""Kernels of the embedding, last norm, output projection and sampling."""
ROW_PASSES = 8
"""Reads and writes of a residual row in a layer outside matrix products."""
BLOCK_TOKENS = 16
"""Tokens of a block, until `block_tokens` is set."""
LOGIT_BYTES = 4
ALIASES = {"fp8": "float8"}
"""Option's name of a type -> name in `model_shape.DTYPE_BYTES`."""
LOGIT_PASSES = 4
"""Reads and writes of a row's logits by the sampler."""


@dataclass(frozen=True)
class Precision:
    """Number types of a simulated run. weights, experts, tables: stored types of layers' matrices, experts, and
    vocabulary tables. activations: computation type where weights have at least 16 bits; narrower weights set the peak
    themselves. kv: stored type of keys and values."""

    weights: str
    activations: str
    kv: str
    experts: str = ""
    tables: str = ""

    @classmethod
    def of(cls, shape: ModelShape, dtype: str | None = None, kv_dtype: str | None = None) -> Precision:
        """Types of a model. dtype, kv_dtype: None means weights as stored, keys and values as computed."""
        weights = ALIASES.get(dtype or "", dtype) or shape.dtype
        if weights not in DTYPE_BYTES:
            raise UserError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {weights!r}", param="dtype")
        activations = weights if DTYPE_BYTES[weights] >= 2 else "bfloat16"
        kv = ALIASES.get(kv_dtype or "", kv_dtype) or activations
        if kv not in DTYPE_BYTES or DTYPE_BYTES[kv] < 1:
            known = ", ".join(name for name, size in DTYPE_BYTES.items() if size >= 1)
            raise UserError(f"kv_cache_dtype must be one of {known}, not {kv!r}", param="kv_cache_dtype")
        experts = ALIASES.get(dtype or "", dtype) or shape.expert_dtype
        tables = activations if weights in QUANTIZED else weights
        return cls(weights, activations, kv, experts, tables)


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one name on one device. Seconds at the peak per row; seconds of bytes: once a step (the
    weights), and per row."""

    name: str
    per_row: float
    weights: float
    row_bytes: float


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Attention seconds of one kind's layers on one device. At the peak: per pair of a chunk's token and a position,
    and per position of a single token. Of bytes: per position read, and per token of a chunk."""

    chunk_pair: float
    decode_pair: float
    kept: float
    decode_kept: float
    chunk_row: float


def windows_of(shape: ModelShape) -> Windows:
    """Positions that a token reads, for each kind of attention in the order of `attention_counts`; an indexer's own
    reads follow."""
    windows: list[int | ChunkTokens | None] = []
    for attention in shape.attention_counts:
        if attention.kind == "chunked" and attention.window:
            windows.append(ChunkTokens(attention.window))
        elif attention.index_top:
            windows += attention.index_top, None
        else:
            windows.append(attention.reach)
    return tuple(windows)


class CostModel:
    """Costs of one model's steps on one replica of a layout."""

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        layout: ParallelConfig | None = None,
        precision: Precision | None = None,
        *,
        expands_prompts: bool = False,
        vision: VisionConfig | None = None,
    ) -> None:
        """Cost model of a layout. expands_prompts: count a second copy of the matrices that expand latents. vision:
        loaded tower. Raises UserError for a layout that the model cannot have, or a dtype that the device lacks."""
        self.shape = shape = shape if vision is None else replace(shape, entrance_layers=vision.entrance_layers)
        self.hardware = hardware
        self.layout = layout or ParallelConfig()
        self.precision = precision or Precision.of(shape)
        self.expands_prompts = expands_prompts
        self.vision = vision
        self.windows = windows_of(shape)
        self._block_tokens = BLOCK_TOKENS
        _check(shape, self.layout)
        self._bandwidth = hardware.bandwidth * hardware.factors.bandwidth
        self._row_size = DTYPE_BYTES[self.precision.activations]
        self._kv_size = DTYPE_BYTES[self.precision.kv]
        self._layers = shape.layers_per_stage(self.layout.pp)
        self._moe_layers = min(self._layers, -(-shape.num_moe_layers * self._layers // shape.num_layers))
        self._half_rows = hardware.half_rows
        self._decode_seconds: dict[int, float] = {}
        """Sequences with one token each -> `_rows_seconds` of such a step."""
        self._products = _merged(self._dense_products())
        self._logits = self._logits_product()
        self._set_up_attention()
        self._constant, self._per_token, self._per_sampled = self._linear_parts()
        self._set_up_experts()
        self.tower: TowerCost | None = None
        """Vision tower, on the first stage."""
        if vision is not None:
            costs = EncoderCosts.of(vision, shape.active_parameters(), self.layout)
            self.tower = TowerCost(vision, hardware, self.precision.activations, costs, self._link(self.layout.tp))

    # -- queries ----------------------------------------------------------------------------------------------------

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block: the length of the runs that attention reads, and of copies."""
        return self._block_tokens

    @block_tokens.setter
    def block_tokens(self, block_tokens: int) -> None:
        if block_tokens != self._block_tokens:
            self._block_tokens = block_tokens
            self._set_up_attention()

    def step_seconds(self, work: StepWork, *, overlapped: bool = False) -> float:
        """Seconds from the first kernel of a step to its results. With pp > 1 the step's sequences are cut into m
        micro-batches; a single step takes (m + pp - 1) times the longest stage, with the best m. overlapped: the next
        step follows at once, so a step takes m >= pp stages."""
        pp = self.layout.pp
        if pp == 1:
            return self._longest_stage(work)
        best = float("inf")
        for m in range(1, max(1, min(pp, work.num_sequences)) + 1):
            stage = self._longest_stage(_share(work, m))
            best = min(best, stage * (max(m, pp) if overlapped else m + pp - 1))
        return best

    def breakdown(self, work: StepWork) -> dict[str, float]:
        """Operator -> seconds of a step in the longest pipeline stage (with the output projection)."""
        if self.layout.pcp > 1 and work.num_chunks:
            return self._stage_breakdown(self._dealt(work)) | {"shared keys": self._shared_keys(work)}
        return self._stage_breakdown(work)

    def _longest_stage(self, work: StepWork) -> float:
        if self.layout.pcp > 1 and work.num_chunks:
            return self._stage_seconds(self._dealt(work)) + self._shared_keys(work)
        return self._stage_seconds(work)

    def _stage_breakdown(self, work: StepWork) -> dict[str, float]:
        tokens, sampled, seconds = work.num_tokens, work.num_sampled, dict[str, float]()
        if not tokens:
            return seconds
        for product in self._products:
            seconds[product.name] = self._product_seconds(product, tokens)
        if self._moe_layers:
            seconds["experts"] = self._expert_seconds(tokens)
        chunk_tokens = tokens - work.num_decodes
        for index, attention in enumerate(self._attention):
            if work.num_chunks:
                pairs, context = work.prefill_pairs[index], work.prefill_context[index]
                moved = context * attention.kept + chunk_tokens * attention.chunk_row
                _add(seconds, "prefill attention", max(pairs * attention.chunk_pair, moved))
            if work.num_decodes:
                _add(seconds, "decode attention", work.decode_context[index] * self._decode_position(attention))
        for name, value in self._per_token.items():
            seconds[name] = tokens * value
        if sampled:
            seconds["logits"] = self._product_seconds(self._logits, sampled)
            for name, value in self._per_sampled.items():
                _add(seconds, name, sampled * value)
        for name, value in self._constant.items():
            _add(seconds, name, value)
        _add(seconds, "per sequence", work.num_sequences * self.hardware.sequence_overhead)
        _add(seconds, "per new sequence", work.num_new * self.hardware.new_sequence_overhead)
        if work.num_copied_blocks:
            seconds["block copies"] = self._copies(work)
        return {name: value for name, value in seconds.items() if value}

    def _dealt(self, work: StepWork) -> StepWork:
        """Part of a step with prompts that one of the groups computes. Each reads nearly all keys, and samples all."""
        pcp = self.layout.pcp
        return StepWork(
            num_tokens=-(-work.num_tokens // pcp),
            num_sequences=work.num_sequences,
            num_sampled=work.num_sampled,
            num_new=work.num_new,
            num_chunks=work.num_chunks,
            num_decodes=work.num_decodes // pcp,
            decode_context=[-(-value // pcp) for value in work.decode_context],
            prefill_context=work.prefill_context,
            prefill_pairs=[-(-value // pcp) for value in work.prefill_pairs],
            num_copied_blocks=work.num_copied_blocks,
        )

    def _shared_keys(self, work: StepWork) -> float:
        """Seconds in which a group gets the keys of a step's other rows in a stage's layers, and hidden states once."""
        layout = self.layout
        latency, link = self._link(layout.tp * layout.pcp)
        others = work.num_tokens - work.num_tokens // layout.pcp
        layers = -(-self.shape.num_layers // layout.pp)
        row = self.shape.kv_elements(layout.tp) * self._row_size * layers / self.shape.num_layers
        return (layers + 1) * latency + others * row / link

    @property
    def _expansion(self) -> int:
        return self.shape.expansion_parameters if self.expands_prompts else 0

    @property
    def weight_bytes(self) -> float:
        shape, precision = self.shape, self.precision
        tables = shape.embedding_parameters * (1 if shape.is_tied else 2)
        routed = shape.routed_parameters
        rest = shape.parameters() - tables - routed + self._expansion
        return (
            rest * DTYPE_BYTES[precision.weights]
            + tables * DTYPE_BYTES[precision.tables or precision.weights]
            + routed * DTYPE_BYTES[precision.experts or precision.weights]
        )

    @property
    def weight_bytes_per_device(self) -> float:
        """Weight bytes of the largest pipeline stage, with a vocabulary table in the first and the last."""
        shape, layout, precision = self.shape, self.layout, self.precision
        tables = shape.embedding_parameters * (1 if shape.is_tied or layout.pp > 1 else 2)
        all_tables = shape.embedding_parameters * (1 if shape.is_tied else 2)
        routed = shape.routed_parameters
        rest = shape.parameters() - all_tables - routed + self._expansion
        share = self._layers / shape.num_layers
        table_size = DTYPE_BYTES[precision.tables or precision.weights]
        dense = rest * share * DTYPE_BYTES[precision.weights] + tables * table_size
        experts = routed * share * DTYPE_BYTES[precision.experts or precision.weights]
        tower = 0 if self.tower is None else self.tower.weight_bytes
        return dense / layout.tp + experts * self.expert_share + tower

    @property
    def expert_share(self) -> float:
        experts, layout = self.shape.experts, self.layout
        if experts is None or layout.redundant_experts is None:
            return 1 / max(layout.ep, layout.tp)
        return math.ceil((experts.num_experts + layout.redundant_experts) / layout.ep) / experts.num_experts

    # -- a step, without names --------------------------------------------------------------------------------------

    def _stage_seconds(self, work: StepWork) -> float:
        tokens, sampled = work.num_tokens, work.num_sampled
        if not tokens:
            return 0.0
        if tokens == work.num_decodes and not work.num_new:
            total = self._decode_seconds.get(tokens)
            if total is None:
                total = self._decode_seconds[tokens] = self._rows_seconds(work)
        else:
            total = self._rows_seconds(work)
        if work.num_decodes:
            for context, seconds in zip(work.decode_context, self._flat_decode, strict=True):
                total += context * seconds
        if work.num_chunks:
            chunk_tokens = tokens - work.num_decodes
            for index, attention in enumerate(self._attention):
                by_peak = work.prefill_pairs[index] * attention.chunk_pair
                by_bandwidth = work.prefill_context[index] * attention.kept + chunk_tokens * attention.chunk_row
                total += by_peak if by_peak > by_bandwidth else by_bandwidth
        if sampled:
            total += sampled * self._sum_per_sampled + self._product_seconds(self._logits, sampled)
        if work.num_copied_blocks:
            total += self._copies(work)
        return total

    def _rows_seconds(self, work: StepWork) -> float:
        tokens = work.num_tokens
        rows = tokens + self._half_rows
        total = self._sum_constant + tokens * self._sum_per_token + work.num_sequences * self._per_sequence
        total += work.num_new * self._per_new_sequence
        for per_row, weights, row_bytes in self._flat_products:
            by_peak, by_bandwidth = rows * per_row, weights + tokens * row_bytes
            total += by_peak if by_peak > by_bandwidth else by_bandwidth
        if self._moe_layers:
            total += self._expert_seconds(tokens)
        return total

    def _product_seconds(self, product: Product, rows: float) -> float:
        return max((rows + self._half_rows) * product.per_row, product.weights + rows * product.row_bytes)

    def _expert_seconds(self, tokens: float) -> float:
        picks = tokens * self._picks
        touched = self._num_local_experts * (1 - math.pow(self._missed, tokens * self._replicas_together))
        by_peak = (picks + touched * self._half_rows) * self._expert.per_row
        by_bandwidth = touched * self._expert.weights + picks * self._expert.row_bytes
        return max(by_peak, by_bandwidth) + tokens * self._exchange

    @staticmethod
    def _decode_position(attention: AttentionCost) -> float:
        return max(attention.decode_pair, attention.decode_kept)

    def _copies(self, work: StepWork) -> float:
        elements = self.shape.kv_elements(self.layout.tp) * self._layers / self.shape.num_layers
        block = self._block_tokens / self.layout.dcp * elements * self._kv_size
        return 2 * work.num_copied_blocks * block / self._bandwidth

    # -- operators --------------------------------------------------------------------------------------------------

    def _product(self, name: str, weights: float, width: float, layers: float, dtype: str) -> Product:
        """Product over `layers`. weights: elements on this device in one layer. width: elements of a row, read and
        written."""
        rate = self.hardware.peak(dtype) * self.hardware.factors.compute
        return Product(
            name,
            per_row=layers * 2 * weights / rate,
            weights=layers * weights * DTYPE_BYTES[dtype] / self._bandwidth,
            row_bytes=layers * width * self._row_size / self._bandwidth,
        )

    def _dense_products(self) -> Iterator[Product]:
        shape, tp, layers, dtype = self.shape, self.layout.tp, self._layers, self.precision.weights
        counts: Counter[tuple[Matrix, ...]] = Counter(layer.projections for layer in shape.layers)
        for projections, count in counts.items():
            share = count * layers / shape.num_layers
            for inputs, outputs in projections:
                yield self._product("projections", inputs * outputs / tp, inputs + outputs / tp, share, dtype)
        dense = layers - self._moe_layers
        if dense:
            yield from self._mlp("mlp", shape.intermediate, dense)
        if shape.experts is not None and self._moe_layers:
            router = shape.hidden * shape.experts.num_experts
            yield self._product("router", router, shape.hidden, self._moe_layers, self.precision.activations)
            if shape.experts.shared_intermediate:
                yield from self._mlp("shared experts", shape.experts.shared_intermediate, self._moe_layers)

    def _mlp(self, name: str, width: int, layers: int) -> Iterator[Product]:
        hidden, tp, dtype = self.shape.hidden, self.layout.tp, self.precision.weights
        up = (2 if self.shape.is_gated else 1) * width / tp
        yield self._product(name, hidden * up, hidden + up, layers, dtype)
        yield self._product(name, hidden * width / tp, hidden + width / tp, layers, dtype)

    def _logits_product(self) -> Product:
        shape, tp = self.shape, self.layout.tp
        dtype = self.precision.tables or self.precision.weights
        return self._product("logits", shape.embedding_parameters / tp, shape.hidden + shape.vocab / tp, 1, dtype)

    def _set_up_experts(self) -> None:
        experts, layout = self.shape.experts, self.layout
        if experts is None or not self._moe_layers:
            return
        whole = layout.ep > 1
        parts = 1 if whole else layout.tp
        width = 2 * self.shape.hidden + (2 if self.shape.is_gated else 1) * 2 * experts.intermediate / parts
        dtype = self.precision.experts or self.precision.weights
        self._expert = self._product("experts", self.shape.expert_parameters / parts, width, self._moe_layers, dtype)
        self._missed = 1 - experts.num_active / experts.num_experts
        self._num_local_experts = experts.num_experts / (layout.ep if whole else 1)
        self._picks = experts.num_active / (layout.tp if whole else 1)
        self._replicas_together = layout.replicas_together
        self._exchange = self._moe_layers * self._exchange_seconds(experts.num_active) / layout.tp if whole else 0.0

    def _exchange_seconds(self, picks: int) -> float:
        hardware, factor = self.hardware, self.hardware.factors.link
        there = min(self._row_size, max(1.0, DTYPE_BYTES[self.precision.experts or self.precision.weights]))
        num_bytes = self.shape.hidden * (there + self._row_size)
        near = min(self.layout.ep, hardware.node_size)
        nodes = -(-self.layout.ep // near)
        others = (nodes - 1) * (1 - (1 - 1 / nodes) ** picks)
        over_network = others * num_bytes / (hardware.network_bandwidth * factor)
        return max(over_network, picks * (near - 1) / near * num_bytes / (hardware.link_bandwidth * factor))

    def _set_up_attention(self) -> None:
        self._attention = []
        for attention, num_layers in self.shape.attention_counts.items():  # in the order of `windows_of`
            self._attention.append(self._attention_of(attention, num_layers))
            if attention.index_top:
                self._attention.append(self._indexer_of(attention, num_layers))
        self._flat_decode = [self._decode_position(attention) for attention in self._attention]

    def _attention_of(self, attention: AttentionShape, num_layers: int) -> AttentionCost:
        tp, factors, num_heads = self.layout.tp, self.hardware.factors, attention.num_heads
        layers = num_layers * self._layers / self.shape.num_layers
        row, run = attention.key_dim + attention.value_dim, (attention.key_dim + attention.value_dim) / 2
        chunk_pair = decode_pair = 2 * row
        kept_bytes = decode_bytes = attention.token_elements(tp) * self._kv_size / self.layout.dcp
        if attention.kind == "latent":
            run = attention.latent_dim
            decode_pair = 2 * (attention.latent_dim + attention.latent_rank)
            if attention.index_top:  # every token reads its own vectors, so none are expanded for a chunk
                chunk_pair = decode_pair
                kept_bytes = decode_bytes = attention.latent_dim * self._kv_size
        elif attention.kind == "state":
            # The state decays, is compared with the key, changed by the value and read by the query. A decoding step
            # reads it and the rows after its border; a prompt reads and writes them once per border.
            num_heads, run = attention.num_kv_heads, math.inf
            chunk_pair = decode_pair = 7 * attention.key_dim * attention.value_dim
            decode_bytes = attention.state_bytes(tp)
            kept_bytes = 2 * decode_bytes / STATE_BORDER
        heads = num_heads / tp
        rate = self.hardware.peak(self.precision.activations) * factors.attention_compute
        bandwidth = self.hardware.bandwidth * factors.attention_bandwidth
        run_bytes = self._block_tokens * run * self._kv_size
        return AttentionCost(
            chunk_pair=layers * heads * chunk_pair / rate,
            decode_pair=layers * heads * decode_pair / rate,
            kept=layers * kept_bytes / bandwidth,
            decode_kept=layers * decode_bytes / bandwidth * (1 + self.hardware.run_overhead / run_bytes),
            chunk_row=layers * heads * row * self._row_size / bandwidth,
        )

    def _indexer_of(self, attention: AttentionShape, num_layers: int) -> AttentionCost:
        factors, size = self.hardware.factors, attention.index_dim
        layers = num_layers * self._layers / self.shape.num_layers
        rate = self.hardware.peak(self.precision.activations) * factors.attention_compute
        bandwidth = self.hardware.bandwidth * factors.attention_bandwidth
        pair, kept = layers * 2 * attention.index_heads * size / rate, layers * size * self._kv_size / bandwidth
        run_bytes = self._block_tokens * size * self._kv_size
        return AttentionCost(
            chunk_pair=pair,
            decode_pair=pair,
            kept=kept,
            decode_kept=kept * (1 + self.hardware.run_overhead / run_bytes),
            chunk_row=layers * (attention.index_heads + 1) * size * self._row_size / bandwidth,
        )

    def _linear_parts(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        shape, hardware, layers = self.shape, self.hardware, self._layers
        row = shape.hidden * self._row_size
        num_kernels = layers * KERNELS_PER_LAYER + KERNELS_PER_STEP
        constant = {"launches": num_kernels * hardware.launch_overhead}
        per_token = {
            "elementwise": layers * ROW_PASSES * row / self._bandwidth,
            "embedding": 2 * row / self._bandwidth,
            "per token": hardware.token_overhead,
        }
        per_sampled = {"sampling": shape.vocab * LOGIT_BYTES * LOGIT_PASSES / self._bandwidth}
        tp = self.layout.tp
        latency, link = self._link(tp)
        if tp > 1:
            share = (tp - 1) / tp
            reduces = 2 * layers - (self._moe_layers if self.layout.ep > 1 else 0)
            constant["all-reduce"] = (reduces + 1) * latency
            per_token["all-reduce"] = reduces * 2 * share * row / link
            per_sampled["all-reduce"] = shape.vocab * self._row_size * share / link
        if self.layout.dcp > 1:  # queries there, results and the sums of their weights back
            constant["merged parts"] = 2 * layers * latency
            per_token["merged parts"] = self._merged_elements() * self._row_size / link
        if self.layout.ep > 1 and self._moe_layers:
            far = self.layout.ep > hardware.node_size
            constant["exchange"] = self._moe_layers * 2 * (hardware.network_latency if far else hardware.link_latency)
        if self.layout.pp > 1:
            latency, link = self._link(self.layout.devices_per_replica)
            constant["hand-over"], per_token["hand-over"] = latency, row / link
        self._sum_constant = sum(constant.values())
        self._sum_per_token, self._sum_per_sampled = sum(per_token.values()), sum(per_sampled.values())
        self._per_sequence, self._per_new_sequence = hardware.sequence_overhead, hardware.new_sequence_overhead
        self._flat_products = [(each.per_row, each.weights, each.row_bytes) for each in self._products]
        return constant, per_token, per_sampled

    def _merged_elements(self) -> float:
        others, total = self.layout.dcp - 1, 0.0
        for attention, num_layers in self.shape.attention_counts.items():
            row = attention.num_heads / self.layout.tp * (attention.scored_dim + attention.attended_dim + 1)
            total += num_layers * self._layers / self.shape.num_layers * others * row
        return total

    def _link(self, num_devices: int) -> tuple[float, float]:
        """(latency, bytes per second) between `num_devices` neighbouring devices; over the network if a node has
        fewer."""
        hardware, factor = self.hardware, self.hardware.factors.link
        if num_devices > hardware.node_size:
            return hardware.network_latency, hardware.network_bandwidth * factor
        return hardware.link_latency, hardware.link_bandwidth * factor


def _merged(products: Iterator[Product]) -> list[Product]:
    found: dict[str, Product] = {}
    for each in products:
        other = found.get(each.name, Product(each.name, 0.0, 0.0, 0.0))
        found[each.name] = Product(
            each.name, other.per_row + each.per_row, other.weights + each.weights, other.row_bytes + each.row_bytes
        )
    return list(found.values())


def _add(seconds: dict[str, float], name: str, value: float) -> None:
    seconds[name] = seconds.get(name, 0.0) + value


def _share(work: StepWork, m: int) -> StepWork:
    if m == 1:
        return work
    return StepWork(
        num_tokens=-(-work.num_tokens // m),
        num_sequences=-(-work.num_sequences // m),
        num_sampled=-(-work.num_sampled // m),
        num_new=-(-work.num_new // m),
        num_chunks=-(-work.num_chunks // m),
        num_decodes=-(-work.num_decodes // m),
        decode_context=[-(-value // m) for value in work.decode_context],
        prefill_context=[-(-value // m) for value in work.prefill_context],
        prefill_pairs=[-(-value // m) for value in work.prefill_pairs],
        num_copied_blocks=-(-work.num_copied_blocks // m),
    )


def _check(shape: ModelShape, layout: ParallelConfig) -> None:
    for attention in shape.attention_counts:
        if attention.num_heads % layout.tp:
            raise UserError(
                f"tp={layout.tp} does not divide the {attention.num_heads} heads of {shape.name}", param="tp"
            )
        fewer, more = sorted((layout.tp, attention.num_kv_heads))
        if more % fewer and attention.kind != "latent":
            raise UserError(
                f"tp={layout.tp} neither divides the {attention.num_kv_heads} key-value heads of {shape.name} nor is a "
                "multiple of them",
                param="tp",
            )
    reason = why_not_dealt(shape, layout.tp, layout.dcp) if layout.dcp > 1 else None
    if reason is not None:
        raise UserError(f"dcp={layout.dcp} is not possible: {reason}", param="dcp")
    reason = why_prompts_not_dealt(shape) if layout.pcp > 1 else None
    if layout.pcp > 1 and (layout.replicas_together > 1 or layout.redundant_experts is not None):
        reason = "each replica must have experts of its own, which stay"
    if reason is not None:
        raise UserError(f"pcp={layout.pcp} is not possible: {reason}", param="pcp")
    if layout.pp > shape.most_stages:
        of_images = "" if shape.entrance_layers == 1 else f", whose first {shape.entrance_layers} take images' features"
        message = f"pp={layout.pp} exceeds the {shape.num_layers} layers of {shape.name}{of_images}"
        raise UserError(message, param="pp")
    is_uneven = shape.experts is None or shape.experts.num_experts % layout.ep
    if layout.ep > 1 and layout.redundant_experts is None and is_uneven:
        raise UserError(f"ep={layout.ep} does not share out the experts of {shape.name}", param="ep")
    if layout.redundant_experts is not None:
        if shape.experts is None or layout.ep == 1:
            raise UserError("enable_eplb needs whole experts on several devices", param="enable_eplb")
        wrong = why_no_copies(layout.redundant_experts, shape.experts.num_experts, layout.ep)
        if wrong is not None:
            raise UserError(f"eplb_config.num_redundant_experts {wrong}", param="eplb_config")
