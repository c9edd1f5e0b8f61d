"""Several API keys, some with priorities of their own."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.server.keys import KeyRing
from quire.server.settings import ServerSettings
from tests.server.conftest import serving

KEYS = """
[team-a]
key = "key-of-a"
priority_range = "-5,5"

[nightly]
key = "schlüssel"
priority_range = "0,0"

["any one"]
key = "plain"
"""
SOME_MODELS = """
[all]
key = "plain"

[narrow]
key = "narrow"
models = ["second", "sql"]

[none]
key = "none"
models = ["sql"]
"""


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS, encoding="utf-8")
    return path


async def test_each_key_has_its_own_priorities(model_path: Path, key_file: Path) -> None:
    settings = ServerSettings(api_key=["flag-1", "flag-2"], api_key_file=str(key_file), priority_range="-1,3")
    body = {"prompt": "hi", "max_tokens": 1}
    async with serving(model_path, settings, scheduling_policy="priority") as served:

        async def allowed(key: str) -> list[int]:
            headers = [(b"authorization", f"Bearer {key}".encode())]
            found = []
            for priority in (-6, -5, -1, 0, 3, 5, 6):
                answer = await served.client.post(
                    "/v1/completions", json={**body, "priority": priority}, headers=headers
                )
                if answer.status_code == 200:
                    found.append(priority)
                else:
                    assert answer.status_code == 400
                    assert answer.json()["error"]["param"] == "priority"
            return found

        assert await allowed("key-of-a") == [-5, -1, 0, 3, 5]
        assert await allowed("schlüssel") == [0]
        for key in ("plain", "flag-1", "flag-2"):
            assert await allowed(key) == [-1, 0, 3]
        refused = await served.client.post("/v1/completions", json=body, headers={"Authorization": "Bearer team-a"})
        assert refused.status_code == 401
        headers = {"Authorization": "Bearer key-of-a"}
        error = (await served.client.post("/v1/completions", json={**body, "priority": 9}, headers=headers)).json()
        assert error["error"]["message"] == (
            "priority must be between -5 and 5 on this server (priority_range of its key), not 9"
        )


async def test_keys_of_some_models(model_path: Path, tmp_path: Path) -> None:
    """Other models do not exist for them, in no list and in no error; the default is the first of all."""
    path = tmp_path / "keys.toml"
    path.write_text(SOME_MODELS)
    settings = ServerSettings(served_model_name=["first", "second"], api_key_file=str(path))
    async with serving(model_path, settings) as served:
        for key, usable in (("plain", ["first", "second"]), ("narrow", ["second"]), ("none", [])):
            headers = {"Authorization": f"Bearer {key}"}
            listed = await served.client.get("/v1/models", headers=headers)
            assert [card["id"] for card in listed.json()["data"]] == usable
            for name in ("first", "second", None):
                body = {"prompt": "hi", "max_tokens": 1, "model": name}
                answer = await served.client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == (200 if (name or "first") in usable else 404)
                if answer.status_code == 404:
                    message = answer.json()["error"]["message"]
                    assert message.endswith(f"(served: {', '.join(usable) or 'none with this key'})")
            one = await served.client.get("/v1/models/first", headers=headers)
            assert one.status_code == (200 if "first" in usable else 404)


def test_a_key_given_twice_keeps_the_priorities_of_the_file(key_file: Path) -> None:
    keys = KeyRing.of(ServerSettings(api_key=["key-of-a"], api_key_file=str(key_file)))
    client = keys.find(b"key-of-a")
    assert client is not None
    assert client.priorities == (-5, 5)
    assert keys.anyone is None


def test_a_key_is_compared_with_every_key_in_constant_time(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where a key stands nor how much of it is right makes a difference: digests, all of them, each time."""
    keys = KeyRing.of(ServerSettings(api_key=["first", "second"], api_key_file=str(key_file)))
    compared: list[tuple[int, int]] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append((len(known), len(given)))
        return known == given

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for given, is_known in ((b"first", True), (b"plain", True), (b"firs", False), (b"x" * 5000, False)):
        assert (keys.find(given) is not None) == is_known
        assert compared == [(32, 32)] * 5
        compared.clear()


def test_without_keys_anyone_is_a_client() -> None:
    keys = KeyRing.of(ServerSettings(priority_range="-2,3"))
    assert keys.anyone is not None
    assert keys.anyone.priorities == (-2, 3)
    assert keys.find(b"") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "no table [name] with a key"),
        ("[a", "no valid TOML"),
        ("a = " + "[" * 3000, "no valid TOML"),
        ("a = " + "9" * 5000, "no valid TOML"),
        ('[a]\nkey = "very-secret"\nkey = "again"\n', "no valid TOML"),
        ("[a]\n", "[a]: Object missing required field `key`"),
        ("[a]\nkey = 7\n", "[a]: Expected `str`, got `int`"),
        ('key = "very-secret"\n', "[key]: Expected `object`, got `str`"),
        ('[a]\nkey = " "\n', "[a]: the key is empty"),
        ('[a]\nkey = "very-secret"\nrange = "0,1"\n', "[a]: Object contains unknown field `range`"),
        ('[a]\nkey = "very-secret"\n[b]\nkey = "very-secret"\n', "[b]: an earlier table has the same key"),
        ('[a]\nkey = "very-secret"\npriority_range = "5,1"\n', "[a] priority_range must be LOW,HIGH"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        KeyRing.of(ServerSettings(api_key_file=str(path)))
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert "very-secret" not in caught.value.message
    assert caught.value.param == "api_key_file"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        KeyRing.of(ServerSettings(api_key_file=str(tmp_path / "none")))
