"""/metrics on an address of its own: what it serves, and to whom."""

from __future__ import annotations

import httpx
import pytest

from quire.errors import ConfigError
from quire.server.listener import bind
from quire.server.metrics_server import serving_metrics
from quire.server.settings import ServerSettings
from tests.server.conftest import Served

SETTINGS = ServerSettings(port=0)


async def test_metrics_and_nothing_else(served: Served) -> None:
    with bind(SETTINGS) as listener:
        url = listener.url
        async with serving_metrics(served.context, SETTINGS, listener), httpx.AsyncClient(base_url=url) as client:
            await served.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
            metrics = await client.get("/metrics")
            assert metrics.status_code == 200
            assert 'quire_http_requests_total{handler="/v1/completions",method="POST",status="200"} 1.0' in metrics.text
            assert "vllm:num_requests_running" in metrics.text
            assert (await client.post("/v1/completions", json={"prompt": "abc"})).status_code == 404
            assert (await client.get("/metrics", headers={"Host": "evil.example"})).status_code == 421
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient(base_url=url).get("/metrics")


async def test_an_error_under_it_comes_out_and_ends_it(served: Served) -> None:
    with bind(SETTINGS) as listener, pytest.raises(ConfigError, match="why"):
        async with serving_metrics(served.context, SETTINGS, listener):
            raise ConfigError("why", param="x")
