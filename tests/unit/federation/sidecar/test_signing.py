"""Announcements signed with certificates: whose signature counts, and whose does not."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from holdfast.config.federation import Federation
from holdfast.config.problem import ConfigError
from holdfast.security.tls import TlsError
from holdfast_federation.sidecar import announcement_keys as signing_module
from holdfast_federation.sidecar.announcement_keys import CertificateKeys, signing_of
from tests.support.federation_settings import member_settings
from tests.support.scripted_edge import ScriptedEdge, Site, until
from tests.support.sim_federation_member import node_id

A, B = node_id(1), node_id(2)
Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class Authority:
    """One that makes certificates of all kinds."""

    def __init__(self, name: str = "ca", parent: "Authority | None" = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        issuer = parent or self
        self.certificate = self._made(self.name, self.key.public_key(), True, issuer)

    def _made(
        self, name: x509.Name, key: object, is_ca: bool, issuer: "Authority", days: int = 9
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer.name)
            .public_key(key)  # type: ignore[arg-type]
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=10))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
            .sign(issuer.key, hashes.SHA256())
        )

    def issue(self, name: str, key: Key, days: int = 9) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        return self._made(subject, key.public_key(), False, self, days)


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)


def signer(
    directory: Path, ca: bytes, chain: bytes, key: Key, name: str = "plants"
) -> CertificateKeys:
    directory.mkdir(exist_ok=True)
    (directory / "ca.pem").write_bytes(ca)
    (directory / "cert.pem").write_bytes(chain)
    (directory / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return CertificateKeys(settings(directory, name=name), True)


def settings(directory: Path, **more: str) -> Federation:
    files = {
        name: str(directory / file)
        for name, file in (("certificate", "cert.pem"), ("key", "key.pem"), ("ca", "ca.pem"))
    }
    return member_settings({**files, **more})


def keys() -> list[Key]:
    return [
        ec.generate_private_key(ec.SECP256R1()),
        rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate(),
    ]


@pytest.mark.parametrize("number", range(3), ids=["ec", "rsa", "ed25519"])
def test_a_members_signature_counts_for_it_alone(tmp_path: Path, number: int) -> None:
    authority, key = Authority(), keys()[number]
    chain = pem(authority.issue(A.hex(), key))
    one = signer(tmp_path, pem(authority.certificate), chain, key)
    signature = one.sign(b"statement")
    assert one.verifies(A, chain, signature, b"statement")
    assert not one.verifies(A, chain, signature, b"another")
    assert not one.verifies(B, chain, signature, b"statement")
    assert not one.verifies(A, chain, signature[:-1], b"statement")
    assert not one.verifies(A, chain, b"", b"statement")
    assert not one.verifies(A, b"no certificate", signature, b"statement")
    # Nor in another federation of the same authority.
    other = signer(tmp_path, pem(authority.certificate), chain, key, "other")
    assert not other.verifies(A, chain, signature, b"statement")


def test_the_certificate_is_of_the_federations_authority(tmp_path: Path) -> None:
    authority, stranger, key = Authority(), Authority("stranger"), keys()[2]
    ca = pem(authority.certificate)
    middle = Authority("middle", authority)
    not_ca_key = keys()[0]
    not_ca = authority.issue("leaf", not_ca_key)
    by_leaf = Authority("leaf")
    by_leaf.key = not_ca_key  # type: ignore[assignment]
    good = pem(authority.issue(A.hex(), key))
    one = signer(tmp_path, ca, good, key)
    signature = one.sign(b"statement")

    def counts(*chain: x509.Certificate) -> bool:
        return one.verifies(A, pem(*chain), signature, b"statement")

    assert counts(authority.issue(A.hex(), key))
    assert counts(middle.issue(A.hex(), key), middle.certificate)
    assert not counts(middle.issue(A.hex(), key))
    assert not counts(stranger.issue(A.hex(), key))
    assert not counts(stranger.issue(A.hex(), key), stranger.certificate)
    # Its issuer is certified, but not to certify others.
    assert not counts(by_leaf.issue(A.hex(), key), not_ca)
    assert not counts(authority.issue(A.hex(), key, days=-1))


def test_certificates_as_links_have_them(tmp_path: Path) -> None:
    ca = trustme.CA()
    issued = ca.issue_cert(A.hex())
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    one = signing_of(settings(tmp_path))
    assert one is not None
    assert not one.is_required
    assert one.verifies(A, one.certificate, one.sign(b"x"), b"x")
    assert signing_of(settings(tmp_path, signatures="off")) is None
    required = signing_of(settings(tmp_path, signatures="required"))
    assert required is not None
    assert required.is_required


def test_what_signing_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs certificate, key and ca"):
        member_settings({"signatures": "required"})
    assert signing_of(member_settings()) is None

    def missing(settings: Federation, is_required: bool) -> CertificateKeys:
        raise ImportError("cryptography")

    monkeypatch.setattr(signing_module, "CertificateKeys", missing)
    assert signing_of(settings(tmp_path)) is None
    with pytest.raises(TlsError, match=r"pip install 'holdfast\[federation-signing\]'"):
        signing_of(settings(tmp_path, signatures="required"))


@pytest.mark.timeout(100)
def test_members_that_require_signatures_over_a_relay(tmp_path: Path) -> None:
    """Three federators on real sockets; and a fourth that does not sign is not believed."""
    ca = trustme.CA()

    def certified(node: bytes) -> dict[str, str]:
        directory = tmp_path / f"certificates-{node.hex()}"
        directory.mkdir()
        issued = ca.issue_cert(node.hex())
        issued.private_key_pem.write_to_path(str(directory / "key.pem"))
        issued.cert_chain_pems[0].write_to_path(str(directory / "cert.pem"))
        ca.cert_pem.write_to_path(str(directory / "ca.pem"))
        files = {"certificate": "cert.pem", "key": "key.pem", "ca": "ca.pem"}
        return {"id": node.hex()} | {name: str(directory / file) for name, file in files.items()}

    async def test() -> None:
        async with Site(tmp_path) as site:
            site.config = replace(site.config, degree_min=1)
            origin, relay, here = ScriptedEdge(), ScriptedEdge(), ScriptedEdge(["a/#"])
            required = {"signatures": "required"}
            await site.start("relay", relay, **certified(A), **required)
            one = await site.start("origin", origin, ["relay"], **certified(B), **required)
            last = await site.start("here", here, ["relay"], **certified(node_id(3)), **required)
            await until(lambda: origin.wanted == {"a/#"}, "interest")
            assert one.member.database.entries[last.node].voucher is not None
            origin.publish("1", "a/1", 1)
            await until(lambda: len(here.delivered) == 1, "the message")
            unsigned = ScriptedEdge(["b/#"])
            off = certified(node_id(4)) | {"signatures": "off"}
            fourth = await site.start("fourth", unsigned, ["relay"], **off)
            await until(lambda: fourth.links.linked(), "a link")
            relayed = site.running[0].member
            await until(lambda: relayed.counts["unsigned announcement"], "a refusal")
            assert fourth.node not in relayed.database.entries

    uvloop.run(test())
