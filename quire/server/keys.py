"""The API keys of a server, and the priorities that the client of each may send."""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import ConfigError
from quire.server.settings import ServerSettings, parse_priorities
from quire.utils.text_files import read_text_file

FIELD = "api_key_file"


@dataclass(frozen=True, slots=True)
class Client:
    """What a server grants the client that brought a key. priorities: (lowest, highest) that it may send; option: the
    setting that says so, for error messages."""

    priorities: tuple[int, int]
    option: str = "--priority-range"


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A table of the key file."""

    key: str
    priority_range: str | None = None


class KeyRing:
    """The keys that a server accepts. Empty: every client may call, without a key."""

    def __init__(self, clients: dict[str, Client], anyone: Client) -> None:
        """clients: by key. anyone: the client of a server without keys."""
        self._clients = [(_digest(key.encode()), client) for key, client in clients.items()]
        self._anyone = anyone

    @classmethod
    def of(cls, settings: ServerSettings) -> KeyRing:
        """The keys of `--api-key` and `--api-key-file`. Raises ConfigError for a file that is none."""
        anyone = Client(settings.priorities())
        clients = dict.fromkeys(settings.api_key, anyone)
        if settings.api_key_file is not None:
            clients |= _read_keys(settings.api_key_file, anyone)
        return cls(clients, anyone)

    @property
    def anyone(self) -> Client | None:
        """The client that needs no key; None when the server asks for one."""
        return None if self._clients else self._anyone

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


def _read_keys(path: str, anyone: Client) -> dict[str, Client]:
    """The clients of a TOML file, by key: one table each, with `key` and, if wanted, `priority_range`. Error messages
    name the tables and never a key."""
    try:
        tables: dict[str, Any] = tomllib.loads(read_text_file(path, param=FIELD))
    except tomllib.TOMLDecodeError:  # its message may quote a key
        raise ConfigError(f"{path}: no valid TOML", param=FIELD) from None
    if not tables:
        raise ConfigError(f"{path}: no table [name] with a key", param=FIELD)
    clients: dict[str, Client] = {}
    for name, table in tables.items():
        where = f"{path}: [{name}]"
        try:
            entry = msgspec.convert(table, _Entry)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}", param=FIELD) from None
        if not entry.key.strip():
            raise ConfigError(f"{where}: the key is empty", param=FIELD)
        if entry.key in clients:
            raise ConfigError(f"{where}: an earlier table has the same key", param=FIELD)
        clients[entry.key] = anyone
        if entry.priority_range is not None:
            priorities = parse_priorities(entry.priority_range, f"{where} priority_range", FIELD)
            clients[entry.key] = Client(priorities, "priority_range of its key")
    return clients
