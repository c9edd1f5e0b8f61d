"""Requests that have ended: the latest, and what most of them took."""

from __future__ import annotations

from quire.clock import VirtualClock
from quire.dashboard.recent import KEPT, SHOWN, RecentRequests
from quire.metrics.progress import RequestProgress
from quire.outputs import CompletionOutput, RequestMetrics, RequestOutput


def output(request_id: str, num_tokens: int, finish_reason: str | None, first: float | None) -> RequestOutput:
    completion = CompletionOutput(
        index=0, text="", token_ids=list(range(num_tokens)), cumulative_logprob=0.0, finish_reason=finish_reason
    )
    metrics = RequestMetrics(queue_time=0.0, time_to_first_token=first)
    is_over = finish_reason is not None
    return RequestOutput(
        request_id, None, [1, 2, 3], [completion], finished=is_over, num_cached_tokens=1, metrics=metrics
    )


def test_the_latest_come_first_and_most_are_counted() -> None:
    clock = VirtualClock()
    requests = RecentRequests()
    assert requests.recent().ended == []
    assert requests.recent().seconds is None
    for number in range(KEPT + 50):
        progress = RequestProgress(clock.now())
        progress.observe_tokens(output(f"r{number}", 1, None, 0.5).outputs[0], clock.now())
        clock.advance(0.01 * number)
        last = output(f"r{number}", 2, "length", 0.5)
        progress.observe_tokens(last.outputs[0], clock.now())
        requests.note(last, progress, clock.now())
    found = requests.recent()
    assert [each.request_id for each in found.ended] == [f"r{KEPT + 49 - back}" for back in range(SHOWN)]
    first = found.ended[0]
    assert (first.finish_reasons, first.num_prompt_tokens, first.num_cached_tokens, first.num_generated) == (
        ["length"], 3, 1, 3,
    )  # fmt: skip
    assert found.time_to_first_token is not None
    assert found.seconds is not None
    assert (found.time_to_first_token.p50, found.time_to_first_token.p95) == (0.5, 0.5)
    kept = sorted(0.5 + 0.01 * number for number in range(50, KEPT + 50))
    assert abs(found.seconds.p50 - kept[99]) < 1e-9
    assert abs(found.seconds.p95 - kept[190]) < 1e-9


def test_a_request_that_never_got_a_token_has_no_times() -> None:
    requests = RecentRequests()
    requests.note(output("r", 0, "abort", None), RequestProgress(0.0), 0.0)
    found = requests.recent()
    assert (found.ended[0].seconds, found.ended[0].time_to_first_token) == (None, None)
    assert found.seconds is None
    assert requests.recent() == found
