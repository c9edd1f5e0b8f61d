"""What only some families compute: the gated delta rule, the indexer of sparse attention and attention over its choice,
attention in both directions and means for pooling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.attention_subjects import Batch, device_batch, device_limits, scattered_tables
from benchmarks.gpu.limits import Work
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.subjects import BLOCK_SIZE, Subject
from benchmarks.gpu.timing import Call
from quire.attention.device_batch import DeviceStateStep
from quire.attention.latent import IndexShape, LatentShape
from quire.attention.triton_backend import TritonAttention, TritonAttentionStep
from quire.config.model_shape import STATE_BORDER
from quire.kernels.triton.embedding import mean_rows
from quire.kernels.triton.encoder_attention import attend
from quire.kernels.triton.linear_state import gated_delta_rule
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import LatentSpec
from quire.layers.states import DeltaRule

FLOAT_BYTES = 4
STATE_DECODES = (Batch(256, 1, 992), Batch(32, 1, 992))
"""The last token is the 32nd behind a border: half of the rows that a page keeps are read."""
STATE_PROMPTS = (Batch(1, 8192, 8192), Batch(8, 1024, 1024))
INDEXED = (Batch(64, 1, 8192), Batch(8, 1, 65536), Batch(1, 1024, 16384))
TEXTS = ((256, 128), (32, 512))
"""Texts, and tokens of the longest: they have from half of that on."""


@dataclass(frozen=True, slots=True)
class RuleShape:
    """Heads of a gated delta rule."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def qkv_width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class EncoderShape:
    num_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


QWEN3_NEXT, TINY_RULE = RuleShape(16, 32, 128, 128), RuleShape(1, 2, 16, 16)
DEEPSEEK_V32 = LatentShape(0, 128, 512, 64, 0.1, top=2048), IndexShape(0, 64, 128, 64, 2048, 576, 128**-0.5)
TINY_SPARSE = LatentShape(0, 2, 32, 16, 0.1, top=4), IndexShape(0, 2, 16, 16, 4, 48, 0.25)
BERT_BASE, TINY_ENCODER = EncoderShape(12, 64), EncoderShape(2, 16)


