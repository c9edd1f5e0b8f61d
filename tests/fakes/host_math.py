"""The platform of a device whose model and attention are the CPU's plain ones: hundreds of steps take seconds, where
Triton's interpreter would take minutes. Request state, uploads, prepared inputs, sampling and the order of a step are
the real ones.

Its logits are, bit by bit, those of `attention_backend="torch"`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.device_batch import DeviceBatch
from quire.attention.interface import AttentionBatch
from quire.attention.states import StateBackend
from quire.attention.torch_backend import TorchAttention, TorchAttentionStep
from quire.config.engine import EngineConfig
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.executors.local import LocalExecutor
from quire.kv_cache.layout import KVCacheLayout
from quire.models.interface import CausalLM
from quire.models.loader import NO_EXTRAS, Extras, load_model
from quire.models.weight_files import Progress
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.worker.kv_tensors import layer_pages
from quire.worker.platform.cuda import CudaPlatform
from quire.worker.platform.streams import HostStreams


def on_the_host(batch: DeviceBatch) -> AttentionBatch:
    """The same batch as the plain back ends take it. No padding."""
    query_start, seq_lens, rows = batch.query_start.long(), batch.seq_lens.long(), batch.rows.long()
    counts = query_start.diff()
    assert int(counts.min()) > 0, "there is no padding without graphs"
    assert int(seq_lens.max()) <= batch.max_seq_len
    assert int(counts.max()) <= batch.max_query_len
    return AttentionBatch(
        query_start=query_start,
        start_positions=seq_lens - counts,
        slot_positions=batch.slot_positions,
        sequence_index=torch.repeat_interleave(torch.arange(batch.num_seqs), counts),
        block_tables=tuple(table[rows].contiguous() for table in batch.block_tables),
        slot_mapping=batch.slot_mapping,
        state_tables=tuple(table[rows].contiguous() for table in batch.state_tables),
    )


class HostAttention:
    """Plans the plain back end's step for a batch that lies "on the device"."""

    def __init__(self, layout: KVCacheLayout, pages: Mapping[int, torch.Tensor]) -> None:
        self._plain = TorchAttention(layout, pages)

    def plan(self, batch: DeviceBatch) -> TorchAttentionStep:
        return self._plain.plan(on_the_host(batch))


class HostStates(StateBackend):
    """The states' half of that."""

    def plan_on_device(self, batch: DeviceBatch) -> Any:
        return self.plan(on_the_host(batch))


@dataclass
class LateCopy:
    """Reads the tensors when it is waited for, so that what has overwritten them by then shows."""

    tensors: Sequence[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.tensors]


class LateStreams(HostStreams):
    """Results reach the host as late as they may."""

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> Any:
        return LateCopy(list(tensors))


class HostMathPlatform(CudaPlatform):
    def __init__(self, config: EngineConfig, group: ProcessGroup = SINGLE_RANK) -> None:
        super().__init__(config, group)
        self.streams = LateStreams()

    def load(
        self,
        model: ModelConfig,
        load: LoadConfig,
        group: ProcessGroup,
        progress: Progress | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> CausalLM:
        return load_model(model, load, group)

    @property
    def head_layers(self) -> None:
        """Plain operators compute heads, too."""

    def make_states(self, layout: KVCacheLayout, pages: Mapping[int, torch.Tensor]) -> StateBackend:
        return HostStates(layout, pages)

    def make_attention(
        self, layout: KVCacheLayout, pages: Sequence[torch.Tensor], model: ModelConfig, group: ProcessGroup
    ) -> Any:
        return HostAttention(layout, layer_pages(pages, layout, getattr(torch, model.kv_cache_dtype)))


class HostMathExecutor(LocalExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, HostMathPlatform(config))
