"""Announcements that nobody but their member can make.

A signature is of the member's state in one version, not of a frame: epoch, version, links, address,
whether it is leaving, and all its filters. So a change and the whole have the same signature, and
members on the way may cut the whole into other chunks.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Protocol

from holdfast.federation.core.frames import Announcement


class AnnouncementKeys(Protocol):
    """The key of this member, and the authority of all."""

    @property
    def certificate(self) -> bytes:
        """Of this member, with those in between, PEM."""

    @property
    def is_required(self) -> bool:
        """Is nothing unsigned believed?"""

    def sign(self, statement: bytes) -> bytes: ...

    def verifies(
        self, origin: bytes, certificate: bytes, signature: bytes, statement: bytes
    ) -> bool:
        """Is it the signature of the member `origin`, by what the federation's authority says?"""


def statement(news: Announcement, filters: Iterable[str]) -> bytes:
    """Every part has its length, so no two states have the same statement."""
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
