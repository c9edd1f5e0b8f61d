from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count as count_from
from itertools import islice

import numpy as np
import torch

from quire.attention.states import StateBackend
from quire.attention.torch_backend import TorchAttention
from quire.config.model import ModelConfig
from quire.kernels.arguments import ExpertWeights
from quire.kernels.experts import experts
from quire.kernels.matmul import row_linear
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.layers.context import LayerContext
from quire.layers.operations import TorchOperations
from quire.models.decoder import Decoder
from quire.models.loader import checkpoint_tensors
from quire.models.registry import build_model
from quire.models.weight_files import Progress, WeightFiles
from quire.parallel.single import SINGLE_RANK
from quire.quantization.integer_weight import WeightTensor
from quire.quantization.unquantized import PlainParameters, UnquantizedLinear
from quire.worker.block_tables import BlockTables, table_shapes
from quire.worker.input_batch import InputBatch
from quire.worker.kv_tensors import layer_pages, state_pages
from quire.worker.platform.cpu_inputs import CacheBackends, prepare_inputs

CHUNK_TOKENS = 512
BLOCK_SIZE = 16


class WatchingLinear(UnquantizedLinear):
    """Unquantised matrices that record the squares of their inputs. loading: name of the tensor being loaded."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.loading = ""
        self._names: dict[int, list[str]] = {}
        """Tensor names by matrix address."""
        self._sums: dict[int, torch.Tensor] = {}
        self._rows: Counter[int] = Counter()

    def load_rows(
        self, parameters: PlainParameters, suffix: str, tensor: WeightTensor, first_row: int, num_rows: int
    ) -> None:
        super().load_rows(parameters, suffix, tensor, first_row, num_rows)
        if suffix == "weight":
            self._names.setdefault(parameters.weight.data_ptr(), []).append(self.loading)

    def apply(self, parameters: PlainParameters, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        self._watch(parameters, x)
        return super().apply(parameters, x, residual)

    def apply_experts(
        self, weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        def product(parameters: PlainParameters, rows: torch.Tensor) -> torch.Tensor:
            self._watch(parameters, rows)
            return row_linear(rows, parameters.weight, parameters.bias)

        return experts(weights, x, routing, residual, product)

    def means(self) -> dict[str, torch.Tensor]:
        """Mean square of each input column, [columns] float32, by tensor name; matrices without inputs, such as
        unchosen experts, are left out."""
        return {name: (sums / self._rows[key]).float() for key, sums in self._sums.items() for name in self._names[key]}

    def _watch(self, parameters: PlainParameters, x: torch.Tensor) -> None:
        key, squares = parameters.weight.data_ptr(), x.double().square().sum(0)
        self._sums[key] = self._sums[key] + squares if key in self._sums else squares
        self._rows[key] += len(x)


def watch_inputs(
    config: ModelConfig, files: WeightFiles, token_ids: Sequence[int], report: Progress
) -> dict[str, torch.Tensor]:
    """Importance matrices by Hugging Face's tensor names: mean squares of inputs over the text in chunks of
    CHUNK_TOKENS, with the whole model in float32. Raises ModelLoadError."""
    linear, plain = WatchingLinear(), UnquantizedLinear(torch.float32)
    context = LayerContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        cache_dtype="float32",
        group=SINGLE_RANK,
        operations=TorchOperations(),
        linear=linear,
        vocabulary=plain,
        positions=plain,
    )
    model = build_model(config, context)
    assert isinstance(model, Decoder), "decoders alone become files"

    def tensors() -> Iterator[tuple[str, WeightTensor]]:
        for linear.loading, tensor in checkpoint_tensors(files, config, lambda done, total: None):
            yield linear.loading, tensor  # type: ignore[misc]

    with torch.inference_mode():
        model.load_weights(tensors())
        size = min(CHUNK_TOKENS, config.max_model_len)
        for first in range(0, len(token_ids), size):
            chunk = token_ids[first : first + size]
            _forward(model, chunk)
            report(first + len(chunk), len(token_ids))
    return linear.means()


def _forward(model: Decoder, token_ids: Sequence[int]) -> None:
    count = len(token_ids)
    groups, layers_per_group = group_layers(model.cache_specs(), BLOCK_SIZE, CHUNK_TOKENS)
    num_blocks = 1 + sum(-(-count // group.block_size) for group in groups)
    layout = KVCacheLayout(BLOCK_SIZE, num_blocks, groups, layers_per_group)
    pages = [torch.zeros(num_blocks, layout.page_bytes, dtype=torch.uint8) for _ in range(layers_per_group)]
    tables, free = BlockTables(table_shapes(layout), 1, count), count_from(1)
    tables.append(0, [list(islice(free, -(-count // group.block_size))) for group in layout.groups])
    batch = InputBatch.of_plan(np.zeros(1, np.int64), [0], [count])
    known, attention = prepare_inputs(batch, np.array([token_ids], np.int32), tables)
    backends = CacheBackends(
        TorchAttention(layout, layer_pages(pages, layout, torch.float32)),
        StateBackend(layout, state_pages(pages, layout)),
    )
    model.forward(backends.forward_batch(known, attention))
