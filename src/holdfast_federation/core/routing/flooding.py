"""Floods announcements: this member's own, and those of the others.

An announcement goes to every linked peer except the one that sent it, gathered for `flood_delay_s`.
A peer whose digest in HELLO differs requests the newer entries, so a lost frame loses nothing.

A member accepts an announcement by these rules:

- It rejects an epoch that no member can have counted up to.
- It accepts a valid signature of the origin, from any peer.
- Without a signature it rejects everything if signatures are required. Otherwise it accepts that of
  a linked member from this member only, and others from any linked peer. So an unsigned federation
  trusts the members between two others.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import IdentityConflict, Send
from holdfast_federation.core.frames import (
    FILTERS_MAX,
    Announcement,
    AnnouncementRequest,
    Voucher,
    Vouchers,
    encode,
)
from holdfast_federation.core.identity import EPOCH_COUNTED_MAX, EPOCH_STEP_MAX
from holdfast_federation.core.routing.announcement_frames import (
    Key,
    PendingNews,
    by_key,
    encode_entries,
    encoded,
    key_of,
)
from holdfast_federation.core.routing.interest import LocalInterest
from holdfast_federation.core.routing.link_health import LinkTable
from holdfast_federation.core.routing.link_state import (
    AnnouncementVerdict,
    LinkStateDatabase,
    announcements,
)
from holdfast_federation.core.signing import AnnouncementKeys, statement

AGE_TOLD_S: Final = 60.0
"""The age in seconds from which an entry is sent together with its age."""

NEVER: Final = float("inf")


class AnnouncementChange(NamedTuple):
    """The accepted announcement of a member."""

    node: bytes
    is_certain: bool
    """True if the member signed it or sent it over its own link."""


class Flooder:
    """The announcements that this member sends, and the acceptance of those that it receives."""

    def __init__(
        self,
        context: MemberContext,
        address: str,
        database: LinkStateDatabase,
        links: LinkTable,
        interest: LocalInterest,
        now: float,
        signing: AnnouncementKeys | None = None,
    ) -> None:
        self._counts = context.counts
        self._signing = signing
        self._identity = context.identity
        self._address = address
        self._config = context.config
        self._database = database
        self._links = links
        self._interest = interest
        self._effects = context.effects
        self._linked: list[bytes] = []
        self._is_leaving = False
        self._pending: list[PendingNews] = []
        # By peer, the vouchers for the next frame that it sends.
        self._vouchers: dict[bytes, dict[Key, Voucher]] = {}
        # By linked member: another peer that sent an announcement of it.
        self._doubted: dict[bytes, bytes] = {}
        self._flush_at = NEVER
        self._links_at = NEVER
        self._interest_at = NEVER
        self._interest_next = now
        self._batch_s = context.config.interest_batch_s
        self._refresh_at = now + context.config.refresh_s
        self._now_at_start = now
        self._requested_at: dict[bytes, float] = {}
        # By peer: the epoch of a later run of this member that it announced without a signature.
        self._claims: dict[bytes, int] = {}
        self._announce_all(1, now)

    @property
    def is_claimed(self) -> bool:
        """Whether a peer knows a later run of this member."""
        return bool(self._claims)

    def set_links(self, linked: list[bytes], now: float) -> None:
        """Announces the links after `flood_delay_s`, so that several changes share one."""
        if linked != self._linked and not self._is_leaving:
            self._linked = linked
            self._links_at = min(self._links_at, now + self._config.flood_delay_s)

    def interest_changed(self, now: float) -> None:
        if self._interest_at == NEVER and not self._is_leaving:
            self._interest_at = max(now + self._config.interest_batch_s, self._interest_next)

    def leave(self, now: float) -> None:
        """Announces that this member leaves for good, so the others drop its queues."""
        self._is_leaving = True
        self._linked = []
        self._links_at = self._interest_at = NEVER
        self._announce_all(self._version() + 1, now)
        self.flush()

    def handle_timers(self, now: float) -> None:
        if now >= self._links_at:
            # It has waited for `flood_delay_s` already.
            self._announce([], [], now)
            self._flush_at = now
        if now >= self._interest_at:
            self._announce_interest(now)
        if now >= self._refresh_at:
            self._announce([], [], now)
        if now >= self._flush_at:
            self.flush()
        self._weigh_claims(now)

    def timer(self) -> float:
        claims_at = self._now_at_start + self._config.claim_s if self._claims else NEVER
        return min(self._flush_at, self._links_at, self._interest_at, self._refresh_at, claims_at)

    def _announce_interest(self, now: float) -> None:
        """Announces changed filters, at first soon, then at intervals that double."""
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
        self._send_news(self._own(version + 1, version, added, removed), now)

    def _announce_all(self, version: int, now: float) -> None:
        filters = set() if self._is_leaving else self._interest.announced()
        parts = sorted(filters)
        self._send_news(self._own(version, 0, parts[:FILTERS_MAX], []), now)
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

    def _send_news(self, news: Announcement, now: float) -> None:
        verdict = self._database.apply(news, now, is_own=True)
        assert verdict is AnnouncementVerdict.NEWS
        entry = self._database.entries[news.origin]
        if self._signing is not None:
            signature = self._signing.sign(statement(news, entry.filters))
            entry.voucher = Voucher(
                *(news.origin, news.epoch, news.version, 0.0),
                self._signing.certificate,
                signature,
            )
        self._pass_on([news], entry.voucher, None, now)

    def _version(self) -> int:
        return self._database.entries[self._identity.node].version

    def handle_vouchers(self, peer: bytes, frame: Vouchers) -> None:
        """Keeps the vouchers of a peer. They belong to its next frame of announcements."""
        self._vouchers[peer] = by_key(frame)

    def handle_news(
        self, peer: bytes, entries: Sequence[Announcement], now: float
    ) -> list[AnnouncementChange]:
        """Handles announcements. Returns the members whose entries have changed."""
        changed = []
        has_gap = False
        vouchers = self._vouchers.pop(peer, {})
        for news in entries:
            voucher = vouchers.get(key_of(news))
            if news.origin == self._identity.node:
                self._handle_own(peer, news, voucher, now)
            elif self._database.is_news(news) and self._may_believe(peer, news, voucher):
                is_signed = self._check_of(news, voucher)
                verdict = self._database.apply(news, now, source=peer, is_signed=is_signed)
                if verdict is AnnouncementVerdict.NEWS:
                    changed.append(
                        AnnouncementChange(news.origin, peer == news.origin or bool(is_signed))
                    )
                    self._accept(peer, news, voucher, bool(is_signed), now)
                elif verdict is AnnouncementVerdict.GAP:
                    has_gap = True
                elif verdict is not AnnouncementVerdict.PART:
                    self._counts[f"{verdict.name.lower()} announcement"] += 1
        if has_gap:
            self.request(peer, now)
        return changed

    def _may_believe(self, peer: bytes, news: Announcement, voucher: Voucher | None) -> bool:
        """True if the sender may send it. The signature is checked later."""
        if self._signing is not None and voucher is not None and voucher.signature:
            return True
        if self._signing is not None and self._signing.is_required:
            self._counts["unsigned announcement"] += 1
            return False
        if news.origin != peer and news.origin in self._links:
            # The member announces it itself, unless its link is about to be lost.
            self._doubted[news.origin] = peer
            self._counts["announcement by another"] += 1
            return False
        return True

    def _check_of(
        self, news: Announcement, voucher: Voucher | None
    ) -> Callable[[set[str]], bool] | None:
        signing = self._signing
        if signing is None or voucher is None or not voucher.signature:
            return None
        certificate, signature = voucher.certificate, voucher.signature
        return lambda filters: signing.verifies(
            news.origin, certificate, signature, statement(news, filters)
        )

    def _accept(
        self,
        peer: bytes,
        news: Announcement,
        voucher: Voucher | None,
        is_signed: bool,
        now: float,
    ) -> None:
        entry = self._database.entries[news.origin]
        if voucher is not None:
            # A forged age would otherwise make every member forget the origin at once.
            entry.received_at = now - min(voucher.age_s, self._config.forget_s / 2)
            entry.voucher = voucher if is_signed else None
        whole = [news]
        if news.chunks > 1:
            whole = announcements(entry)
        self._pass_on(whole, entry.voucher, peer, now)

    def handle_digest(self, peer: bytes, digest: bytes, now: float) -> None:
        if digest != self._database.digest:
            self.request(peer, now)

    def handle_request(
        self, peer: bytes, known: Sequence[tuple[bytes, int, int]], now: float
    ) -> None:
        ours = self._database.entries
        for data in encode_entries(
            self._database.newer_than(known), self._identity.node, now, AGE_TOLD_S
        ):
            self._effects.append(Send(peer, data))
        forgotten = self._database.forgotten
        for node, epoch, version in known:
            held = ours[node].key if node in ours else forgotten.get(node, (0, 0))
            if (epoch, version) > held:
                self.request(peer, now)
                break

    def request(self, peer: bytes, now: float) -> None:
        """Requests the newer entries of a peer, at most once in `request_every_s`."""
        if now < self._requested_at.get(peer, -NEVER) + self._config.request_every_s:
            return
        self._requested_at[peer] = now
        request = AnnouncementRequest(self._database.summary())
        self._effects.append(Send(peer, encode(request)))

    def linked(self, peer: bytes) -> None:
        self._requested_at.pop(peer, None)
        self._vouchers.pop(peer, None)

    def unlinked(self, peer: bytes, now: float) -> None:
        """Resets the peer. Others may send its announcements from now on."""
        self._vouchers.pop(peer, None)
        self._claims.pop(peer, None)
        teller = self._doubted.pop(peer, None)
        if teller is not None and teller in self._links:
            self.request(teller, now)

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        self._flush_at = NEVER
        # Most peers receive the same frames, so those are encoded once.
        frames: dict[bytes | None, list[bytes]] = {}
        sources = {news.source for news in pending}
        for peer in self._links.peers():
            skipped = peer if peer in sources else None
            if skipped not in frames:
                frames[skipped] = encoded(
                    [news for news in pending if skipped is None or news.source != skipped]
                )
            self._effects.extend(Send(peer, data) for data in frames[skipped])

    def _pass_on(
        self,
        news: list[Announcement],
        voucher: Voucher | None,
        source: bytes | None,
        now: float,
    ) -> None:
        self._pending.extend(PendingNews(entry, voucher, source) for entry in news)
        self._flush_at = min(self._flush_at, now + self._config.flood_delay_s)

    def _handle_own(
        self, peer: bytes, news: Announcement, voucher: Voucher | None, now: float
    ) -> None:
        """Handles an announcement of this member that it did not make: another process uses its
        identity, its directory is an old copy, or the peer forged it, which a signature excludes.
        """
        own = self._database.entries[self._identity.node]
        if (news.epoch, news.version) <= own.key:
            return
        if news.epoch > min(own.epoch + EPOCH_STEP_MAX, EPOCH_COUNTED_MAX - 1):
            self._counts["absurd announcement"] += 1
            return
        if self._signing is not None and self._signing.is_required:
            if news.base or news.chunks > 1:
                # The signature covers all filters of the member, and this is a part of them.
                self.request(peer, now)
                return
            check = self._check_of(news, voucher)
            if check is None or not check(set(news.added)):
                self._counts["forged announcement"] += 1
                return
            self._effects.append(IdentityConflict(news.epoch))
        else:
            self._counts["later start"] += 1
            self._claims[peer] = max(news.epoch, self._claims.get(peer, 0))
            self._weigh_claims(now)

    def _weigh_claims(self, now: float) -> None:
        """Restarts this member with a later epoch when most peers claim one, or when one peer does
        and this run is `claim_s` old.

        Counter-example without the second rule: C, a neighbour of A, forges an announcement of A to
        B, which has no link to A. B ignores A's own announcements until A starts again with a later
        epoch. Without the first rule, C alone restarts A as often as it likes."""
        if not self._claims:
            return
        peers = self._links.peers()
        unaware = sum(peer not in self._claims for peer in peers)
        if len(self._claims) > unaware or now >= self._now_at_start + self._config.claim_s:
            self._effects.append(IdentityConflict(max(self._claims.values())))
            self._claims.clear()
