from __future__ import annotations

import hashlib
import hmac
import tomllib
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from quire.errors import ConfigError
from quire.server.limits import RateLimit
from quire.server.settings import ServerSettings, parse_priorities
from quire.utils.failures import one_line
from quire.utils.shared_numbers import Numbers
from quire.utils.text_files import read_text_file

FIELD = "api_key_file"
MAX_PER_MINUTE = 10**12


@dataclass(frozen=True, slots=True)
class Client:
    """Rights of the client with a key. priorities: (lowest, highest) it may send. option: setting that limits them, for
    errors. is_admin: it may use control routes."""

    priorities: tuple[int, int]
    option: str = "--priority-range"
    is_admin: bool = False
    name: str = ""
    """Name for fair scheduling between clients; independent of the key's text."""
    limit: RateLimit | None = None
    models: frozenset[str] | None = None
    """Models and adapters that it may use; None: all."""
    cache_salt: str = ""
    """Only clients with equal salts share cached prefixes."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    priority_range: str | None = None
    admin: bool = False
    requests_per_minute: Annotated[int, msgspec.Meta(ge=1, le=MAX_PER_MINUTE)] | None = None
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=1, le=MAX_PER_MINUTE)] | None = None
    models: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] = ""

    def limit(self, numbers: Numbers) -> RateLimit | None:
        if self.requests_per_minute is None and self.tokens_per_minute is None:
            return None
        return RateLimit(self.requests_per_minute, self.tokens_per_minute, numbers)


class KeyRing:
    """Keys that a server accepts. With no key, or only admins' keys, clients need none."""

    def __init__(self, clients: dict[str, Client], anyone: Client) -> None:
        """clients: by key. anyone: rights of a client without a key, if the server needs none."""
        self._clients = [(_digest(key.encode()), client) for key, client in clients.items()]
        self._anyone = anyone
        self.has_admin_keys = any(client.is_admin for client in clients.values())
        self._needs_key = any(not client.is_admin for client in clients.values())

    @classmethod
    def of(cls, settings: ServerSettings, numbers: Numbers | None = None) -> KeyRing:
        """Keys of `--api-key`, `--admin-api-key` and `--api-key-file`. numbers: counters that API processes share, if
        any. Raises ConfigError for an invalid file."""
        anyone = Client(settings.priorities())
        clients = {key: replace(anyone, name=f"key {place}") for place, key in enumerate(settings.api_key)}
        for place, key in enumerate(settings.admin_api_key):
            clients[key] = replace(anyone, is_admin=True, name=f"admin key {place}")
        if settings.api_key_file is not None:
            clients |= _read_keys(settings.api_key_file, anyone, numbers or Numbers.alone())
        return cls(clients, anyone)

    @property
    def anyone(self) -> Client | None:
        """Client without a key; None if the server asks for one."""
        return None if self._needs_key else self._anyone

    def find(self, key: bytes) -> Client | None:
        """Find the client of a key; None: unknown key. Compares all keys in constant time."""
        given, found = _digest(key), None
        for digest, client in self._clients:
            if hmac.compare_digest(digest, given):
                found = client
        return found

    def owned_by(self, digest: str) -> Client | None:
        """Client of the key with this SHA-256 digest in hexadecimal; None if it is no longer accepted."""
        return next((client for known, client in self._clients if known.hex() == digest), None)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read_keys(path: str, anyone: Client, numbers: Numbers) -> dict[str, Client]:
    """Read clients by key from a TOML file, one table each (`_Entry`). Errors name the tables, never a key."""
    text = read_text_file(path, param=FIELD)
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError):  # also too long numbers; the error's own text may quote a key
        raise ConfigError(f"{path}: no valid TOML", param=FIELD) from None
    if not tables:
        raise ConfigError(f"{path}: no table [name] with a key", param=FIELD)
    clients: dict[str, Client] = {}
    for name, table in tables.items():
        where = one_line(f"{path}: [{name}]")
        try:
            entry = msgspec.convert(table, _Entry)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {one_line(str(error))}", param=FIELD) from None
        if not entry.key.strip():
            raise ConfigError(f"{where}: the key is empty", param=FIELD)
        if entry.key in clients:
            raise ConfigError(f"{where}: an earlier table has the same key", param=FIELD)
        clients[entry.key] = replace(anyone, is_admin=entry.admin, name=f"[{name}]")
        if entry.priority_range is not None:
            priorities = parse_priorities(entry.priority_range, f"{where} priority_range", FIELD)
            clients[entry.key] = Client(priorities, "priority_range of its key", entry.admin, name=f"[{name}]")
        models = None if entry.models is None else frozenset(entry.models)
        limited = replace(clients[entry.key], limit=entry.limit(numbers), models=models, cache_salt=entry.cache_salt)
        clients[entry.key] = limited
    return clients