class FamilySubjects:
    """shape: of activations' dtype. scale: divides numbers of tokens; if not 1, sizes are tiny."""

    def __init__(self, shape: Shape, device: torch.device, scale: int = 1) -> None:
        self._device = device
        self._scale = scale
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._itemsize = shape.itemsize
        is_full = scale == 1
        self._rule = QWEN3_NEXT if is_full else TINY_RULE
        self._latent, self._index = DEEPSEEK_V32 if is_full else TINY_SPARSE
        self._encoder = BERT_BASE if is_full else TINY_ENCODER

    def all(self) -> Iterator[Subject]:
        yield from self.rules()
        yield from self.indexed()
        yield from self.texts()

    # -- layers that keep a state -------------------------------------------------------------------------------------

    def rules(self) -> Iterator[Subject]:
        """Decodes read the state after the last border and the rows since; prompts are computed in chunks."""
        for kernel, batches in (("delta rule decode", STATE_DECODES), ("delta rule prompt", STATE_PROMPTS)):
            for batch in batches:
                scaled = self._scaled(batch, least=STATE_BORDER // 2)
                yield Subject(kernel, batch.name, self.rule_work(scaled), {"triton": partial(self._apply_rule, scaled)})

    def rule_work(self, batch: Batch) -> Work:
        """The state is read once (and written at borders), the rows behind the border are read, new ones written. A
        token meets the state twice and half a chunk's keys and updates."""
        rule, tokens = self._rule, batch.num_seqs * batch.num_new
        start = batch.length - batch.num_new
        state = rule.value_heads * rule.key_dim * rule.value_dim
        row = rule.value_heads * rule.value_dim + rule.key_heads * rule.key_dim + rule.value_heads
        borders = batch.length // STATE_BORDER > start // STATE_BORDER
        states = batch.num_seqs * (state * ((start >= STATE_BORDER) + borders) + row * (start % STATE_BORDER))
        moved = tokens * (rule.qkv_width + rule.value_heads * rule.value_dim) * self._itemsize
        met = min(batch.length, STATE_BORDER) / 2
        operations = 4.0 * rule.key_dim * rule.value_dim + 4.0 * met * (rule.key_dim + rule.value_dim)
        rows = batch.num_seqs * min(batch.num_new, STATE_BORDER) * row
        return Work(FLOAT_BYTES * (states + rows) + moved, tokens * rule.value_heads * operations)

    def _apply_rule(self, batch: Batch) -> Call:
        shape, heads = self._rule, self._rule.value_heads
        rate, bias = (torch.rand(heads, device=self._device) for _ in range(2))
        rule = DeltaRule(shape.key_heads, heads, shape.key_dim, shape.value_dim, rate, bias, 0, 0)
        tables, num_blocks = scattered_tables(Batch(batch.num_seqs, 1, 1), 1, self._device)
        pages = torch.rand(num_blocks, rule.end // FLOAT_BYTES, device=self._device).view(torch.uint8)
        interval = -(-batch.length // STATE_BORDER) * STATE_BORDER
        described = device_batch(batch, tables, interval, self._device)
        states = DeviceStateStep(described, {0: tables}, interval, {0: pages})
        tokens = described.num_tokens
        qkv, gates = self._random(tokens, shape.qkv_width), self._random(tokens, 2 * heads)
        out = torch.empty(tokens, heads * shape.value_dim, dtype=self._dtype, device=self._device)
        return lambda: gated_delta_rule(rule, qkv, gates, out, states)

    # -- sparse attention ---------------------------------------------------------------------------------------------

    def indexed(self) -> Iterator[Subject]:
        """The indexer over all keys, and attention over those that were chosen."""
        for batch in INDEXED:
            scaled = self._scaled(batch, least=2 * self._index.top)
            choose, attended = self.indexed_work(scaled)
            yield Subject("indexer", batch.name, choose, {"triton": partial(self._select, scaled)})
            yield Subject("sparse attention", batch.name, attended, {"triton": partial(self._attend, scaled)})

    def indexed_work(self, batch: Batch) -> tuple[Work, Work]:
        """Of choosing: every key of a sequence is read once, and meets all queries behind it. Of attention: each token
        reads its own choice."""
        latent, index, tokens = self._latent, self._index, batch.num_seqs * batch.num_new
        met = tokens * (batch.length - (batch.num_new - 1) / 2)
        keys = batch.num_seqs * batch.length * index.dim
        queries = tokens * (index.num_heads * (index.dim + 1) + index.dim)
        choose = Work(
            (keys + queries) * self._itemsize + 4 * tokens * index.top, 2.0 * met * index.num_heads * index.dim
        )
        moved = tokens * latent.num_heads * (2 * latent.rank + latent.rope_dim)
        operations = 2.0 * tokens * index.top * latent.num_heads * (latent.width + latent.rank)
        return choose, Work((tokens * index.top * latent.width + moved) * self._itemsize, operations)

    def _sparse_step(self, batch: Batch) -> TritonAttentionStep:
        latent, index = self._latent, self._index
        tables, num_blocks = scattered_tables(batch, BLOCK_SIZE, self._device)
        spec = LatentSpec(latent.width, self._itemsize, 0, index.dim, index.top)
        backend = TritonAttention(
            KVCacheLayout(BLOCK_SIZE, num_blocks, *group_layers([spec], BLOCK_SIZE)),
            {0: self._random(num_blocks, BLOCK_SIZE, latent.width + index.dim)},
            device_limits(self._device),
            num_heads=latent.num_heads,
            dtype=self._dtype,
            max_num_seqs=batch.num_seqs,
            max_model_len=batch.length,
        )
        return backend.plan(device_batch(batch, tables, BLOCK_SIZE, self._device))

    def _select(self, batch: Batch) -> Call:
        index, step, tokens = self._index, self._sparse_step(batch), batch.num_seqs * batch.num_new
        widths = index.num_heads * index.dim, index.dim, index.num_heads
        query, key, weights = (self._random(tokens, width) for width in widths)
        selected = torch.zeros(tokens, index.top, dtype=torch.int32, device=self._device)
        return lambda: step.select_keys(index, (query, key, weights), None, selected)

    def _attend(self, batch: Batch) -> Call:
        latent, step, tokens = self._latent, self._sparse_step(batch), batch.num_seqs * batch.num_new
        heads, seen = latent.num_heads, batch.length - batch.num_new
        chosen = torch.stack([torch.randperm(seen)[: latent.top].sort().values for _ in range(tokens)])
        selected = chosen.to(torch.int32).to(self._device)
        widths = heads * latent.rank, heads * latent.rope_dim, latent.rank, latent.rope_dim
        first, second, third, fourth = (self._random(tokens, width) for width in widths)
        return lambda: step.attend_latent(latent, (first, second, third, fourth), None, selected)

    # -- pooling ------------------------------------------------------------------------------------------------------

    def texts(self) -> Iterator[Subject]:
        """Attention in both directions without padding, and the means of texts."""
        width = self._encoder.width
        for count, longest in TEXTS:
            lengths = self.lengths(count, longest)
            tokens, case = sum(lengths), f"{count} texts of {longest // 2} to {longest} tokens"
            pairs = sum(length * length for length in lengths)
            work = Work(4 * tokens * width * self._itemsize, 4.0 * pairs * width)
            yield Subject("encoder attention", case, work, {"triton": partial(self._encode, lengths)})
            moved = (tokens + len(lengths)) * width * self._itemsize
            yield Subject("means of texts", case, Work(moved), {"triton": partial(self._mean, lengths)})

    def lengths(self, count: int, longest: int) -> list[int]:
        """From half of the longest on, one after another."""
        count, longest = (max(2, number // self._scale) for number in (count, longest))
        half = longest // 2
        return [half + number % (longest - half + 1) for number in range(count)]

    def _encode(self, lengths: Sequence[int]) -> Call:
        encoder, qkv = self._encoder, self._random(sum(lengths), 3 * self._encoder.width)
        starts = self._starts(lengths)
        return lambda: attend(qkv, None, starts, encoder.num_heads, encoder.head_dim**-0.5, None)

    def _mean(self, lengths: Sequence[int]) -> Call:
        x, starts = self._random(sum(lengths), self._encoder.width), self._starts(lengths)
        return lambda: mean_rows(x, starts[:-1], starts[1:])

    def _starts(self, lengths: Sequence[int]) -> torch.Tensor:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return ends.to(torch.int32).to(self._device)

    def _scaled(self, batch: Batch, least: int) -> Batch:
        """Smaller by `scale`; of at least `least` tokens and those that it computes."""
        if self._scale == 1:
            return batch
        new = 1 if batch.num_new == 1 else max(2, batch.num_new // self._scale)
        length = new if batch.num_new == batch.length else max(least, batch.length // self._scale) + new
        return Batch(max(1, batch.num_seqs // self._scale), new, length)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).to(self._dtype)
