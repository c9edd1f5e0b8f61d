"""Which names the server answers to, and which pages may call it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx
import pytest

from quire.server import site
from quire.server.settings import ServerSettings
from quire.server.site import HostRules, SiteGuard
from tests.server.conftest import Served, serving

PATHS = ("/", "/health", "/metrics", "/debug/kv", "/v1/models", "/nothing", "//v1/models", "/v1/models/", "/%76ersion")


def host_allowed(bound_to: str, name: str, *allowed: str) -> bool:
    return asyncio.run(HostRules(bound_to, allowed).allow(name))


class TestHostRules:
    @pytest.mark.parametrize("bound_to", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
    def test_on_a_loopback_address(self, bound_to: str) -> None:
        for name in ("localhost", "app.localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"):
            assert host_allowed(bound_to, name), name
        others = ("evil.example", "0.0.0.0", "192.168.0.7", "localhost.evil.example", "notlocalhost", "127.1", "")
        for name in (*others, "2130706433", "127.0.0.1.evil.example", "::ffff:1.2.3.4", socket.gethostname()):
            assert not host_allowed(bound_to, name), name

    @pytest.mark.parametrize("bound_to", ["0.0.0.0", "::", "192.168.0.7", "server.lan"])
    def test_elsewhere(self, bound_to: str) -> None:
        for name in (
            "localhost",
            "127.0.0.1",
            "::1",
            "10.0.0.9",
            "2001:db8::7",
            bound_to,
            socket.gethostname().lower(),
        ):
            assert host_allowed(bound_to, name), name
        for name in ("evil.example", "10.0.0.9.evil.example", "10.0.0", ""):
            assert not host_allowed(bound_to, name), name

    def test_the_machine_is_asked_for_its_names_once_and_only_where_they_count(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []
        monkeypatch.setattr(site, "_machine_names", lambda: calls.append(0) or frozenset({"box", "box.lan"}))

        async def ask() -> None:
            rules = HostRules("0.0.0.0", [])
            assert await rules.allow("10.0.0.1")
            assert calls == []
            assert await rules.allow("box.lan")
            assert not await rules.allow("evil.example")
            assert len(calls) == 1
            assert not await HostRules("127.0.0.1", []).allow("box")
            assert len(calls) == 1

        asyncio.run(ask())

    def test_allowed_names(self) -> None:
        assert host_allowed("127.0.0.1", "api.example", "API.example")
        assert not host_allowed("127.0.0.1", "x.api.example", "api.example")
        assert host_allowed("127.0.0.1", "x.api.example", "*.api.example")
        assert not host_allowed("127.0.0.1", "api.example", "*.api.example")
        assert not host_allowed("127.0.0.1", "evilapi.example", "*.api.example")
        assert host_allowed("127.0.0.1", "anything", "*")


class TestHosts:
    @pytest.mark.parametrize(
        "host", ["evil.example:8170", "evil.example", "EVIL.example.", "x" * 60_000, "localhost.evil.example"]
    )
    async def test_a_foreign_name_is_421_wherever_it_asks(self, served: Served, host: str) -> None:
        for path in PATHS:
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                response = await served.client.request(method, "http://quire" + path, headers={"Host": host})
                assert response.status_code == 421
                if method != "HEAD":
                    error = response.json()["error"]
                    assert error["code"] == "host_not_allowed"
                    assert "--allowed-hosts" in error["message"]
                assert len(response.content) < 500
                assert "location" not in response.headers

    @pytest.mark.parametrize(
        "host",
        ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "127.3.2.1", "[::1]:8000", "[::1]", "quire"],
    )
    async def test_own_names(self, served: Served, host: str) -> None:
        assert (await served.client.get("/v1/models", headers={"Host": host})).status_code == 200

    @pytest.mark.parametrize("host", ["", "a b", "a,b", "u@localhost", "localhost:x", "[::1", "localhost/", "ä"])
    async def test_what_is_no_host(self, served: Served, host: str) -> None:
        response = await served.client.get("/health", headers=[(b"host", host.encode())])
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_host")

    async def test_probes_by_address(self, model_path: Path) -> None:
        async with serving(model_path, ServerSettings(host="0.0.0.0")) as served:
            for host in ("10.1.2.3:8000", "[fd00::7]:8000", "127.0.0.1"):
                for path in ("/health", "/metrics"):
                    assert (await served.client.get(path, headers={"Host": host})).status_code == 200
            assert (await served.client.get("/health", headers={"Host": "evil.example"})).status_code == 421

    async def test_the_option(self, model_path: Path) -> None:
        async with serving(model_path, ServerSettings(allowed_hosts=["api.example"])) as served:
            assert (await served.client.get("/health", headers={"Host": "api.example:443"})).status_code == 200
            assert (await served.client.get("/health", headers={"Host": "evil.example"})).status_code == 421

    async def test_a_slash_too_many_redirects_nowhere(self, served: Served) -> None:
        for host in ("quire", "evil.example"):
            response = await served.client.post("/v1/completions/", json={"prompt": "a"}, headers={"Host": host})
            assert response.status_code == (404 if host == "quire" else 421)
            assert "location" not in response.headers

    async def test_a_long_path_is_not_sent_back(self, served: Served) -> None:
        response = await served.client.get("/" + "x" * 60_000)
        assert response.status_code == 404
        assert len(response.content) < 500


class TestOrigins:
    @pytest.mark.parametrize(
        "origin",
        [
            "https://evil.example",
            "null",
            "http://quire:8000",
            "https://quire",
            "http://quire.evil",
            "file://",
            "",
            "quire",
        ],
    )
    async def test_a_foreign_page_is_403_wherever_it_asks(self, served: Served, origin: str) -> None:
        for path in PATHS:
            for method in ("GET", "POST", "OPTIONS"):
                headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
                response = await served.client.request(method, "http://quire" + path, headers=headers)
                assert response.status_code == 403
                error = response.json()["error"]
                assert error["code"] == "origin_not_allowed"
                assert "--cors-allowed-origins" in error["message"]
                assert "access-control-allow-origin" not in response.headers

    @pytest.mark.parametrize(
        ("host", "origin"),
        [
            ("quire", "http://quire"),
            ("quire:80", "http://quire"),
            ("localhost:8000", "http://localhost:8000"),
            ("[::1]:8000", "http://[::1]:8000"),
        ],
    )
    async def test_the_servers_own_page(self, served: Served, host: str, origin: str) -> None:
        headers = {"Host": host, "Origin": origin}
        assert (await served.client.get("/debug/kv", headers=headers)).status_code == 200
        body = {"prompt": "a", "max_tokens": 1}
        assert (await served.client.post("/v1/completions", json=body, headers=headers)).status_code == 200

    async def test_two_origins(self, served: Served) -> None:
        headers = [("Origin", "http://quire"), ("Origin", "http://evil.example")]
        assert (await served.client.get("/health", headers=headers)).status_code == 403

    async def test_an_allowed_page_and_its_preflight(self, model_path: Path) -> None:
        page = "https://app.example"
        settings = ServerSettings(cors_allowed_origins=[page], api_key=["key"], enable_sleep_mode=True)
        async with serving(model_path, settings) as served:
            ask = {"Origin": page, "Access-Control-Request-Method": "POST"}
            ask["Access-Control-Request-Headers"] = "authorization,content-type"
            preflight = await served.client.options("/v1/completions", headers=ask)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == page
            for authorization, status in (("Bearer key", 200), ("Bearer no", 401)):
                response = await served.client.post(
                    "/v1/completions",
                    json={"prompt": "a", "max_tokens": 1},
                    headers={"Origin": page, "Authorization": authorization},
                )
                assert response.status_code == status
                assert response.headers["access-control-allow-origin"] == page
            refused = await served.client.post("/sleep", content=b"x", headers={"Origin": page})
            assert refused.status_code == 415
            assert refused.headers["access-control-allow-origin"] == page, "so that the page can read why"
            foreign = {**ask, "Origin": "https://evil.example"}
            assert (await served.client.options("/v1/completions", headers=foreign)).status_code == 403
            rebound = {**ask, "Host": "evil.example"}
            assert (await served.client.options("/v1/completions", headers=rebound)).status_code == 421

    async def test_any_page(self, model_path: Path) -> None:
        async with serving(model_path, ServerSettings(cors_allowed_origins=["*"])) as served:
            for origin in ("https://evil.example", "null"):
                response = await served.client.get("/v1/models", headers={"Origin": origin})
                assert response.status_code == 200
                assert response.headers["access-control-allow-origin"] == "*"

    async def test_a_page_cannot_put_the_server_to_sleep(self, model_path: Path) -> None:
        async with serving(model_path, ServerSettings(enable_sleep_mode=True)) as served:
            for kind in ("text/plain", "application/x-www-form-urlencoded"):
                headers = {"Origin": "https://evil.example", "Content-Type": kind}
                response = await served.client.post("/sleep?level=2", content=b"x=y", headers=headers)
                assert response.status_code == 403
                del headers["Origin"]
                response = await served.client.post("/sleep?level=2", content=b"x=y", headers=headers)
                assert response.status_code == 415
            assert (await served.client.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_http_1_0_without_a_host() -> None:
    """What some load balancers send; no browser does."""

    async def app(scope: object, receive: object, send: object) -> None:
        reached.append(scope)

    async def send(message: dict[str, object]) -> None:
        answers.append(message)

    reached: list[object] = []
    answers: list[dict[str, object]] = []
    guard = SiteGuard(app, HostRules("127.0.0.1", []), [])  # type: ignore[arg-type]
    scope = {"type": "http", "scheme": "http", "method": "GET", "path": "/health", "headers": []}
    await guard(scope, None, send)  # type: ignore[arg-type]
    assert reached == [scope]
    await guard({**scope, "headers": [(b"origin", b"http://a")]}, None, send)  # type: ignore[arg-type]
    assert answers[0]["status"] == 403


async def test_in_front_of_everything(served: Served) -> None:
    """Even of the framework's own answers to what it cannot route."""
    transport = served.client._transport
    async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as client:
        for method in ("TRACE", "PUT", "BREW"):
            assert (await client.request(method, "/anything")).status_code == 421
