"""How members come to hold the same of what they share: they compare, and each pulls what it lacks.

A member tells another the hashes of what they share when it begins to share more with it, when it
can reach it again or hears that it was restarted, and else one after the other, every
`retained_check_s`. Who has other hashes asks, bucket by bucket and page by page, for what is newer
there. New filters of its own it asks for at once, at the nearest member that announces them, too.
One question is open at a time; what gets lost is found by a later comparison.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from holdfast.federation.core.context import MemberContext
from holdfast.federation.core.frames import (
    FILTERS_MAX,
    RETAINED_PAGE_BYTES,
    RETAINED_PAGE_MAX,
    Retained,
    RetainedDigest,
    RetainedMessage,
    RetainedRequest,
)
from holdfast.federation.core.messages.forwarding import FrameForwarder
from holdfast.federation.core.retained.replication import RetainedReplication
from holdfast.federation.core.retained.store import RetainedStore
from holdfast.federation.core.routing.interest import RemoteInterest
from holdfast.federation.core.routing.routes import Routes
from holdfast.protocol.topics.names import is_shared

NEVER: Final = float("inf")
PULLS_MAX: Final = 4096
"""Waiting; of what is beyond, a later comparison tells again."""
FILTER_PULLS_MAX: Final = 64
"""Of one change of interest; of more filters, comparisons tell."""
NOTICE_S: Final = 0.3
"""From a change to the comparison that follows: announcements come first."""
DIGEST_EVERY_S: Final = 1.0
"""To the same member."""


class Pull(NamedTuple):
    peer: bytes
    filter: str
    bucket: int | None


class _Open:
    """The question that is asked."""

    def __init__(self, pull: Pull) -> None:
        self.pull = pull
        self.after = ""
        self.end_topic: str | None = None
        self.number = 0
        self.requests = 0
        self.request_at = 0.0


class AntiEntropy:
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
        # What the peers said last that they share with us.
        self._digests: dict[bytes, dict[int, int]] = {}
        self._due: dict[bytes, float] = {}
        self._digest_sent_at: dict[bytes, float] = {}
        self._reached: set[bytes] = set()
        self._review_at = NEVER
        self._check_at = now + context.config.retained_check_s
        self._checked = b""

    # What happens

    def add_filters(self, filters: Iterable[str], now: float) -> None:
        """This member announces further filters."""
        plain = [filter for filter in filters if not is_shared(filter)]
        self._store.review(plain, now)
        for filter in plain if len(plain) <= FILTER_PULLS_MAX else ():
            nearest = self._nearest(filter)
            if nearest is not None:
                self._enqueue(Pull(nearest, filter, None))
        self._continue(now)

    def remove_filters(self, filters: Iterable[str], now: float) -> None:
        self._store.review([filter for filter in filters if not is_shared(filter)], now)

    def peers_changed(self, filters: Iterable[str], now: float) -> None:
        plain = [filter for filter in filters if not is_shared(filter)]
        for peer in self._store.review(plain, now):
            self._send_digest(peer, now + NOTICE_S)

    def found(self, topic: str, now: float) -> None:
        """Held from now on, and no publication that would reach the others by itself."""
        for peer in self._store.sharing(topic):
            self._send_digest(peer, now + NOTICE_S)

    def graph_changed(self, now: float) -> None:
        self._review_at = min(self._review_at, now + NOTICE_S)

    def restarted(self, peer: bytes, now: float) -> None:
        self._send_digest(peer, now + NOTICE_S)

    def peer_down(self, peer: bytes) -> None:
        self._digests.pop(peer, None)
        self._due.pop(peer, None)
        self._digest_sent_at.pop(peer, None)

    # Frames

    def handle_digest(self, frame: RetainedDigest, now: float) -> None:
        theirs = dict(frame.buckets)
        self._digests[frame.source] = theirs
        ours = self._store.vector(frame.source)
        for bucket in sorted(ours.keys() | theirs.keys()):
            if ours.get(bucket) != theirs.get(bucket):
                self._enqueue(Pull(frame.source, "#", bucket))
        self._continue(now)

    def handle_request(self, frame: RetainedRequest, now: float) -> None:
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

    # Comparing

    def _send_digest(self, peer: bytes, at: float) -> None:
        at = max(at, self._digest_sent_at.get(peer, -NEVER) + DIGEST_EVERY_S)
        self._due[peer] = min(at, self._due.get(peer, NEVER))

    def _find_reachable(self, now: float) -> None:
        """Who has come within reach."""
        self._review_at = NEVER
        reached = {peer for peer in self._store.peers() if self._forwarding.can_reach(peer)}
        for peer in reached - self._reached:
            self._send_digest(peer, now)
        self._reached = reached

    def _check(self, now: float) -> None:
        peers = self._store.peers()
        later = [peer for peer in peers if peer > self._checked]
        if peers:
            self._checked = (later or peers)[0]
            self._send_digest(self._checked, now)

    def _compare(self, peer: bytes, now: float) -> None:
        vector = self._store.vector(peer)
        # Who shares nothing that we know of tells us, if there is something.
        if vector and self._forwarding.can_reach(peer):
            self._digest_sent_at[peer] = now
            self._forwarding.send_on(
                RetainedDigest(self._own, peer, 0, sorted(vector.items())), None, now
            )

    # Asking

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
        """By now: others had it, too."""
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
        """What we hold, or should."""
        held = self._store.get(topic)
        return held.version < version if held is not None else self._store.is_wanted(topic)

    def _nearest(self, filter: str) -> bytes | None:
        """Of the members that announce all that the filter matches; one with several filters may
        pass for one of these, and what it lacks comes from others."""
        covering = [set(self._interest.members(name)) for name in witnesses(filter)]
        found = []
        for node in set.intersection(*covering):
            distance = self._routes.distance(node)
            if node != self._own and distance is not None and self._forwarding.can_reach(node):
                found.append((distance, node))
        return min(found)[1] if found else None


WITNESS_LEVELS: Final = 16


def witnesses(filter: str) -> list[str]:
    """Names that a filter matches, all of them, only if it matches all that this one does: their
    levels are in no topic. A filter of more than 16 `+` passes for `#`."""
    levels = ["\0" if level == "+" else level for level in filter.split("/")]
    if levels[-1] != "#":
        return ["/".join(levels)]
    above = levels[:-1]
    return ["/".join(above or ["\0"]), "/".join(above + ["\0"] * WITNESS_LEVELS)]


def _pages(messages: list[RetainedMessage]) -> Iterable[list[RetainedMessage]]:
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
