"""Signatures for tests: a key is the member's id, and nobody looks at another's."""

from hashlib import sha256

from holdfast_federation.core.frames import Announcement, Voucher
from holdfast_federation.core.signing import statement


class TestSigning:
    __test__ = False

    def __init__(self, node: bytes, is_required: bool = True) -> None:
        self.certificate = node
        self.is_required = is_required

    def sign(self, statement: bytes) -> bytes:
        return sha256(self.certificate + statement).digest()

    def verifies(
        self, origin: bytes, certificate: bytes, signature: bytes, statement: bytes
    ) -> bool:
        return origin == certificate and signature == sha256(certificate + statement).digest()


def voucher(news: Announcement, filters: set[str], signer: bytes | None = None) -> Voucher:
    """`signer`: another one than the origin."""
    node = signer or news.origin
    signature = TestSigning(node).sign(statement(news, filters))
    return Voucher(news.origin, news.epoch, news.version, 0.0, node, signature)
