"""Signs a member's announcements with the key of its certificate and verifies those of others.

The certificate that authenticates a member on its links also signs its announcements, so there is
no second key to distribute. It travels with the signature, because most members have no link to the
origin of an announcement. This module needs `cryptography` (`pip install
'holdfast[federation-signing]'`), because the standard library cannot sign.
"""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.config.federation import Federation
from holdfast.security.tls import TlsError
from holdfast_federation.core.frames import CERTIFICATE_BYTES_MAX

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.padding import PSS
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509 import Certificate

logger = logging.getLogger("holdfast")

CHAIN_MAX: Final = 5
"""The most certificates in a chain from a member's own to the authority's."""
KEPT_MAX: Final = 4096
"""The most verdicts on certificates, good or bad, in memory. The oldest one is dropped first."""
_CONTEXT: Final = b"holdfast federation announcement 1\0"
EXTRA: Final = "pip install 'holdfast[federation-signing]'"


class CertificateKeys:
    """The `AnnouncementKeys` of `holdfast_federation.core.signing` that use X.509 certificates."""

    def __init__(self, settings: Federation, is_required: bool) -> None:
        """Reads certificate, key and authority from files.

        Raises `TlsError` or `OSError` when a file cannot be used, and `ImportError` without
        `cryptography`.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        self.is_required = is_required
        self.certificate = Path(settings.certificate).read_bytes()
        if len(self.certificate) > CERTIFICATE_BYTES_MAX:
            raise TlsError(
                f"{settings.certificate}: {len(self.certificate)} bytes, at most"
                f" {CERTIFICATE_BYTES_MAX} go with an announcement: leave out what is in ca"
            )
        self._context = _CONTEXT + settings.name.encode() + b"\0"
        # By origin and certificate. None: the certificate does not belong to the origin.
        self._cache: dict[tuple[bytes, bytes], Certificate | None] = {}
        try:
            self._key = load_pem_private_key(Path(settings.key).read_bytes(), None)
            self._authorities = x509.load_pem_x509_certificates(Path(settings.ca).read_bytes())
            x509.load_pem_x509_certificates(self.certificate)
        except (ValueError, TypeError) as error:
            raise TlsError(f"{settings.key}: cannot be used to sign: {error}") from None

    def sign(self, statement: bytes) -> bytes:
        """Signs a statement. The federation's name is signed too, so it is valid there only."""
        from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

        data, key = self._context + statement, self._key
        if isinstance(key, rsa.RSAPrivateKey):
            return key.sign(data, *_rsa())
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key.sign(data, ec.ECDSA(_hash()))
        assert isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
        return key.sign(data)

    def verifies(
        self, origin: bytes, certificate: bytes, signature: bytes, statement: bytes
    ) -> bool:
        """Returns whether the origin signed the statement with a valid certificate.

        The certificate's dates are checked at each call, because the verdict on its chain is
        cached.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

        leaf = self._certified(origin, certificate)
        if leaf is None or not _is_current(leaf):
            return False
        data, key = self._context + statement, leaf.public_key()
        try:
            if isinstance(key, rsa.RSAPublicKey):
                key.verify(signature, data, *_rsa())
            elif isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(signature, data, ec.ECDSA(_hash()))
            elif isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
                key.verify(signature, data)
            else:
                return False
        except InvalidSignature:
            return False
        return True

    def _certified(self, origin: bytes, certificate: bytes) -> "Certificate | None":
        """Returns the member's certificate if the authority has issued it, else None."""
        key = (origin, certificate)
        if key not in self._cache:
            if len(self._cache) >= KEPT_MAX:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = self._check(origin, certificate)
        return self._cache[key]

    def _check(self, origin: bytes, certificate: bytes) -> "Certificate | None":
        from cryptography import x509

        try:
            chain = x509.load_pem_x509_certificates(certificate)[:CHAIN_MAX]
            if origin.hex() not in _names(chain[0]):
                return None
            for number, one in enumerate(chain):
                if number and not (_may_issue(one) and _is_current(one)):
                    return None
                if any(_is_issued_by(one, authority) for authority in self._authorities):
                    return chain[0]
                if number + 1 == len(chain) or not _is_issued_by(one, chain[number + 1]):
                    return None
        except (ValueError, TypeError):
            pass
        return None


def signing_of(settings: Federation) -> CertificateKeys | None:
    """Makes the keys that the settings ask for, or None without signatures.

    Raises `TlsError` or `OSError` when the files cannot be used.
    """
    if settings.signatures == "off" or not settings.certificate:
        return None
    is_required = settings.signatures == "required"
    try:
        return CertificateKeys(settings, is_required)
    except ImportError:
        if is_required:
            raise TlsError(f'signatures = "required" needs cryptography: {EXTRA}') from None
        logger.info("federation_unsigned text='cryptography is missing: %s'", EXTRA)
        return None


def _hash() -> "SHA256":
    from cryptography.hazmat.primitives.hashes import SHA256

    return SHA256()


def _rsa() -> "tuple[PSS, SHA256]":
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS

    return PSS(MGF1(_hash()), PSS.DIGEST_LENGTH), _hash()


def _names(certificate: "Certificate") -> set[str]:
    """Returns the common names and DNS names, the same that links accept."""
    from cryptography import x509

    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    found = {str(name.value) for name in names}
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return found
    return found | set(extension.value.get_values_for_type(x509.DNSName))


def _may_issue(certificate: "Certificate") -> bool:
    from cryptography import x509

    try:
        extension = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    return extension.value.ca


def _is_issued_by(certificate: "Certificate", issuer: "Certificate") -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_current(certificate: "Certificate") -> bool:
    now = datetime.now(UTC)
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
