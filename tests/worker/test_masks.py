"""Constrained requests on workers of a tiny LLaMA, whose masks arrive while their steps are in flight."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import QuireError
from quire.executors.local import LocalExecutor
from quire.sampling_params import ThinkingBudget
from quire.step import SamplingInputs
from tests.fakes.core import CoreClient
from tests.fakes.masks import AllowedByPosition
from tests.worker.conftest import ON_A_CPU, PLATFORMS, MakeDriver
from tests.worker.driver import Driver

FREE: dict[str, dict[str, Any]] = {
    "free": {"prompt": [5, 9, 2], "max_tokens": 30, "logprobs": 2},
    "pooled": {"prompt": [9, 9, 4, 1], "max_tokens": 1, "pooling": True},
    "drawn": {"prompt": list(range(1, 38)), "max_tokens": 25, "temperature": 0.9, "top_p": 0.9, "seed": 4},
}
BOUND: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": [5, 9, 2], "max_tokens": 30, "constraint": "5"},
    "drawn twice": {"prompt": [3] * 21, "max_tokens": 20, "temperature": 1.0, "n": 2, "constraint": "7", "logprobs": 1},
    "forced": {"prompt": [4] * 6, "max_tokens": 30, "constraint": "70", "frequency_penalty": 0.4, "n": 2, "seed": 2},
    "beams": {"prompt": [6, 2, 8], "max_tokens": 12, "use_beam_search": True, "n": 3, "constraint": "31"},
    "thinking": {
        "prompt": [8, 1],
        "max_tokens": 20,
        "temperature": 1.0,
        "n": 2,
        "thinking_budget": ThinkingBudget(num_tokens=6, starts=[[90, 91]], ends=[[92, 93, 94]], is_open=True),
    },
    "thinking in turn": {  # the mark waits until the constraint allows its tokens
        "prompt": [2, 2],
        "max_tokens": 24,
        "constraint": "2",
        "thinking_budget": ThinkingBudget(num_tokens=5, starts=[[90, 91]], ends=[[92]], is_open=True),
    },
    "pressed": {"prompt": [7], "max_tokens": 28, "constraint": "31", "presence_penalty": 0.5, "temperature": 0.7},
}


@pytest.fixture
def make_client(model_path: Path, executors: list[LocalExecutor], platform: str) -> Any:
    def make(**options: Any) -> CoreClient:
        make_executor, defaults = PLATFORMS[platform]
        settings = {"model": str(model_path), "max_num_seqs": 8, "num_blocks_override": 200, **defaults, **options}
        config = resolve(EngineOptions.from_keywords({**settings, "max_model_len": 128, "block_size": 4}))
        executors.append(make_executor(config))
        return CoreClient(config, executors[-1])

    return make


def run(client: CoreClient, requests: dict[str, dict[str, Any]]) -> dict[tuple[str, int], Any]:
    """What came of each sequence: tokens, log-probabilities, vector."""
    for name, request in requests.items():
        client.add(name, request["prompt"], ignore_eos=True, **{k: v for k, v in request.items() if k != "prompt"})
    client.run()
    return {key: (client.tokens[key], client.logprobs[key], client.pooled.get(key[0])) for key in client.tokens}


def follow(client: CoreClient, executor: LocalExecutor) -> list[tuple[str, int]]:
    """The plans that are executed, the inputs that are sent and the results that are taken from now on, in order."""
    events: list[tuple[str, int]] = []
    scheduler: Any = client.scheduler
    for owner, name, what in (
        (executor, "execute", "execute"),
        (executor, "send_sampling_inputs", "send"),
        (scheduler, "update", "update"),
    ):
        setattr(owner, name, partial(_note, events, what, getattr(owner, name)))
    return events


def _note(events: list[tuple[str, int]], what: str, call: Any, first: Any, *rest: Any, **options: Any) -> Any:
    events.append((what, first.step_id))
    return call(first, *rest, **options)


@pytest.mark.parametrize("platform", ["cpu", pytest.param("device", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize("options", [{}, {"attention_backend": "torch"}], ids=["default", "torch"])
def test_at_queue_depth_2_as_at_depth_1(
    make_client: Any, executors: list[LocalExecutor], options: dict[str, Any], platform: str
) -> None:
    if platform == "device" and options:
        pytest.skip("a device has its own attention")
    alone = {}
    for name, request in (FREE | BOUND).items():
        alone |= run(make_client(queue_depth=1, **options), {name: request})
    source = AllowedByPosition()
    for depth in (1, 2):
        client = make_client(queue_depth=depth, max_num_batched_tokens=32, **options)
        events = follow(client, executors[-1])
        assert run(client, FREE | BOUND) == alone
        for name, index in alone:
            if "constraint" in BOUND.get(name, {}):
                assert source.follows(BOUND[name]["constraint"], client.tokens[name, index])
        sent = [number for number, (what, _) in enumerate(events) if what == "send"]
        late = [number for number in sent if events[number - 1][0] == "update"]
        assert len(late) > 15 if depth == 2 else not late
    assert not source.follows("5", alone["free", 0][0])
    turn = alone["thinking in turn", 0][0]
    due = next(place for place in range(5, 24) if not (31 * place * place + 17 * turn[place - 1] + 92) % 2)
    assert due > 5  # the constraint did not allow the mark at once
    assert turn.index(92) == due
    assert [alone["thinking", index][0][6:9] for index in range(2)] == 2 * [[92, 93, 94]]


@ON_A_CPU
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_samples_whose_masks_come_late_are_discarded(
    make_client: Any, executors: list[LocalExecutor], queue_depth: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sequences compute the last token again: the same tokens and log-probabilities."""
    expected = run(make_client(queue_depth=queue_depth), FREE | BOUND)
    monkeypatch.setattr("quire.engine.core.LATE_SECONDS", 0.0)
    client = make_client(queue_depth=queue_depth)
    client.masks.goes_on, client.masks.mask_waits = True, itertools.cycle([0, 3, 0, 0, 1])
    num_discarded, send = 0, executors[-1].send_sampling_inputs

    def count(inputs: SamplingInputs) -> None:
        nonlocal num_discarded
        num_discarded += len(inputs.discarded)
        send(inputs)

    executors[-1].send_sampling_inputs = count  # type: ignore[method-assign]
    assert run(client, FREE | BOUND) == expected
    assert num_discarded > 3


