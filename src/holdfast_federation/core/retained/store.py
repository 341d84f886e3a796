"""Stores a member's retained messages: those that its own clients published, and those that match
filters that it announces.

Two members *share* a message when both announce a filter for its topic, or when one does and the
other is its origin. They should have the same version of it, and a few hashes show whether they do.
The announcements alone decide which topics two members share, so both compute the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import Final
from zlib import crc32

from holdfast.protocol.topics.retained import RetainedTrie
from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import DeleteRetained, StoreRetained
from holdfast_federation.core.frames import BUCKETS, Retained, RetainedMessage, encode
from holdfast_federation.core.retained.clock import Version

NOBODY: Final = bytes(16)
"""A member id that no member has."""
SCAN_PAGE: Final = 256
"""The number of topics between two steps of a scan."""
ENDINGS_SPARE: Final = 1024
"""The number of outdated entries of `_endings` that is always allowed."""


@dataclass(slots=True, eq=False)
class RetainedEntry:
    """A stored message with its hash, and the members that share it."""

    message: RetainedMessage
    bucket: int
    hash: int
    shared_with: tuple[bytes, ...] = ()


class RetainedStore:
    """The stored messages, and per peer and bucket the combined hash of the shared ones.

    Invariant: a vector is the exclusive or of the hashes of the messages that are shared with the
    peer in that bucket. Two members with equal vectors have equal versions, except with probability
    2^-63 per bucket. A change costs one operation per sharing member, however many messages there
    are.
    """

    def __init__(
        self,
        context: MemberContext,
        members: Callable[[str], tuple[bytes, ...]],
    ) -> None:
        """`members`: returns the members that announce a filter for a topic, this one included."""
        self._own = context.node
        self._config = context.config
        self._members = members
        self._effects = context.effects
        self._trie: RetainedTrie[RetainedEntry] = RetainedTrie()
        self._bytes = 0
        # Per bucket: by peer and topic, the messages that are shared with the peer.
        self._shared: list[dict[bytes, dict[str, RetainedEntry]]] = [{} for _ in range(BUCKETS)]
        # By peer and bucket: the combined hash of the shared messages.
        self._vectors: dict[bytes, dict[int, int]] = {}
        # A heap of (wall time of expiry, topic, version).
        self._endings: list[tuple[int, str, Version]] = []
        # Topics that no filter of this member matches, with the time since when, the oldest first.
        self._unwanted: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._trie)

    def get(self, topic: str) -> RetainedMessage | None:
        held = self._entry(topic)
        return held.message if held is not None else None

    def is_wanted(self, topic: str) -> bool:
        """True if this member announces a filter for the topic."""
        return self._own in self._members(topic)

    def put(self, message: RetainedMessage, now: float) -> bool:
        """Replaces the version of a topic. Returns False if there is no room for another topic."""
        held = self._entry(message.topic)
        size = self._bytes + message.size - (held.message.size if held is not None else 0)
        if held is None and len(self._trie) >= self._config.retained_messages_max:
            return False
        if size > self._config.retained_bytes_max:
            return False
        if held is not None:
            self._unshare(message.topic, held)
        held = RetainedEntry(message, bucket_of(message.topic), _hash(message))
        self._bytes = size
        self._trie.set(message.topic, held)
        self._set_sharers(message.topic, held, now)
        ends_us = self.ends_us(message)
        if ends_us is not None:
            heappush(self._endings, (ends_us, message.topic, message.version))
            self._bound_endings()
        return True

    def store(self, message: RetainedMessage) -> None:
        """Makes the message durable."""
        frame = Retained(self._own, NOBODY, 0, 0, [message], None)
        self._effects.append(StoreRetained(message.topic, encode(frame)))

    def remove(self, topic: str) -> None:
        """Removes the version of a topic, here and on disk."""
        held = self._trie.remove(topic)
        if isinstance(held, RetainedEntry):
            self._unshare(topic, held)
            self._bytes -= held.message.size
            assert self._bytes >= 0, "fewer bytes are retained than none"
            self._unwanted.pop(topic, None)
            self._effects.append(DeleteRetained(topic))

    def ends_us(self, message: RetainedMessage) -> int | None:
        """Returns the wall time at which a tombstone is removed or a message expires, or None."""
        if not message.payload:
            return message.version[0] + int(self._config.tombstone_s * 1e6)
        return message.expires_us

    def tidy(self, now: float, wall_us: int) -> list[RetainedMessage]:
        """Removes what has expired, and what others published and this member has not wanted for
        `unwanted_s`. Returns the latter."""
        while self._endings and self._endings[0][0] <= wall_us:
            _, topic, version = heappop(self._endings)
            held = self._entry(topic)
            if held is not None and held.message.version == version:
                self.remove(topic)
        gone = []
        while self._unwanted:
            topic, since = next(iter(self._unwanted.items()))
            if now - since < self._config.unwanted_s:
                break
            held = self._entry(topic)
            assert held is not None
            gone.append(held.message)
            self.remove(topic)
        return gone

    def review(self, filters: Iterable[str], now: float) -> set[bytes]:
        """Computes the sharing members again for topics of filters that a member has added or
        removed. Returns the members that share more than before."""
        more: set[bytes] = set()
        for filter in filters:
            for topic, held in self._matching(filter):
                before = set(held.shared_with)
                self._unshare(topic, held)
                self._set_sharers(topic, held, now)
                more.update(set(held.shared_with) - before)
        return more

    def sharing(self, topic: str) -> list[bytes]:
        """Returns the members that share the topic's version."""
        held = self._entry(topic)
        return list(held.shared_with) if held is not None else []

    def peers(self) -> list[bytes]:
        """Returns the members that share anything, in order of ids."""
        return sorted(self._vectors)

    def vector(self, peer: bytes) -> dict[int, int]:
        """Returns the hashes of what the member shares, by bucket."""
        return self._vectors.get(peer, {})

    def shared(
        self, peer: bytes, bucket: int, after: str, upto: str | None
    ) -> list[RetainedMessage]:
        """Returns what the member shares of a bucket, with topics from `after` (exclusive) to
        `upto`, in order of topics."""
        topics = self._shared[bucket].get(peer, {})
        return [
            topics[topic].message
            for topic in sorted(topics)
            if topic > after and (upto is None or topic <= upto)
        ]

    def matching(self, filter: str, after: str) -> Iterable[RetainedMessage]:
        """Returns the messages that match the filter, with topics after `after`, in order of
        topics."""
        return (held.message for topic, held in self._matching(filter, after) if topic > after)

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two inputs."""
        entries = self._trie.entries
        assert self._bytes == sum(held.message.size for held in entries.values())
        vectors: dict[bytes, dict[int, int]] = {}
        for topic, held in entries.items():
            assert held.message.topic == topic, "a version under another topic"
            for peer in held.shared_with:
                buckets = vectors.setdefault(peer, {})
                buckets[held.bucket] = buckets.get(held.bucket, 0) ^ held.hash
        for peer, buckets in vectors.items():
            for bucket, value in buckets.items():
                assert self._vectors.get(peer, {}).get(bucket, 0) == value, "a peer's vector"
        assert self._unwanted.keys() <= entries.keys(), "an unwanted topic that is not here"

    def _bound_endings(self) -> None:
        """Removes the entries of replaced versions from the heap when they are the majority."""
        if len(self._endings) <= 2 * len(self._trie) + ENDINGS_SPARE:
            return
        current = []
        for ending in self._endings:
            held = self._entry(ending[1])
            if held is not None and held.message.version == ending[2]:
                current.append(ending)
        heapify(current)
        self._endings = current

    def _entry(self, topic: str) -> RetainedEntry | None:
        held = self._trie.get(topic)
        return held if isinstance(held, RetainedEntry) else None

    def _matching(self, filter: str, after: str = "") -> Iterable[tuple[str, RetainedEntry]]:
        scan = self._trie.scan(filter, after)
        while not scan.done:
            yield from scan.next(SCAN_PAGE)

    def _set_sharers(self, topic: str, held: RetainedEntry, now: float) -> None:
        members = set(self._members(topic))
        origin = held.message.version[1]
        is_wanted = self._own in members
        if is_wanted or origin == self._own:
            members.add(origin)
            members.discard(self._own)
            held.shared_with = tuple(sorted(members))
            self._unwanted.pop(topic, None)
        else:
            held.shared_with = ()
            self._unwanted.setdefault(topic, now)
        for peer in held.shared_with:
            self._shared[held.bucket].setdefault(peer, {})[topic] = held
            self._add(peer, held)

    def _unshare(self, topic: str, held: RetainedEntry) -> None:
        for peer in held.shared_with:
            topics = self._shared[held.bucket][peer]
            del topics[topic]
            if not topics:
                del self._shared[held.bucket][peer]
            self._add(peer, held)

    def _add(self, peer: bytes, held: RetainedEntry) -> None:
        """Adds the hash by exclusive or. Adding it again removes it."""
        vector = self._vectors.setdefault(peer, {})
        value = vector.pop(held.bucket, 0) ^ held.hash
        if value:
            vector[held.bucket] = value
        elif not vector:
            del self._vectors[peer]


def bucket_of(topic: str) -> int:
    return crc32(topic.encode()) % BUCKETS


def _hash(message: RetainedMessage) -> int:
    """Returns the hash of a version; never 0."""
    stamp, node, epoch, sequence = message.version
    text = b"%b%d.%d.%d %b" % (node, stamp, epoch, sequence, message.topic.encode())
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1 | 1
