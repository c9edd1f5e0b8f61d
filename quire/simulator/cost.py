"""What a step takes: for each operator the longer of its operations at the peak and its bytes at the bandwidth.

Each limit is taken with its factor (`quire.simulator.hardware.Factors`). Operators run one after the other, so their
times add up:

- projections, MLPs, output projection: 2 operations for each weight and row; weights are read once a step, rows are
  read and written. Of a mixture of experts the expected number of distinct experts is read, routing being even.
- attention, of chunks and of single tokens apart: operations for each pair of a query and a key, bytes of the keys and
  values of the real contexts (a chunk reads its context once).
- the rest of a layer (norms, residuals, activations) and the sampler move bytes.
- tp > 1: two all-reduces a layer, each a latency and 2 (tp - 1) / tp of the rows' bytes over the link.
- pp > 1: the step is cut into micro-batches of its sequences; a stage takes the layers of the largest one. See
  `step_seconds`.
- every kernel costs `launch_overhead`.

Host overhead and swapping are no part of it: they run beside the device (quire/simulator/executor.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from quire.errors import UserError
from quire.simulator.hardware import DTYPE_BYTES, Hardware
from quire.simulator.layout import Layout
from quire.simulator.shape import ModelShape
from quire.simulator.work import StepWork

KERNELS_PER_LAYER = 10
KERNELS_PER_STEP = 12
"""Embedding, last norm, output projection and sampling."""
ROW_PASSES = 8
"""Times that a layer reads or writes a row of the residual stream outside its matrix products: two norms and two
additions, each in and out."""
LOGIT_BYTES = 4
LOGIT_PASSES = 4
"""Times that the sampler reads or writes the logits of a row."""
QUERIES_PER_TILE = 128
"""A chunk's keys and values come from the device memory once for so many of its queries, if they fill no cache."""


@dataclass(frozen=True)
class Precision:
    """weights: what they are stored in. activations: what is computed in, where weights are 16-bit or wider; narrower
    ones set the peak themselves. kv: what keys and values are stored in."""

    weights: str
    activations: str
    kv: str

    @classmethod
    def of(cls, shape: ModelShape, dtype: str | None = None, kv_dtype: str | None = None) -> Precision:
        """dtype, kv_dtype: None: weights as stored, the rest as wide as they are computed in."""
        weights = dtype or shape.dtype
        if weights not in DTYPE_BYTES:
            raise UserError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {weights!r}", param="dtype")
        activations = weights if DTYPE_BYTES[weights] >= 2 else "bfloat16"
        kv = kv_dtype or activations
        if kv not in DTYPE_BYTES or kv == "int4":
            raise UserError(f"kv_cache_dtype {kv!r} is not known to the cost model", param="kv_cache_dtype")
        return cls(weights, activations, kv)


