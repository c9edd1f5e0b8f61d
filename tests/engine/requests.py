"""Requests of every kind for engines that die or from which requests move, and what a front end makes of them."""

from __future__ import annotations

import msgspec

from quire.engine.client import EngineClient
from quire.engine.messages import AddRequest, RequestRejected
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from tests.fakes.mortal import FAKE

__all__ = ["FAKE", "KINDS", "Heard", "hear", "hear_rest", "request", "told"]

Heard = dict[tuple[str, int], list[SequenceUpdate]]


def request(number: int, *, pooling: bool = False, **params: object) -> EngineRequest:
    settings = SamplingParams(**{"temperature": 1.0, "ignore_eos": True, **params})  # type: ignore[arg-type]
    prompt = [1 + (number * 7 + place) % 90 for place in range(3 + 5 * (number % 4))]
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=prompt,
        params=settings,
        max_tokens=settings.max_tokens or 9,
        seed=number,
        pooling=pooling,
    )


KINDS: list[dict[str, object]] = [
    {"max_tokens": 30},
    {"max_tokens": 12, "n": 3, "logprobs": 2},
    {"max_tokens": 9, "prompt_logprobs": 1},
    {"max_tokens": 14, "n": 2, "best_of": 4},
    {"max_tokens": 6, "n": 2, "use_beam_search": True, "temperature": 0.0},
    {"max_tokens": 25, "stop_token_ids": [3, 5, 8, 13, 21, 34], "min_tokens": 3},
]


def hear(client: EngineClient, requests: list[EngineRequest]) -> tuple[Heard, list[RequestRejected]]:
    """Run the requests to their ends; the updates of each sequence, and what was rejected."""
    for each in requests:
        client.send(AddRequest(each))
    heard: Heard = {}
    return heard, hear_rest(client, requests, heard)


def hear_rest(client: EngineClient, requests: list[EngineRequest], heard: Heard) -> list[RequestRejected]:
    """Add to the updates of each sequence until all of these requests have ended; what was rejected."""
    unfinished = {
        (each.request_id, index)
        for each in requests
        for index in range(each.params.n if each.params.use_beam_search else each.params.num_sequences)
    }
    unfinished -= {key for key, updates in heard.items() if updates[-1].finish_reason is not None}
    rejected: list[RequestRejected] = []
    while unfinished:
        outputs = client.receive(30)
        assert outputs is not None, f"still waiting for {unfinished}"
        rejected += outputs.rejections
        unfinished -= {key for key in unfinished for each in outputs.rejections if key[0] == each.request_id}
        for update in outputs.updates:
            heard.setdefault((update.request_id, update.index), []).append(update)
            if update.finish_reason is not None:
                unfinished.discard((update.request_id, update.index))
    return rejected


def told(heard: Heard) -> dict[tuple[str, int], object]:
    """What a front end makes of the updates, whatever steps they came in."""
    return {
        key: (
            [token_id for update in updates for token_id in update.new_token_ids],
            [msgspec.to_builtins(entry) for update in updates for entry in update.logprobs or ()],
            [
                (each.prompt_logprobs.start + place, msgspec.to_builtins(entry))
                for each in updates
                if each.prompt_logprobs is not None
                for place, entry in enumerate(each.prompt_logprobs.entries)
            ],
            [(u.finish_reason, u.stop_reason, u.ranking, u.pooled) for u in updates if u.finish_reason is not None],
        )
        for key, updates in heard.items()
    }
