"""The routes that control the engine: there when asked for, for admins only, and what they do to requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from quire.server.settings import ServerSettings
from tests.server.conftest import serving

SETTINGS = ServerSettings(enable_sleep_mode=True)
ADMIN = ServerSettings(enable_admin_routes=True)
CHAT = {"messages": [{"role": "user", "content": "a"}]}
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


async def test_it_does_not_sleep_under_a_request_that_is_kept(model_path: Path) -> None:
    async with serving(model_path, SETTINGS, executor="slow") as served:
        running = asyncio.ensure_future(served.client.post("/v1/completions", json={**BODY, "max_tokens": 200}))
        await served.until_running(1)
        response = await served.client.post("/sleep?mode=keep")
        assert response.status_code == 400
        assert "while requests live" in response.json()["error"]["message"]
        assert (await served.client.get("/ready")).status_code == 200
        asleep = asyncio.ensure_future(served.client.post("/sleep?mode=wait"))
        served.hurry()
        assert (await asleep).status_code == 200
        assert (await running).json()["choices"][0]["finish_reason"] == "length"
        assert (await served.client.get("/ready")).status_code == 503


async def test_it_ends_requests_to_sleep(model_path: Path) -> None:
    async with serving(model_path, SETTINGS, executor="slow") as served:
        running = asyncio.ensure_future(served.client.post("/v1/completions", json={**BODY, "max_tokens": 200}))
        await served.until_running(1)
        assert (await served.client.post("/sleep")).status_code == 200
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"
        for tags, status in (("kv_cache", 400), ("scales", 400), ("weights", 200)):
            response = await served.client.post(f"/wake_up?tags={tags}")
            assert response.status_code == status
        assert response.json() == {"is_sleeping": True}
        assert (await served.client.post("/v1/completions", json=BODY)).status_code == 503
        assert (await served.client.post("/wake_up?tags=kv_cache")).json() == {"is_sleeping": False}
        assert (await served.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_level_that_there_is_not(model_path: Path) -> None:
    async with serving(model_path, SETTINGS) as served:
        response = await served.client.post("/sleep?level=3")
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "level")
        assert (await served.client.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_without_the_settings_there_are_no_such_routes(model_path: Path) -> None:
    async with serving(model_path) as served:
        routes = [("POST", path) for path in ("/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache")]
        routes += [("POST", path) for path in ("/reset_mm_cache", "/reset_encoder_cache", "/abort_requests")]
        routes += [("POST", path) for path in ("/stop_replica", "/start_replica")]
        routes += [("GET", path) for path in ("/is_sleeping", "/is_paused", "/server_info", "/tokenizer_info")]
        options = {"/sleep": "sleep-mode", "/wake_up": "sleep-mode", "/is_sleeping": "sleep-mode"}
        options["/tokenizer_info"] = "tokenizer-info-endpoint"
        for method, path in routes:
            response = await served.client.request(method, path)
            assert response.status_code == 404
            message = response.json()["error"]["message"]
            assert message.endswith(f"it is served with --enable-{options.get(path, 'admin-routes')}")
        assert "served with" not in (await served.client.post("/sleeping")).json()["error"]["message"]


async def test_a_pause_holds_or_refuses_new_requests(model_path: Path) -> None:
    """Running ones are kept, and new ones with them; or they are ended or waited for, and new ones are refused. The
    tokens are those of an engine that was not paused."""
    body = {**BODY, "max_tokens": 200}
    async with serving(model_path) as served:
        expected = (await served.client.post("/v1/completions", json=body)).json()["choices"]
    for mode in ("keep", "wait", "abort"):
        async with serving(model_path, ADMIN, executor="slow") as served:
            post, get = served.client.post, served.client.get
            running = asyncio.ensure_future(post("/v1/completions", json=body))
            await served.until_running(1)
            pausing = asyncio.ensure_future(post(f"/pause?mode={mode}"))
            if mode == "wait":
                served.hurry()
            assert (await pausing).json() == {"status": "paused"}
            assert (await get("/is_paused")).json() == {"is_paused": True}
            assert ((await get("/ready")).status_code, (await get("/health")).status_code) == (503, 200)
            new = asyncio.ensure_future(post("/v1/completions", json={**body, "stream": True}))
            if mode != "keep":
                refused = await asyncio.wait_for(new, 120)
                assert (refused.status_code, "POST /resume" in refused.text) == (503, True)
                await running
            served.hurry()
            await asyncio.sleep(0.1)
            assert running.done() == new.done() == (mode != "keep")
            assert (await post("/resume")).json() == {"status": "resumed"}
            choice = (await running).json()["choices"]
            assert choice == expected if mode != "abort" else choice[0]["finish_reason"] == "abort"
            assert (await get("/ready")).status_code == 200
            if mode != "keep":
                new = asyncio.ensure_future(post("/v1/completions", json={**body, "stream": True}))
            assert (await new).text.endswith("data: [DONE]\n\n")
            await served.until_idle()


async def test_what_else_is_told_and_done(model_path: Path) -> None:
    settings = ServerSettings(enable_admin_routes=True, enable_tokenizer_info_endpoint=True, api_key=["secret-key"])
    async with serving(model_path, settings) as served:
        served.client.headers["Authorization"] = "Bearer secret-key"
        post, get = served.client.post, served.client.get
        await post("/v1/completions", json={**BODY, "prompt": "abcdefgh" * 8})
        assert (await post("/reset_prefix_cache")).json()["num_blocks"] > 0
        assert (await post("/reset_prefix_cache")).json()["num_blocks"] == 0
        info = (await get("/server_info")).json()
        assert info["config"]["scheduler"]["max_num_seqs"] == 8
        assert info["engine"]["num_blocks"] == 64
        assert "secret-key" not in str(info)
        assert isinstance((await get("/server_info?config_format=text")).json()["config"], str)
        info = (await get("/tokenizer_info")).json()
        assert info["vocab_size"] == served.context.tokenizer.vocab_size
        assert info["chat_template"] == served.context.tokenizer.chat_template
        wrong = ("/pause?mode=later", "/pause?clear_cache=maybe", "/reset_prefix_cache?reset_external=true")
        for path in wrong:
            answer = await post(path)
            assert (answer.status_code, answer.json()["error"]["param"] in path) == (400, True)
        assert (await get("/server_info?config_format=xml")).status_code == 400
        assert (await get("/ready")).status_code == 200


async def test_only_clients_on_this_machine_control_without_an_admin_key(model_path: Path) -> None:
    async with serving(model_path, ADMIN) as served:
        assert served.app is not None

        async def status(host: str, **headers: str) -> int:
            transport = httpx.ASGITransport(served.app, client=(host, 1))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url=served.url) as client:
                return (await client.get("/is_paused", headers=headers)).status_code

        for host in ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"):
            assert await status(host) == 200, host
        for host in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "", "localhost.evil"):
            assert await status(host) == 403, host
        for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP"):
            assert await status("127.0.0.1", **{header: "127.0.0.1"}) == 403, header


async def test_an_admins_key(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[ops]\nkey = "from-file"\nadmin = true\n')
    keys = ServerSettings(enable_admin_routes=True, admin_api_key=["flag"], api_key=["user"], api_key_file=str(path))
    async with serving(model_path, keys) as served:
        expected = {"flag": (200, 200), "from-file": (200, 200), "user": (403, 200), "other": (401, 401)}
        for key, statuses in expected.items():
            for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
                found = [
                    (await served.client.get(p, headers=headers)).status_code for p in ("/is_paused", "/v1/models")
                ]
                assert tuple(found) == statuses, key
        assert (await served.client.get("/is_paused")).status_code == 401
    open_keys = ServerSettings(enable_admin_routes=True, admin_api_key=["flag"])
    async with serving(model_path, open_keys) as served:
        assert (await served.client.get("/v1/models")).status_code == 200, "an admin's key locks nothing else"
        assert (await served.client.get("/is_paused")).status_code == 401


async def test_caches_that_text_models_do_not_have(model_path: Path) -> None:
    async with serving(model_path, ADMIN) as served:
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            answer = await served.client.post(path)
            assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "body", "id_of", "num_same"),
    [
        ("/v1/completions", BODY, "cmpl-mine", 2),
        ("/v1/completions", {**BODY, "n": 4, "temperature": 1}, "cmpl-mine", 1),
        ("/v1/completions", {**BODY, "prompt": ["abc"] * 8}, "cmpl-mine", 1),
        ("/v1/chat/completions", CHAT, "chatcmpl-mine", 2),
    ],
)
async def test_answers_are_aborted_by_their_ids(
    model_path: Path, path: str, body: dict[str, object], id_of: str, num_same: int
) -> None:
    """Those of the same id too, and what waits for its turn; no others."""
    async with serving(model_path, ADMIN, executor="slow", max_num_seqs=4) as served:
        post = served.client.post
        headers = {"X-Request-Id": "mine"}
        long = {**body, "max_tokens": 200}
        other = asyncio.ensure_future(post("/v1/completions", json={**BODY, "max_tokens": 200, "request_id": "mine-1"}))
        await served.until_running(1)
        mine = [asyncio.ensure_future(post(path, json=long, headers=headers)) for _ in range(num_same)]
        await served.until_running(1 + num_same)
        answer = await post("/abort_requests", json={"request_ids": [id_of, "cmpl-none"]})
        assert (answer.status_code, answer.content) == (200, b"")
        for aborted in await asyncio.gather(*mine):
            reasons = {choice["finish_reason"] for choice in aborted.json()["choices"]}
            assert "abort" in reasons
            assert reasons <= {"abort", "timeout"}
        assert not other.done()
        served.hurry()
        assert (await other).json()["choices"][0]["finish_reason"] == "length"
        await served.until_idle()


async def test_responses_and_messages_are_aborted_by_theirs(model_path: Path) -> None:
    async with serving(model_path, ADMIN, executor="slow") as served:
        post, get = served.client.post, served.client.get
        asked = {"input": "hi", "background": True, "max_output_tokens": 200}
        made = (await post("/v1/responses", json=asked)).json()
        await served.until_running(1)
        assert (await post("/abort_requests", json={"request_ids": made["id"]})).status_code == 200
        while (ended := (await get(f"/v1/responses/{made['id']}")).json())["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.005)
        assert ended["status"] == "failed"
        await served.until_idle()


async def test_what_is_to_be_aborted_must_be_said(model_path: Path) -> None:
    async with serving(model_path, ADMIN) as served:
        answer = await served.client.post("/abort_requests", json={})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "request_ids")
        assert error["message"] == "Missing 'request_ids' in request body"
