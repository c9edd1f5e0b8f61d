"""AsyncLLM over fake executors: many requests, and every way in which one or all of them can end early."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from contextlib import aclosing

import msgspec
import psutil
import pytest

from quire.beam_search_params import BeamSearchParams
from quire.config.options import EngineOptions
from quire.engine import output_processor
from quire.engine.async_engine import AsyncLLM
from quire.engine.messages import AddRequest, CallResult, ClientMessage
from quire.engine.output_stream import StatsListener
from quire.errors import (
    ConfigError,
    EngineDeadError,
    InternalError,
    PromptTooLongError,
    QuireError,
    UserError,
)
from quire.kv_cache.stats import EngineStats
from quire.outputs import RequestOutput, SequenceUpdate
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from tests.engine.async_driving import LONG, SHORT, begin, collect, pid_of, start, until_empty
from tests.fakes.panic import Panic
from tests.processes import has_ended


async def test_fifty_requests_at_once_get_their_own_tokens(process_engine: AsyncLLM) -> None:
    prompts = [[1 + index, 2, 3 + index % 7] for index in range(50)]
    together = await asyncio.gather(*(collect(process_engine, prompt) for prompt in prompts))
    assert all(len(tokens) == 6 for tokens in together)
    assert len({tuple(tokens) for tokens in together}) > 40
    alone = [await collect(process_engine, prompt) for prompt in prompts[::17]]
    assert alone == together[::17]
    assert (await until_empty(process_engine)).finished_requests_total == 53


async def test_cumulative_outputs_end_with_the_whole(engine: AsyncLLM) -> None:
    outputs = [output async for output in engine.generate([1, 2, 3], SHORT, "a")]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(lengths)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].request_id == "a"
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].outputs[0].token_ids == await collect(engine, [1, 2, 3])


async def test_a_slow_consumer_of_cumulative_outputs_skips_to_the_newest(engine: AsyncLLM) -> None:
    async with aclosing(engine.generate([1, 2, 3], SHORT)) as outputs:
        await anext(outputs)
        while (await engine.stats()).num_running:
            await asyncio.sleep(0.01)
        rest = [output async for output in outputs]
    assert [len(output.outputs[0].token_ids) for output in rest] == [6]


async def test_leaving_the_iterator_frees_the_blocks(engine: AsyncLLM) -> None:
    async for _ in engine.generate([1, 2, 3], LONG):
        assert (await engine.stats()).num_used_blocks > 0
        break
    gc.collect()
    assert (await until_empty(engine)).num_running == 0


async def test_cancelling_the_task_frees_the_blocks(process_engine: AsyncLLM) -> None:
    task = await begin(process_engine, "a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await until_empty(process_engine)).num_running == 0


async def test_abort_ends_the_iterator_with_its_reason(engine: AsyncLLM) -> None:
    task = asyncio.create_task(anext_finished(engine))
    while (await engine.stats()).generation_tokens_total == 0:
        await asyncio.sleep(0.01)
    await engine.abort(["unknown", "a"])
    output = await task
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 1500
    await until_empty(engine)


async def anext_finished(engine: AsyncLLM) -> RequestOutput:
    last = None
    async for output in engine.generate([1, 2, 3], LONG, "a"):
        last = output
    assert last is not None
    return last


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(engine: AsyncLLM) -> None:
    task = await begin(engine, "a")
    with pytest.raises(UserError, match="'a' is already in use"):
        await collect(engine, [4, 5], request_id="a")
    assert not task.done()
    assert (await engine.stats()).num_running == 1
    await engine.abort("a")
    await task
    assert len(await collect(engine, [4, 5], request_id="a")) == 6


async def test_bad_prompts_are_refused_and_count_as_nothing(engine: AsyncLLM) -> None:
    with pytest.raises(UserError, match="not a token id"):
        await collect(engine, [97])
    with pytest.raises(PromptTooLongError):
        await collect(engine, [1] * 5000)
    with pytest.raises(UserError, match="no tokenizer"):
        await engine.texts.encode("text")
    assert engine.num_unfinished == 0


async def test_what_the_core_refuses_is_a_user_error(options: EngineOptions) -> None:
    engine = start(msgspec.structs.replace(options, num_blocks_override=8))
    with pytest.raises(UserError) as caught:
        await collect(engine, [1] * 60, SamplingParams(n=16, max_tokens=60))
    assert caught.value.param == "max_tokens"
    assert engine.num_unfinished == 0
    assert len(await collect(engine, [1, 2])) == 6
    engine.shutdown()


@pytest.mark.parametrize("executor", ["failing_step", "slow"])
async def test_death_fails_everything_that_waits(options: EngineOptions, executor: str) -> None:
    engine = start(options, executor, in_process=False)
    tasks = [asyncio.create_task(collect(engine, [1, 2, index], LONG)) for index in range(5)]
    if executor == "slow":
        while (await engine.stats()).num_running < 5:
            await asyncio.sleep(0.01)
        assert not engine.errored
        os.kill(pid_of(engine), signal.SIGKILL)
    cause = "SIGKILL" if executor == "slow" else "injected failure at step 3"
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) and cause in str(result) for result in results), results
    assert engine.errored
    for wait in (engine.stats(), collect(engine, [1])):
        with pytest.raises(EngineDeadError, match=cause):
            await wait
    with pytest.raises(EngineDeadError, match=cause):
        engine.check_health()
    assert engine.num_unfinished == 0
    engine.shutdown()
    assert cause in str(engine.dead_error)


async def test_shutdown_fails_what_waits(engine: AsyncLLM) -> None:
    task = await begin(engine, "a")
    engine.check_health()
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        await task
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        await collect(engine, [1])


async def test_a_failing_start_is_reported_as_it_is(options: EngineOptions) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        start(msgspec.structs.replace(options, block_size=12), in_process=False)
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        AsyncLLM(blocksize=16)
    engine = start(options, "failing_load", in_process=False)
    with pytest.raises(EngineDeadError, match="injected failure of the load"):
        _ = engine.ready
    with pytest.raises(EngineDeadError, match="injected failure of the load"):
        await collect(engine, [1])
    engine.shutdown()


async def test_drain_waits_for_what_runs_and_refuses_the_rest(engine: AsyncLLM) -> None:
    task = asyncio.create_task(collect(engine, [1, 2, 3]))
    while engine.num_unfinished == 0:
        await asyncio.sleep(0)
    draining = asyncio.create_task(engine.drain(30))
    await asyncio.sleep(0)
    with pytest.raises(QuireError, match="draining"):
        await collect(engine, [4])
    assert await draining is True
    assert len(await task) == 6


async def test_drain_aborts_what_is_left_at_its_timeout(engine: AsyncLLM) -> None:
    task = asyncio.create_task(anext_finished(engine))
    while (await engine.stats()).num_running == 0:
        await asyncio.sleep(0.01)
    assert await engine.drain(0.01) is False
    assert (await task).outputs[0].finish_reason == "abort"
    await until_empty(engine)


async def test_unknown_calls_are_user_errors(engine: AsyncLLM) -> None:
    with pytest.raises(UserError, match="unknown method 'nonsense'"):
        await engine.call("nonsense")
    assert await engine.reset_prefix_cache() == 0


class Recorder(StatsListener):
    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.stats: list[EngineStats] = []
        self.threads: set[int] = set()
        self.requests: list[tuple[str, int]] = []
        """(id, prompt tokens)"""
        self.rejected: list[str] = []

    def record_request(self, request_id: str, request: EngineRequest, text: str | None) -> None:
        self.requests.append((request_id, len(request.prompt_token_ids)))
        self.threads.add(id(asyncio.get_running_loop()))

    def record_rejected(self, request_id: str) -> None:
        self.rejected.append(request_id)
        self.threads.add(id(asyncio.get_running_loop()))

    def record_outputs(self, outputs: list[RequestOutput]) -> None:
        self.outputs += outputs
        self.threads.add(id(asyncio.get_running_loop()))

    def record_stats(self, stats: EngineStats) -> None:
        self.stats.append(stats)
        self.threads.add(id(asyncio.get_running_loop()))


async def test_listeners_hear_of_every_output_and_snapshot_on_the_loop(engine: AsyncLLM) -> None:
    recorder = Recorder()
    engine.add_listener(recorder)
    tokens = await collect(engine, [1, 2, 3], request_id="a")
    heard = [token for output in recorder.outputs for token in output.outputs[0].token_ids]
    assert heard == tokens
    assert recorder.outputs[-1].finished
    assert recorder.outputs[-1].metrics.latency >= recorder.outputs[0].metrics.time_to_first_token > 0
    assert recorder.stats[-1].generation_tokens_total == 6
    task = await begin(engine, "b")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert recorder.outputs[-1].outputs[0].finish_reason == "abort"
    assert recorder.requests == [("a", 3), ("b", 3)]
    assert recorder.threads == {id(asyncio.get_running_loop())}


def test_one_engine_serves_one_loop_after_another(options: EngineOptions) -> None:
    engine = start(options)
    first = asyncio.run(collect(engine, [1, 2, 3]))
    assert asyncio.run(collect(engine, [1, 2, 3])) == first
    engine.shutdown()


def test_two_loops_at_once_are_refused(options: EngineOptions) -> None:
    engine = start(options, "slow")

    async def first() -> None:
        async for _ in engine.generate([1, 2, 3], LONG):
            with pytest.raises(RuntimeError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, collect(engine, [4]))
            return

    asyncio.run(first())
    engine.shutdown()


def test_requests_of_a_loop_that_was_closed_are_aborted(options: EngineOptions) -> None:
    engine = start(options, "slow")
    loop = asyncio.new_event_loop()
    left = engine.generate([1, 2, 3], LONG, "a")
    assert loop.run_until_complete(anext(left)).request_id == "a"
    loop.close()
    assert asyncio.run(until_empty(engine)).num_running == 0
    assert len(asyncio.run(collect(engine, [4], request_id="a"))) == 6
    engine.shutdown()


def test_an_engine_without_references_ends_its_process(options: EngineOptions) -> None:
    engine = start(options, in_process=False)
    assert engine.ready.num_blocks == 256
    process = psutil.Process(pid_of(engine))
    del engine
    gc.collect()
    process.wait(60)
    assert has_ended(process)


async def test_beam_search_through_another_process(process_engine: AsyncLLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True, early_stopping="never", logprobs=1)
    found = await process_engine.beam_search([1, 2, 3], params)
    assert [sequence.tokens[:3] for sequence in found.sequences] == [[1, 2, 3]] * 3
    assert len({tuple(sequence.tokens) for sequence in found.sequences}) == 3
    assert all(len(sequence.logprobs or ()) == 5 for sequence in found.sequences)
    outputs = [each async for each in process_engine.generate([1, 2, 3], params.to_sampling_params(), delta=True)]
    assert len(outputs) == 1, "nothing is said before the end"
    assert [each.cumulative_logprob for each in outputs[0].outputs] == [each.cum_logprob for each in found.sequences]
    with pytest.raises(UserError, match="must be BeamSearchParams"):
        await process_engine.beam_search([1], SHORT)  # type: ignore[arg-type]


async def test_a_cancelled_beam_search_frees_its_blocks(engine: AsyncLLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=500, ignore_eos=True)
    task = asyncio.create_task(engine.beam_search([1, 2, 3], params))
    while (await engine.stats()).num_used_blocks == 0:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while (await engine.stats()).num_used_blocks:
        await asyncio.sleep(0.001)
    await engine.call("check")


async def test_a_time_limit_ends_a_request_that_runs_and_one_that_waits(engine: AsyncLLM) -> None:
    """The core notices by itself: no message reaches it meanwhile."""
    timed = msgspec.structs.replace(LONG, timeout_s=0.3)
    outputs = [output async for output in engine.generate([1, 2, 3], timed)]
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "timeout"
    assert len(outputs[-1].outputs[0].token_ids) < 1500
    at_once = [o async for o in engine.generate([1, 2, 3], msgspec.structs.replace(LONG, timeout_s=1e-9))]
    assert [(o.finished, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in at_once] == [
        (True, [], "timeout")
    ]
    stats = await until_empty(engine)
    assert (stats.timed_out_requests_total, stats.finished_requests_total) == (2, 2)


async def test_priorities_order_requests_and_are_checked(engine: AsyncLLM, options: EngineOptions) -> None:
    for priority in (101, -101, 0.5, True):
        with pytest.raises(UserError) as caught:
            await anext(engine.generate([1, 2], SHORT, priority=priority))  # type: ignore[arg-type]
        assert caught.value.param == "priority"
    one_row = start(
        msgspec.structs.replace(options, max_num_seqs=1, scheduling_policy="priority"), "slow"
    )  # so that it still runs when all wait
    await begin(one_row, "runs")
    order: list[int] = []

    async def run(priority: int) -> None:
        async for _ in one_row.generate([1, 2, 3], SHORT, priority=priority):
            pass
        order.append(priority)

    waiting = [asyncio.create_task(run(priority)) for priority in (3, 1, 2)]
    while (await one_row.stats()).num_waiting < 3:
        await asyncio.sleep(0.01)
    await one_row.abort("runs")
    await asyncio.gather(*waiting)
    assert order == [1, 2, 3]
    one_row.shutdown()


async def test_first_come_first_served_takes_no_priorities(options: EngineOptions) -> None:
    engine = start(options)
    assert len(await collect(engine, [1, 2])) == 6
    with pytest.raises(UserError, match="scheduling_policy") as caught:
        await anext(engine.generate([1, 2], SHORT, priority=1))
    assert caught.value.param == "priority"


async def test_prefixes_are_registered_and_let_go(engine: AsyncLLM) -> None:
    prefix = list(range(1, 22))
    plain = await collect(engine, [*prefix, 5])
    await engine.reset_prefix_cache()
    name = await engine.register_prefix(prefix)
    assert (await engine.stats()).num_registered_blocks == 2
    outputs = [output async for output in engine.generate([*prefix, 5], SHORT)]
    assert (outputs[-1].num_cached_tokens, outputs[-1].outputs[0].token_ids) == (21, plain)
    assert await engine.unregister_prefix(name) == 2
    with pytest.raises(UserError, match="no prefix"):
        await engine.unregister_prefix(name)
    with pytest.raises(UserError, match="not a token id"):
        await engine.register_prefix([97])
    await until_empty(engine)
    assert engine.num_unfinished == 0


async def test_a_registration_that_is_cancelled_leaves_nothing(engine: AsyncLLM) -> None:
    blocker = await begin(engine, "a")
    for delay in (0.0, 0.005, 0.02, 0.05):
        task = asyncio.create_task(engine.register_prefix(list(range(1, 90))))
        await asyncio.sleep(delay)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await engine.unregister_prefix(task.result())
    await engine.abort("a")
    await blocker
    assert (await until_empty(engine)).num_registered_blocks == 0


async def test_a_prefix_that_does_not_fit_is_refused(options: EngineOptions) -> None:
    engine = start(msgspec.structs.replace(options, num_blocks_override=8))
    recorder = Recorder()
    engine.add_listener(recorder)
    with pytest.raises(UserError, match="unregister other prefixes"):
        await engine.register_prefix([1] * 120)
    [(name, size)] = recorder.requests
    assert (size, recorder.rejected, recorder.outputs) == (120, [name], [])
    assert engine.num_unfinished == 0
    assert len(await collect(engine, [1, 2])) == 6


async def test_a_failure_of_one_request_s_output_ends_it_alone(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    engine.add_listener(recorder)
    bystander = await begin(engine, "bystander")
    original = output_processor._RequestState.take_update

    def take(self: output_processor._RequestState, update: SequenceUpdate) -> bool:
        if update.request_id.startswith("victim"):
            raise Panic("index out of bounds")
        return original(self, update)

    monkeypatch.setattr(output_processor._RequestState, "take_update", take)
    with pytest.raises(InternalError, match="Panic: index out of bounds"):
        await collect(engine, [1, 2], LONG, request_id="victim")
    while (await engine.stats()).num_running > 1:
        await asyncio.sleep(0.01)
    assert not engine.errored
    assert not bystander.done()
    [last] = [output for output in recorder.outputs if output.request_id == "victim"]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "error")
    await engine.abort("bystander")
    await bystander
    await until_empty(engine)


async def test_an_abort_whose_last_output_fails_still_frees_the_request(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await begin(engine, "a")
    monkeypatch.setattr(output_processor._SequenceState, "mark_finished", _panic)
    await engine.abort("a")
    with pytest.raises(InternalError, match="'a#"):
        await task
    await until_empty(engine)


def _panic(*_arguments: object) -> None:
    raise Panic("index out of bounds")


async def test_the_end_of_the_receiver_s_thread_ends_everything_that_waits(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [await begin(engine, f"r{index}") for index in range(3)]
    monkeypatch.setattr(engine._session, "_take", _panic)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert [type(result) for result in results] == [EngineDeadError] * 3
    assert engine.errored
    assert len({result.error_id for result in results if isinstance(result, EngineDeadError)}) == 1
    assert "the front end failed: Panic: index out of bounds" in str(engine.dead_error)
    assert "Panic" not in engine.dead_error.summary
    with pytest.raises(EngineDeadError):
        engine.check_health()


async def test_open_calls_change_under_the_lock_alone(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's thread goes through them when the engine dies."""
    lock, held = engine._session._lock, []

    class Calls(dict[int, asyncio.Future[CallResult]]):
        def pop(self, call_id: int, *default: object) -> object:  # type: ignore[override]
            held.append(lock.locked())
            return super().pop(call_id, *default)  # type: ignore[call-overload]

    monkeypatch.setattr(engine._session, "_calls", Calls())
    await engine.stats()
    assert held == [True, True]


