"""Light client for OpenAI-compatible servers: one streaming request in, one timeline out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from quire.bench.datasets import PromptSpec
from quire.bench.metrics import RequestRecord
from quire.errors import UserError
from quire.utils.sse import EventParser

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_REASON = 160
"""Characters kept of an error's reason."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        """True for text, or an empty delta that stands for a token (without a complete character yet); False for a
        chunk with only the role or finish reason."""
        delta = self.delta or _Delta()
        if self.text or delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls:
            return True
        return delta.role is None and self.finish_reason is None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _RequestError(Exception):
    """Failed request, with the reason that the report counts."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Address and settings of a benchmark's requests. extra_body: fields merged into every body."""

    base_url: str
    endpoint: str
    model: str
    api_key: str | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers without compression, whose buffer would distort times."""
        return {"Accept-Encoding": "identity"} | authorization(self.api_key)

    def body(self, prompt: PromptSpec) -> dict[str, Any]:
        """Request's JSON body. A chat prompt must have `messages`."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": prompt.max_tokens,
        }
        if self.endpoint == "chat":
            body["messages"] = prompt.messages
        else:
            body["prompt"] = prompt.text if prompt.token_ids is None else prompt.token_ids
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return body | self.extra_body


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def open_client(settings: ClientSettings, *, timeout: float) -> httpx.AsyncClient:
    """Client without a limit on connections. timeout: seconds without a byte after which a request fails."""
    return httpx.AsyncClient(
        base_url=settings.base_url,
        headers=settings.headers,
        timeout=httpx.Timeout(timeout, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


async def stream_request(
    client: httpx.AsyncClient, settings: ClientSettings, prompt: PromptSpec, due: float
) -> RequestRecord:
    """Send one request and follow its stream to the end. The server's faults are in `error`, never raised."""
    content = msgspec.json.encode(settings.body(prompt))
    timeline = _Timeline(due=due, sent=time.perf_counter())
    try:
        async with client.stream(
            "POST", ENDPOINTS[settings.endpoint], content=content, headers={"Content-Type": "application/json"}
        ) as response:
            if response.status_code != 200:
                raise _RequestError(_status_reason(response.status_code, await response.aread()))
            await _follow(response, timeline)
    except _RequestError as error:
        return timeline.record(str(error))
    except httpx.TimeoutException:
        return timeline.record("timeout")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return timeline.record(f"{type(error).__name__}: {error}".rstrip(": ")[:MAX_REASON])
    return timeline.record(None if timeline.chunk_times else "no output")


@dataclass(slots=True)
class _Timeline:
    due: float
    sent: float
    chunk_times: list[float] = field(default_factory=list)
    first_choice: float | None = None
    usage: _Usage | None = None

    def add_chunk(self, chunk: _Chunk, now: float) -> None:
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.choices:
            self.first_choice = self.first_choice or now
            if any(choice.has_output for choice in chunk.choices):
                self.chunk_times.append(now)

    def close(self) -> None:
        if not self.chunk_times and self.usage and self.usage.completion_tokens and self.first_choice is not None:
            self.chunk_times.append(self.first_choice)

    def record(self, error: str | None) -> RequestRecord:
        usage = self.usage or _Usage(completion_tokens=len(self.chunk_times))
        return RequestRecord(
            due=self.due,
            sent=self.sent,
            chunk_times=tuple(self.chunk_times),
            num_prompt_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
            error=error,
        )


async def _follow(response: httpx.Response, timeline: _Timeline) -> None:
    """Read events up to `[DONE]`, then the body's rest. Raises _RequestError for an error event, broken JSON or an
    early end."""
    parser = EventParser()
    decode: Callable[[bytes], _Chunk] = msgspec.json.Decoder(_Chunk).decode
    is_done = False
    async for data in response.aiter_raw():
        now = time.perf_counter()
        for event in parser.feed(data):
            if is_done or event == b"[DONE]":
                is_done = True
                continue
            try:
                chunk = decode(event)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                raise _RequestError("malformed event in the stream") from None
            if chunk.error is not None:
                raise _RequestError(f"error in the stream: {_message(chunk.error)}"[:MAX_REASON])
            timeline.add_chunk(chunk, now)
    if not is_done:
        raise _RequestError("stream ended before [DONE]")
    timeline.close()


def _status_reason(status: int, body: bytes) -> str:
    try:
        content = json.loads(body)
    except ValueError:
        content = body.decode("utf-8", "replace").strip().partition("\n")[0]
    return f"HTTP {status}: {_message(content)}"[:MAX_REASON]


def _message(content: Any) -> str:
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return content if isinstance(content, str) else json.dumps(content)


async def first_model(base_url: str, api_key: str | None) -> str:
    """First model that the server lists. Raises UserError if it is unreachable or lists none."""
    headers = authorization(api_key)
    try:
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=30, trust_env=False) as client:
            response = await client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise UserError(f"cannot reach {base_url}: {reason}", param="base_url") from None
    if response.status_code != 200:
        raise UserError(f"{base_url}/v1/models answers {_status_reason(response.status_code, response.content)}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{base_url}/v1/models lists no model: name one with --model", param="model") from None
