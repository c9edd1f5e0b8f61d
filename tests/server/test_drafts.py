"""Drafts as clients see them: predictions, and what became of a request's drafts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.server.app import create_app
from quire.server.protocol.common import SpeculativeDecoding
from quire.server.settings import ServerSettings
from tests.server.conftest import HOST, Served
from tests.server.sse import chunks

MOST = 6
NGRAM = {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write a function."}],
    "max_tokens": 48,
    "temperature": 100.0,
    "seed": 3,
}
"""So hot that its text repeats nothing."""


def test_the_drafts_of_a_request() -> None:
    steps = bytes([3, 0, 3, 3, 2, 1])
    found = SpeculativeDecoding.of(steps, 3, is_detailed=True)
    assert (found.num_spec_steps, found.num_draft_tokens, found.num_accepted_draft_tokens) == (3, 8, 4)
    assert (found.acceptance_histogram, found.num_spec_tokens) == ([1, 1, 0, 1], 3)
    assert found.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert found.draft_acceptance_rate == 0.5
    assert (found.per_step_drafted, found.per_step_accepted) == ([3, 3, 2], [0, 3, 1])
    none = SpeculativeDecoding.of(b"", 2, is_detailed=False)
    assert (none.mean_acceptance_length, none.draft_acceptance_rate, none.acceptance_histogram) == (1.0, 0.0, [0, 0, 0])


@contextlib.asynccontextmanager
async def client_of(engine: AsyncLLM, level: str) -> AsyncIterator[httpx.AsyncClient]:
    settings = ServerSettings(allowed_hosts=[HOST], per_request_spec_decode_metrics=level)
    transport = httpx.ASGITransport(app=create_app(engine, settings), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
        yield client


async def test_a_prediction_and_what_became_of_it(bundled_model_path: Path) -> None:
    options = EngineOptions(
        model=str(bundled_model_path), num_threads=1, num_blocks_override=64, speculative_config=NGRAM
    )
    engine = AsyncLLM.from_options(options, in_process=True)
    try:
        async with client_of(engine, "detailed") as client:

            async def ask(**fields: Any) -> Any:
                response = await client.post("/v1/chat/completions", json={**ASKED, **fields})
                assert response.status_code == 200, response.text
                return response.json()

            plain = await ask()
            text = plain["choices"][0]["message"]["content"]
            assert "completion_tokens_details" not in plain["usage"]
            own = plain["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
            for content in (text, [{"type": "text", "text": text[:40]}, {"type": "text", "text": text[40:]}]):
                answer = await ask(prediction={"type": "content", "content": content})
                assert answer["choices"][0]["message"]["content"] == text
                found = answer["metrics"]["speculative_decoding"]
                details = answer["usage"]["completion_tokens_details"]
                assert details["accepted_prediction_tokens"] == found["num_accepted_draft_tokens"] > own + 20
                assert sum(found["per_step_accepted"]) == found["num_accepted_draft_tokens"]
                assert sum(found["per_step_drafted"]) == found["num_draft_tokens"] >= 20
                assert len(found["acceptance_histogram"]) == MOST + 1
            wrong = await ask(prediction={"type": "content", "content": "none of this at all"})
            assert wrong["choices"] == plain["choices"]
            details = wrong["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] <= own
            assert details["rejected_prediction_tokens"] > 0
            assert (await ask(n=2))["metrics"] is None
            assert "metrics" not in await ask(include_metrics=False)
            streamed = {"stream": True, "stream_options": {"include_usage": True}}
            events = chunks((await client.post("/v1/chat/completions", json={**ASKED, **streamed})).text)
            assert [bool(event.get("metrics")) for event in events] == [False] * (len(events) - 1) + [True]
            assert events[-1]["metrics"]["speculative_decoding"] == plain["metrics"]["speculative_decoding"]
            bad = await client.post("/v1/chat/completions", json={**ASKED, "prediction": {"content": 5}})
            assert bad.status_code == 400
        async with client_of(engine, "summary") as client:
            body = {"prompt": "a b a b a b", "max_tokens": 8}
            found = (await client.post("/v1/completions", json=body)).json()["metrics"]["speculative_decoding"]
            assert "per_step_accepted" not in found
            assert found["num_spec_tokens"] == MOST
            assert "time_to_first_token_ms" not in (await client.post("/v1/completions", json=body)).json()["metrics"]
    finally:
        engine.shutdown()


async def test_without_drafts_a_prediction_has_no_effect(served: Served) -> None:
    asked = {"messages": [{"role": "user", "content": "=abc"}], "prediction": {"type": "content", "content": "abc"}}
    response = await served.client.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200
    assert response.headers["x-quire-ignored"] == "prediction"
    assert "metrics" not in response.json()