@ON_A_CPU
@pytest.mark.parametrize(
    ("preemption_mode", "queue_depth"), [("recompute", 1), ("recompute", 2), ("swap", 1), ("swap", 2)]
)
def test_preempted_and_aborted(make_client: Any, preemption_mode: str, queue_depth: int, platform: str) -> None:
    """Forced tokens are appended; for what is expected, each is sampled."""
    plain = make_client(queue_depth=2)
    plain.masks.tells_forced = False
    expected = run(plain, FREE | BOUND)
    options = {"swap_space": "4MiB"} if preemption_mode == "swap" else {}
    client = make_client(queue_depth=queue_depth, num_blocks_override=33, preemption_mode=preemption_mode, **options)
    for name, request in (FREE | BOUND).items():
        fields = {key: value for key, value in request.items() if key != "prompt"}
        client.add(name, request["prompt"], ignore_eos=True, **fields)
        client.add(f"{name}, aborted", request["prompt"], ignore_eos=True, **fields)
    while client.core.has_work:
        client.step()
        client.scheduler.check()
        for name in FREE | BOUND:
            if len(client.tokens.get((f"{name}, aborted", 0), [])) >= 5:
                client.abort(f"{name}, aborted")
    client.assert_all_free()
    assert client.core.stats().preemptions_total > 0
    for key, (tokens, *_) in expected.items():
        assert client.tokens[key] == tokens
        aborted = client.tokens.get((f"{key[0]}, aborted", key[1]), [])
        assert aborted == tokens[: len(aborted)]


def announce(driver: Driver, executor: LocalExecutor) -> Any:
    """Submit a step whose sample 0 needs a mask; returns its future."""
    driver.add(0, [5, 9, 2])
    submitted = []

    def execute(plan):  # type: ignore[no-untyped-def]
        plan.masked_samples.append(0)
        submitted.append(executor.execute(plan))
        return submitted[0]

    driver._execute = execute
    driver.submit({0: 3})
    return submitted[0]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_step_without_its_inputs_is_an_error_and_no_hang(
    make_driver: MakeDriver, executors: list[LocalExecutor], queue_depth: int, platform: str
) -> None:
    driver = make_driver(queue_depth=queue_depth)
    [executor] = executors
    future = announce(driver, executor)
    assert not future.done()
    with pytest.raises(QuireError, match="step 1 comes before the sampling inputs of step 0"):
        executor.execute(driver.plans[0].__class__(1, [], [], [], [], []))
    with pytest.raises(QuireError, match="step 7 awaits no sampling inputs"):
        executor.send_sampling_inputs(SamplingInputs(7, {}))
    executor.shutdown()
    with pytest.raises(QuireError, match="sampling inputs"):
        future.result(None)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_mask_that_does_not_fit_fails_its_step(
    make_driver: MakeDriver, executors: list[LocalExecutor], queue_depth: int, platform: str
) -> None:
    driver = make_driver(queue_depth=queue_depth)
    [executor] = executors
    future = announce(driver, executor)
    executor.send_sampling_inputs(SamplingInputs(0, {0: b"\xff"}))
    with pytest.raises(QuireError, match="a mask over 97 tokens has 16 bytes"):
        future.result(None)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_sample_that_has_ended_needs_no_mask(
    make_driver: MakeDriver, executors: list[LocalExecutor], queue_depth: int, platform: str
) -> None:
    driver = make_driver(queue_depth=queue_depth)
    [executor] = executors
    future = announce(driver, executor)
    executor.send_sampling_inputs(SamplingInputs(0, {}))
    assert len(future.result(None).token_ids[0]) == 1
