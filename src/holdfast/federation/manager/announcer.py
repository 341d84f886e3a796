"""Announcements of neighbours to members of the published protocol, repeated until received.

A member that reports has received one when its report contains the link. For any other member the
manager sees only that its broker accepts the announcement. With QoS 2 many brokers cannot say
whether there is a subscriber, so the announcement is sent TELLINGS times. A member that was away
then joins again and receives its neighbours. The pauses between attempts grow. A removed member
receives nothing.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from holdfast.federation.manager.brokers import Brokers
from holdfast.federation.manager.graph.graph import Link
from holdfast.federation.manager.messages import Report
from holdfast.federation.manager.state.federation_state import Member, PendingAnnouncement

PAUSE_FIRST_S: Final = 1.0
"""The seconds before the second attempt."""
PAUSE_MAX_S: Final = 60.0
"""The most seconds between two attempts."""
TELLINGS: Final = 3
"""The number of times that the broker of a member without reports must accept an announcement."""
AT_ONCE_MAX: Final = 16
"""The most members that receive announcements at the same time."""


def is_confirmed(announcement: PendingAnnouncement, report: Report) -> bool:
    """True if the member's report shows that it has received the announcement."""
    is_linked = any(link.peer == announcement.about for link in report.links)
    return is_linked == (announcement.action == "NEW")


@dataclass
class _Entry:
    """The attempts of one announcement so far."""

    announcement: PendingAnnouncement
    due: float
    pause_s: float
    delivered: int = 0


class Schedule:
    """The times at which announcements are due. It is pure: the caller passes the time."""

    def __init__(self) -> None:
        self._entries: dict[Link, _Entry] = {}

    def due(self, wanted: dict[Link, PendingAnnouncement], now: float) -> list[PendingAnnouncement]:
        """Returns the announcements to send now, ordered by member, then by neighbour."""
        self._entries = {
            key: entry
            for key, entry in self._entries.items()
            if wanted.get(key) == entry.announcement
        }
        return [
            wanted[key]
            for key in sorted(wanted)
            if key not in self._entries or self._entries[key].due <= now
        ]

    def sent(self, announcement: PendingAnnouncement, is_taken: bool, now: float) -> bool:
        """Records an attempt and returns whether the broker has accepted the announcement often
        enough for a member without reports."""
        key = (announcement.receiver, announcement.about)
        entry = self._entries.get(key)
        if entry is None or entry.announcement != announcement:
            entry = self._entries[key] = _Entry(announcement, now, PAUSE_FIRST_S / 2)
        entry.pause_s = min(entry.pause_s * 2, PAUSE_MAX_S)
        entry.due = now + entry.pause_s
        entry.delivered += is_taken
        return entry.delivered >= TELLINGS

    def timer(self) -> float | None:
        return min((entry.due for entry in self._entries.values()), default=None)


async def announce_all(
    brokers: Brokers, receivers: dict[int, Member], due: list[PendingAnnouncement]
) -> list[PendingAnnouncement]:
    """Sends announcements, each member's in order, and returns those that its broker accepted.

    It takes as long as the slowest member, whose announcements each take at most the timeout of
    `brokers`.
    """
    by_receiver: dict[int, list[PendingAnnouncement]] = {}
    for each in due:
        by_receiver.setdefault(each.receiver, []).append(each)
    told: list[PendingAnnouncement] = []
    slots = asyncio.Semaphore(AT_ONCE_MAX)

    async def announce(receiver: int, announcements: list[PendingAnnouncement]) -> None:
        async with slots:
            for announcement in announcements:
                member = receivers[receiver]
                if not await brokers.announce(member.ip, announcement, member.is_vouched):
                    return
                told.append(announcement)

    await asyncio.gather(
        *(announce(each, announcements) for each, announcements in by_receiver.items())
    )
    return told
