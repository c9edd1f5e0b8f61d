"""llama.cpp's adapters over HTTP: by number, with the scale of the server or of a request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.cli.serve import with_adapters
from quire.config.adapter_files import FileScale
from quire.config.adapters import AdaptersConfig
from quire.config.hf_config import BUNDLED_DIRECTORIES
from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.errors import ConfigError, UserError
from quire.server.app import create_app
from quire.server.keys import Client
from quire.server.limits import CLIENT
from quire.server.numbered_adapters import NumberedAdapters
from quire.server.protocol.common import LoraScale
from quire.server.settings import ServerSettings
from quire.server.shared_adapters import SharedAdapters
from tests.fakes.adapters import merged, write, write_adapter
from tests.models.test_gguf_adapters import to_gguf
from tests.server.conftest import HOST

PROMPT = list(range(20, 60))
LIMITS = AdaptersConfig(max_running=1, max_rank=16, num_slots=1)
JSON = {"Content-Type": "application/json"}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(BUNDLED_DIRECTORIES["bundled"], dtype=torch.float32)


@asynccontextmanager
async def serving(settings: dict[str, Any], **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    given: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_blocks_override": 64, **options}
    engine = AsyncLLM(in_process=True, enable_lora=True, **given)
    own = ServerSettings(enable_admin_routes=True, served_model_name=["base"], allowed_hosts=[HOST], **settings)
    try:
        app = create_app(engine, own)
        await app.state.context.adapters.load_at_start(own)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            yield client
    finally:
        engine.shutdown()


async def ask(client: httpx.AsyncClient, status: int = 200, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 2, "return_token_ids": True, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def bits(answer: Any) -> Any:
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def cached(answer: Any) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def as_gguf(model: PreTrainedModel, directory: Path, seed: int) -> Path:
    plain = write_adapter(model, directory / f"plain{seed}", seed=seed)
    heads = {"self_attn.q_proj": 8, "self_attn.k_proj": 4}
    return to_gguf(plain, directory / f"{seed}.gguf", "llama", heads)


async def test_scales(model: PreTrainedModel, tmp_path: Path) -> None:
    """A scale is part of the content: no request of one meets blocks of another."""
    first, second = as_gguf(model, tmp_path, 1), write_adapter(model, tmp_path / "second", seed=2)
    write_adapter(model, tmp_path / "named" / "half", seed=1, lora_alpha=8)
    settings = {"lora": [f"{first}"], "lora_scaled": [f"{second}:0"], "lora_dir": str(tmp_path / "named")}
    async with serving(settings, max_loras=2) as client:
        listed = (await client.get("/lora-adapters")).json()
        assert listed == [{"id": 0, "path": "1.gguf", "scale": 1.0}, {"id": 1, "path": "second", "scale": 0.0}]
        whole, half = await ask(client), await ask(client, lora=[{"id": 0, "scale": 0.5}])
        assert (cached(whole), cached(half)) == (0, 0)
        again = await ask(client, lora=[{"id": 0, "scale": 0.5}])
        assert cached(again) > 0
        assert bits(again) == bits(half) == bits(await ask(client, model="half")) != bits(whole)
        base = await ask(client, lora=[{"id": 0, "scale": 0}])
        assert cached(base) == 0
        other = await ask(client, lora=[{"id": 1, "scale": -1.5}, {"id": 0}])

        set_to = await client.post("/lora-adapters", json=[{"id": 1, "scale": -1.5}])
        assert set_to.json() == {"success": True}
        assert [each["scale"] for each in (await client.get("/lora-adapters")).json()] == [0.0, -1.5]
        assert bits(await ask(client)) == bits(other)
        assert bits(await ask(client, lora=[])) == bits(other)
        await client.post("/lora-adapters", json=[])
        assert bits(await ask(client)) == bits(base)
        await check_routes(client, half)
    for answer, path, scale in ((whole, "plain1", 1.0), (half, "plain1", 0.5), (other, "second", -1.5)):
        check_logprobs(model, tmp_path / path, scale, answer)


async def check_routes(client: httpx.AsyncClient, half: Any) -> None:
    """All routes that take the field, and errors."""
    lora = [{"id": 0, "scale": 0.5}]
    body = {"prompt": PROMPT, "n_predict": 4, "temperature": 0, "return_tokens": True, "lora": lora}
    assert (await client.post("/completion", json=body)).json()["tokens"] == bits(half)[0]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "lora": lora, "chat_template": "a"}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code != 500
    for wrong, words in (
        ([{"id": 2, "scale": 1}], "lora: no adapter has the id 2 (ids: 0, 1)"),
        ([{"id": 0, "scale": 1}, {"id": 1, "scale": 0.1}], "sums of adapters are not computed"),
        ([{"scale": 1}], "id"),
        ([{"id": "x", "scale": 1}], "id"),
    ):
        for path, sent in (("/v1/completions", {"prompt": "a", "lora": wrong}), ("/lora-adapters", wrong)):
            answer = await client.post(path, json=sent)
            assert answer.status_code == 400, answer.text
            assert words in answer.json()["error"]["message"]
    for nothing in ({"lora": []}, "x", 3):
        assert (await client.post("/lora-adapters", json=nothing)).status_code == 400
    assert (await client.post("/lora-adapters", content=b"[", headers=JSON)).status_code == 400
    assert [each["scale"] for each in (await client.get("/lora-adapters")).json()] == [0.0, 0.0], "unchanged"
    answer = await ask(client, 400, model="half", lora=lora)
    assert "the model 'half' is one already" in answer["error"]["message"]


def check_logprobs(model: PreTrainedModel, directory: Path, scale: float, answer: Any) -> None:
    """Compare with Transformers, which has the adapter merged with this scale."""
    config = json.loads((directory / "adapter_config.json").read_text())
    whole = merged(model, directory, factor=scale)
    assert config["r"] == 8
    tokens, logprobs = bits(answer)
    with torch.no_grad():
        wanted = whole(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        assert logprob == pytest.approx(wanted[place, token].item(), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"lora": ["a,b"], "lora_init_without_apply": True}, [("a", 0.0), ("b", 0.0)]),
        ({"lora": ['"a,b",c'], "lora_init_without_apply": True}, [("a,b", 0.0), ("c", 0.0)]),
        ({"lora": ["a"], "lora_scaled": ["b:0,c:d:0.0"]}, [("a", 1.0), ("b", 0.0), ("c:d", 0.0)]),
        ({"lora_scaled": ["b:-2.5"]}, [("b", -2.5)]),
    ],
)
def test_options(options: dict[str, Any], files: list[tuple[str, float]]) -> None:
    assert [(each.path, each.scale) for each in ServerSettings(**options).lora_files] == files


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora": ["a", "b"]}, "sums of adapters"),
        ({"lora": ["a"], "lora_scaled": ["b:0.1"]}, "sums of adapters"),
        ({"lora": ["a,"]}, "empty path"),
        ({"lora_scaled": ["a"]}, "is not FILE:SCALE"),
        ({"lora_scaled": ["a:b"]}, "is not FILE:SCALE"),
        ({"lora_scaled": ["a:inf"]}, "is not FILE:SCALE"),
        ({"lora_scaled": [":1"]}, "is not FILE:SCALE"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**options)


def test_the_engine_takes_them(tmp_path: Path) -> None:
    """Without further options adapters are on, as in llama.cpp; given ones count."""
    paths = [str(write(tmp_path / str(rank), {}, {"r": rank, "lora_alpha": 8})) for rank in (4, 17)]
    files = [FileScale(path, 0.0) for path in paths]
    found = with_adapters(EngineOptions(), files, ())
    assert (found.enable_lora, found.max_loras, found.max_lora_rank) == (True, 2, 32)
    given = with_adapters(EngineOptions(max_lora_rank=8, max_loras=1), files, ("max_lora_rank", "max_loras"))
    assert (given.enable_lora, given.max_loras, given.max_lora_rank) == (True, 1, 8)
    assert with_adapters(EngineOptions(), [], ()) == EngineOptions()


def test_processes_know_the_scales_of_one_another(tmp_path: Path) -> None:
    """Content is that of the first who read it."""
    path = write(tmp_path / "one", {}, {"r": 1, "lora_alpha": 8})
    first, second = (NumberedAdapters(SharedAdapters.of(tmp_path).numbered) for _ in range(2))
    files = [FileScale(str(path), 1.0)]
    first.open(files, LIMITS)
    digest = first.usable()[0].ref.digest
    write(path, {}, {"r": 2, "lora_alpha": 8})
    second.open(files, LIMITS)
    second.change([LoraScale(0, 0.25)])
    found = first.chosen(None)
    assert found is not None
    assert (found.scale, found.name) == (0.25, "one")
    assert found == second.chosen(None) != first.usable()[0].ref
    assert second.usable()[0].ref.digest == digest
    assert found.digest != digest


def test_keys_of_some_names(tmp_path: Path) -> None:
    """A key for some names sees and scales the adapters of these alone."""
    paths = [write(tmp_path / name, {}, {"r": 1, "lora_alpha": 8}) for name in ("one", "two")]
    numbered = NumberedAdapters()
    numbered.open([FileScale(str(path), 0.0) for path in paths], LIMITS)
    client: Any = SimpleNamespace(spec=Client, models=frozenset({"base", "two"}))
    token = CLIENT.set(client)
    try:
        assert list(numbered.usable()) == [1]
        assert numbered.chosen([LoraScale(1, 1.0)]) is not None
        with pytest.raises(UserError, match=r"no adapter has the id 0 \(ids: 1\)"):
            numbered.chosen([LoraScale(0, 1.0)])
    finally:
        CLIENT.reset(token)


async def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora: .*is no directory of an adapter"):
        async with serving({"lora": [str(tmp_path / "none")]}):
            raise AssertionError("the server starts")
