"""A tiny model whose forward pass is run in one of its ways, with the inputs of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.attention.device_batch import DeviceBatch, TokenColumns
from quire.attention.states import StateBackend
from quire.config.adapters import ADAPTER_SLOTS
from quire.config.families import read_shape
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.kv_cache.layout import KVCacheLayout
from quire.layers.adapters import Adapters, AdapterStack
from quire.layers.batch import ForwardResult
from quire.layers.context import LayerContext
from quire.layers.device_adapters import DeviceSlots, add_on_device, look_up_on_device
from quire.layers.operations import TorchOperations
from quire.layers.overlay import RowOverlay
from quire.models.decoder import Decoder
from quire.models.loader import dummy_weights
from quire.models.registry import model_architectures
from quire.parallel.single import SingleRank
from quire.quantization.unquantized import UnquantizedLinear
from quire.worker.cuda_graphs import CudaGraphRunner, DeviceBackends, PassShape
from quire.worker.graph_dispatch import Execution, ExecutionSettings, choose_execution
from tests.fakes.device_attention import TwinBackend
from tests.fakes.graph_capture import RecordingCapture

BLOCK_SIZE, NUM_ROWS, NUM_TOKENS, NUM_BLOCKS = 4, 8, 32, 64
LONGEST = 24
FULL, PIECEWISE, DRAFT_ROWS = (1, 2, 4, 8), (4, 16, 32), 3
SETTINGS = {
    "eager": ExecutionSettings(),
    "full": ExecutionSettings(full_sizes=FULL),
    "piecewise": ExecutionSettings(piecewise_sizes=PIECEWISE),
    "both": ExecutionSettings(full_sizes=FULL, piecewise_sizes=PIECEWISE),
    "drafts": ExecutionSettings(full_sizes=FULL, draft_rows=DRAFT_ROWS),
}


def tiny_config(bundled_model_path: Path) -> ModelConfig:
    """The bundled model's, made smaller."""
    config = resolve(EngineOptions(model=str(bundled_model_path), load_format="dummy", device="cpu")).model
    hf = {**config.hf, "intermediate_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    hf |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return replace(config, shape=read_shape(hf), max_model_len=LONGEST, dtype="float32", hf=hf)


class Buffers:
    """The inputs of steps at full capacity; batches are views of them."""

    def __init__(self, size: int = 0) -> None:
        """size: of the hidden states that come in (0: none do)."""
        self.hidden = torch.zeros(NUM_TOKENS, size)
        self.token_ids = torch.zeros(NUM_TOKENS, dtype=torch.int64)
        self.adapters = torch.zeros(NUM_TOKENS, dtype=torch.int64)
        self.has_adapters = False
        self.positions = torch.zeros(NUM_TOKENS, dtype=torch.int64)
        self.slots = torch.zeros(NUM_TOKENS, dtype=torch.int64)
        self.rows = torch.zeros(NUM_ROWS, dtype=torch.int32)
        self.query_start = torch.zeros(NUM_ROWS + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(NUM_ROWS, dtype=torch.int32)
        self.tables = torch.arange(NUM_BLOCKS, dtype=torch.int32).view(NUM_ROWS, -1)

    def fill(
        self, execution: Execution, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> tuple[DeviceBatch, TokenColumns]:
        """The inputs of one step, padded to the execution's sizes; what padding may hold is anything."""
        counts = [len(each) for each in tokens]
        num_tokens, num_seqs = sum(counts), len(rows)
        self.token_ids[:num_tokens] = torch.tensor([token for each in tokens for token in each], dtype=torch.int64)
        self.token_ids[num_tokens:] = 7
        places = [start + index for start, count in zip(starts, counts, strict=True) for index in range(count)]
        owners = np.repeat(rows, counts) if rows else np.zeros(0, np.int64)
        self.positions.zero_()
        self.positions[:num_tokens] = torch.tensor(places, dtype=torch.int64)
        self.slots.fill_(-1)
        for index, (row, place) in enumerate(zip(owners, places, strict=True)):
            self.slots[index] = self.tables[row, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
        self.rows.zero_()
        self.rows[:num_seqs] = torch.tensor(list(rows), dtype=torch.int32)
        self.query_start.fill_(num_tokens)
        self.query_start[: num_seqs + 1] = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        self.seq_lens.zero_()
        self.seq_lens[:num_seqs] = torch.tensor(starts, dtype=torch.int32) + torch.tensor(counts, dtype=torch.int32)
        return self.batch(execution, max(counts, default=1), int(self.seq_lens.max())), self.tokens(execution)

    def tokens(self, execution: Execution) -> TokenColumns:
        hidden = self.hidden[: execution.num_tokens] if self.hidden.numel() else None
        others = {ADAPTER_SLOTS: self.adapters[: execution.num_tokens]} if self.has_adapters else {}
        return TokenColumns(self.token_ids[: execution.num_tokens], others, hidden)

    def batch(self, execution: Execution, max_query_len: int, max_seq_len: int) -> DeviceBatch:
        return DeviceBatch(
            num_seqs=execution.num_seqs,
            num_tokens=execution.num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            rows=self.rows[: execution.num_seqs],
            query_start=self.query_start[: execution.num_seqs + 1],
            seq_lens=self.seq_lens[: execution.num_seqs],
            slot_positions=self.positions[: execution.num_tokens],
            slot_mapping=(self.slots[: execution.num_tokens],),
            block_tables=(self.tables,),
        )

    def padded(self, execution: Execution) -> tuple[DeviceBatch, TokenColumns]:
        return self.fill(execution, (), (), ())


class DeviceAdapting(TorchOperations):
    """Torch's operators, but for the device's kernels of adapters."""

    def add_adapted(self, stack: AdapterStack, x: torch.Tensor, y: torch.Tensor, slots: Any) -> torch.Tensor:
        assert isinstance(slots, DeviceSlots)
        return add_on_device(stack, x, y, slots)

    def add_looked_up(self, adapters: Any, indices: torch.Tensor, y: torch.Tensor, slots: Any) -> torch.Tensor:
        assert isinstance(adapters, AdapterStack)
        return look_up_on_device(adapters, indices, y, slots)


NO_STATES = StateBackend(KVCacheLayout(BLOCK_SIZE, NUM_BLOCKS, (), 1), {})


class Passes:
    """One model with its own cache and its own way of running."""

    def __init__(
        self,
        config: ModelConfig,
        settings: ExecutionSettings,
        backend: type[TwinBackend] = TwinBackend,
        numbers: range = range(2),
        taps: tuple[int, ...] = (),
        adapters: Adapters | None = None,
        **options: Any,
    ) -> None:
        """numbers, taps: the layers that run, and those that are tapped. adapters: of a device."""
        plain = UnquantizedLinear(torch.float32)
        context = LayerContext(
            torch.float32,
            torch.device("cpu"),
            "float32",
            SingleRank(),
            DeviceAdapting(),
            plain,
            plain,
            plain,
            adapters=adapters,
        )
        self.model: Decoder = model_architectures().load(config.architecture)(config, context)
        self.model.load_weights(dummy_weights(self.model.slots, 3, lambda *_: None, torch.device("cpu")))
        if adapters is not None:
            adapters.weights_are_loaded()
        self.model = self.model.stage(numbers)
        self.backend = backend(config.num_layers, NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.capture = RecordingCapture(**options)
        size = config.num_heads * config.head_dim
        self.num_rows = torch.zeros(1, dtype=torch.int32)
        shape = PassShape(size, LONGEST, torch.float32, torch.device("cpu"), self.num_rows, taps)
        self.settings = settings
        self.slots: dict[int, int] = {}
        """Slots of rows with adapters."""
        self.passes = CudaGraphRunner(
            self.model, DeviceBackends(self.backend, NO_STATES), shape, settings, self.capture
        )
        self.buffers = Buffers(self.model.output_size if numbers.start else 0)
        self.buffers.has_adapters = adapters is not None

    def run(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        hidden: torch.Tensor | None = None,
        overlay: RowOverlay | None = None,
    ) -> torch.Tensor:
        """Hidden states of the real tokens."""
        return self.run_tapped(rows, starts, tokens, hidden, overlay).hidden

    def run_tapped(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        hidden: torch.Tensor | None = None,
        overlay: RowOverlay | None = None,
    ) -> ForwardResult[torch.Tensor]:
        """hidden: what a stage behind the first takes, of the real tokens. Of a sequence with few, all but the first
        are drafts."""
        counts = [len(each) for each in tokens]
        settings = self.settings if overlay is None else self.settings.without_full()
        is_decode = max(counts) <= DRAFT_ROWS
        execution = choose_execution(sum(counts), len(rows), max(counts), settings, is_decode=is_decode)
        owners = np.repeat([self.slots.get(row, 0) for row in rows], counts)
        self.buffers.adapters.zero_()
        self.buffers.adapters[: len(owners)] = torch.from_numpy(owners)
        execution = replace(execution, adapts=bool(owners.any()))
        with torch.inference_mode():
            batch, columns = self.buffers.fill(execution, rows, starts, tokens)
            if hidden is not None:
                self.buffers.hidden[: len(hidden)] = hidden
            found = self.passes.run(execution, batch, columns, None, overlay)
            tapped = {layer: each[: sum(counts)].clone() for layer, each in found.tapped.items()}
            return ForwardResult(found.hidden[: sum(counts)].clone(), tapped)
