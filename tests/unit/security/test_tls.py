"""TLS contexts: a handshake in memory, and the error for each wrong file."""

import ssl
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from holdfast.security.tls import TlsError, server_context
from tests.support.certificates import revocation_list


class Files:
    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.ca = directory / "ca.pem"
        self.certificate = directory / "server.pem"
        self.key = directory / "server.key"
        self.authority.cert_pem.write_to_path(self.ca)
        issued = self.authority.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(self.certificate)
        issued.private_key_pem.write_to_path(self.key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """The TLS version agreed on. Raises ssl.SSLError where either side refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    return ends[0].version()


def client_context(files: Files) -> ssl.SSLContext:
    context = ssl.create_default_context()
    files.authority.configure_trust(context)
    return context


def test_handshake(files: Files) -> None:
    client = client_context(files)
    server = server_context(files.certificate, files.key)
    assert handshake(server, client) == "TLSv1.3"
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(server, client) == "TLSv1.2"
    server = server_context(files.certificate, files.key, ciphers="ECDHE-ECDSA-AES128-GCM-SHA256")
    assert handshake(server, client) == "TLSv1.2"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_old_versions_are_refused(files: Files) -> None:
    client = client_context(files)
    client.minimum_version = ssl.TLSVersion.TLSv1_1
    client.maximum_version = ssl.TLSVersion.TLSv1_1
    client.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        handshake(server_context(files.certificate, files.key), client)


def test_client_certificates(files: Files) -> None:
    client = client_context(files)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    required = server_context(files.certificate, files.key, files.ca, True)
    with pytest.raises(ssl.SSLError):
        handshake(required, client)
    assert handshake(server_context(files.certificate, files.key, files.ca), client)
    files.authority.issue_cert("device").configure_cert(client)
    assert handshake(required, client) == "TLSv1.2"


def test_errors_name_the_file(files: Files, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not PEM\n")
    other = tmp_path / "other.key"
    files.authority.issue_cert("other").private_key_pem.write_to_path(other)
    encrypted = tmp_path / "encrypted.key"
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"x"),
        )
    )
    good, key_path = files.certificate, files.key
    cases: list[tuple[tuple[Path, Path, Path | None], str]] = [
        ((missing, key_path, None), f"{missing}: cannot read the certificate file: No such file"),
        ((good, missing, None), f"{missing}: cannot read the key file"),
        ((good, key_path, missing), f"{missing}: cannot read the CA file"),
        ((good, key_path, tmp_path), f"{tmp_path}: cannot read the CA file: Is a directory"),
        ((garbage, key_path, None), f"{garbage}: no certificate in PEM"),
        ((good, garbage, None), f"{garbage}: no private key in PEM"),
        ((good, key_path, garbage), f"{garbage}: no CA certificate in PEM"),
        ((good, other, None), f"{other}: the key does not belong to {good}"),
        ((good, encrypted, None), f"{encrypted}: the key is encrypted"),
    ]
    for (certificate, key_file, ca), text in cases:
        with pytest.raises(TlsError) as caught:
            server_context(certificate, key_file, ca)
        assert str(caught.value).startswith(text)
    with pytest.raises(TlsError, match="name the CA"):
        server_context(good, key_path, None, True)
    with pytest.raises(TlsError, match="tls_ciphers = 'NOPE': OpenSSL knows none"):
        server_context(good, key_path, ciphers="NOPE")


def test_the_lowest_version(files: Files) -> None:
    client = client_context(files)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        handshake(server_context(files.certificate, files.key, minimum="1.3"), client)


def test_application_protocols(files: Files) -> None:
    server = server_context(files.certificate, files.key, alpn=["mqtt"])
    for offered in ([], ["mqtt"], ["other"], ["other", "mqtt"]):
        client = client_context(files)
        if offered:
            client.set_alpn_protocols(offered)
        assert handshake(server, client) == "TLSv1.3"


def test_revoked_certificates(files: Files, tmp_path: Path) -> None:
    good, bad = (files.authority.issue_cert(name) for name in ("good", "bad"))
    serials = [x509.load_pem_x509_certificate(bad.cert_chain_pems[0].bytes()).serial_number]
    crl = tmp_path / "crl.pem"
    crl.write_bytes(revocation_list(files.authority, serials))
    server = server_context(files.certificate, files.key, files.ca, True, crl=crl)
    for issued, is_accepted in ((good, True), (bad, False)):
        client = client_context(files)
        # The refusal of TLS 1.3 arrives after the client's end of the handshake.
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        issued.configure_cert(client)
        if is_accepted:
            assert handshake(server, client)
        else:
            with pytest.raises(ssl.SSLError):
                handshake(server, client)


def test_a_file_that_is_no_revocation_list(files: Files, tmp_path: Path) -> None:
    broken = tmp_path / "crl.pem"
    broken.write_text("-----BEGIN X509 CRL-----\nxx\n-----END X509 CRL-----\n")
    for path in (files.ca, broken):
        with pytest.raises(TlsError, match="no certificate revocation list"):
            server_context(files.certificate, files.key, files.ca, crl=path)
    with pytest.raises(TlsError, match="cannot read the revocation list file"):
        server_context(files.certificate, files.key, files.ca, crl=tmp_path / "none")
