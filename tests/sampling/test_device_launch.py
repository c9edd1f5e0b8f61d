"""Sampling is enqueued: nothing waits for the device or reads from it, and a step pays for what its rows use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.triton.runtime import recorded_launches
from quire.sampling.batch import SampleBatch, TokenMasks
from quire.sampling.parameters import NUM_WORDS, SamplingRows
from quire.sampling.sampler import Sampler
from quire.sampling.triton_kernels import TritonKernels
from quire.sampling.warm_up import warm_up
from quire.sampling_params import SamplingParams
from tests.sampling.device_helpers import pageable
from tests.sampling.helpers import Case, beam

HARMLESS = {"empty", "zeros", "select", "slice", "_to_copy", "detach", "alias", "empty_strided", "lift_fresh"}
"""Operators that make memory, views and copies on the device: none waits, none gives the host a value."""
HARMLESS |= {"take", "index_select", "mul", "add", "sub"}
"""Operators of one kernel whose shapes the host knows."""


class Launches:
    """Takes the kernels' names, and lets nothing run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.names.append(kernel.fn.__name__.strip("_").removesuffix("_kernel"))


class OnlyEnqueues(TorchDispatchMode):
    """Fails on every operator that could wait for the device, and on copies to the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert name in HARMLESS, f"{func} may wait for the device"
        to_host = name == "_to_copy" and str(kwargs.get("device")) == "cpu"
        assert not to_host, "a copy to the host waits"
        if name == "_to_copy" and args[0].device.type == "cpu":
            assert kwargs.get("non_blocking"), "a copy from the host waits"
        return func(*args, **kwargs)


def on_no_device(cases: Sequence[Case]) -> tuple[Sampler[torch.Tensor], SampleBatch[torch.Tensor]]:
    """Cases in rows of tensors that have no memory (torch's "meta"): reading a value from one is an error."""
    device, count = torch.device("meta"), len(cases)
    rows = SamplingRows(count)
    for row, case in enumerate(cases):
        rows.set(row, case.sampling)
    words = torch.empty((count, NUM_WORDS), dtype=torch.int32, device=device)
    column = torch.empty(count, dtype=torch.int32, device=device)
    table = torch.empty((count, 64), dtype=torch.int32, device=device)
    sampler = Sampler(rows, TritonKernels(rows, words, pageable))
    return sampler, SampleBatch(np.arange(count), column, column, column, table)


def launched(cases: Sequence[Case], dtype: torch.dtype, masks: TokenMasks | None = None) -> list[str]:
    """Names of the kernels that sampling launches."""
    sampler, batch = on_no_device(cases)
    logits = torch.empty((len(cases), 151936), dtype=dtype, device="meta")
    launches = Launches()
    with recorded_launches(launches), OnlyEnqueues():
        samples = sampler.sample(logits, batch, masks)
        assert all(tensor.device.type == "meta" for tensor in samples.tensors())
        sampler.logprobs(logits, batch.rows, 3)
    assert launches.names.pop() == "rank"
    return launches.names


GREEDY = Case(SamplingParams(temperature=0))
RANDOM = Case(SamplingParams())
FILTERED = Case(SamplingParams(top_k=5, top_p=0.5))
EVERYTHING = Case(
    SamplingParams(
        top_p=0.9,
        logit_bias={1: 1.0},
        repetition_penalty=1.1,
        presence_penalty=0.5,
        min_tokens=2,
        allowed_token_ids=[1, 2],
        logprobs=3,
        logprob_token_ids=[3, 5],
    ),
    stop=[4],
    bad=[[1, 2]],
)
EDITS = ["bias", "count", "apply", "stop", "banned", "gather", "fill", "gather"]
FILTERS = ["cutoff", "collect", "pick_filtered"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("cases", "kernels"),
    [
        ([GREEDY], ["scan", "pick"]),
        ([GREEDY, RANDOM], ["scan", "pick"]),
        ([FILTERED], ["scan", *FILTERS]),
        ([GREEDY, FILTERED, RANDOM], ["scan", "pick", *FILTERS]),
        ([EVERYTHING, GREEDY], [*EDITS, "scan", "pick", *FILTERS, "rank"]),
        ([beam(4), GREEDY], ["normalize", "scan", "pick", "rank"]),
    ],
    ids=["greedy", "random", "filtered", "mixed", "everything", "beam"],
)
def test_only_enqueues_what_the_rows_use(cases: list[Case], kernels: list[str], dtype: torch.dtype) -> None:
    assert launched(cases, dtype) == kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks_are_enqueued(dtype: torch.dtype) -> None:
    masks = TokenMasks(np.array([1]), np.ones((1, 151936 // 32), np.uint32))
    assert launched([GREEDY, RANDOM], dtype, masks) == ["mask", "scan", "pick"]


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.item(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.tolist(),
        lambda tensor: torch.zeros(3).to("meta"),
    ],
    ids=["item", "nonzero", "mask", "cpu", "tolist", "blocking upload"],
)
def test_the_check_sees_each_kind(wait: Any) -> None:
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), OnlyEnqueues():
        wait(torch.empty(1, device="meta"))


@pytest.mark.parametrize("num_rows", [1, 2])
def test_warming_up_runs_every_kernel_and_leaves_nothing(num_rows: int) -> None:
    table = torch.zeros((num_rows, 8), dtype=torch.int32)
    words = torch.zeros((num_rows, NUM_WORDS), dtype=torch.int32)
    rows = SamplingRows(num_rows)
    launches = Launches()
    with recorded_launches(launches):
        sampler = Sampler(rows, TritonKernels(rows, words, pageable))
        warm_up(sampler, rows, words, table, torch.zeros(2, 64, dtype=torch.bfloat16))
    assert set(launches.names) == {"scan", "pick", "normalize", "rank", "mask", *EDITS, *FILTERS}
    assert rows.lists.words().tolist() == [0] * 8 * num_rows
    assert not rows.rows_with_prompt_logprobs
    defaults = SamplingRows(1)
    defaults.set(0, Case(SamplingParams()).sampling)
    assert (words.numpy() == defaults.words(0)).all()


def test_raw_logits_are_kept_where_log_probabilities_are_wanted() -> None:
    """float32 scores are changed in place unless a later kernel needs the model's own."""
    sampler, batch = on_no_device([Case(SamplingParams(logit_bias={1: 1.0}))])
    taken: list[torch.Tensor] = []

    class Scores(Launches):
        def launch(self, kernel: Any, grid: Any, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
            taken.append(args[0])

    logits = torch.empty((1, 64), dtype=torch.float32, device="meta")
    with recorded_launches(Scores()):
        sampler.sample(logits, batch)
        assert all(scores is logits for scores in taken)
        taken.clear()
        sampler._rows.set(0, Case(SamplingParams(logit_bias={1: 1.0}, logprobs=0)).sampling)
        sampler.sample(logits, batch)
    assert taken[0] is not logits, "the rules"
    assert taken[-1] is logits, "log-probabilities"
