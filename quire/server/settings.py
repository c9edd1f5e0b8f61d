"""ServerSettings: the options of the HTTP server besides the engine's."""

from __future__ import annotations

import re

import msgspec

from quire.errors import ConfigError, nearest_name
from quire.request import MAX_PRIORITY
from quire.utils.sizes import parse_bytes

MAX_PORT = 65535
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one server. Wrong values raise ConfigError with `param` set. `HELP` holds one line for each field.

    served_model_name: names that requests may use; the first is the one in responses. Empty: the engine's model name.
    max_body_size: bytes of a request body, as a number or "8MiB".
    api_key, api_key_file: the keys that clients may send (quire/server/keys.py); with neither, no key is asked for.
    priority_range: "LOW,HIGH", the priorities that clients may send where the engine takes any (lower is earlier). The
        file of keys may name another one for a key.
    max_num_queued: most requests that may wait for a place in the batch before new ones get 429; None: no limit.
    shutdown_timeout: seconds that running requests get to finish after SIGTERM.
    cors_allowed_origins: origins (scheme://host:port) whose pages may call besides the server's own; "*": any.
    allowed_hosts: names in the Host header that are served besides those that the address listened on implies
        (quire/server/site.py); "*.example.com" stands for all names under it, "*" for any.
    keep_alive_timeout, header_timeout, body_timeout, write_timeout: seconds that a client may take to begin a request,
        to send its head, to send its body, and to read some of its answer.
    max_total_body_size: bytes of all bodies that are being received (quire/server/json_bodies.py).
    enable_sleep_mode: whether clients may send the engine to sleep (quire/server/sleep.py).
    preload_prefix: text files whose content is computed and pinned before the server is ready (docs/prefixes.md).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: list[str] = []
    api_key: list[str] = []
    api_key_file: str | None = None
    max_body_size: int | str = "8MiB"
    max_num_queued: int | None = 4096
    priority_range: str = "0,100"
    shutdown_timeout: float = 30.0
    preload_prefix: list[str] = []
    cors_allowed_origins: list[str] = []
    allowed_hosts: list[str] = []
    keep_alive_timeout: float = 30.0
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    max_connections: int = 8192
    max_total_body_size: int | str = "256MiB"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    access_log: bool = False
    enable_sleep_mode: bool = False

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host must not be empty", param="host")
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"port must be between 0 and {MAX_PORT}, not {self.port}", param="port")
        if not isinstance(self.api_key, list):  # the characters of a string would all be keys
            raise ConfigError("api_key must be a list of keys", param="api_key")
        if not all(key.strip() for key in self.api_key):
            raise ConfigError("api_key must not be empty", param="api_key")
        if self.max_num_queued is not None and self.max_num_queued < 1:
            raise ConfigError(f"max_num_queued must be at least 1, not {self.max_num_queued}", param="max_num_queued")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(
                f"shutdown_timeout must be a number of seconds >= 0, not {self.shutdown_timeout}",
                param="shutdown_timeout",
            )
        for name in ("keep_alive_timeout", "header_timeout", "body_timeout", "write_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"{name} must be a number of seconds > 0, not {seconds}", param=name)
        if self.max_connections < 1:
            raise ConfigError(
                f"max_connections must be at least 1, not {self.max_connections}", param="max_connections"
            )
        for name in ("served_model_name", "preload_prefix", "cors_allowed_origins", "allowed_hosts"):
            if not all(getattr(self, name)):
                raise ConfigError(f"{name} must not hold an empty string", param=name)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            missing = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise ConfigError("ssl_keyfile and ssl_certfile go together: one is missing", param=missing)
        _check_origins(self.cors_allowed_origins)
        _check_hosts(self.allowed_hosts)
        if self.max_total_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_total_body_size ({self.max_total_body_size}) must be at least max_body_size "
                f"({self.max_body_size}): one body of that size is to be received",
                param="max_total_body_size",
            )
        self.priorities()

    def priorities(self) -> tuple[int, int]:
        """(lowest, highest) priority that a client may send. Raises ConfigError for a range that is none."""
        return parse_priorities(self.priority_range, "priority_range", "priority_range")

    @property
    def max_total_body_bytes(self) -> int:
        return parse_bytes(self.max_total_body_size, param="max_total_body_size")

    @property
    def max_body_bytes(self) -> int:
        return parse_bytes(self.max_body_size, param="max_body_size")

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"

    @classmethod
    def from_keywords(cls, keywords: dict[str, object]) -> ServerSettings:
        """Build from keyword arguments. Unknown names and wrong types raise ConfigError."""
        for name in keywords:
            if name not in cls.__struct_fields__:
                nearest = nearest_name(name, cls.__struct_fields__)
                raise ConfigError(f"unknown server setting {name!r}{nearest}", param=name)
        try:
            return msgspec.convert(keywords, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise ConfigError(f"server setting: {error}") from None


def parse_priorities(text: str, name: str, param: str) -> tuple[int, int]:
    """(lowest, highest) of "LOW,HIGH". Raises ConfigError, which calls the text `name`, for a range that is none."""
    low, _, high = text.partition(",")
    try:
        found = int(low), int(high)
    except ValueError:
        found = 1, 0
    if not -MAX_PRIORITY <= found[0] <= 0 <= found[1] <= MAX_PRIORITY:
        raise ConfigError(
            f"{name} must be LOW,HIGH with {-MAX_PRIORITY} <= LOW <= 0 <= HIGH <= {MAX_PRIORITY}, not {text!r}",
            param=param,
        )
    return found


def _check_origins(origins: list[str]) -> None:
    for origin in origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_allowed_origins: {origin!r} is no origin such as https://app.example:8443 (or '*')",
                param="cors_allowed_origins",
            )


