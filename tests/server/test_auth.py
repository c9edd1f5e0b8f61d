"""With an API key set, every route but the public ones asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import Request

from quire.server.auth import key_check
from quire.server.errors import LLAMA_CPP_PATHS
from quire.server.keys import KeyRing
from quire.server.settings import ServerSettings
from quire.utils.fair_threads import CALLER
from tests.server.conftest import Served, serving

KEY = "s3cret-schlüssel"
PUBLIC = {"/", "/docs", "/health", "/ready", "/ping", "/version", "/metrics", "/api/version", "/v1/health"}


@pytest.fixture
async def locked(model_path: Path, tmp_path: Path) -> AsyncIterator[Served]:
    settings = ServerSettings(api_key=[KEY], served_model_name=["tiny"], files_dir=str(tmp_path / "files"))
    async with serving(model_path, settings) as served:
        yield served


async def test_default_deny(locked: Served) -> None:
    """Asked of the routes that exist, so that a new one is locked or listed above."""
    paths = {
        route.path: method
        for route in locked.client._transport.app.routes  # type: ignore[attr-defined]
        for method in route.methods
    }
    assert set(paths) > PUBLIC
    assert {"/v1/completions", "/v1/files", "/v1/batches"} <= set(paths)
    for path, method in paths.items():
        response = await locked.client.request(method, path.replace("{name:path}", "tiny"))
        if path in PUBLIC:
            assert response.status_code == 200, path
        else:
            assert response.status_code == 401, path
            error = response.json()["error"]
            if path.startswith("/api/"):
                assert error.startswith("an API key is required")
            else:
                is_typed = path.startswith("/v1/messages") or path in LLAMA_CPP_PATHS
                named = error["type"] if is_typed else error["code"]
                assert named in ("invalid_api_key", "authentication_error")
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        (f"Bearer  {KEY} ", 200),
        (KEY, 401),
        (f"Basic {KEY}", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        (f"Bearer {KEY}x", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Bearer {KEY.upper()}", 401),
    ],
)
async def test_the_header(locked: Served, header: str, status: int) -> None:
    response = await locked.client.get("/v1/models", headers=[(b"authorization", header.encode())])
    assert response.status_code == status


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1//models", "/v1/models/", "/%761/models", "/V1/models", "/health/../v1/models"]
)
async def test_no_spelling_of_a_path_gets_around_it(locked: Served, path: str) -> None:
    assert (await locked.client.get(path)).status_code in (401, 404)


async def test_the_body_is_not_read_before_the_key(locked: Served) -> None:
    headers = {"Content-Type": "application/json"}
    assert (await locked.client.post("/v1/completions", content=b"{", headers=headers)).status_code == 401


async def test_without_a_key_all_are_welcome(served: Served) -> None:
    for headers in ({}, {"Authorization": "Bearer whatever"}):
        assert (await served.client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("host", "caller"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "::ffff:192.0.2.7"),
        ("socket", "socket"),
    ],
)
async def test_work_takes_turns_by_key_and_without_one_by_address(host: str, caller: str) -> None:
    async def endpoint() -> None:
        """Asks for a key."""

    async def caller_of(settings: ServerSettings, headers: list[tuple[bytes, bytes]]) -> str:
        scope = {"type": "http", "client": (host, 1), "headers": headers, "endpoint": endpoint, "state": {}}
        await key_check(KeyRing.of(settings))(Request(scope))
        return CALLER.get()

    assert await caller_of(ServerSettings(), []) == caller
    keys = ServerSettings(api_key=["a", "b"])
    assert await caller_of(keys, [(b"x-api-key", b"b")]) == "key 1"
    assert await caller_of(keys, [(b"x-api-key", b"a")]) == "key 0"
