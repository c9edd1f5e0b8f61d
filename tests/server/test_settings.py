"""ServerSettings: wrong values are one clear line with the name of the setting."""

from __future__ import annotations

import pytest

from quire.errors import ConfigError
from quire.server.settings import ServerSettings


def test_sizes() -> None:
    assert ServerSettings().max_body_bytes == 8 * 2**20
    assert ServerSettings(max_body_size="10MB").max_body_bytes == 10_000_000


@pytest.mark.parametrize(
    ("keywords", "param"),
    [
        ({"host": ""}, "host"),
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"api_key": [" "]}, "api_key"),
        ({"max_num_queued": 0}, "max_num_queued"),
        ({"shutdown_timeout": -1}, "shutdown_timeout"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout"),
        ({"served_model_name": [""]}, "served_model_name"),
        ({"cors_allowed_origins": [""]}, "cors_allowed_origins"),
        ({"ssl_keyfile": "key.pem"}, "ssl_certfile"),
        ({"ssl_certfile": "cert.pem"}, "ssl_keyfile"),
        ({"max_body_size": 0}, "max_body_size"),
        ({"max_body_size": "much"}, "max_body_size"),
        ({"max_total_body_size": "1MiB"}, "max_total_body_size"),
        ({"max_connections": 0}, "max_connections"),
        ({"keep_alive_timeout": 0}, "keep_alive_timeout"),
        ({"header_timeout": -1}, "header_timeout"),
        ({"body_timeout": float("nan")}, "body_timeout"),
        ({"write_timeout": float("inf")}, "write_timeout"),
        ({"hung_engine_timeout": 3.9}, "hung_engine_timeout"),
        ({"hung_engine_timeout": float("inf")}, "hung_engine_timeout"),
        ({"cors_allowed_origins": ["app.example"]}, "cors_allowed_origins"),
        ({"cors_allowed_origins": ["https://app.example/"]}, "cors_allowed_origins"),
        ({"cors_allowed_origins": ['["*"]']}, "cors_allowed_origins"),
        ({"allowed_hosts": [""]}, "allowed_hosts"),
        ({"allowed_hosts": ["http://app.example"]}, "allowed_hosts"),
        ({"allowed_hosts": ["app.example:80"]}, "allowed_hosts"),
        ({"prot": 1}, "prot"),
    ],
)
def test_wrong_values(keywords: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings.from_keywords(keywords)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


def test_a_key_that_is_no_list_is_not_taken_for_its_characters() -> None:
    with pytest.raises(ConfigError, match="api_key must be a list of keys"):
        ServerSettings(api_key="secret")  # type: ignore[arg-type]


def test_names_and_origins() -> None:
    origins = ["*", "null", "https://app.example:8443", "chrome-extension://abc", "http://[::1]:3000"]
    hosts = ["*", "*.app.example", "app_1", "10.0.0.1", "fd00::7"]
    settings = ServerSettings(cors_allowed_origins=origins, allowed_hosts=hosts)
    assert (settings.cors_allowed_origins, settings.allowed_hosts) == (origins, hosts)


def test_wrong_types_and_near_names() -> None:
    with pytest.raises(ConfigError, match="port"):
        ServerSettings.from_keywords({"port": "eighty"})
    with pytest.raises(ConfigError, match="did you mean 'port'"):
        ServerSettings.from_keywords({"prot": 1})
