"""POST /sleep and /wake_up: there when asked for, 503 meanwhile, 400 while requests live."""

from __future__ import annotations

import asyncio
from pathlib import Path

from quire.server.settings import ServerSettings
from tests.server.conftest import serving

SETTINGS = ServerSettings(enable_sleep_mode=True)
BODY = {"prompt": "abc", "max_tokens": 4, "temperature": 0}


async def test_requests_get_503_while_the_engine_sleeps(model_path: Path) -> None:
    async with serving(model_path, SETTINGS) as served:
        post, get = served.client.post, served.client.get
        before = (await post("/v1/completions", json=BODY)).json()["choices"]
        assert (await get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await post("/sleep?level=2")).json() == {"is_sleeping": True}
        assert (await get("/is_sleeping")).json() == {"is_sleeping": True}
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, body in (
            ("completions", BODY),
            ("completions", {**BODY, "stream": True}),
            ("chat/completions", chat),
        ):
            response = await post(f"/v1/{path}", json=body)
            assert response.status_code == 503
            assert "asleep" in response.json()["error"]["message"]
        assert (await get("/health")).status_code == 200
        assert (await post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert (await post("/wake_up")).json() == {"is_sleeping": False}
        assert (await post("/v1/completions", json=BODY)).json()["choices"] == before


async def test_it_does_not_sleep_under_a_request(model_path: Path) -> None:
    async with serving(model_path, SETTINGS, executor="slow") as served:
        running = asyncio.ensure_future(served.client.post("/v1/completions", json={**BODY, "max_tokens": 50}))
        await served.until_running(1)
        response = await served.client.post("/sleep")
        assert response.status_code == 400
        assert "while requests live" in response.json()["error"]["message"]
        assert (await running).status_code == 200
        await served.until_idle()
        assert (await served.client.post("/sleep")).status_code == 200


async def test_a_level_that_there_is_not(model_path: Path) -> None:
    async with serving(model_path, SETTINGS) as served:
        response = await served.client.post("/sleep?level=3")
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "level")
        assert (await served.client.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_without_the_setting_there_are_no_such_routes(model_path: Path) -> None:
    async with serving(model_path) as served:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            assert (await served.client.request(method, path)).status_code == 404
