"""TLS below the seal, for networks on which others may listen: settings of ``[peer]``.

Mutual: each side shows a certificate that the job's own authority (``tls_ca``) signed. Names in
certificates are not compared with addresses, which change with every machine; that the other side
belongs to the job is proven by the job's key, inside.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from outlast.config import Settings
from outlast.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The three files of ``[peer]``: certificate, its private key, and the authority's certificate.

    Raises:
        ConfigError: from ``client`` and ``server``, when the files cannot be used.
    """

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, settings: Settings) -> Tls | None:
        """As the settings say; None without them.

        Raises:
            ConfigError: some of the three are set, and not all.
        """
        cert, key, ca = settings.peer_tls_cert, settings.peer_tls_key, settings.peer_tls_ca
        if cert is not None and key is not None and ca is not None:
            return cls(cert=cert, key=key, ca=ca)
        if cert is key is ca:  # all None
            return None
        names = {"peer.tls_cert": cert, "peer.tls_key": key, "peer.tls_ca": ca}
        missing = next(name for name, path in names.items() if path is None)
        raise ConfigError(
            f"{missing} is not set; TLS between machines needs peer.tls_cert, peer.tls_key and "
            "peer.tls_ca: set all three, or none"
        )

    @property
    def files(self) -> tuple[str, str, str]:
        """The three, in the order of the fields, for another process."""
        return str(self.cert), str(self.key), str(self.ca)

    def client(self) -> ssl.SSLContext:
        """For the side that connects."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server(self) -> ssl.SSLContext:
        """For the side that accepts."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        path = self.ca
        try:
            context.load_verify_locations(self.ca)
            path = self.cert
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{path} cannot be used for TLS between machines ({why}); peer.tls_cert, "
                "peer.tls_key and peer.tls_ca are files in PEM format, the key without a password"
            ) from None
        return context
