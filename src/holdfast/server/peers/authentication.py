"""What a node shows its peers and asks of them: a secret, certificates, both or (on loopback)
neither."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.security.peer_secret import read_secret
from holdfast.security.tls import TlsError, server_context


class Credentials(Protocol):
    """Names of files, empty where there is none; `certificate`, `key` and `ca` go together. The
    tables [cluster] and [federation] are ones."""

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
    secret: bytes = b""
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None

    @classmethod
    def load(cls, files: Credentials) -> "PeerAuth":
        """From the files the configuration names. Raises SecretError and TlsError."""
        secret = read_secret(Path(files.secret_file)) if files.secret_file else b""
        if not files.ca:
            return cls(secret)
        certificate, key, ca = Path(files.certificate), Path(files.key), Path(files.ca)
        server = server_context(certificate, key, ca, require_certificate=True)
        server.minimum_version = ssl.TLSVersion.TLSv1_3
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.minimum_version = ssl.TLSVersion.TLSv1_3
        # Nodes are known by their ids, which certificate_names has; addresses may change.
        client.check_hostname = False
        try:
            client.load_cert_chain(certificate, key)
            client.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise TlsError(f"{certificate}: cannot be used to dial: {error.reason}") from None
        return cls(secret, server, client)
