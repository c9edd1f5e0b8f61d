"""Limits and cache salts of API keys, and what asks for a key."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.clock import VirtualClock
from quire.errors import ConfigError
from quire.server.errors import ApiError
from quire.server.keys import KeyRing
from quire.server.limits import Allowance, RateLimit
from quire.server.settings import ServerSettings
from quire.utils.shared_numbers import Numbers
from tests.server.conftest import Served, serving

USER = [{"role": "user", "content": "a"}]
KEYS = """
[free]
key = "free"
[few]
key = "few"
requests_per_minute = 2
[short]
key = "short"
tokens_per_minute = 10
[salted]
key = "salted"
cache_salt = "tenant 1"
[other]
key = "other"
cache_salt = "tenant 2"
"""


@pytest.fixture
async def keyed(model_path: Path, tmp_path: Path) -> AsyncIterator[Served]:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    async with serving(model_path, ServerSettings(served_model_name=["tiny"], api_key_file=str(path))) as served:
        yield served


async def ask(served: Served, key: str, prompt: str = "=ab", **fields: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return await served.client.post("/v1/completions", json={"prompt": prompt, **fields}, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_a_minute(keyed: Served, stream: bool) -> None:
    statuses = [(await ask(keyed, "few", stream=stream)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    refused = await ask(keyed, "few", stream=stream)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert (await ask(keyed, "free", stream=stream)).status_code == 200, "keys are limited each for itself"
    text = (await keyed.client.get("/metrics")).text
    assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="rate_limit"} 2.0' in text


async def test_routes_that_compute_nothing_are_not_limited(keyed: Served) -> None:
    headers = {"Authorization": "Bearer few"}
    for _ in range(5):
        assert (await keyed.client.get("/v1/models", headers=headers)).status_code == 200
    assert (await ask(keyed, "few")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": USER}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": USER}),
        ("/v1/responses/input_tokens", {"input": "a"}),
    ],
)
async def test_routes_that_only_count_tokens_are_not_limited(keyed: Served, path: str, body: dict[str, Any]) -> None:
    for key in ("few", "short"):
        headers = {"Authorization": f"Bearer {key}"}
        for _ in range(5):
            assert (await keyed.client.post(path, json=body, headers=headers)).status_code == 200
        assert (await ask(keyed, key)).status_code == 200


async def test_a_batch_of_chats_is_one_request_and_the_tokens_of_all(
    keyed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr(RateLimit, "use_tokens", lambda limit, count: used.append(count))
    messages = [[{"role": "user", "content": content}] for content in "abcde"]
    asked = {"url": "/v1/chat/completions/batch", "json": {"messages": messages, "max_tokens": 2}}
    headers = {"Authorization": "Bearer few"}
    answered = [await keyed.client.post(**asked, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answered] == [200, 200]
    assert sum(used) == sum(answer.json()["usage"]["total_tokens"] for answer in answered)
    used.clear()
    refused = await keyed.client.post(**asked, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert not used


async def test_tokens_a_minute_count_prompts_and_answers(keyed: Served) -> None:
    assert (await ask(keyed, "short", "=a", n=2)).status_code == 200  # 3 + 2 * 2
    assert (await ask(keyed, "short", "=ab")).status_code == 200  # begins within the limit
    refused = await ask(keyed, "short", "=a")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "RateLimitError")
    assert "10 tokens a minute" in refused.json()["error"]["message"]


async def test_keys_of_different_salts_share_no_prefix(keyed: Served) -> None:
    prompt = "=" + "x" * 60

    async def cached(key: str, **fields: Any) -> int:
        usage = (await ask(keyed, key, prompt, max_tokens=1, **fields)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [await cached("salted"), await cached("salted")] == [0, 48]
    assert await cached("other") == 0
    assert await cached("free") == 0
    assert await cached("salted", cache_salt="mine") == 0, "the request's own salt counts as well"
    assert await cached("free", cache_salt="tenant 1") == 0, "a request cannot name another key's salt"
    assert await cached("salted") == 48


@pytest.mark.parametrize(
    "line",
    ["requests_per_minute = 0", "tokens_per_minute = -1", "tokens_per_minute = 1.5", 'cache_salt = ""', "rpm = 1"],
)
def test_wrong_limits(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[a]\nkey = "secret"\n{line}\n')
    with pytest.raises(ConfigError) as raised:
        KeyRing.of(ServerSettings(api_key_file=str(path)))
    assert "[a]" in str(raised.value)
    assert "secret" not in str(raised.value)


@given(
    per_minute=st.integers(1, 1000),
    events=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2000)), max_size=40),
)
def test_an_allowance_is_never_exceeded_by_more_than_its_last_use(
    per_minute: int, events: list[tuple[float, int]]
) -> None:
    """What is used before the last use begins stays within one minute's savings and what was refilled."""
    clock = VirtualClock()
    allowance = Allowance(per_minute, Numbers.alone(), clock)
    used = 0.0
    for pause, amount in events:
        clock.advance(pause)
        wait = allowance.seconds_until(1)
        if wait > 0:
            clock.advance(wait * 1.0001)
            assert allowance.seconds_until(1) == 0, "what was said to be the wait is enough"
        assert used <= per_minute * (1 + clock.now() / 60) + 1e-6
        allowance.use(amount)
        used += amount


def test_processes_that_count_at_once_do_not_both_use_the_last_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second counts as soon as the first lets it."""
    clock = VirtualClock()
    numbers = [Numbers.create(tmp_path / "numbers", 3), Numbers.open(tmp_path / "numbers", 3, 0)]
    first, second = [RateLimit(1, None, each, clock) for each in numbers]
    lock, counted = numbers[0].lock, []

    @contextlib.contextmanager
    def lock_and_let_the_other_count() -> Iterator[None]:
        with lock():
            yield
        if not counted:
            counted.append(_counts(second))

    monkeypatch.setattr(numbers[0], "lock", lock_and_let_the_other_count)
    assert sorted([_counts(first), *counted]) == [False, True]


def _counts(limit: RateLimit) -> bool:
    try:
        limit.count_request()
    except ApiError:
        return False
    return True


def test_a_limit_of_requests_refills_evenly() -> None:
    clock = VirtualClock()
    limit = RateLimit(6, None, Numbers.alone(), clock)
    for _ in range(6):
        limit.count_request()
    with pytest.raises(ApiError) as raised:
        limit.count_request()
    assert raised.value.headers["Retry-After"] == "10"
    clock.advance(10)
    limit.count_request()
    clock.advance(3600)
    for _ in range(6):
        limit.count_request()
    with pytest.raises(ApiError):
        limit.count_request()


@pytest.mark.parametrize(("protect", "status"), [(False, 200), (True, 401)])
async def test_metrics_may_ask_for_a_key(model_path: Path, protect: bool, status: int) -> None:
    settings = ServerSettings(api_key=["key"], protect_metrics=protect)
    async with serving(model_path, settings) as served:
        assert (await served.client.get("/metrics")).status_code == status
        answer = await served.client.get("/metrics", headers={"Authorization": "Bearer key"})
        assert (answer.status_code, "vllm:" in answer.text) == (200, True)
