"""What every member said of itself last: its links, its address, its filters.

Of each member the highest (epoch, version) counts, however announcements arrive. A version that was
not heard again for `expiry_s` goes: members repeat theirs in half that time. What comes as a change
is applied to exactly the version it names; else the whole has to be asked for.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from holdfast.federation.frames import FILTERS_MAX, MEMBERS_MAX, Announcement

REFRESH_S: Final = 1800.0
EXPIRY_S: Final = 2 * REFRESH_S
FILTERS_KEPT_MAX: Final = 1 << 20
"""Of all members together; who announces more is not heard."""


class Verdict(enum.Enum):
    NEWS = enum.auto()
    """Applied, to be passed on."""
    OLD = enum.auto()
    PART = enum.auto()
    """A chunk; the others are awaited."""
    GAP = enum.auto()
    """A change of a version that we do not have."""
    FULL = enum.auto()
    """Of a member too many, or of too many filters."""


@dataclass(slots=True)
class Entry:
    origin: bytes
    epoch: int
    version: int
    links: frozenset[bytes]
    address: str
    is_leaving: bool
    filters: set[str]
    heard_at: float

    @property
    def key(self) -> tuple[int, int]:
        return (self.epoch, self.version)


@dataclass(frozen=True, slots=True)
class Change:
    """Of the filters of one member."""

    node: bytes
    added: Iterable[str]
    removed: Iterable[str]


@dataclass(slots=True)
class _Partial:
    key: tuple[int, int]
    chunks: dict[int, Announcement] = field(default_factory=dict)


class LinkStateDatabase:
    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        # Changes of the graph; of anything: the digest does.
        self.graph_version = 0
        # Of filters; taken by whoever keeps the interest.
        self.changes: list[Change] = []
        self._partials: dict[bytes, _Partial] = {}
        self._digest = 0
        self._filters = 0
        self._part_filters = 0

    @property
    def digest(self) -> bytes:
        """The same in two members, as good as certainly, exactly when their databases are."""
        return self._digest.to_bytes(8, "big")

    def apply(self, news: Announcement, now: float, is_own: bool = False) -> Verdict:
        entry = self.entries.get(news.origin)
        key = (news.epoch, news.version)
        if entry is not None and key <= entry.key:
            return Verdict.OLD
        if not is_own and self._is_full(news):
            return Verdict.FULL
        if news.base:
            if entry is None or entry.key != (news.epoch, news.base):
                return Verdict.GAP
            added, removed = set(news.added), set(news.removed)
            filters = (entry.filters - removed) | added
        else:
            whole = self._assembled(news)
            if whole is None:
                return Verdict.PART
            filters = whole
            before = entry.filters if entry is not None else set()
            added, removed = filters - before, before - filters
        self._put(news, filters, now)
        if added or removed:
            self.changes.append(Change(news.origin, added, removed))
        return Verdict.NEWS

    def _is_full(self, news: Announcement) -> bool:
        if news.origin not in self.entries and len(self.entries) >= MEMBERS_MAX:
            return True
        return self._filters + self._part_filters + len(news.added) > FILTERS_KEPT_MAX

    def _assembled(self, news: Announcement) -> set[str] | None:
        """All filters of a version that comes in chunks, once its last chunk is here. Only the
        newest such version of a member is gathered."""
        if news.chunks == 1:
            self._drop_part(news.origin)
            return set(news.added)
        key = (news.epoch, news.version)
        partial = self._partials.get(news.origin)
        if partial is None or partial.key < key:
            if partial is None and len(self._partials) >= MEMBERS_MAX:
                return None
            self._drop_part(news.origin)
            partial = _Partial(key)
            self._partials[news.origin] = partial
        elif partial.key > key:
            return None
        if news.chunk not in partial.chunks:
            partial.chunks[news.chunk] = news
            self._part_filters += len(news.added)
        if len(partial.chunks) < news.chunks:
            return None
        self._drop_part(news.origin)
        return {filter for chunk in partial.chunks.values() for filter in chunk.added}

    def _drop_part(self, origin: bytes) -> None:
        partial = self._partials.pop(origin, None)
        if partial is not None:
            self._part_filters -= sum(len(chunk.added) for chunk in partial.chunks.values())

    def _put(self, news: Announcement, filters: set[str], now: float) -> None:
        links = frozenset(news.links)
        before = self.entries.get(news.origin)
        if before is None or before.links != links:
            self.graph_version += 1
        if before is not None:
            self._digest ^= _hash(before)
        entry = Entry(
            news.origin,
            news.epoch,
            news.version,
            links,
            news.address,
            news.is_leaving,
            filters,
            now,
        )
        self.entries[news.origin] = entry
        self._filters += len(filters) - (len(before.filters) if before is not None else 0)
        self._digest ^= _hash(entry)

    def expire(self, now: float, keep: bytes, expiry_s: float = EXPIRY_S) -> list[bytes]:
        """The members, other than `keep`, that were not heard for too long."""
        gone = [
            entry.origin
            for entry in self.entries.values()
            if now - entry.heard_at >= expiry_s and entry.origin != keep
        ]
        for origin in gone:
            entry = self.entries.pop(origin)
            self._digest ^= _hash(entry)
            self._filters -= len(entry.filters)
            self._drop_part(origin)
            self.graph_version += 1
            if entry.filters:
                self.changes.append(Change(origin, (), entry.filters))
        return gone

    def take_changes(self) -> list[Change]:
        changes, self.changes = self.changes, []
        return changes

    def summary(self) -> list[tuple[bytes, int, int]]:
        return [(entry.origin, entry.epoch, entry.version) for entry in self.entries.values()]

    def newer_than(self, known: Iterable[tuple[bytes, int, int]]) -> list[Entry]:
        theirs = {node: (epoch, version) for node, epoch, version in known}
        return [
            entry
            for entry in self.entries.values()
            if entry.origin not in theirs or entry.key > theirs[entry.origin]
        ]

    def graph(self) -> dict[bytes, list[bytes]]:
        """Neighbours in order of ids, by links that both ends announce."""
        entries = self.entries
        return {
            node: sorted(
                peer for peer in entry.links if peer in entries and node in entries[peer].links
            )
            for node, entry in entries.items()
        }


def announcements(entry: Entry) -> list[Announcement]:
    """All that is known of a member, in as many chunks as its filters need."""
    filters = sorted(entry.filters)
    parts = [filters[at : at + FILTERS_MAX] for at in range(0, len(filters), FILTERS_MAX)] or [[]]
    return [
        Announcement(
            entry.origin,
            entry.epoch,
            entry.version,
            0,
            sorted(entry.links),
            entry.address,
            entry.is_leaving,
            part,
            [],
            number,
            len(parts),
        )
        for number, part in enumerate(parts)
    ]


def _hash(entry: Entry) -> int:
    text = b"%b%d.%d" % (entry.origin, entry.epoch, entry.version)
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
