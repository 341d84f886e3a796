"""The credentials of a node and its requirements for peers.

These are a secret, certificates, both, or (on loopback) neither.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.security.peer_secret import read_secret
from holdfast.security.tls import TlsError, server_context


class Credentials(Protocol):
    """The names of the credential files, empty where there is none.

    `certificate`, `key` and `ca` go together. The tables [cluster] and [federation] implement this.
    """

    @property
    def secret_file(self) -> str: ...
    @property
    def certificate(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def ca(self) -> str: ...


@dataclass(frozen=True)
class PeerAuth:
    """The loaded secret, and the TLS contexts for accepting and dialling."""

    secret: bytes = b""
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None

    @classmethod
    def load(cls, files: Credentials) -> "PeerAuth":
        """Load the configured files. Raises `SecretError` or `TlsError` if they cannot be used."""
        secret = read_secret(Path(files.secret_file)) if files.secret_file else b""
        if not files.ca:
            return cls(secret)
        certificate, key, ca = Path(files.certificate), Path(files.key), Path(files.ca)
        server = server_context(certificate, key, ca, require_certificate=True)
        server.minimum_version = ssl.TLSVersion.TLSv1_3
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.minimum_version = ssl.TLSVersion.TLSv1_3
        # A certificate names the node's id (`certificate_names`), because addresses may change.
        client.check_hostname = False
        try:
            client.load_cert_chain(certificate, key)
            client.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise TlsError(f"{certificate}: cannot be used to dial: {error.reason}") from None
        return cls(secret, server, client)
