"""TLS contexts for listeners and for dialling, with errors that name the file."""

import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_ALERTS: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a client certificate",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it agrees to nothing, and may ask for a client certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know who signed our certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not take our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not take our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "our certificate has been revoked",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
}
"""The peer's answers in plain words, by OpenSSL's names."""
_OPENSSL_TEXT: Final = re.compile(r"\[[^\]]*\] (.*) \(_ssl\.c:[0-9]+\)", re.DOTALL)
TLS_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class TlsError(ValueError):
    """A certificate, key or CA that cannot be used. The text has the file and the remedy."""


def server_context(
    certificate: Path,
    key: Path,
    ca: Path | None = None,
    require_certificate: bool = False,
    ciphers: str = "",
    *,
    minimum: str = "1.2",
    crl: Path | None = None,
    alpn: Sequence[str] = (),
) -> ssl.SSLContext:
    """A context for TLS 1.2 and later. Raises `TlsError`.

    `certificate` is PEM with the chain after the server's own. `ca` has the signers of client
    certificates: with it the server asks for one, and with `require_certificate` it requires one.
    `ciphers` is OpenSSL's list for TLS 1.2, empty for Python's default. `minimum` is "1.2" or
    "1.3". `crl` has revocation lists in PEM, one for each CA that has signed a client's
    certificate. `alpn` are the application protocols that are accepted; a client that names none
    of them, or others, is served too.
    """
    if require_certificate and ca is None:
        raise TlsError("to require client certificates, name the CA that signed them")
    files = (("certificate", certificate), ("key", key), ("CA", ca), ("revocation list", crl))
    for kind, path in files:
        if path is not None:
            _check_readable(kind, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = TLS_VERSIONS[minimum]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    _load_pair(context, certificate, key)
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError:
            raise TlsError(f"{ca}: no CA certificate in PEM format") from None
        context.verify_mode = ssl.CERT_REQUIRED if require_certificate else ssl.CERT_OPTIONAL
    if crl is not None:
        _load_revoked(context, crl)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    if ciphers:
        try:
            context.set_ciphers(ciphers)
        except ssl.SSLError:
            raise TlsError(f"tls_ciphers = {ciphers!r}: OpenSSL knows none of them") from None
    return context


def client_context(ca: str = "", certificate: str = "", key: str = "") -> ssl.SSLContext:
    """A context for dialling, which checks the name of the server. Raises `TlsError`.

    All files are PEM. `ca` has the signers of the server's certificate; empty means those the
    system trusts. `certificate` and `key` are the client's own, both or none.
    """
    if bool(certificate) != bool(key):
        raise TlsError("a certificate and its key go together: one of them is missing")
    files = (("CA", ca), ("certificate", certificate), ("key", key))
    for kind, name in files:
        if name:
            _check_readable(kind, Path(name))
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except ssl.SSLError:
        raise TlsError(f"{ca}: no CA certificate in PEM format") from None
    if certificate:
        _load_pair(context, Path(certificate), Path(key))
    return context


def explained(error: OSError) -> str:
    """The reason for which a dialled server refuses the connection, if it sent one. Otherwise the
    error's own text."""
    reason = error.reason if isinstance(error, ssl.SSLError) else ""
    return _ALERTS.get(reason or "", str(error))


def handshake_error(error: Exception) -> str:
    """OpenSSL's reason for a failed handshake, without the place in its source."""
    text = str(error)
    found = _OPENSSL_TEXT.fullmatch(text)
    return text if found is None else found[1]


def _check_readable(kind: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise TlsError(f"{path}: cannot read the {kind} file: {error.strerror}") from None


def _load_revoked(context: ssl.SSLContext, crl: Path) -> None:
    # OpenSSL would take any PEM file, and refuse every client later.
    try:
        has_list = b"-----BEGIN X509 CRL-----" in crl.read_bytes()
        if has_list:
            context.load_verify_locations(crl)
    except ssl.SSLError:
        has_list = False
    if not has_list:
        raise TlsError(f"{crl}: no certificate revocation list in PEM format")
    context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF


def _load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def refuse() -> str:
        # Without it OpenSSL would prompt on the terminal, and a service would hang.
        raise TlsError(f"{key}: the key is encrypted; store it without a passphrase")

    # A first attempt without the key shows which of the two files is at fault.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
    except ssl.SSLError:
        raise TlsError(f"{certificate}: no certificate in PEM format") from None
    try:
        context.load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{key}: the key does not belong to {certificate}") from None
        if error.reason in ("EE_KEY_TOO_SMALL", "CA_MD_TOO_WEAK", "KEY_TOO_SMALL"):
            raise TlsError(f"{certificate}: OpenSSL finds it too weak ({error.reason})") from None
        raise TlsError(f"{key}: no private key in PEM format") from None
