"""Credentials of a node and its requirements for peers.

These are a secret, certificates, both, or (on loopback) neither.
"""

import ssl
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field

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


class PeerAuth(Struct):
    """The loaded secret, and the TLS contexts for accepting and dialling.

    A mesh uses the present values for each new connection. Connections that are established keep
    theirs, also past the end of a certificate.
    """

    secret: bytes = b""
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None
    digests: dict[str, bytes] = field(default_factory=dict)
    """The hashes of the loaded files, by the names of `Credentials`."""

    @classmethod
    def load(cls, files: Credentials) -> "PeerAuth":
        """Loads the configured files. Raises `SecretError` or `TlsError` if they cannot be used."""
        secret = read_secret(Path(files.secret_file)) if files.secret_file else b""
        digests = {"secret_file": sha256(secret).digest()}
        if not files.ca:
            return cls(secret, digests=digests)
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
            for name, path in (("certificate", certificate), ("key", key), ("ca", ca)):
                digests[name] = sha256(path.read_bytes()).digest()
        except ssl.SSLError as error:
            raise TlsError(f"{certificate}: cannot be used to dial: {error.reason}") from None
        return cls(secret, server, client, digests)

    def renew(self, loaded: "PeerAuth") -> list[str]:
        """Uses other files for new connections. Returns the names of those that differ."""
        changed = sorted(
            name for name, digest in loaded.digests.items() if self.digests.get(name) != digest
        )
        self.secret, self.digests = loaded.secret, loaded.digests
        self.server, self.client = loaded.server, loaded.client
        return changed
