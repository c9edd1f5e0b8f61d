"""The API keys of a server, and the priorities that the client of each may send."""

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
    """What a server grants the client that brought a key. priorities: (lowest, highest) that it may send; option: the
    setting that says so, for error messages. is_admin: whether it may use control routes."""

    priorities: tuple[int, int]
    option: str = "--priority-range"
    is_admin: bool = False
    name: str = ""
    """Whose requests take turns with those of others; it says nothing of the key."""
    limit: RateLimit | None = None
    """Requests and tokens a minute."""
    models: frozenset[str] | None = None
    """Names of models and adapters that it may use; None: all."""
    cache_salt: str = ""
    """Cached prefixes are shared only with clients of equal salt; empty: with all that have none."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A table of the key file."""

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
    """The keys that a server accepts. Without any that is not an admin's, every client may call without a key."""

    def __init__(self, clients: dict[str, Client], anyone: Client) -> None:
        """clients: by key. anyone: the client of a server without keys."""
        self._clients = [(_digest(key.encode()), client) for key, client in clients.items()]
        self._anyone = anyone
        self.has_admin_keys = any(client.is_admin for client in clients.values())
        self._needs_key = any(not client.is_admin for client in clients.values())

    @classmethod
    def of(cls, settings: ServerSettings, numbers: Numbers | None = None) -> KeyRing:
        """The keys of `--api-key`, `--admin-api-key` and `--api-key-file`. numbers: of all processes that count what a
        key has used; None: this one alone. Raises ConfigError for a file that is none."""
        anyone = Client(settings.priorities())
        clients = {key: replace(anyone, name=f"key {place}") for place, key in enumerate(settings.api_key)}
        for place, key in enumerate(settings.admin_api_key):
            clients[key] = replace(anyone, is_admin=True, name=f"admin key {place}")
        if settings.api_key_file is not None:
            clients |= _read_keys(settings.api_key_file, anyone, numbers or Numbers.alone())
        return cls(clients, anyone)

    @property
    def anyone(self) -> Client | None:
        """The client that needs no key; None when the server asks for one."""
        return None if self._needs_key else self._anyone

    def find(self, key: bytes) -> Client | None:
        """The client that a key belongs to. Every key is compared, and in constant time, so that the time taken says
        nothing about any of them."""
        given, found = _digest(key), None
        for digest, client in self._clients:
            if hmac.compare_digest(digest, given):
                found = client
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read_keys(path: str, anyone: Client, numbers: Numbers) -> dict[str, Client]:
    """The clients of a TOML file, by key: one table each, with `key` and the optional fields of `_Entry`. Error
    messages name the tables and never a key."""
    text = read_text_file(path, param=FIELD)
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError):  # also numbers without end; the message may quote a key
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
