"""Remembers announcements over a member's restarts."""

from collections.abc import Iterable, Sequence

from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.frames import (
    Announcement,
    Announcements,
    InvalidFrame,
    Memory,
    Voucher,
    Vouchers,
    decode,
    encode,
)
from holdfast_federation.core.routing.announcement_frames import (
    Key,
    by_key,
    encode_entries,
    key_of,
)
from holdfast_federation.core.routing.link_state import (
    AnnouncementVerdict,
    LinkStateDatabase,
)


class AnnouncementMemory:
    """The database of announcements as frames for the disk, and its return from there."""

    def __init__(self, context: MemberContext, database: LinkStateDatabase, now: float) -> None:
        self._identity = context.identity
        self._config = context.config
        self._database = database
        self._started_at = now

    def load(self, remembered: Iterable[bytes], now: float, wall_s: float | None) -> None:
        """Loads what `frames` returned in an earlier run. Raises BadFrame."""
        vouchers: dict[Key, Voucher] = {}
        for data in remembered:
            frame = decode(data)
            if isinstance(frame, Vouchers):
                vouchers = by_key(frame)
            elif isinstance(frame, Memory):
                away_s = 0.0 if wall_s is None else max(0.0, wall_s - frame.wall_s)
                self._age(away_s)
                for node, epoch, version in frame.forgotten:
                    if node not in self._database.entries:
                        self._database.note_forgotten(node, (epoch, version))
            elif isinstance(frame, Announcements):
                self._restore(frame.entries, vouchers, now)
                vouchers = {}
            else:
                raise InvalidFrame(
                    "the federation's memory holds what is no announcement: delete it"
                )

    def _restore(
        self, entries: Sequence[Announcement], vouchers: dict[Key, Voucher], now: float
    ) -> None:
        """Loads remembered announcements. They were verified when they were received."""
        for news in entries:
            if news.origin == self._identity.node:
                continue
            if self._database.apply(news, now) is not AnnouncementVerdict.NEWS:
                continue
            voucher = vouchers.get(key_of(news))
            if voucher is not None:
                entry = self._database.entries[news.origin]
                entry.received_at = now - min(voucher.age_s, self._oldest_s())
                entry.voucher = voucher if voucher.signature else None

    def _age(self, away_s: float) -> None:
        for entry in self._database.entries.values():
            if entry.origin != self._identity.node:
                oldest = self._started_at - self._oldest_s()
                entry.received_at = max(min(entry.received_at, oldest), entry.received_at - away_s)

    def _oldest_s(self) -> float:
        """The greatest age of a remembered entry: two refresh intervals remain in any case, because
        the wall clock may have been set. A member that is alive announces twice in that time."""
        return self._config.forget_s - 2 * self._config.refresh_s

    def frames(self, now: float, wall_s: float) -> list[bytes]:
        """Returns the known announcements with their vouchers, and the forgotten members."""
        entries = self._database.entries.values()
        forgotten = [(node, *key) for node, key in self._database.forgotten.items()]
        return [
            *encode_entries(entries, self._identity.node, now, 0.0),
            encode(Memory(wall_s, forgotten)),
        ]
