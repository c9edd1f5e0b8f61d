"""The socket that a server listens on, and its certificate."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from quire.errors import ConfigError
from quire.server.settings import ServerSettings


def bind(settings: ServerSettings) -> socket.socket:
    """Bind the address before the model is loaded; clients cannot connect until the server listens.

    Raises ConfigError when the address is in use, not allowed or not ours.
    """
    if settings.uds is not None:
        return _bind_path(settings.uds)
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on host {host!r}: {error.strerror}", param="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is already in use", param="port") from None
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}", param="port") from None
    return listener


def _bind_path(path: str) -> socket.socket:
    """A Unix socket that the user and the group of this process may call. A socket that an ended server left there is
    replaced; one on which a server listens is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and not _answers(path):
            Path(path).unlink()
        listener.bind(path)
        Path(path).chmod(0o660)
    except OSError as error:
        listener.close()
        reason = "it is already in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(f"cannot listen on uds {path}: {reason}", param="uds") from None
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(path) == 0


def url_of(settings: ServerSettings, listener: socket.socket) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    return f"{settings.scheme}://{_host(settings.host)}:{listener.getsockname()[1]}"


def remove_socket(settings: ServerSettings) -> None:
    """Of a server that listened on one in the file system."""
    if settings.uds is not None:
        Path(settings.uds).unlink(missing_ok=True)


def check_certificate(settings: ServerSettings) -> None:
    """Raise ConfigError when the certificate or its key cannot be used."""
    if settings.ssl_certfile is None:
        return
    import ssl

    try:
        # An empty password, so that an encrypted key is an error and not a question on the terminal.
        context = ssl.create_default_context()
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
        if settings.ssl_ciphers is not None:
            context.set_ciphers(settings.ssl_ciphers)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"ssl_certfile {settings.ssl_certfile} with ssl_keyfile {settings.ssl_keyfile}"
            f"{f' and ssl_ca_certs {settings.ssl_ca_certs}' if settings.ssl_ca_certs else ''}: {reason}",
            param="ssl_certfile",
        ) from None


def _host(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
