"""Random batches for the attention kernels, with everything that must not be read or written poisoned."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from quire.attention.device_batch import DeviceBatch
from quire.kernels.arguments import LayerAttention
from quire.kernels.triton.attention_tiles import HeadShape, SplitPlan, Tiles, scratch_rows
from quire.kernels.triton.decode_attention import SplitScratch, split_attention
from quire.kernels.triton.paged_attention import PagedAttention, varlen_attention

NAN = float("nan")
CPU = torch.device("cpu")


@dataclass
class Case:
    """Sequences as (length, new tokens), and one layer's pages with their keys and values (page_dtype uint8: e4m3 bits;
    float8_e4m3fn: the same, as numbers where the device converts them). Slots that no query sees hold NaN, entries of
    block tables that none sees name a block outside the pool. Two rows of tables and two tokens are padding."""

    layer: LayerAttention
    sequences: list[tuple[int, int]]
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None
    sinks: torch.Tensor | None = None
    device: torch.device = CPU
    seed: int = 0
    images: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By sequence: first and last + 1 of its new tokens that see one another."""
    pages: torch.Tensor = field(init=False)
    qkv: torch.Tensor = field(init=False)
    batch: DeviceBatch = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        layer, lengths = self.layer, [length for length, _ in self.sequences]
        counts = [-(-length // self.block_size) for length in lengths]
        num_blocks = sum(counts) + 3
        page_dtype = self.page_dtype or self.dtype
        shape = (num_blocks, 2, self.block_size, layer.num_kv_heads, layer.head_dim)
        is_float8 = page_dtype.itemsize == 1
        self.pages = torch.full(shape, 0x7F if is_float8 else NAN, dtype=torch.uint8 if is_float8 else page_dtype)
        rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].int()
        table = torch.full((len(lengths) + 2, max(counts) + 2), 10**6, dtype=torch.int32)
        blocks = torch.randperm(num_blocks - 1, generator=generator).int()[: sum(counts)] + 1
        for row, (length, new), own in zip(rows, self.sequences, blocks.split(counts), strict=True):
            first_seen = 0 if layer.window is None else max(0, length - new - layer.window + 1)
            kept = first_seen // self.block_size
            table[row, kept : len(own)] = own[kept:]
            for position in range(first_seen, length):
                block = int(own[position // self.block_size])
                drawn = torch.randn(2, *shape[3:], generator=generator)
                stored = drawn.to(torch.float8_e4m3fn).view(torch.uint8) if is_float8 else drawn.to(page_dtype)
                self.pages[block, :, position % self.block_size] = stored
        starts = torch.tensor([0, *(new for _, new in self.sequences)]).cumsum(0)
        real = int(starts[-1])
        width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        self.qkv = torch.randn(real + 2, width, generator=generator).to(self.dtype)
        self.qkv[real:] = NAN
        padding = torch.zeros(2, dtype=torch.int32)
        self.batch = DeviceBatch(
            num_seqs=len(lengths) + 2,
            num_tokens=real + 2,
            max_query_len=max(new for _, new in self.sequences),
            max_seq_len=max(lengths),
            rows=torch.cat((rows, padding)),
            query_start=torch.cat((starts, starts[-1:], starts[-1:])).int(),
            seq_lens=torch.cat((torch.tensor(lengths, dtype=torch.int32), padding)),
            slot_positions=torch.zeros(real + 2, dtype=torch.int64),
            slot_mapping=(torch.full((real + 2,), -1),),
            block_tables=(table,),
            last_seen=self._last_seen() if self.images else None,
        )
        self._move()

    def _last_seen(self) -> torch.Tensor:
        parts = [torch.arange(length - new, length) for length, new in self.sequences]
        for index, spans in self.images.items():
            for first, end in spans:
                parts[index][first:end] = parts[index][end - 1].item()
        return torch.cat((*parts, torch.full((2,), 10**6)))

    def _move(self) -> None:
        """Everything was made on the host; the kernels find it on the device."""

        def moved(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(moved, value))
            return value.to(self.device) if isinstance(value, torch.Tensor) else value

        if self.page_dtype == torch.float8_e4m3fn and self.device.type == "cuda":
            self.pages = self.pages.view(self.page_dtype)
        self.pages, self.qkv, self.sinks = map(moved, (self.pages, self.qkv, self.sinks))
        columns = {column.name: moved(getattr(self.batch, column.name)) for column in fields(self.batch)}
        self.batch = DeviceBatch(**columns)

    @property
    def num_real_tokens(self) -> int:
        return self.batch.num_tokens - 2

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.layer.num_heads, self.layer.num_kv_heads, self.layer.head_dim, 4)

    def poisoned(self) -> torch.Tensor:
        shape = (self.batch.num_tokens, self.layer.num_heads * self.layer.head_dim)
        return torch.full(shape, NAN, dtype=self.dtype, device=self.device)

    def varlen(self, tiles: Tiles, skipped: int = 0) -> torch.Tensor:
        out = self.poisoned()
        varlen_attention(self._work(out), tiles, skipped)
        return out

    def split(self, plan: SplitPlan) -> torch.Tensor:
        out = self.poisoned()
        scratch = SplitScratch.allocate(
            scratch_rows(plan, self.shape, self.batch.num_seqs), self.layer.head_dim, out.device
        )
        for part in (scratch.values, scratch.maxima, scratch.totals):
            part.fill_(NAN)
        split_attention(self._work(out), plan, scratch)
        return out

    def _work(self, out: torch.Tensor) -> PagedAttention:
        return PagedAttention(self.qkv, self.pages, out, self.batch, 0, self.layer, self.sinks)

    @cached_property
    def expected(self) -> torch.Tensor:
        """[real tokens, num_heads * head_dim] float64, token by token over keys gathered one by one."""
        layer, pages, table = self.layer, self.pages.cpu(), self.batch.block_tables[0].cpu()
        starts, rows = self.batch.query_start.tolist(), self.batch.rows.tolist()
        query = self.qkv.cpu()[:, : layer.num_heads * layer.head_dim].double()
        query = query.view(-1, layer.num_heads, layer.head_dim)
        group = layer.num_heads // layer.num_kv_heads
        outs = []
        for index, (length, new) in enumerate(self.sequences):
            row = table[rows[index]]
            for token in range(new):
                own = length - new + token
                first = 0 if layer.window is None else max(0, own - layer.window + 1)
                last = own if self.batch.last_seen is None else int(self.batch.last_seen[starts[index] + token])
                seen = torch.arange(first, last + 1)
                stored = pages[row[seen // self.block_size].long(), :, seen % self.block_size]
                if stored.dtype == torch.uint8:
                    stored = stored.view(torch.float8_e4m3fn)
                key, value = stored.double().repeat_interleave(group, dim=2).unbind(1)
                key, value = key * layer.cache_scale.key, value * layer.cache_scale.value
                scores = torch.einsum("hd,lhd->hl", query[starts[index] + token], key) * layer.scale
                if layer.soft_cap is not None:
                    scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
                if self.sinks is not None:
                    scores = torch.cat((scores, self.sinks.cpu().double()[:, None]), dim=1)
                weights = torch.softmax(scores, dim=1)[:, : len(seen)]
                outs.append(torch.einsum("hl,lhd->hd", weights, value).flatten())
        return torch.stack(outs) if outs else torch.empty(0, query.shape[1] * query.shape[2])


TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def assert_equals_reference(case: Case, out: torch.Tensor, *, most_tokens: int | None = None) -> None:
    """Tokens of sequences with at most `most_tokens` new ones (None: all) are right, nothing else is written."""
    out = out.cpu()
    expected, starts = case.expected, case.batch.query_start.tolist()
    for index, (_, new) in enumerate(case.sequences):
        mine = slice(starts[index], starts[index] + new)
        if most_tokens is None or new <= most_tokens:
            torch.testing.assert_close(out[mine].double(), expected[mine], rtol=0, atol=TOLERANCE[case.dtype])
        else:
            assert out[mine].isnan().all(), "another kernel's sequence was written"
    assert out[case.num_real_tokens :].isnan().all(), "padding was written"
