"""Files that operators write: TOML files of keys, YAML files of vLLM's flags, lines of a batch; damaged.

The promises: a file is read or refused in one line; no error of a file of keys quotes a key; each line of a batch has
one line of answer, whatever is in it.
"""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from quire.cli.vllm import config_arguments
from quire.errors import ConfigError
from quire.server.batch import Pace, run_batch
from quire.server.keys import KeyRing
from quire.server.settings import ServerSettings
from tests.fuzz.bodies import VALID, mutated
from tests.fuzz.harness import Attack, Fuzzer
from tests.server.conftest import Served, serving
from tests.server.model_directory import write_model

SECRET = "sesame-0123456789"
KEYS = f"""[team-a]
key = "{SECRET}"
priority_range = "-100,100"
admin = true
requests_per_minute = 60
tokens_per_minute = 100000
cache_salt = "team-a"
["b c"]
key = "another-{SECRET}"
"""
FLAGS = """model: some/model
max-model-len: 4k
served-model-name: [a, b]
enable-prefix-caching: true
hf-overrides: {rope_scaling: {factor: 2.0}}
port: 8000
"""
NASTY = (
    "", "\x00", "\ufeff", "\t", "\n", "---\n", "[", "]", "{", "}", ":", "=", '"', '"""', "'''", "#", "&a ", "*a",
    "<<: *a",
    "!!python/object:os.system ", "!!binary ", "!!timestamp ", "inf", "nan", "-", "9" * 5000, "1e999", "[" * 2000,
    "{a: " * 300, "x.y.z = 1\n", "[[team-a]]\n", "2026-11-23T00:00:00Z", "0x" + "f" * 300, "\\u0000", "\U0001f600",
    "? a\n: b\n", "a: &a [*a]\n", "true", "null", "~",
)  # fmt: skip


def damaged(text: str, rng: Random) -> str:
    for _ in range(rng.randint(0, 4)):
        place = rng.randint(0, len(text))
        text = text[:place] + rng.choice(NASTY) + text[place + rng.choice((0, 0, 1, 5, 40)) :]
    return text


def read_keys(path: Path) -> None:
    KeyRing.of(ServerSettings(api_key_file=str(path)))


def read_flags(path: Path) -> None:
    assert all(isinstance(word, str) for word in config_arguments(str(path)))


def attack_file(rng: Random, path: Path, text: str, read: Callable[[Path], None]) -> None:
    data = damaged(text, rng).encode("utf-8", "surrogatepass")
    path.write_bytes(data + rng.choice((b"", b"", b"\xff", b"\xed\xa0\x80")))
    refused = ""
    try:
        read(path)
    except ConfigError as error:
        refused = error.message
    assert "\n" not in refused, refused
    assert len(refused) < 3000, refused
    assert SECRET not in refused, refused


def batch_line(rng: Random, number: int) -> bytes:
    path, body = rng.choice(VALID)
    content = mutated(body, rng) if rng.random() < 0.9 else rng.choice(NASTY).encode("utf-8", "surrogatepass")
    line: dict[str, object] = {"custom_id": str(number), "method": "POST", "url": path, "body": "BODY"}
    for name in list(line):
        if rng.random() < 0.1:
            line[name] = rng.choice((None, 3, "", "x" * 500, [], "GET", "/metrics", "http://example.com/", {}))
    text = json.dumps(line) if rng.random() < 0.8 else damaged(json.dumps(line), rng)
    return text.encode("utf-8", "surrogatepass").replace(b'"BODY"', content).replace(b"\n", b" ")


async def attack_batch(rng: Random, served: Served) -> None:
    assert served.app is not None
    lines = [batch_line(rng, number) for number in range(4)]
    written: list[bytes] = []
    await run_batch(served.app, io.BytesIO(b"\n".join(lines) + b"\n"), written.append, pace=Pace(2))
    results = [json.loads(line) for line in written]
    assert len(results) == sum(1 for line in lines if line.strip()), lines
    for result in results:
        assert set(result) == {"id", "custom_id", "response", "error"}, result
        status = None if result["response"] is None else result["response"]["status_code"]
        assert (result["error"] is None) == (status == 200), result
        assert status is None or status < 500, (lines, result)


@contextmanager
def target() -> Iterator[Attack]:
    loop = asyncio.new_event_loop()
    try:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            server = serving(write_model(directory / "tiny"))
            served = loop.run_until_complete(server.__aenter__())

            def attack(rng: Random) -> None:
                match rng.randrange(3):
                    case 0:
                        attack_file(rng, directory / "keys.toml", KEYS, read_keys)
                    case 1:
                        attack_file(rng, directory / "flags.yaml", FLAGS, read_flags)
                    case _:
                        loop.run_until_complete(attack_batch(rng, served))

            try:
                yield attack
                loop.run_until_complete(served.until_idle())
            finally:
                loop.run_until_complete(server.__aexit__(None, None, None))
    finally:
        loop.close()


FUZZER = Fuzzer("operators", target, num_test_cases=150)
