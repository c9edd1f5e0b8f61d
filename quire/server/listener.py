"""Listening socket of a server, and its certificate, which `--enable-ssl-refresh` renews while the server runs."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path

import msgspec

from quire import envs
from quire.errors import ConfigError
from quire.logging import get_logger, note
from quire.server.settings import ServerSettings

logger = get_logger(__name__)

BACKLOG = 2048
DEFAULT_CIPHERS = "DEFAULT"
"""OpenSSL's own choice."""
FIRST_INHERITED = 3
"""Descriptor of the first socket that systemd passes."""


class Listener:
    """Socket bound before the model is loaded; clients connect after `listen`. As a context manager it closes the
    socket and removes its file, unless replaced by another server."""

    def __init__(self, bound: socket.socket, settings: ServerSettings, *, is_inherited: bool = False) -> None:
        """settings: its address is the socket's. is_inherited: systemd keeps the socket, where connections wait for the
        next server; its file stays."""
        self.socket = bound
        self.is_inherited = is_inherited
        self.settings = settings
        self._file = None if settings.uds is None else _file_at(settings.uds)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()
        if not self.is_inherited and (path := self.settings.uds) is not None and _file_at(path) == self._file:
            Path(path).unlink(missing_ok=True)

    @property
    def url(self) -> str:
        if self.settings.uds is not None:
            return f"unix:{self.settings.uds}"
        return f"{self.settings.scheme}://{_host(self.settings.host)}:{self.socket.getsockname()[1]}"

    def listen(self) -> None:
        """Let clients connect. Raises ConfigError if another server has taken the address."""
        path = self.settings.uds
        if path is not None and _file_at(path) != self._file:
            raise ConfigError(f"cannot listen on uds {path}: another server has replaced it", param="uds")
        try:
            self.socket.listen(BACKLOG)
        except OSError as error:
            raise _refusal(self.settings, self.socket.getsockname()[1] if path is None else 0, error) from None


def bind(settings: ServerSettings) -> Listener:
    """Bind the address, or take the socket that systemd passes (socket activation). Raises ConfigError if the address
    is in use, forbidden or not local, or several sockets are passed."""
    if (inherited := _take_inherited()) is not None:
        return Listener(inherited, _with_address_of(inherited, settings), is_inherited=True)
    if settings.uds is not None:
        return Listener(_bind_path(settings, settings.uds), settings)
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on host {host!r}: {error.strerror}", param="host") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refusal(settings, port, error) from None
    return Listener(bound, settings)


def _take_inherited() -> socket.socket | None:
    """Socket that systemd passes to this process, taken out of the environment; None without one."""
    count = envs.take_passed_sockets()
    if count == 0:
        return None
    if count > 1:
        raise ConfigError(f"systemd passes {count} sockets; a server takes one (one ListenStream=)", param="port")
    os.set_inheritable(FIRST_INHERITED, False)
    try:
        taken = socket.socket(fileno=FIRST_INHERITED)
        is_listening = taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"systemd passes no socket: {error.strerror}", param="port") from None
    is_known = taken.family in (socket.AF_INET, socket.AF_INET6) or (
        taken.family == socket.AF_UNIX and isinstance(taken.getsockname(), str)
    )
    if not (is_known and is_listening and taken.type == socket.SOCK_STREAM):
        taken.close()
        message = "systemd passes a socket of another kind; a server takes ListenStream= with a port or path, Accept=no"
        raise ConfigError(message, param="port")
    return taken


def _with_address_of(inherited: socket.socket, settings: ServerSettings) -> ServerSettings:
    address = inherited.getsockname()
    if inherited.family == socket.AF_UNIX:
        return msgspec.structs.replace(settings, uds=address)
    return msgspec.structs.replace(settings, uds=None, host=address[0], port=address[1])


def _refusal(settings: ServerSettings, port: int, error: OSError) -> ConfigError:
    if settings.uds is not None:
        reason = "it is already in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        return ConfigError(f"cannot listen on uds {settings.uds}: {reason}", param="uds")
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {settings.host} is already in use", param="port")
    return ConfigError(f"cannot listen on port {port} of {settings.host}: {error.strerror}", param="port")


def _bind_path(settings: ServerSettings, path: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and not _answers(path):
            Path(path).unlink()
        bound.bind(path)
        Path(path).chmod(0o660)
    except OSError as error:
        bound.close()
        raise _refusal(settings, 0, error) from None
    return bound


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(path) == 0


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_certificate(settings: ServerSettings) -> None:
    """Raise ConfigError for an unusable certificate or key."""
    if settings.ssl_certfile is None:
        return
    _make_context(settings)


def _make_context(settings: ServerSettings) -> ssl.SSLContext:
    """Context for TLS. Raises ConfigError for an unusable certificate or key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert settings.ssl_certfile is not None
    try:
        # An empty password, so that an encrypted key is an error and not a question on the terminal.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
        context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
        context.set_ciphers(settings.ssl_ciphers or DEFAULT_CIPHERS)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"ssl_certfile {settings.ssl_certfile} with ssl_keyfile {settings.ssl_keyfile}"
            f"{f' and ssl_ca_certs {settings.ssl_ca_certs}' if settings.ssl_ca_certs else ''}: {reason}",
            param="ssl_certfile",
        ) from None
    return context


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class CertificateWatch:
    """Watch of the files of certificate, key and authorities. After a change, new connections get the new certificate;
    open ones keep theirs."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._paths = [
            path for path in (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs) if path is not None
        ]
        self._seen = self._state()

    def check(self, context: ssl.SSLContext) -> bool:
        """If the files have changed, let new handshakes of `context` use them; return whether they do. Files that do
        not fit together change nothing."""
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        try:
            renewed = _make_context(self._settings)
        except ConfigError as error:
            logger.warning("the certificate is not renewed: %s", error)
            return False

        def change(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = renewed

        context.sni_callback = change  # also called for clients that name no server
        note(__name__, "the certificate %s is renewed", self._settings.ssl_certfile)
        return True

    def _state(self) -> list[tuple[int, int, int, int] | None]:
        """Identity of each file's content; None: it cannot be seen."""
        found: list[tuple[int, int, int, int] | None] = []
        for path in self._paths:
            try:
                status = os.stat(path)
            except OSError:
                found.append(None)
            else:
                found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return found
