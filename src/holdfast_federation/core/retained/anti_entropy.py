"""Compares retained messages between members: each pulls the versions that it lacks.

A member sends another one the hashes of what they share:

- when it begins to share more with it,
- when the other is reachable again, or has restarted,
- otherwise one member after the other, every `retained_check_s`.

A member with other hashes requests the newer versions, bucket by bucket and page by page. It
requests those of its own new filters at once, from the nearest member that announces them. One
request is open at a time. A later comparison finds what gets lost.

Without wall time this member takes no part: it relays the frames of others and ignores them.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from holdfast.protocol.topics.names import is_shared
from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import Message
from holdfast_federation.core.frames import (
    FILTERS_MAX,
    RETAINED_PAGE_BYTES,
    RETAINED_PAGE_MAX,
    Clock,
    Data,
    Retained,
    RetainedDigest,
    RetainedMessage,
    RetainedRequest,
)
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.forwarding import FrameForwarder, Passing
from holdfast_federation.core.retained.clock import TOLD_S, HybridClock
from holdfast_federation.core.retained.replication import RetainedReplication
from holdfast_federation.core.retained.store import RetainedStore
from holdfast_federation.core.routing.interest import RemoteInterest
from holdfast_federation.core.routing.link_state import LinkStateChange
from holdfast_federation.core.routing.routes import Routes

NEVER: Final = float("inf")
PULLS_MAX: Final = 4096
"""The most waiting pulls. A later comparison finds the others again."""
FILTER_PULLS_MAX: Final = 64
"""The most pulls of one change of interest. With more filters the comparisons do it."""
NOTICE_S: Final = 0.3
"""The seconds from a change to the comparison after it, so that announcements arrive first."""
DIGEST_EVERY_S: Final = 1.0
"""The least seconds between two comparisons with the same member."""


class Pull(NamedTuple):
    """A request to make: the newer versions of a filter, or of a bucket, at a peer."""

    peer: bytes
    filter: str
    bucket: int | None


class _Open:
    """The request that waits for its response."""

    def __init__(self, pull: Pull) -> None:
        self.pull = pull
        self.after = ""
        self.end_topic: str | None = None
        self.number = 0
        self.requests = 0
        self.request_at = 0.0


class AntiEntropy:
    """The comparisons and requests of this member.

    Invariant: two members that share a topic end with the same version of it, if frames between
    them arrive from time to time. Neither a lost request nor a lost page needs an exception,
    because the hashes differ until both have the newest version.
    """

    def __init__(
        self,
        context: MemberContext,
        store: RetainedStore,
        retaining: RetainedReplication,
        interest: RemoteInterest,
        routes: Routes,
        forwarding: FrameForwarder,
        now: float,
    ) -> None:
        self._own = context.node
        self._config = context.config
        self._store = store
        self._retaining = retaining
        self._interest = interest
        self._routes = routes
        self._forwarding = forwarding
        self._number = 0
        self._open: _Open | None = None
        self._pulls: deque[Pull] = deque()
        # By peer: the hashes that it sent last, by bucket.
        self._digests: dict[bytes, dict[int, int]] = {}
        self._due: dict[bytes, float] = {}
        self._digest_sent_at: dict[bytes, float] = {}
        self._reached: set[bytes] = set()
        self._review_at = NEVER
        self._check_at = now + context.config.retained_check_s
        self._checked = b""

    # Events

    def add_filters(self, filters: Iterable[str], now: float) -> None:
        """Requests what matches the filters that this member announces from now on."""
        plain = [filter for filter in filters if not is_shared(filter)]
        self._store.review(plain, now)
        for filter in plain if len(plain) <= FILTER_PULLS_MAX else ():
            nearest = self._nearest(filter)
            if nearest is not None:
                self._enqueue(Pull(nearest, filter, None))
        self._continue(now)

    def remove_filters(self, filters: Iterable[str], now: float) -> None:
        """Stops sharing what only these filters of this member matched."""
        self._store.review([filter for filter in filters if not is_shared(filter)], now)

    def peers_changed(self, filters: Iterable[str], now: float) -> None:
        """Compares with the members that share more since other members changed their filters."""
        plain = [filter for filter in filters if not is_shared(filter)]
        for peer in self._store.review(plain, now):
            self._send_digest(peer, now + NOTICE_S)

    def found(self, topic: str, now: float) -> None:
        """Compares a topic that is here from now on. No publication carries it to the others."""
        for peer in self._store.sharing(topic):
            self._send_digest(peer, now + NOTICE_S)

    def graph_changed(self, now: float) -> None:
        """Looks for members that have become reachable, after NOTICE_S."""
        self._review_at = min(self._review_at, now + NOTICE_S)

    def restarted(self, peer: bytes, now: float) -> None:
        """Compares with a member that has restarted."""
        self._send_digest(peer, now + NOTICE_S)

    def peer_down(self, peer: bytes) -> None:
        """Drops what is known of the comparison with a member."""
        self._digests.pop(peer, None)
        self._due.pop(peer, None)
        self._digest_sent_at.pop(peer, None)

    # Frames

    def handle_digest(self, frame: RetainedDigest, now: float) -> None:
        """Requests the buckets whose hashes differ."""
        theirs = dict(frame.buckets)
        self._digests[frame.source] = theirs
        ours = self._store.vector(frame.source)
        for bucket in sorted(ours.keys() | theirs.keys()):
            if ours.get(bucket) != theirs.get(bucket):
                self._enqueue(Pull(frame.source, "#", bucket))
        self._continue(now)

    def handle_request(self, frame: RetainedRequest, now: float) -> None:
        """Sends a page of the versions that are newer than those the requester has."""
        known = dict(frame.known)
        if frame.bucket is None:
            found = self._store.matching(frame.filter, frame.after)
        else:
            found = self._store.shared(frame.source, frame.bucket, frame.after, frame.end_topic)
            if any(self._is_older(topic, version) for topic, version in frame.known):
                self._enqueue(Pull(frame.source, "#", frame.bucket))
        page: list[RetainedMessage] = []
        size = 0
        upto = None
        for message in found:
            if frame.end_topic is not None and message.topic > frame.end_topic:
                break
            theirs = known.get(message.topic)
            if theirs is not None and theirs >= message.version:
                continue
            if page and (
                len(page) == RETAINED_PAGE_MAX or size + message.size > RETAINED_PAGE_BYTES
            ):
                upto = page[-1].topic
                break
            page.append(message)
            size += message.size
        self._forwarding.send_on(
            Retained(self._own, frame.source, 0, frame.number, page, upto), None, now
        )
        self._continue(now)

    def handle_retained(self, frame: Retained, now: float) -> None:
        """Takes a page of versions, sends back newer ones, and requests the next page."""
        newer: list[RetainedMessage] = []
        for message in frame.messages:
            ours = self._retaining.merge(message, now)
            if ours is not None:
                newer.append(ours)
        for page in _pages(newer):
            self._forwarding.send_on(Retained(self._own, frame.source, 0, 0, page, None), None, now)
        asked = self._open
        if asked is None or frame.number != asked.number or frame.source != asked.pull.peer:
            return
        asked.requests = 0
        if frame.end_topic is not None and frame.end_topic > asked.after:
            asked.after = frame.end_topic
            self._request(asked, now)
        elif asked.end_topic is not None:
            asked.after = asked.end_topic
            self._request(asked, now)
        else:
            self._open = None
            self._continue(now)

    # Time

    def timer(self) -> float:
        times = [self._review_at, self._check_at, *self._due.values()]
        if self._open is not None:
            times.append(self._open.request_at)
        return min(times)

    def handle_timers(self, now: float) -> None:
        if now >= self._review_at:
            self._find_reachable(now)
        if now >= self._check_at:
            self._check_at = now + self._config.retained_check_s
            self._check(now)
        for peer in sorted(peer for peer, at in self._due.items() if at <= now):
            del self._due[peer]
            self._compare(peer, now)
        if self._open is not None and now >= self._open.request_at:
            if self._open.requests < self._config.retained_requests:
                self._request(self._open, now)
            else:
                self._open = None
                self._continue(now)

    # Comparisons

    def _send_digest(self, peer: bytes, at: float) -> None:
        """Schedules a comparison with the member."""
        at = max(at, self._digest_sent_at.get(peer, -NEVER) + DIGEST_EVERY_S)
        self._due[peer] = min(at, self._due.get(peer, NEVER))

    def _find_reachable(self, now: float) -> None:
        """Compares with the members that are reachable since the last call."""
        self._review_at = NEVER
        reached = {peer for peer in self._store.peers() if self._forwarding.can_reach(peer)}
        for peer in reached - self._reached:
            self._send_digest(peer, now)
        self._reached = reached

    def _check(self, now: float) -> None:
        """Compares with the next member in order of ids."""
        peers = self._store.peers()
        later = [peer for peer in peers if peer > self._checked]
        if peers:
            self._checked = (later or peers)[0]
            self._send_digest(self._checked, now)

    def _compare(self, peer: bytes, now: float) -> None:
        """Sends the hashes of what is shared with the member."""
        vector = self._store.vector(peer)
        # Without shared messages there is nothing to compare here. If the member has some, it sends
        # its own hashes.
        if vector and self._forwarding.can_reach(peer):
            self._digest_sent_at[peer] = now
            self._forwarding.send_on(
                RetainedDigest(self._own, peer, 0, sorted(vector.items())), None, now
            )

    # Requests

    def _enqueue(self, pull: Pull) -> None:
        if pull not in self._pulls and len(self._pulls) < PULLS_MAX:
            self._pulls.append(pull)

    def _continue(self, now: float) -> None:
        while self._open is None and self._pulls:
            pull = self._pulls.popleft()
            if self._forwarding.can_reach(pull.peer) and not self._is_alike(pull):
                self._open = _Open(pull)
                self._request(self._open, now)

    def _is_alike(self, pull: Pull) -> bool:
        """True if the hashes agree by now, because other members had the same versions."""
        if pull.bucket is None or pull.peer not in self._digests:
            return False
        said = self._digests[pull.peer].get(pull.bucket)
        return said == self._store.vector(pull.peer).get(pull.bucket)

    def _request(self, asked: _Open, now: float) -> None:
        pull = asked.pull
        self._number += 1
        asked.number = self._number
        asked.requests += 1
        asked.request_at = now + self._config.retained_request_s
        asked.end_topic = None
        known: list[RetainedMessage] = []
        if pull.bucket is not None:
            known = self._store.shared(pull.peer, pull.bucket, asked.after, None)
            if len(known) > FILTERS_MAX:
                del known[FILTERS_MAX:]
                asked.end_topic = known[-1].topic
        request = RetainedRequest(
            self._own,
            pull.peer,
            0,
            asked.number,
            pull.filter,
            pull.bucket,
            asked.after,
            asked.end_topic,
            [(message.topic, message.version) for message in known],
        )
        self._forwarding.send_on(request, None, now)

    def _is_older(self, topic: str, version: tuple[int, bytes, int, int]) -> bool:
        """True if the version here is older, or missing although it is wanted."""
        held = self._store.get(topic)
        return held.version < version if held is not None else self._store.is_wanted(topic)

    def _nearest(self, filter: str) -> bytes | None:
        """Returns the nearest member whose filters cover the given one, or None.

        Several filters of one member may look like one that covers it. What that member lacks comes
        from the others.
        """
        covering = [set(self._interest.members(name)) for name in witnesses(filter)]
        found = []
        for node in set.intersection(*covering):
            distance = self._routes.distance(node)
            if node != self._own and distance is not None and self._forwarding.can_reach(node):
                found.append((distance, node))
        return min(found)[1] if found else None


WITNESS_LEVELS: Final = 16
"""The number of levels of the longer witness."""


def witnesses(filter: str) -> list[str]:
    """Returns topic names that a filter matches only if it covers the given filter. Their levels
    occur in no topic. A filter of more than 16 `+` counts as `#`."""
    levels = ["\0" if level == "+" else level for level in filter.split("/")]
    if levels[-1] != "#":
        return ["/".join(levels)]
    above = levels[:-1]
    return ["/".join(above or ["\0"]), "/".join(above + ["\0"] * WITNESS_LEVELS)]


def _pages(messages: list[RetainedMessage]) -> Iterable[list[RetainedMessage]]:
    """Yields the messages in pages that are bounded in number and bytes."""
    page: list[RetainedMessage] = []
    size = 0
    for message in messages:
        if page and (len(page) == RETAINED_PAGE_MAX or size + message.size > RETAINED_PAGE_BYTES):
            yield page
            page, size = [], 0
        page.append(message)
        size += message.size
    if page:
        yield page


CLOCK_EVERY_S: Final = 600.0
"""The seconds between two CLOCK frames to the linked members."""


class RetainedMessages:
    """The store, the clock, the replication and the comparison of one member together."""

    def __init__(
        self,
        context: MemberContext,
        wall_s: float | None,
        remote: RemoteInterest,
        routes: Routes,
        forwarding: FrameForwarder,
        now: float,
    ) -> None:
        self._own = context.node
        self._counts = context.counts
        self.is_on = wall_s is not None
        self.store = RetainedStore(context, remote.members)
        self.clock = HybridClock(wall_s or 0.0, now)
        self._retaining = RetainedReplication(context, self.store, self.clock)
        self._digest_sent_at = now
        self._own_wall_s = (wall_s or 0.0) - now
        self._reconciling = AntiEntropy(
            context, self.store, self._retaining, remote, routes, forwarding, now
        )

    def load(self, stored: Iterable[bytes], now: float) -> None:
        """Loads the stored messages. Raises BadFrame or BadEntry when they are malformed."""
        if self.is_on:
            self._retaining.load(list(stored), now)

    def set_wall(self, wall_s: float, now: float) -> bool:
        """Sets the wall clock. Returns True if the linked members must receive it now."""
        jumped_s = abs(wall_s - now - self._own_wall_s)
        self._own_wall_s = wall_s - now
        for topic in self._retaining.set_wall(wall_s, now):
            self._reconciling.found(topic, now)
        if jumped_s <= TOLD_S and now - self._digest_sent_at < CLOCK_EVERY_S:
            return False
        self._digest_sent_at = now
        return True

    def own_clock(self, now: float) -> Clock | None:
        """Returns the CLOCK frame for the linked members, or None without wall time."""
        return Clock(now + self._own_wall_s) if self.is_on else None

    def peer_clock(self, peer: bytes, frame: Clock, now: float) -> None:
        if self.is_on:
            for topic in self._retaining.peer_clock(peer, frame.wall_s, now):
                self._reconciling.found(topic, now)

    # Publications

    def publish(self, id: MessageId, message: Message, now: float) -> int:
        """Accepts a publication of a client here. Returns its stamp, or 0 without one."""
        return self._retaining.publish(id, message, now) if self.is_on else 0

    def broker_has(self, id: MessageId, message: Message, now: float) -> None:
        if self.is_on and self._retaining.broker_has(id, message, now):
            self._reconciling.found(message.topic, now)

    def is_newest(self, data: Data, now: float) -> bool:
        return not self.is_on or self._retaining.is_newest(data, now)

    def delivered(self, data: Data, now: float) -> None:
        if self.is_on:
            self._retaining.delivered(data, now)

    def missed(self, data: Data, now: float) -> None:
        if self.is_on and data.is_retained and data.stamp:
            self._retaining.missed(data, now)

    # Others

    def changed(self, change: LinkStateChange, now: float) -> None:
        """Handles a change of the filters that a member announces. Routing applied it before."""
        if not self.is_on:
            return
        if change.node != self._own:
            self._reconciling.peers_changed([*change.added, *change.removed], now)
        else:
            self._reconciling.remove_filters(change.removed, now)
            self._reconciling.add_filters(change.added, now)

    def graph_changed(self, now: float) -> None:
        if self.is_on:
            self._reconciling.graph_changed(now)

    def restarted(self, node: bytes, now: float) -> None:
        if self.is_on:
            self._reconciling.restarted(node, now)

    def peer_down(self, node: bytes) -> None:
        self._reconciling.peer_down(node)

    def handle(self, frame: Passing, now: float) -> None:
        if not self.is_on:
            self._counts["retained off"] += 1
        elif isinstance(frame, Retained):
            self._reconciling.handle_retained(frame, now)
        elif isinstance(frame, RetainedDigest):
            self._reconciling.handle_digest(frame, now)
        else:
            self._reconciling.handle_request(frame, now)

    # Time

    def timer(self) -> float:
        return self._reconciling.timer() if self.is_on else float("inf")

    def handle_timers(self, now: float) -> None:
        if self.is_on:
            self._reconciling.handle_timers(now)

    def tidy(self, now: float) -> None:
        if self.is_on:
            self._retaining.tidy(now)
