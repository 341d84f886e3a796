"""Certificates in PEM files, of an authority of the test's own."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Certificate:
    certificate: str
    key: str


class Authority:
    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._authority = trustme.CA()
        self._directory = directory
        self._name = name
        self.ca = str(directory / f"{name}.pem")
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(
        self, common_name: str = "", host: str = "127.0.0.1", *further: str, days: float = 3650
    ) -> Certificate:
        """A certificate that ends after so many days, or has ended before so many if negative."""
        now = datetime.datetime.now(datetime.UTC)
        issued = self._authority.issue_cert(
            host,
            *further,
            common_name=common_name or None,
            not_before=now - datetime.timedelta(days=365),
            not_after=now + datetime.timedelta(days=days),
        )
        stem = self._directory / f"{self._name}-{common_name or host}"
        made = Certificate(f"{stem}.pem", f"{stem}.key")
        issued.cert_chain_pems[0].write_to_path(made.certificate)
        issued.private_key_pem.write_to_path(made.key)
        return made

    def revoke(self, *certificates: Certificate, hours: float = 24) -> str:
        """The path of a revocation list with these certificates that ends in so many hours."""
        serials = [
            x509.load_pem_x509_certificate(Path(each.certificate).read_bytes()).serial_number
            for each in certificates
        ]
        path = self._directory / f"{self._name}.crl"
        path.write_bytes(revocation_list(self._authority, serials, hours))
        return str(path)


def revocation_list(authority: trustme.CA, serials: list[int], hours: float = 24) -> bytes:
    """A revocation list in PEM, valid for a day or so many hours."""
    key = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(issuer.subject)
        .last_update(now - datetime.timedelta(hours=48))
        .next_update(now + datetime.timedelta(hours=hours))
    )
    for serial in serials:
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(revoked.build())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