def _check_hosts(hosts: list[str]) -> None:
    for host in hosts:
        if host != "*" and not _HOST.fullmatch(host):
            raise ConfigError(
                f"allowed_hosts: {host!r} is no name such as app.example or *.app.example (without scheme or port; "
                "'*': any)",
                param="allowed_hosts",
            )


HELP: dict[str, str] = {
    "host": "address to listen on",
    "port": "port to listen on (0: any free one)",
    "served_model_name": "name of the model in the API; may be given several times (default: the model as given)",
    "api_key": "key that clients must send as 'Authorization: Bearer KEY'; may be given several times",
    "api_key_file": "TOML file of further keys: a table [NAME] for each client, with key and perhaps priority_range",
    "max_body_size": "largest request body, such as 8MiB",
    "max_num_queued": "most requests that may wait before new ones are refused with 429",
    "priority_range": "priorities LOW,HIGH that clients may send, with --scheduling-policy priority; lower is earlier",
    "shutdown_timeout": "seconds that running requests get to finish after SIGTERM",
    "preload_prefix": "text file that is computed and kept as a prefix before the start; may be given several times",
    "cors_allowed_origins": "origin that browsers may call from ('*': any); may be given several times",
    "allowed_hosts": "name that clients may call the server by, besides its own ('*.example.com': all names under it, "
    "'*': any); may be given several times",
    "keep_alive_timeout": "seconds that a connection may stay open between requests, and before the first",
    "header_timeout": "seconds that the head of a request may take to arrive",
    "body_timeout": "seconds that the body of a request may take to arrive",
    "write_timeout": "seconds without reading after which a client is cut off",
    "max_connections": "most connections at a time; more are refused with 503",
    "max_total_body_size": "most bytes of request bodies that are received at a time; more are refused with 503",
    "ssl_keyfile": "private key file: serve https",
    "ssl_certfile": "certificate file: serve https",
    "access_log": "log one line for each HTTP request",
    "enable_sleep_mode": "serve POST /sleep and /wake_up, by which clients give the engine's memory back",
}
