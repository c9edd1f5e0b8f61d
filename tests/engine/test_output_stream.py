"""What waits for a consumer: one output at most, from which nothing is missing."""

from __future__ import annotations

import asyncio
import copy
import gc

import pytest

from quire.engine import output_stream
from quire.engine.output_stream import MAX_SEPARATE, OutputStream
from quire.errors import QuireError
from quire.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def delta(step: int, *indices: int, logprobs: bool = False, **fields: object) -> RequestOutput:
    completions = [
        CompletionOutput(
            index,
            f"{step}.{index} ",
            [step, index],
            cumulative_logprob=-float(step),
            logprobs=[{step: Logprob(-1.0)}, {index: Logprob(-2.0)}] if logprobs else None,
        )
        for index in indices
    ]
    output = RequestOutput("r", "p", [1, 2], completions, False, metrics=RequestMetrics(latency=float(step)))
    for name, value in fields.items():
        setattr(output, name, value)
    return output


@pytest.fixture
def one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that was not taken is merged."""
    monkeypatch.setattr(output_stream, "MAX_SEPARATE", 1)


@pytest.mark.usefixtures("one_waits")
async def test_deltas_that_were_not_taken_are_one_delta() -> None:
    stream = OutputStream("r", "r#1", delta=True)
    stream.put(delta(0, 0, prompt_logprobs=[None]))
    stream.put(delta(1, 1, 0))
    last = delta(2, 1, finished=True)
    last.outputs[0].finish_reason = "length"
    stream.put(last)
    output = await stream.get()
    assert [(each.index, each.text, each.token_ids) for each in output.outputs] == [
        (0, "0.0 1.0 ", [0, 0, 1, 0]),
        (1, "1.1 2.1 ", [1, 1, 2, 1]),
    ]
    assert [each.finish_reason for each in output.outputs] == [None, "length"]
    assert [each.cumulative_logprob for each in output.outputs] == [-1.0, -2.0]
    assert (output.finished, output.prompt_logprobs, output.metrics.latency) == (True, [None], 2.0)


@pytest.mark.usefixtures("one_waits")
async def test_logprobs_stay_with_their_tokens() -> None:
    stream = OutputStream("r", "r#1", delta=True)
    for step in range(3):
        stream.put(delta(step, 0, logprobs=True))
    [completion] = (await stream.get()).outputs
    assert completion.logprobs is not None
    assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids == [0, 0, 1, 0, 2, 0]


@pytest.mark.usefixtures("one_waits")
async def test_logprobs_come_back_as_they_were() -> None:
    stream = OutputStream("r", "r#1", delta=True)
    entries = [
        {7: Logprob(-0.1, 1, "a"), 2_000_000: Logprob(-1e-300, None, None)},
        {3: Logprob(float("-inf"), 250_000, "")},
        {},
        {4: Logprob(-2.5, 2, "b"), 1: Logprob(-0.25, 1, "\ufffd"), 9: Logprob(-3.0, 3, "c")},
    ]
    for step, entry in enumerate(entries):
        output = delta(step, 0)
        output.outputs[0].logprobs = [entry]
        stream.put(output)
    [completion] = (await stream.get()).outputs
    assert completion.logprobs == entries
    assert [list(entry) for entry in completion.logprobs or ()] == [list(entry) for entry in entries]


@pytest.mark.usefixtures("one_waits")
async def test_waiting_logprobs_are_no_work_for_the_garbage_collector() -> None:
    stream = OutputStream("r", "r#1", delta=True)
    stream.put(delta(0, 0, logprobs=True))
    stream.put(delta(1, 0, logprobs=True))
    gc.collect()
    before = len(gc.get_objects())
    for step in range(2, 2000):
        stream.put(delta(step, 0, logprobs=True))
    gc.collect()
    assert len(gc.get_objects()) - before < 100


@pytest.mark.usefixtures("one_waits")
async def test_what_others_hold_is_not_changed() -> None:
    stream = OutputStream("r", "r#1", delta=True)
    outputs = [delta(step, 0, 1, logprobs=True) for step in range(4)]
    before = copy.deepcopy(outputs)
    for output in outputs:
        stream.put(output)
    await stream.get()
    stream.put(delta(9, 0))
    assert outputs == before


async def test_a_consumer_that_does_not_come_finds_few_outputs() -> None:
    stream = OutputStream("r", "r#1", delta=True)
    for step in range(10_000):
        stream.put(delta(step, 0))
    taken = [(await stream.get()).outputs[0].token_ids for _ in range(MAX_SEPARATE)]
    assert taken[:-1] == [[step, 0] for step in range(MAX_SEPARATE - 1)], "one that is a little behind gets each"
    assert taken[-1] == [token for step in range(MAX_SEPARATE - 1, 10_000) for token in (step, 0)]
    waiting = asyncio.ensure_future(stream.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.put(delta(1, 0))
    assert (await waiting).outputs[0].token_ids == [1, 0], "a consumer that is there gets each as it is"


async def test_a_newer_whole_replaces_the_older() -> None:
    stream = OutputStream("r", "r#1", delta=False)
    stream.put(delta(0, 0))
    stream.put(newest := delta(1, 0))
    assert await stream.get() is newest


async def test_a_failure_comes_behind_what_was_there() -> None:
    stream = OutputStream("r", "r#1", delta=True)
    stream.put(delta(0, 0))
    stream.fail(QuireError("gone"))
    assert (await stream.get()).outputs[0].token_ids == [0, 0]
    for _ in range(2):
        with pytest.raises(QuireError, match="gone"):
            await stream.get()


@pytest.mark.usefixtures("one_waits")
async def test_what_came_before_a_failure_of_the_model_is_delivered_before_it() -> None:
    stream = OutputStream("r", "r#1", delta=True)
    for step in range(3):
        stream.put(delta(step, 0))
    last = delta(3, 0, finished=True)
    last.outputs[0].finish_reason = "error"
    stream.put(last)
    assert (await stream.get()).outputs[0].token_ids == [0, 0, 1, 0, 2, 0]
    assert await stream.get() is last
