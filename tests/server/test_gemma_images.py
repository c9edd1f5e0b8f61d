"""Gemma 3 with pictures over HTTP: tokens are Transformers', also behind an engine that is killed amid a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel

from quire.cli.main import main
from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.server.app import create_app
from quire.server.settings import ServerSettings
from tests.e2e.test_images import NUM_TOKENS, prompt
from tests.e2e.test_restart import GUARD_SECONDS, open_engine
from tests.e2e.test_whole_images import LEAST, SMALL, TALL, WIDE, continued
from tests.fakes.fates import Fates
from tests.models.vision_models import GEMMA_PROCESSOR, GEMMA_TOKENS, TEMPLATE, random_gemma3, save_chat
from tests.server.conftest import HOST, Served
from tests.server.test_images import part

TEXT = {"type": "text", "text": "w5 w6"}
MESSAGES = [
    {"role": "user", "content": [TEXT, part(WIDE), part(TALL, detail="high")]},
    {"role": "assistant", "content": "w7"},
    {"role": "user", "content": [part(SMALL), TEXT]},
]
"""Three pictures, one of which is of a later message."""
SAME = prompt(5, 6, WIDE, TALL, 7, SMALL, 5, 6, 8)
BODY = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
SETTINGS = {"num_blocks_override": 120, "block_size": 4, "num_threads": 1, "max_num_seqs": 4, "dtype": "float32"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_gemma3()


@pytest.fixture(scope="module")
def directory(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = TEMPLATE.replace("<s> <image> </s>", "<s>")
    return save_chat(model, tmp_path_factory.mktemp("gemma3-chat"), template, GEMMA_PROCESSOR)


@pytest.fixture
def fates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fates:
    return Fates(tmp_path, monkeypatch)


@contextlib.asynccontextmanager
async def serving(engine: AsyncLLM) -> AsyncIterator[Served]:
    try:
        app = create_app(engine, ServerSettings(served_model_name=["tiny"], allowed_hosts=[HOST]))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}", timeout=60) as client:
            yield Served(engine, app.state.context, client)
    finally:
        engine.shutdown()


async def streamed(served: Served, **more: Any) -> list[int]:
    """Tokens of a streamed answer."""
    found: list[int] = []
    body = BODY | {"stream": True, "return_token_ids": True} | more
    async with served.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                found += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    return found


async def test_pictures_of_a_chat(directory: Path, model: PreTrainedModel) -> None:
    """Whole, streamed by several beside one another, and left by a client amid a stream."""
    expected, _ = continued(model, SAME)
    options = EngineOptions.from_keywords({"model": str(directory), **SETTINGS, "max_num_batched_tokens": LEAST})
    engine = AsyncLLM.from_options(options, in_process=True)
    async with asyncio.timeout(GUARD_SECONDS), serving(engine) as served:
        answer = (await served.client.post("/v1/chat/completions", json=BODY | {"return_token_ids": True})).json()
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["prompt_tokens"] == 6 + 3 * (GEMMA_TOKENS + 2)
        assert await asyncio.gather(*(streamed(served) for _ in range(3))) == [expected] * 3
        leaving = asyncio.ensure_future(streamed(served, max_tokens=150))
        while not (await engine.stats()).num_running:
            await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        while (stats := await engine.stats()).num_running or stats.num_used_blocks:
            await asyncio.sleep(0.005)
        assert stats.generation_tokens_total < 4 * NUM_TOKENS + 150, "it was not generated to its end"
        assert await streamed(served) == expected


@pytest.mark.long
async def test_an_engine_that_is_killed_amid_streams(directory: Path, model: PreTrainedModel, fates: Fates) -> None:
    expected, _ = continued(model, SAME)
    engine = open_engine({"model": str(directory), **SETTINGS, "max_num_batched_tokens": LEAST})
    async with asyncio.timeout(GUARD_SECONDS), serving(engine) as served:
        fates.are(("die", 6))
        assert await asyncio.gather(*(streamed(served) for _ in range(3))) == [expected] * 3
        assert (engine.num_restarts, fates.num_left) == (1, 0)


def test_a_server_without_room_for_an_image_does_not_start(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-num-seqs", "4", "--num-blocks-override", "40", "--block-size", "4", "--port", "0"]
    assert main(["serve", str(directory), "--max-num-batched-tokens", str(LEAST - 1), *flags]) == 2
    error = capsys.readouterr().err
    assert f"max_num_batched_tokens ({LEAST - 1}) must be at least {LEAST}: an image of this model has" in error
    assert "Traceback" not in error