async def test_a_pause_behind_a_resume_is_known_to_the_front_end(engine: AsyncLLM) -> None:
    """The answer to the resume comes when the pause has been asked for."""
    await engine.pause("keep")
    await asyncio.gather(engine.resume(), engine.pause("keep"))
    assert await engine.is_paused()
    assert engine.pauses
    await asyncio.gather(engine.pause("keep"), engine.resume())
    assert not await engine.is_paused()
    assert not engine.pauses


async def test_pending_are_those_that_the_engine_has_not_finished(engine: AsyncLLM) -> None:
    """A consumer that has yet to read the end of its answer holds nothing of the engine's."""
    unread = engine.generate([1, 2, 3], SHORT, delta=True)
    await anext(unread)
    while engine.num_pending:
        await engine.stats()
    assert engine.num_unfinished == 1
    rest = [output async for output in unread]
    assert sum(len(output.outputs[0].token_ids) for output in rest) <= 5
    assert rest[-1].finished
    assert engine.num_unfinished == 0


class Recorded:
    """What an engine's client is sent: the messages of each call."""

    def __init__(self, engine: AsyncLLM, error: QuireError | None = None) -> None:
        self.calls: list[list[ClientMessage]] = []
        self._send, self._error = engine._session.client.send, error
        engine._session.client.send = self.send  # type: ignore[method-assign]

    def send(self, *messages: ClientMessage) -> None:
        self.calls.append(list(messages))
        if self._error is not None:
            raise self._error
        self._send(*messages)


