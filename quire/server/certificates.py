"""Renewal of a running server's certificate (`--enable-ssl-refresh`)."""

from __future__ import annotations

import os
import ssl

from quire.errors import ConfigError
from quire.logging import get_logger, note
from quire.server.listener import check_certificate
from quire.server.settings import ServerSettings

logger = get_logger(__name__)


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
        """Load the files into `context` if they have changed; return whether that was done. Files that do not fit
        together, such as a key whose certificate is still to be written, leave the context as it is."""
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        settings = self._settings
        try:
            check_certificate(settings)
            assert settings.ssl_certfile is not None
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
            if settings.ssl_ca_certs is not None:
                context.load_verify_locations(settings.ssl_ca_certs)
        except (ConfigError, OSError) as error:
            logger.warning("the certificate is not renewed: %s", error)
            return False
        note(__name__, "the certificate %s is renewed", settings.ssl_certfile)
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