class CostModel:
    """The cost of steps of one model on one replica of a layout."""

    def __init__(
        self, shape: ModelShape, hardware: Hardware, layout: Layout | None = None, precision: Precision | None = None
    ) -> None:
        """Raises UserError when the model cannot be laid out so, or the device lacks the dtype."""
        self.shape = shape
        self.hardware = hardware
        self.layout = layout or Layout()
        self.precision = precision or Precision.of(shape)
        self.windows = tuple(dict.fromkeys(shape.windows))
        _check(shape, self.layout)
        factors = hardware.factors
        self._rate = hardware.peak(self.precision.weights) * factors.compute
        self._bandwidth = hardware.bandwidth * factors.bandwidth
        self._attention_rate = hardware.peak(self.precision.activations) * factors.attention_compute
        self._attention_bandwidth = hardware.bandwidth * factors.attention_bandwidth
        self._link = hardware.link_bandwidth * factors.link
        self._weight_size = DTYPE_BYTES[self.precision.weights]
        self._row_size = DTYPE_BYTES[self.precision.activations]
        self._kv_size = DTYPE_BYTES[self.precision.kv]
        self._layers = shape.layers_per_stage(self.layout.pp)
        self._moe_layers = min(self._layers, -(-shape.num_moe_layers * self._layers // shape.num_layers))
        self._window_layers = [self._layers * shape.windows.count(window) / shape.num_layers for window in self.windows]
        self._projections = list(self._dense_operators())

    # -- what callers ask -------------------------------------------------------------------------------------------

    def step_seconds(self, work: StepWork, *, overlapped: bool = False) -> float:
        """Seconds from the first kernel of a step to its results.

        With pp > 1 the sequences of a step are cut into m micro-batches that follow each other through the stages. A
        step by itself takes (m + pp - 1) times the longest stage: (pp - 1) of them are the bubble; m is chosen to make
        that least. overlapped: the next step is in flight, so its micro-batches enter the pipeline where this step's
        leave it, and a step takes m >= pp stages, without a bubble.
        """
        pp = self.layout.pp
        if pp == 1:
            return sum(self.breakdown(work).values())
        most = max(1, min(pp, work.num_sequences))
        best = float("inf")
        for m in range(1, most + 1):
            stage = sum(self.breakdown(_share(work, m)).values())
            best = min(best, stage * (max(m, pp) if overlapped else m + pp - 1))
        return best

    def breakdown(self, work: StepWork) -> dict[str, float]:
        """Operator -> seconds, of one pipeline stage (the longest: with the output projection)."""
        tokens = work.num_tokens
        seconds: dict[str, float] = {}
        if not tokens:
            return seconds
        for name, weights, width, layers in self._projections:
            seconds[name] = seconds.get(name, 0.0) + layers * self._matmul(tokens, weights, width)
        if self._moe_layers:
            seconds["experts"] = self._moe_layers * self._expert_seconds(tokens)
        if work.num_chunks:
            seconds["prefill attention"] = self._chunk_attention(work)
        if work.num_decodes:
            seconds["decode attention"] = self._decode_attention(work)
        rows = tokens * self.shape.hidden * self._row_size
        seconds["elementwise"] = self._layers * ROW_PASSES * rows / self._bandwidth
        seconds["embedding"] = 2 * rows / self._bandwidth
        if work.num_sampled:
            seconds["logits"] = self._logits(work.num_sampled)
        if self.layout.tp > 1:
            seconds["all-reduce"] = self._all_reduce(rows, work.num_sampled)
        if self.layout.pp > 1:
            seconds["hand-over"] = self.hardware.link_latency + rows / self._link
        if work.num_copied_blocks:
            seconds["block copies"] = self._copies(work)
        seconds["launches"] = self._num_kernels() * self.hardware.launch_overhead
        return seconds

    @property
    def weight_bytes_per_device(self) -> float:
        """Of the largest pipeline stage: its share of the layers, and a table of the vocabulary at each end."""
        shape, layout = self.shape, self.layout
        tables = shape.embedding_parameters * (1 if shape.is_tied or layout.pp > 1 else 2)
        layers = shape.parameters() - shape.embedding_parameters * (1 if shape.is_tied else 2)
        return (layers * self._layers / shape.num_layers + tables) / layout.tp * self._weight_size

    # -- operators --------------------------------------------------------------------------------------------------

    def _dense_operators(self) -> Iterator[tuple[str, float, float, int]]:
        """(name, weights on this device, elements of a row read and written, layers of this stage)."""
        shape, tp, layers = self.shape, self.layout.tp, self._layers
        for _, inputs, outputs in shape.attention_projections():
            yield "projections", inputs * outputs / tp, inputs + outputs / tp, layers
        dense = layers - self._moe_layers
        if dense:
            yield from self._mlp("mlp", shape.intermediate, dense)
        if shape.experts is not None and self._moe_layers:
            yield "router", shape.hidden * shape.experts.num_experts, shape.hidden, self._moe_layers
            if shape.experts.shared_intermediate:
                yield from self._mlp("shared experts", shape.experts.shared_intermediate, self._moe_layers)

    def _mlp(self, name: str, width: int, layers: int) -> Iterator[tuple[str, float, float, int]]:
        hidden, tp = self.shape.hidden, self.layout.tp
        up = (2 if self.shape.is_gated else 1) * width / tp
        yield name, hidden * up, hidden + up, layers
        yield name, hidden * width / tp, hidden + width / tp, layers

    def _matmul(self, rows: float, weights: float, width: float) -> float:
        """rows of `width` elements in and out, multiplied by so many weights."""
        return max(
            2 * rows * weights / self._rate,
            (weights * self._weight_size + rows * width * self._row_size) / self._bandwidth,
        )

    def _expert_seconds(self, tokens: float) -> float:
        """One layer's experts. Each token picks `num_active` of them, all alike likely."""
        experts, tp = self.shape.experts, self.layout.tp
        assert experts is not None
        share = experts.num_active / experts.num_experts
        touched = experts.num_experts * (1 - math.pow(1 - share, tokens))
        size, picks = self.shape.expert_parameters / tp, tokens * experts.num_active
        width = 2 * self.shape.hidden + (2 if self.shape.is_gated else 1) * 2 * experts.intermediate / tp
        return max(
            2 * picks * size / self._rate,
            (touched * size * self._weight_size + picks * width * self._row_size) / self._bandwidth,
        )

    def _chunk_attention(self, work: StepWork) -> float:
        shape, tp = self.shape, self.layout.tp
        if shape.latent is None:
            pair, row = 4 * shape.head_dim, 2 * shape.head_dim
        else:
            latent = shape.latent
            pair = 2 * (latent.nope_dim + latent.rope_dim + latent.value_dim)
            row = latent.nope_dim + latent.rope_dim + latent.value_dim
        heads, kept = shape.num_heads / tp, shape.kv_elements(tp) * self._kv_size
        queries = (work.num_tokens - work.num_decodes) * heads * row * self._row_size
        seconds = 0.0
        for layers, pairs, context in zip(self._window_layers, work.prefill_pairs, work.prefill_context, strict=True):
            moved = context * kept + queries
            seconds += layers * max(pairs * heads * pair / self._attention_rate, moved / self._attention_bandwidth)
        return seconds

    def _decode_attention(self, work: StepWork) -> float:
        """Latent attention multiplies queries by the kept vector itself, of which all heads share one."""
        shape, tp = self.shape, self.layout.tp
        pair = 4 * shape.head_dim if shape.latent is None else 2 * (shape.latent.token_elements + shape.latent.kv_rank)
        heads, kept = shape.num_heads / tp, shape.kv_elements(tp) * self._kv_size
        seconds = 0.0
        for layers, context in zip(self._window_layers, work.decode_context, strict=True):
            seconds += layers * max(
                context * heads * pair / self._attention_rate, context * kept / self._attention_bandwidth
            )
        return seconds

    def _logits(self, rows: int) -> float:
        shape, tp = self.shape, self.layout.tp
        product = self._matmul(rows, shape.embedding_parameters / tp, shape.hidden + shape.vocab / tp)
        return product + rows * shape.vocab * LOGIT_BYTES * LOGIT_PASSES / self._bandwidth

    def _all_reduce(self, row_bytes: float, num_sampled: int) -> float:
        """Two of all rows in each layer, and the gathering of the logits."""
        tp = self.layout.tp
        share = (tp - 1) / tp
        layer = 2 * (self.hardware.link_latency + 2 * share * row_bytes / self._link)
        gathered = num_sampled * self.shape.vocab * self._row_size * share / self._link
        return self._layers * layer + self.hardware.link_latency + gathered

    def _copies(self, work: StepWork) -> float:
        """Copy-on-write of blocks of 16 tokens or whatever `block_tokens` says, read and written."""
        block = self.block_tokens * self._layers * self.shape.kv_elements(self.layout.tp) * self._kv_size
        return 2 * work.num_copied_blocks * block / self._bandwidth

    block_tokens = 16
    """Tokens of a block, for copies of blocks."""

    def _num_kernels(self) -> int:
        return self._layers * KERNELS_PER_LAYER + KERNELS_PER_STEP


def _share(work: StepWork, m: int) -> StepWork:
    """A micro-batch: one of `m` even parts of a step."""
    if m == 1:
        return work
    return StepWork(
        num_tokens=-(-work.num_tokens // m),
        num_sequences=-(-work.num_sequences // m),
        num_sampled=-(-work.num_sampled // m),
        num_chunks=-(-work.num_chunks // m),
        num_decodes=-(-work.num_decodes // m),
        decode_context=[-(-value // m) for value in work.decode_context],
        prefill_context=[-(-value // m) for value in work.prefill_context],
        prefill_pairs=[-(-value // m) for value in work.prefill_pairs],
        num_copied_blocks=-(-work.num_copied_blocks // m),
    )


def _check(shape: ModelShape, layout: Layout) -> None:
    """Raise UserError for a layout that the model cannot have."""
    if shape.num_heads % layout.tp:
        raise UserError(f"tp={layout.tp} does not divide the {shape.num_heads} heads of {shape.name}", param="tp")
    if layout.tp > shape.num_kv_heads and layout.tp % shape.num_kv_heads and shape.latent is None:
        raise UserError(
            f"tp={layout.tp} is no multiple of the {shape.num_kv_heads} key-value heads of {shape.name}", param="tp"
        )
    if layout.pp > shape.num_layers:
        raise UserError(f"pp={layout.pp} exceeds the {shape.num_layers} layers of {shape.name}", param="pp")