async def test_requests_of_one_turn_of_the_loop_are_sent_at_once(engine: AsyncLLM) -> None:
    await collect(engine, [1])  # until the engine is ready, requests are checked on other threads
    sent = Recorded(engine)
    await asyncio.gather(*(collect(engine, [1 + index, 2, 3]) for index in range(5)))
    assert [len(messages) for messages in sent.calls] == [5]


async def test_an_abort_in_the_turn_of_its_request_follows_it(engine: AsyncLLM) -> None:
    await collect(engine, [1])
    sent = Recorded(engine)
    leaving = asyncio.create_task(collect(engine, [1, 2, 3], LONG, request_id="leaves"))
    staying = asyncio.create_task(collect(engine, [1, 2, 3]))
    while not engine._session._outbox:
        await asyncio.sleep(0)
    assert not sent.calls
    await engine.abort("leaves")
    assert await leaving == []
    assert len(await staying) == 6
    kinds = [type(message).__name__ for messages in sent.calls for message in messages]
    assert kinds == ["AddRequest", "AddRequest", "Abort"]
    assert (await until_empty(engine)).num_running == 0


async def test_a_request_that_cannot_be_encoded_fails_alone(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    await collect(engine, [1])
    send = engine._session.client.send

    def choosy(*messages: ClientMessage) -> None:
        if any(isinstance(message, AddRequest) and message.request.prompt_token_ids == [2] for message in messages):
            raise OverflowError("no such integer")
        send(*messages)

    monkeypatch.setattr(engine._session.client, "send", choosy)
    works = [collect(engine, [1 + index]) for index in range(3)]
    first, second, third = await asyncio.gather(*works, return_exceptions=True)
    assert isinstance(first, list)
    assert isinstance(third, list)
    assert isinstance(second, InternalError)
    assert "no such integer" in str(second)
    assert engine.num_unfinished == 0


async def test_requests_that_cannot_be_sent_fail_with_the_cause(engine: AsyncLLM) -> None:
    Recorded(engine, EngineDeadError("it is gone"))
    works = [collect(engine, [1 + index, 2, 3]) for index in range(3)]
    for error in await asyncio.gather(*works, return_exceptions=True):
        assert isinstance(error, EngineDeadError)
        assert "it is gone" in str(error)
    assert engine.num_unfinished == 0
