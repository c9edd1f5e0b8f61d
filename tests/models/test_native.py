"""A recorded model: the same results however often, over however many rows and over whichever pool it runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from quire.attention.native_backend import NativeAttention
from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.kernels.cpu.recorder import SMALLEST_PROGRAM
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.layers.batch import ForwardBatch
from quire.models.loader import load_model
from quire.models.native import NativeModel
from quire.parallel.single import SINGLE_RANK
from quire.worker.block_tables import BlockTables, TableShape
from quire.worker.input_batch import InputBatch
from quire.worker.kv_tensors import allocate_pages
from quire.worker.platform.cpu_inputs import prepare_inputs
from tests.models.conftest import SavedModel

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model(saved_model: Callable[[str], SavedModel]) -> NativeModel:
    directory = str(saved_model("llama-wide").directory)
    config = load_model_config(directory, dtype="float32", max_model_len=None, revision=None, config_only=False)
    loaded = load_model(config, LoadConfig("auto", 0), SINGLE_RANK, runtime=NativeRuntime("auto", 2))
    assert isinstance(loaded, NativeModel)
    return loaded


def pool(model: NativeModel, num_blocks: int = 40) -> NativeAttention:
    groups, layers_per_group = group_layers(model.cache_specs(), BLOCK_SIZE)
    layout = KVCacheLayout(BLOCK_SIZE, num_blocks, groups, layers_per_group)
    return NativeAttention(layout, allocate_pages(layout), "float32", 4, 2)


def forward(
    model: NativeModel,
    backend: NativeAttention,
    num_tokens: int,
    first_block: int = 1,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hidden states of one sequence of `num_tokens`, computed in one step; of some `rows` only, if given."""
    return model.forward(forward_batch(backend, num_tokens, first_block, rows)).hidden.clone()


def forward_batch(
    backend: NativeAttention, num_tokens: int, first_block: int = 1, rows: torch.Tensor | None = None
) -> ForwardBatch:
    tables = BlockTables([TableShape(BLOCK_SIZE)], 1, num_tokens)
    tables.append(0, [range(first_block, first_block - (-num_tokens // BLOCK_SIZE))])
    prompt = InputBatch.dummy_prompts(num_tokens, num_tokens)
    token_ids, batch = prepare_inputs(prompt, (np.arange(num_tokens, dtype=np.int32) * 7 % 97)[None], tables)
    return ForwardBatch(token_ids, batch.slot_positions, backend.plan(batch), rows)


def test_the_number_of_rows_that_a_program_was_made_for_changes_nothing(model: NativeModel) -> None:
    backend = pool(model)
    short = forward(model, backend, 10)
    long = forward(model, backend, SMALLEST_PROGRAM + 50)
    assert torch.equal(forward(model, backend, 10), short)
    assert torch.equal(long[:10], short)


def test_a_step_that_brings_the_objects_of_the_last_one(model: NativeModel) -> None:
    """As decodes do: with other values in the same memory."""
    backend = pool(model)
    batch = forward_batch(backend, 10)
    first = model.forward(batch).hidden.clone()
    batch.token_ids[3] += 1
    other = model.forward(batch).hidden.clone()
    assert torch.equal(other[:3], first[:3])
    assert not (other[3:] == first[3:]).all(dim=1).any()
    forward(model, backend, SMALLEST_PROGRAM + 50)  # another program
    backend.plan(batch.attention.batch)
    assert torch.equal(model.forward(batch).hidden, other)


@pytest.mark.parametrize("rows", [[49], [0], [0, 1, 2], [3, 17, 18, 40], list(range(50))])
def test_rows_that_are_read_have_the_bits_of_all_rows(model: NativeModel, rows: list[int]) -> None:
    backend = pool(model)
    whole = forward(model, backend, 50)
    assert torch.equal(forward(model, backend, 50, rows=torch.tensor(rows)), whole[rows])
    assert torch.equal(forward(model, backend, 50), whole)


@pytest.mark.parametrize("rows", [[3, 3], [4, 2], [50], [-1, 2]])
def test_rows_that_do_not_ascend_inside_the_step_are_refused(model: NativeModel, rows: list[int]) -> None:
    with pytest.raises(ValueError, match="rows to read do not ascend"):
        forward(model, pool(model), 50, rows=torch.tensor(rows))


def test_another_pool_is_another_program(model: NativeModel) -> None:
    one, other = pool(model), pool(model, 50)
    first = forward(model, one, 30)
    assert torch.equal(forward(model, other, 30, first_block=20), first)
    assert torch.equal(forward(model, one, 30, first_block=5), first)


def test_logits_of_any_rows(model: NativeModel) -> None:
    hidden = forward(model, pool(model), 40)
    whole = model.compute_logits(hidden).clone()  # the next call overwrites it
    assert whole.shape == (40, 97)
    assert torch.equal(model.compute_logits(hidden[7:8]), whole[7:8])
    assert torch.equal(model.compute_logits(hidden[::3]), whole[::3])
    many = hidden.repeat(5, 1)
    assert torch.equal(model.compute_logits(many), whole.repeat(5, 1))
    assert model.compute_logits(hidden[:0]).shape == (0, 97)
    for rows in (hidden, hidden[::3]):  # the same tensor with other rows in it, as decodes bring it
        model.compute_logits(rows)
        rows.mul_(0.5)
        assert torch.equal(model.compute_logits(rows).clone(), model.compute_logits(rows.clone()))


def test_a_block_outside_the_pool_is_refused_before_anything_runs(model: NativeModel) -> None:
    with pytest.raises(ValueError, match="block"):
        forward(model, pool(model, 4), 64)
