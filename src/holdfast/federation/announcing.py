"""What this member says of itself, and how news of all spreads.

News goes to every linked peer but the one it came from, gathered for `flood_delay_s`. A digest in
each HELLO finds what went missing: who has another database asks for what is newer there.
"""

from collections.abc import Iterable, Sequence

from holdfast.federation.config import FederationConfig
from holdfast.federation.effects import Effect, IdentityConflict, Send
from holdfast.federation.frames import (
    FILTERS_MAX,
    Announcement,
    AnnouncementRequest,
    Announcements,
    BadFrame,
    decode,
    encode,
)
from holdfast.federation.identity import Identity
from holdfast.federation.interest import LocalInterest
from holdfast.federation.link_state import LinkStateDatabase, Verdict, announcements
from holdfast.federation.links import Links

FRAME_ENTRIES_MAX = 256
FRAME_FILTERS_MAX = 4 * FILTERS_MAX

NEVER = float("inf")


class Announcing:
    def __init__(
        self,
        identity: Identity,
        address: str,
        config: FederationConfig,
        database: LinkStateDatabase,
        links: Links,
        interest: LocalInterest,
        effects: list[Effect],
        now: float,
    ) -> None:
        self._identity = identity
        self._address = address
        self._config = config
        self._database = database
        self._links = links
        self._interest = interest
        self._effects = effects
        self._linked: list[bytes] = []
        self._is_leaving = False
        # News, and the peer it came from.
        self._pending: list[tuple[Announcement, bytes | None]] = []
        self._flush_at = NEVER
        self._links_at = NEVER
        self._interest_at = NEVER
        self._interest_next = now
        self._batch_s = config.interest_batch_s
        self._refresh_at = now + config.refresh_s
        self._asked_at: dict[bytes, float] = {}
        self._announce_all(1, now)

    # Of ourselves

    def set_links(self, linked: list[bytes], now: float) -> None:
        """Links that come or go together are told together."""
        if linked != self._linked and not self._is_leaving:
            self._linked = linked
            self._links_at = min(self._links_at, now + self._config.flood_delay_s)

    def interest_changed(self, now: float) -> None:
        if self._interest_at == NEVER and not self._is_leaving:
            self._interest_at = max(now + self._config.interest_batch_s, self._interest_next)

    def leave(self, now: float) -> None:
        """For good: queues of others for us are given up."""
        self._is_leaving = True
        self._linked = []
        self._links_at = self._interest_at = NEVER
        self._announce_all(self._version() + 1, now)
        self.flush()

    def handle_timers(self, now: float) -> None:
        if now >= self._links_at:
            # It has waited already.
            self._announce([], [], now)
            self._flush_at = now
        if now >= self._interest_at:
            self._announce_interest(now)
        if now >= self._refresh_at:
            self._announce([], [], now)
        if now >= self._flush_at:
            self.flush()

    def timer(self) -> float:
        return min(self._flush_at, self._links_at, self._interest_at, self._refresh_at)

    def _announce_interest(self, now: float) -> None:
        """Changes of at most FILTERS_MAX filters each; the first after a quiet time soon."""
        config = self._config
        self._interest_at = NEVER
        if now >= self._interest_next + config.interest_batch_max_s:
            self._batch_s = config.interest_batch_s
        self._interest_next = now + self._batch_s
        self._batch_s = min(2 * self._batch_s, config.interest_batch_max_s)
        before = self._database.entries[self._identity.node].filters
        wanted = self._interest.announced()
        added, removed = sorted(wanted - before), sorted(before - wanted)
        while added or removed:
            self._announce(added[:FILTERS_MAX], removed[:FILTERS_MAX], now)
            del added[:FILTERS_MAX]
            del removed[:FILTERS_MAX]

    def _announce(self, added: list[str], removed: list[str], now: float) -> None:
        version = self._version()
        self._links_at = NEVER
        self._refresh_at = now + self._config.refresh_s
        self._say(self._own(version + 1, version, added, removed), now)

    def _announce_all(self, version: int, now: float) -> None:
        filters = set() if self._is_leaving else self._interest.announced()
        parts = sorted(filters)
        self._say(self._own(version, 0, parts[:FILTERS_MAX], []), now)
        for at in range(FILTERS_MAX, len(parts), FILTERS_MAX):
            self._announce(parts[at : at + FILTERS_MAX], [], now)

    def _own(self, version: int, base: int, added: list[str], removed: list[str]) -> Announcement:
        return Announcement(
            self._identity.node,
            self._identity.epoch,
            version,
            base,
            self._linked,
            self._address,
            self._is_leaving,
            added,
            removed,
        )

    def _say(self, news: Announcement, now: float) -> None:
        verdict = self._database.apply(news, now, is_own=True)
        assert verdict is Verdict.NEWS
        self._pass_on([news], None, now)

    def _version(self) -> int:
        return self._database.entries[self._identity.node].version

    # Of all

    def handle_news(self, peer: bytes, entries: Sequence[Announcement], now: float) -> list[bytes]:
        """The members whose entries have changed."""
        changed = []
        has_gap = False
        for news in entries:
            if news.origin == self._identity.node:
                self._hear_of_ourselves(news)
                continue
            verdict = self._database.apply(news, now)
            if verdict is Verdict.NEWS:
                changed.append(news.origin)
                whole = [news]
                if news.chunks > 1:
                    whole = announcements(self._database.entries[news.origin])
                self._pass_on(whole, peer, now)
            has_gap = has_gap or verdict is Verdict.GAP
        if has_gap:
            self.request(peer, now)
        return changed

    def recall(self, remembered: Iterable[bytes], now: float) -> None:
        """What `memory` gave in an earlier life. Raises BadFrame."""
        for data in remembered:
            frame = decode(data)
            if not isinstance(frame, Announcements):
                raise BadFrame("the federation's memory holds what is no announcement: delete it")
            for news in frame.entries:
                if news.origin != self._identity.node:
                    self._database.apply(news, now)

    def memory(self) -> list[bytes]:
        news = [part for entry in self._database.entries.values() for part in announcements(entry)]
        return [encode(frame) for frame in frames_of(news)]

    def handle_digest(self, peer: bytes, digest: bytes, now: float) -> None:
        if digest != self._database.digest:
            self.request(peer, now)

    def handle_request(
        self, peer: bytes, known: Sequence[tuple[bytes, int, int]], now: float
    ) -> None:
        ours = self._database.entries
        news = [part for entry in self._database.newer_than(known) for part in announcements(entry)]
        for frame in frames_of(news):
            self._effects.append(Send(peer, encode(frame)))
        if any(node not in ours or (epoch, version) > ours[node].key
               for node, epoch, version in known):  # fmt: skip
            self.request(peer, now)

    def request(self, peer: bytes, now: float) -> None:
        """Ask for what is newer there. Not again and again: the next HELLO shows if it helped."""
        if now < self._asked_at.get(peer, -NEVER) + self._config.request_every_s:
            return
        self._asked_at[peer] = now
        request = AnnouncementRequest(self._database.summary())
        self._effects.append(Send(peer, encode(request)))

    def linked(self, peer: bytes) -> None:
        self._asked_at.pop(peer, None)

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        self._flush_at = NEVER
        # Most peers get the same.
        encoded: dict[bytes | None, list[bytes]] = {}
        sources = {source for _, source in pending}
        for peer in self._links.peers():
            skipped = peer if peer in sources else None
            if skipped not in encoded:
                news = [entry for entry, source in pending if skipped is None or source != skipped]
                encoded[skipped] = [encode(frame) for frame in frames_of(news)]
            self._effects.extend(Send(peer, data) for data in encoded[skipped])

    def _pass_on(self, news: list[Announcement], source: bytes | None, now: float) -> None:
        self._pending.extend((entry, source) for entry in news)
        self._flush_at = min(self._flush_at, now + self._config.flood_delay_s)

    def _hear_of_ourselves(self, news: Announcement) -> None:
        own = self._database.entries[self._identity.node]
        if (news.epoch, news.version) > own.key:
            self._effects.append(IdentityConflict(news.epoch))


def frames_of(news: Sequence[Announcement]) -> list[Announcements]:
    """In order, in frames of bounded size."""
    frames = []
    batch: list[Announcement] = []
    filters = 0
    for entry in news:
        count = len(entry.added) + len(entry.removed)
        if batch and (len(batch) == FRAME_ENTRIES_MAX or filters + count > FRAME_FILTERS_MAX):
            frames.append(Announcements(batch))
            batch, filters = [], 0
        batch.append(entry)
        filters += count
    if batch:
        frames.append(Announcements(batch))
    return frames
