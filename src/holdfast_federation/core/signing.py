"""Signatures of announcements, so that only the member itself can make them.

A signature covers the member's state in one version, not a frame: epoch, version, links, address,
whether it is leaving, and all its filters. So a change and the complete version have the same
signature, and relaying members may divide the version into other chunks.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Protocol

from holdfast_federation.core.frames import Announcement


class AnnouncementKeys(Protocol):
    """The key of this member and the authority of the federation."""

    @property
    def certificate(self) -> bytes:
        """This member's certificate in PEM, with the intermediate ones."""

    @property
    def is_required(self) -> bool:
        """True: unsigned announcements are rejected."""

    def sign(self, statement: bytes) -> bytes: ...

    def verifies(
        self, origin: bytes, certificate: bytes, signature: bytes, statement: bytes
    ) -> bool:
        """Returns whether the member `origin` made the signature, by a certificate that the
        federation's authority issued."""


def statement(news: Announcement, filters: Iterable[str]) -> bytes:
    """Returns the bytes that a signature covers. Every part of variable length is preceded by its
    length, so no two states have the same statement."""
    digest = sha256()
    for filter in sorted(filters):
        data = filter.encode()
        digest.update(b"%d " % len(data) + data)
    address = news.address.encode()
    links = b"".join(sorted(news.links))
    return b"%b %d %d %d %d %b %d %b %b" % (
        news.origin,
        news.epoch,
        news.version,
        news.is_leaving,
        len(address),
        address,
        len(links),
        links,
        digest.digest(),
    )
