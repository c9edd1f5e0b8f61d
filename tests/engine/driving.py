"""Helpers to drive an EngineClient by hand."""

from __future__ import annotations

from quire.engine.client import EngineClient
from quire.engine.messages import AddRequest, Call, CallResult
from quire.kv_cache.stats import EngineStats
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams


def add(request_id: str, *, num_prompt_tokens: int = 5, max_tokens: int = 6) -> AddRequest:
    return AddRequest(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=[1 + index % 90 for index in range(num_prompt_tokens)],
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            max_tokens=max_tokens,
            seed=3,
        )
    )


def tokens_until_finished(client: EngineClient, *request_ids: str) -> dict[str, list[int]]:
    """Receive until every request has finished; its tokens."""
    tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
    for update in updates_until_finished(client, *request_ids):
        tokens[update.request_id] += update.new_token_ids
    return tokens


def updates_until_finished(client: EngineClient, *request_ids: str) -> list[SequenceUpdate]:
    """Receive until every request has finished; what came."""
    updates: list[SequenceUpdate] = []
    unfinished = set(request_ids)
    while unfinished:
        outputs = client.receive(120)
        assert outputs is not None, f"still waiting for {unfinished}"
        updates += outputs.updates
        unfinished -= {update.request_id for update in outputs.updates if update.finish_reason is not None}
    return updates


def first_update(client: EngineClient) -> SequenceUpdate:
    while True:
        outputs = client.receive(120)
        assert outputs is not None
        if outputs.updates:
            return outputs.updates[0]


def call(client: EngineClient, method: str, argument: str = "") -> CallResult:
    client.send(Call(call_id=7, method=method, argument=argument))
    while True:
        outputs = client.receive(120)
        assert outputs is not None
        if outputs.results:
            assert outputs.results[0].call_id == 7
            return outputs.results[0]


def stats(client: EngineClient) -> EngineStats:
    value = call(client, "stats").value
    assert isinstance(value, EngineStats)
    return value
