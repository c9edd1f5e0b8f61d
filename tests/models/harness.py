"""Runs a model over hand-made block tables, as the worker would, and makes tiny random models to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from quire.attention.interface import AttentionBatch
from quire.attention.states import StateBackend
from quire.attention.torch_backend import TorchAttention
from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.kv_cache.deal import ALL_TOKENS, Deal
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.layers.batch import ForwardBatch
from quire.models.decoder import Decoder
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from quire.worker.block_tables import table_shapes
from quire.worker.kv_tensors import layer_pages, state_pages


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Weights so large that logits differ by whole units and every bias and norm matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 1.0 if "embed" in name or "wte" in name or "wpe" in name else 1.5 * weight.shape[-1] ** -0.5
                weight.normal_(0.0, scale, generator=generator)
            else:
                weight.normal_(
                    float("norm" in name or "ln_" in name) * name.endswith("weight"), 0.2, generator=generator
                )
    return model.eval()


def save(model: PreTrainedModel, directory: Path, **options: object) -> Path:
    """Write a Hugging Face directory. End-of-sequence ids are dropped, so that `generate` never stops early."""
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(directory, **options)
    return directory


def load(directory: Path, *, dtype: str = "float32", max_model_len: int | None = None) -> tuple[ModelConfig, Decoder]:
    config = load_model_config(
        str(directory), dtype=dtype, max_model_len=max_model_len, revision=None, config_only=False
    )
    return config, load_model(config, LoadConfig("auto", 0), SINGLE_RANK)


@dataclass
class Row:
    """A sequence in the runner: its tokens, how many are computed, its table in each group."""

    token_ids: list[int]
    tables: list[torch.Tensor]
    num_computed: int = 0


@dataclass
class PagedRunner:
    """A KV pool, and sequences whose blocks are scattered over it."""

    model: Decoder
    block_size: int = 16
    max_len: int = 256
    max_rows: int = 8
    rows: list[Row] = field(default_factory=list)
    snapshot_interval: int = 64
    """Tokens of a block of states, at least."""
    deal: Deal = ALL_TOKENS

    def __post_init__(self) -> None:
        specs = self.model.cache_specs()
        groups, layers_per_group = group_layers(specs, self.block_size, self.snapshot_interval)
        num_blocks = 1 + self.max_rows * sum(-(-self.max_len // group.block_size) for group in groups)
        self.layout = layout = KVCacheLayout(self.block_size, num_blocks, groups, layers_per_group)
        dtype = {4: torch.float32, 2: torch.bfloat16}[layout.token_groups[0].spec.dtype_bytes]
        # Not zeros: what a former owner left behind must have no influence.
        shape = (num_blocks, layout.page_bytes // dtype.itemsize)
        self.pages = [torch.full(shape, 7.0, dtype=dtype).view(torch.uint8) for _ in range(layers_per_group)]
        self.layer_pages = layer_pages(self.pages, layout, dtype)
        self.backend = TorchAttention(layout, self.layer_pages)
        self.state_pages = state_pages(self.pages, layout)
        self.states = StateBackend(layout, self.state_pages)
        self.shapes = table_shapes(layout, self.deal)
        scattered = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self._free = scattered.tolist()

    def add(self, token_ids: Sequence[int]) -> int:
        tables = []
        for shape, group in zip(self.shapes, self.layout.groups, strict=True):
            count = -(-self.max_len // group.block_size)
            taken, self._free = self._free[:count], self._free[count:]
            tables.append(torch.tensor(shape.entries(taken)))
        self.rows.append(Row(list(token_ids), tables))
        return len(self.rows) - 1

    def step(self, work: Sequence[tuple[int, int]], *, last_only: bool = False) -> list[torch.Tensor]:
        """Compute (row, number of tokens) pairs in one step; the logits of all their tokens, or of the last of each."""
        counts = torch.tensor([count for _, count in work])
        starts = torch.tensor([self.rows[row].num_computed for row, _ in work])
        sequence_index = torch.repeat_interleave(torch.arange(len(work)), counts)
        query_start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        token_ids = [
            self.rows[row].token_ids[int(start) : int(start) + count]
            for (row, count), start in zip(work, starts, strict=True)
        ]
        tables, slots, states = [], [], []
        for group, shape in enumerate(self.shapes):
            table = torch.stack([self.rows[row].tables[group] for row, _ in work]).int()
            if not shape.has_slots:
                states.append(table)
                continue
            tables.append(table)
            found = shape.slots(table.numpy(), sequence_index.numpy(), positions.numpy())
            slots.append(torch.from_numpy(found))
        batch = AttentionBatch(
            query_start, starts, positions, sequence_index, tuple(tables), tuple(slots), tuple(states)
        )
        with torch.inference_mode():
            flat = torch.tensor([token for tokens in token_ids for token in tokens])
            read = query_start[1:] - 1 if last_only else None
            planned = self.backend.plan(batch), read, self.states.plan(batch)
            hidden = self.model.forward(ForwardBatch(flat, positions, *planned)).hidden
            logits = self.model.compute_logits(hidden)
        for row, count in work:
            self.rows[row].num_computed += count
        return list(logits.split(1 if last_only else counts.tolist()))

    def greedy(self, rows: Sequence[int], num_tokens: int) -> list[list[int]]:
        """Compute what is left of each row, then extend all of them together."""
        generated: list[list[int]] = [[] for _ in rows]
        for _ in range(num_tokens):
            work = [(row, len(self.rows[row].token_ids) - self.rows[row].num_computed) for row in rows]
            for index, logits in enumerate(self.step(work, last_only=True)):
                token = int(logits[-1].argmax())
                generated[index].append(token)
                self.rows[rows[index]].token_ids.append(token)
        return generated


def chunked_logits(runner: PagedRunner, prompts: Sequence[Sequence[int]], chunk: int) -> list[torch.Tensor]:
    """Logits of all positions of all prompts, computed together, `chunk` tokens of each a step."""
    rows = [runner.add(prompt) for prompt in prompts]
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    while True:
        left = [(row, len(runner.rows[row].token_ids) - runner.rows[row].num_computed) for row in rows]
        work = [(row, min(chunk, count)) for row, count in left if count]
        if not work:
            return [torch.cat(part) for part in parts]
        for (row, _), logits in zip(work, runner.step(work), strict=True):
            parts[rows.index(row)].append(logits)


def next_logits(reference: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
    """Transformers' logits behind `prompt` and behind each of `token_ids` but the last, in one pass over them all:
    [len(token_ids), vocab_size] float32. Where each token is the best of its row, they are a greedy continuation."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *token_ids[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :].float()


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]
