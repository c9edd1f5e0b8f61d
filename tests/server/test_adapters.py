"""Adapters over HTTP: by the name in `model`, loaded at the start, from a directory, and by the admin's routes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.config.hf_config import BUNDLED_DIRECTORIES
from quire.engine.async_engine import AsyncLLM
from quire.errors import ConfigError
from quire.server.adapters import LoraModule
from quire.server.app import create_app
from quire.server.settings import ServerSettings
from tests.fakes.adapters import write, write_adapter
from tests.server.conftest import HOST, serving

BODY = {"prompt": "abc", "max_tokens": 6, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "abc"}]}
MISFIT = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
NO_ADAPTERS_SETTINGS = ServerSettings(enable_admin_routes=True)


async def test_adapters_by_name(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_DIRECTORIES["bundled"])
    paths = {name: str(write_adapter(model, tmp_path / name, seed=seed)) for seed, name in enumerate(("one", "two"))}
    settings = ServerSettings(
        enable_admin_routes=True, lora_dir=str(tmp_path), served_model_name=["base"], allowed_hosts=[HOST]
    )
    engine = AsyncLLM(
        in_process=True, enable_lora=True, max_loras=2, dtype="float32", num_threads=1, num_blocks_override=32
    )
    try:
        app = create_app(engine, settings)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            await check_routes(client, tmp_path, paths)
    finally:
        engine.shutdown()


async def check_routes(client: httpx.AsyncClient, directory: Path, paths: dict[str, str]) -> None:
    """directory: what the server loads adapters from, those of `paths` by name."""
    post, get = client.post, client.get

    async def text(name: str) -> str:
        response = await post("/v1/completions", json={**BODY, "model": name})
        assert response.status_code == 200, response.text
        assert response.json()["model"] == name
        found: str = response.json()["choices"][0]["text"]
        return found

    (directory / "broken").mkdir()
    (directory / "broken" / "adapter_config.json").write_text("this is not json")
    texts = {name: await text(name) for name in ("base", "one", "two")}
    assert len(set(texts.values())) == 3
    load = {"lora_name": "mine", "lora_path": paths["two"]}
    answer = await post("/v1/load_lora_adapter", json=load)
    assert answer.text == "Success: LoRA adapter 'mine' added successfully."
    assert await text("mine") == texts["two"]
    answer = await post("/v1/load_lora_adapter", json=load)
    assert answer.status_code == 400
    assert "has already been loaded" in answer.json()["error"]["message"]
    answer = await post("/v1/load_lora_adapter", json={**load, "lora_path": paths["one"], "load_inplace": True})
    assert answer.status_code == 200
    assert await text("mine") == texts["one"]
    cards = {card["id"]: card for card in (await get("/v1/models")).json()["data"]}
    assert set(cards) == {"base", "one", "two", "mine"}
    assert (cards["mine"]["parent"], cards["mine"]["root"]) == ("base", paths["one"])
    assert cards["base"]["parent"] is None
    answer = await post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
    assert answer.text == "Success: LoRA adapter 'mine' removed successfully."
    assert (await post("/v1/completions", json={**BODY, "model": "mine"})).status_code == 404
    assert (await post("/v1/unload_lora_adapter", json={"lora_name": "mine"})).status_code == 404
    for body, message in (
        ({"lora_name": "x"}, "Both 'lora_name' and 'lora_path'"),
        ({"lora_name": "base", "lora_path": paths["one"]}, "is the model's own"),
        ({"lora_name": "x", "lora_path": str(directory / "broken")}, "adapter_config.json"),
    ):
        answer = await post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    answer = await post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(directory / "none")})
    assert answer.status_code == 404
    assert "is no directory" in answer.json()["error"]["message"]
    matrices = {"q_proj.lora_A": torch.zeros(4, 7), "q_proj.lora_B": torch.zeros(7, 4)}
    layer = "base_model.model.model.layers.0.self_attn"
    write(directory / "misfit", {f"{layer}.{name}.weight": each for name, each in matrices.items()}, MISFIT)
    answer = await post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(directory / "misfit")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
    for path, more in (("completions", BODY), ("chat/completions", CHAT), ("responses", {"input": "abc"})):
        answer = await post(f"/v1/{path}", json={**more, "model": "misfit"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model"), answer.text
    await check_many(client, directory, texts)
    for name in ("../one", "..", "none"):
        assert (await post("/v1/completions", json={**BODY, "model": name})).status_code == 404


async def check_many(client: httpx.AsyncClient, directory: Path, texts: dict[str, str]) -> None:
    """As vLLM's own checks: more adapters than slots are loaded and used at once, with beams too, beside loads that
    fail. texts: those of the adapters of the directory, by name."""

    async def use(number: int) -> None:
        own = ("one", "two")[number % 2]
        load = {"lora_name": f"adapter {number}", "lora_path": str(directory / own)}
        assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 200
        body = {**BODY, "model": load["lora_name"]}
        for beams in ({}, {"use_beam_search": True, "n": 2}, {}):
            answer = await client.post("/v1/completions", json={**body, **beams})
            assert answer.status_code == 200, answer.text
            assert beams or answer.json()["choices"][0]["text"] == texts[own]

    async def fail(name: str, status: int) -> None:
        for _ in range(10):
            load = {"lora_name": "bad", "lora_path": str(directory / name)}
            assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == status

    await asyncio.gather(*map(use, range(8)), fail("none", 404), fail("broken", 400))


async def test_a_server_without_adapters(model_path: Path) -> None:
    async with serving(model_path, NO_ADAPTERS_SETTINGS) as served:
        body = {"lora_name": "x", "lora_path": "/"}
        answer = await served.client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400
        assert "enable_lora" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("a=/b", LoraModule("a", "/b")),
        ("a=/b=c", LoraModule("a", "/b=c")),
        ('{"name": "a", "path": "b", "base_model_name": "c"}', LoraModule("a", "b", "c")),
    ],
)
def test_modules(text: str, module: LoraModule) -> None:
    assert LoraModule.parse(text) == module


@pytest.mark.parametrize("text", ["a", "a=", "=b", '{"name": "a"}', '{"name": "a", "path": "b", "c": 1}'])
def test_wrong_modules(text: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        LoraModule.parse(text)
