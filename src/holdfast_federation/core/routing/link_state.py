"""The link-state database: the newest announcement of every member, with its links, address and
filters.

Of each member the highest (epoch, version) counts, in whatever order announcements arrive. A change
applies only to the version that it names. A member that does not have this version requests the
complete announcement.

A member without a newer announcement for `forget_s` is forgotten, and its version is kept as
forgotten. So the old memory of another member does not bring it back. Only a newer version does,
and the member alone can make one.

No member takes the room of others:

- With too many filters, the filters of the member with the most are cut: it counts as interested in
  everything, with its groups. It loses no message, and the others keep their exact filters.
- With too many members, one of those goes that the peer with the most introductions has introduced.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from holdfast.protocol.topics.names import is_shared
from holdfast_federation.core.frames import (
    CHUNKS_MAX,
    FILTERS_MAX,
    MEMBERS_MAX,
    SHARES_MAX,
    Announcement,
    Voucher,
)
from holdfast_federation.core.identity import EPOCH_COUNTED_MAX, EPOCH_STEP_MAX

FORGET_S: Final = 7 * 86_400.0
"""The seconds without a newer announcement after which a member is forgotten."""
FILTERS_KEPT_MAX: Final = 1 << 20
"""The most filters of all members together. Beyond it those of the member with the most are cut."""
PARTS_KEPT_MAX: Final = 1 << 19
"""The most filters of versions that are not complete yet. Beyond it the largest version is dropped.
"""
MEMBER_FILTERS_MAX: Final = FILTERS_MAX * CHUNKS_MAX
"""The most filters of one member. Beyond it they are cut."""


class AnnouncementVerdict(enum.Enum):
    """The result of applying an announcement."""

    NEWS = enum.auto()
    """It is applied, and the caller floods it."""
    OLD = enum.auto()
    """It is not newer than the entry."""
    PART = enum.auto()
    """It is a chunk of a version whose other chunks are missing."""
    GAP = enum.auto()
    """It changes a version that is not here."""
    FULL = enum.auto()
    """There is no room for another member."""
    ABSURD = enum.auto()
    """Its epoch is higher than a member can have counted."""
    FORGED = enum.auto()
    """Its signature is missing or invalid."""


@dataclass(slots=True)
class LinkStateEntry:
    """The state of one member as it last announced it."""

    origin: bytes
    epoch: int
    version: int
    links: frozenset[bytes]
    address: str
    is_leaving: bool
    filters: set[str]
    received_at: float
    source: bytes = b""
    """The peer that introduced the member; empty for this member and for remembered ones."""
    is_cut: bool = False
    """True if `filters` are "#" and its groups, because it had too many."""
    voucher: Voucher | None = None
    """The signature of this version, if it has one."""

    @property
    def key(self) -> tuple[int, int]:
        return (self.epoch, self.version)


@dataclass(frozen=True, slots=True)
class LinkStateChange:
    """A change of the filters of one member."""

    node: bytes
    added: Iterable[str]
    removed: Iterable[str]


@dataclass(slots=True)
class _Partial:
    key: tuple[int, int]
    chunks: dict[int, Announcement] = field(default_factory=dict)

    def size(self) -> int:
        return sum(len(chunk.added) for chunk in self.chunks.values())


class LinkStateDatabase:
    """The entries of all members, with a digest that two members compare.

    Invariant: equal sets of (origin, epoch, version) mean equal graphs and equal filters, except
    where filters were cut. The paths that the members compute alone agree because of it (`routes`).
    """

    def __init__(self, own: bytes = b"") -> None:
        self.entries: dict[bytes, LinkStateEntry] = {}
        # A counter of changes of the graph. The digest shows any other change.
        self.graph_version = 0
        # The changes of filters that `take_changes` has not returned yet.
        self.changes: list[LinkStateChange] = []
        # The epoch and version of forgotten members, the first forgotten first.
        self.forgotten: dict[bytes, tuple[int, int]] = {}
        # Members that were displaced and that `take_displaced` has not returned yet.
        self.displaced: list[bytes] = []
        self._own = own
        # The number of members that each peer has introduced.
        self._introduced: Counter[bytes] = Counter()
        self._partials: dict[bytes, _Partial] = {}
        self._digest = 0
        self._filters = 0
        self._part_filters = 0

    @property
    def digest(self) -> bytes:
        """The digest: equal in two members exactly when their databases are, except with
        probability 2^-64."""
        return self._digest.to_bytes(8, "big")

    def check(self) -> None:
        """Raises `AssertionError` unless the counts and the digest are those of the entries."""
        digest = 0
        introduced: Counter[bytes] = Counter()
        for entry in self.entries.values():
            digest ^= _hash(entry)
            introduced[entry.source] += 1
        assert digest == self._digest, "the digest"
        for source, count in self._introduced.items():
            assert count == introduced[source], "the members that a peer has introduced"
        assert self._filters == sum(len(entry.filters) for entry in self.entries.values())
        assert self._part_filters == sum(each.size() for each in self._partials.values())
        assert not self.entries.keys() & self.forgotten.keys(), "a known member is forgotten"

    def is_news(self, news: Announcement) -> bool:
        """True if the announcement is newer than the entry, and than the forgotten version."""
        key = (news.epoch, news.version)
        entry = self.entries.get(news.origin)
        if entry is not None:
            return key > entry.key
        forgotten = self.forgotten.get(news.origin)
        return forgotten is None or key > forgotten

    def apply(
        self,
        news: Announcement,
        now: float,
        is_own: bool = False,
        source: bytes = b"",
        is_signed: Callable[[set[str]], bool] | None = None,
    ) -> AnnouncementVerdict:
        """Applies an announcement.

        `source`: the peer that sent it. `is_signed`: returns whether the signature covers the
        member's state with these filters; None if no signature is needed.
        """
        if not self.is_news(news):
            return AnnouncementVerdict.OLD
        entry = self.entries.get(news.origin)
        if not is_own:
            if not _is_counted(entry, news):
                return AnnouncementVerdict.ABSURD
            if entry is None and not self._make_room(source):
                return AnnouncementVerdict.FULL
        if news.base:
            if entry is None or entry.key != (news.epoch, news.base):
                return AnnouncementVerdict.GAP
            if entry.is_cut and is_signed is not None:
                return AnnouncementVerdict.GAP
            filters = (entry.filters - set(news.removed)) | set(news.added)
            is_cut = entry.is_cut
        else:
            whole = self._assembled(news)
            if whole is None:
                return AnnouncementVerdict.PART
            filters, is_cut = whole, False
        if is_signed is not None and not is_signed(filters):
            return AnnouncementVerdict.FORGED
        if is_cut or (len(filters) > MEMBER_FILTERS_MAX and not is_own):
            filters, is_cut = _cut(filters), True
        self._store(news, filters, is_cut, source, now)
        self._bound_filters()
        return AnnouncementVerdict.NEWS

    def _make_room(self, source: bytes) -> bool:
        """Makes room for a member that `source` introduces. Returns False if there is none.

        The last member goes that the peer with the most introductions has introduced. That peer
        itself gets no more room. Counter-example without that: one peer invents members until the
        real ones are displaced.
        """
        if len(self.entries) < MEMBERS_MAX:
            return True
        if not self._introduced:
            return False
        greediest = max(self._introduced, key=lambda peer: self._introduced[peer])
        if self._introduced[source] >= self._introduced[greediest]:
            return False
        last = [origin for origin, entry in self.entries.items() if entry.source == greediest][-1]
        self._remove(last)
        self.displaced.append(last)
        return True

    def _bound_filters(self) -> None:
        while self._filters > FILTERS_KEPT_MAX:
            others = (each for each in self.entries.values() if each.origin != self._own)
            largest = max(others, key=lambda each: len(each.filters), default=None)
            if largest is None or len(largest.filters) == 1:
                return
            # It is cut for the second time if it has too many groups. Each of them then counts as a
            # plain subscriber, and may get a message at several members.
            fewer = {"#"} if largest.is_cut else _cut(largest.filters)
            before, largest.filters = largest.filters, fewer
            largest.is_cut = True
            self._changed(largest.origin, before, largest.filters)

    def _changed(self, origin: bytes, before: set[str], after: set[str]) -> None:
        self._filters += len(after) - len(before)
        if before != after:
            self.changes.append(LinkStateChange(origin, after - before, before - after))

    def _assembled(self, news: Announcement) -> set[str] | None:
        """Returns all filters of a version in chunks, or None until its last chunk is here. Only
        the newest incomplete version of a member is kept."""
        if news.chunks == 1:
            self._drop_part(news.origin)
            return set(news.added)
        key = (news.epoch, news.version)
        partial = self._partials.get(news.origin)
        if partial is None or partial.key < key:
            if partial is None and len(self._partials) >= MEMBERS_MAX:
                self._drop_part(next(iter(self._partials)))
            self._drop_part(news.origin)
            partial = _Partial(key)
            self._partials[news.origin] = partial
        elif partial.key > key:
            return None
        if news.chunk not in partial.chunks:
            partial.chunks[news.chunk] = news
            self._part_filters += len(news.added)
            if self._part_filters > PARTS_KEPT_MAX:
                self._drop_part(max(self._partials, key=lambda node: self._partials[node].size()))
        if len(partial.chunks) < news.chunks:
            return None
        self._drop_part(news.origin)
        return {filter for chunk in partial.chunks.values() for filter in chunk.added}

    def _drop_part(self, origin: bytes) -> None:
        partial = self._partials.pop(origin, None)
        if partial is not None:
            self._part_filters -= partial.size()

    def _store(
        self, news: Announcement, filters: set[str], is_cut: bool, source: bytes, now: float
    ) -> None:
        links = frozenset(news.links)
        before = self.entries.get(news.origin)
        if before is None or before.links != links:
            self.graph_version += 1
        if before is not None:
            assert before.key < (news.epoch, news.version), "the version of a member falls"
            self._digest ^= _hash(before)
        elif source:
            self._introduced[source] += 1
        entry = LinkStateEntry(
            news.origin,
            news.epoch,
            news.version,
            links,
            news.address,
            news.is_leaving,
            filters,
            now,
            source if before is None else before.source,
            is_cut,
        )
        self.entries[news.origin] = entry
        self.forgotten.pop(news.origin, None)
        self._digest ^= _hash(entry)
        self._changed(news.origin, set() if before is None else before.filters, filters)

    def expire(self, now: float, keep: bytes, forget_s: float = FORGET_S) -> list[bytes]:
        """Forgets members without a newer announcement for `forget_s`, except `keep`, and returns
        them."""
        gone = [
            entry.origin
            for entry in self.entries.values()
            if now - entry.received_at >= forget_s and entry.origin != keep
        ]
        for origin in gone:
            self.note_forgotten(origin, self.entries[origin].key)
            self._remove(origin)
        return gone

    def note_forgotten(self, origin: bytes, key: tuple[int, int]) -> None:
        """Keeps the version of a forgotten member."""
        self.forgotten.pop(origin, None)
        self.forgotten[origin] = key
        if len(self.forgotten) > MEMBERS_MAX:
            del self.forgotten[next(iter(self.forgotten))]

    def take_displaced(self) -> list[bytes]:
        """Returns the members that were displaced since the last call."""
        displaced, self.displaced = self.displaced, []
        return displaced

    def _remove(self, origin: bytes) -> None:
        entry = self.entries.pop(origin)
        if entry.source:
            self._introduced[entry.source] -= 1
            if not self._introduced[entry.source]:
                del self._introduced[entry.source]
        self._digest ^= _hash(entry)
        self._drop_part(origin)
        self.graph_version += 1
        self._changed(origin, entry.filters, set())

    def take_changes(self) -> list[LinkStateChange]:
        """Returns the changes of filters since the last call."""
        changes, self.changes = self.changes, []
        return changes

    def summary(self) -> list[tuple[bytes, int, int]]:
        """Returns the key of every entry."""
        return [(entry.origin, entry.epoch, entry.version) for entry in self.entries.values()]

    def newer_than(self, known: Iterable[tuple[bytes, int, int]]) -> list[LinkStateEntry]:
        """Returns the entries that are newer than `known`, or missing there."""
        theirs = {node: (epoch, version) for node, epoch, version in known}
        return [
            entry
            for entry in self.entries.values()
            if (entry.origin not in theirs or entry.key > theirs[entry.origin])
            # The signature covers all filters, and this entry has only some of them. Others get it
            # from a member that has not cut it.
            and not (entry.is_cut and entry.voucher is not None)
        ]

    def graph(self) -> dict[bytes, list[bytes]]:
        """Returns the neighbours of each member, in order of ids, by the links that both ends
        announce. A link that one end announces may be gone, or invented."""
        entries = self.entries
        return {
            node: sorted(
                peer for peer in entry.links if peer in entries and node in entries[peer].links
            )
            for node, entry in entries.items()
        }


def announcements(entry: LinkStateEntry) -> list[Announcement]:
    """Returns the complete announcement of a member, in as many chunks as its filters need."""
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


def _is_counted(entry: LinkStateEntry | None, news: Announcement) -> bool:
    """True if the epoch can be a number of starts. Counter-example without that: with a forged
    epoch of 2^62 the member itself could never announce a higher one."""
    known = entry.epoch if entry is not None else EPOCH_COUNTED_MAX
    return news.epoch <= min(known + EPOCH_STEP_MAX, EPOCH_COUNTED_MAX)


def _cut(filters: set[str]) -> set[str]:
    shares = sorted(filter for filter in filters if is_shared(filter))
    return {"#", *shares[:SHARES_MAX]}


def _hash(entry: LinkStateEntry) -> int:
    text = b"%b%d.%d" % (entry.origin, entry.epoch, entry.version)
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
