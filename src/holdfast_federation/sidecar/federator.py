"""The federator: a member of a federation with its links, its store and its edge."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from holdfast.config.federation import Federation
from holdfast.io.peers.authentication import PeerAuth
from holdfast.io.peers.complaints import Complaints
from holdfast.security.peer_secret import SecretError
from holdfast.security.tls import TlsError
from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import (
    CloseLink,
    Delete,
    DeliverLocally,
    Dial,
    Dropped,
    Effect,
    IdentityConflict,
    Message,
    Send,
    Store,
)
from holdfast_federation.core.frames import Data, InvalidFrame, decode
from holdfast_federation.core.graph import Mesh
from holdfast_federation.core.identity import BadIdentity, Identity, MessageId
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.messages.custody import BadEntry
from holdfast_federation.core.messages.streams import Position
from holdfast_federation.sidecar.announcement_keys import signing_of
from holdfast_federation.sidecar.deliveries import Deliveries
from holdfast_federation.sidecar.edge import Edge, RetainingEdge
from holdfast_federation.sidecar.links import BOUNDS, MemberLinks, identity_of
from holdfast_federation.sidecar.neighbour_sources import NeighbourSources
from holdfast_federation.sidecar.publications import Publications
from holdfast_federation.sidecar.retained_sync import RetainedSync
from holdfast_federation.sidecar.sidecar_settings import link_policy, member_config
from holdfast_federation.sidecar.status import Counters, status_of
from holdfast_federation.sidecar.store.file import MemberStoreError, MemberStoreFull, StoredMember
from holdfast_federation.sidecar.store.member_files import MemberFiles, MemberStorage
from holdfast_federation.sidecar.store.store import MemberStore, aged
from holdfast_federation.sidecar.store.store import MemberStore as CustodyStore

WANT_DELAY_S: Final = 0.05
"""The time in seconds in which changes of interest are gathered into one call of the edge."""
MEMORY_DELAY_S: Final = 0.5
"""The time in seconds by which the stored knowledge of other members may lag behind."""
REST: Final = 20.0
"""The smallest ratio of waiting to work for each pass over all that is known.

With many members and filters, changes are gathered for longer.
"""

Attempt = Callable[[Callable[[FederationMember, float], None]], None]
"""Works with the member, unless it has failed."""


class InterestPersister:
    """Writes the member's memory to the store and reports changed filters to the edge.

    Invariants:

    - A filter is durable before the edge learns of it. Counter-example: the edge subscribes, its
      broker keeps messages, and this process crashes. After the restart the member would not know
      the subscriber, and would acknowledge these messages as unwanted.
    - The interest by which a message has a destination is durable no later than the message. A
      message leaves before that only if the interest is durable already. Counter-example: members B
      and C want the same filter, and the interest of C is not durable. C receives a message, and
      this process crashes. After the restart the next messages would go to B alone.
    - The edge learns the filters soon after each start, also if there are none, unless the memory
      is lost. So it need not decide by a time-out that no other member wants anything.
    """

    def __init__(
        self,
        attempt: Attempt,
        member: FederationMember,
        store: MemberStore,
        want: Callable[[frozenset[str]], None],
        has_memory: bool,
    ) -> None:
        """`has_memory`: whether the member was made with the memory of an earlier start."""
        self._attempt = attempt
        self._store = store
        self._want = want
        self._knows_members = has_memory
        # The interest as the store has been given it.
        self._given_version = member.remote_version
        member.remote.remembered(member.remote_version)
        self._is_stopped = False
        self._want_timer: asyncio.TimerHandle | None = None
        self._memory_timer: asyncio.TimerHandle | None = None
        self._want_delay_s = WANT_DELAY_S
        self._memory_delay_s = MEMORY_DELAY_S
        self._wanted_version = -1
        # None: the edge has not learned the filters since the start.
        self._wanted: frozenset[str] | None = None
        self._remembered_digest = b""

    def on_input(self, member: FederationMember) -> None:
        """Schedules work that is due. The federator calls this after any input of the member."""
        if self._is_stopped:
            return
        loop = asyncio.get_running_loop()
        # A member without a memory knows the filters once it knows another member.
        self._knows_members |= len(member.database.entries) > 1
        is_new = self._knows_members and member.remote_version != self._wanted_version
        if self._want_timer is None and is_new:
            self._want_timer = loop.call_later(
                self._want_delay_s, self._attempt, self._report_wanted
            )
        if self._memory_timer is None and member.database.digest != self._remembered_digest:
            self._memory_timer = loop.call_later(
                self._memory_delay_s, self._attempt, self._remember
            )

    def before_custody(self, member: FederationMember, data: bytes) -> None:
        """Gives the store the interest by which a message that it will receive has destinations."""
        if self._given_version != member.remote_version:
            message = decode(data)
            assert isinstance(message, Data)
            if member.remote.is_young(message.topic):
                self._attempt(self._write)

    def stop(self) -> None:
        """Stops, and gives the store the final state."""
        self._is_stopped = True
        for timer in (self._want_timer, self._memory_timer):
            if timer is not None:
                timer.cancel()
        self._attempt(self._write)

    def _report_wanted(self, member: FederationMember, now: float) -> None:
        self._want_timer = None
        self._wanted_version = member.remote_version
        begin = time.monotonic()
        wanted = member.remote_filters()
        if wanted != self._wanted:
            self._wanted = wanted
            # Messages that the edge hands over for these filters must find them after any restart.
            self._write(member, now)
            self._store.when_written(lambda: self._pass_on(wanted))
        self._want_delay_s = max(WANT_DELAY_S, REST * (time.monotonic() - begin))

    def _pass_on(self, wanted: frozenset[str]) -> None:
        if not self._is_stopped:
            self._want(wanted)

    def _remember(self, member: FederationMember, now: float) -> None:
        self._memory_timer = None
        self._remembered_digest = member.database.digest
        begin = time.monotonic()
        self._write(member, now)
        self._memory_delay_s = max(MEMORY_DELAY_S, REST * (time.monotonic() - begin))

    def _write(self, member: FederationMember, now: float) -> None:
        self._given_version = version = member.remote_version
        self._store.remember(member.memory(now, time.time()))
        self._store.when_written(lambda: member.remote.remembered(version))


logger = logging.getLogger("holdfast")

MADE_UP: Final = {
    "forged announcement": "had a false signature: a member on the way to here makes them up",
    "absurd announcement": "had an epoch that no member has counted up to",
    "unsigned announcement": 'were not signed: set signatures = "send" at all members first',
}
"""The counters of the member that are logged when they grow, with the text of the line."""
Result = TypeVar("Result")


def _link(peer: bytes) -> str:
    return f"the link with {peer.hex()}"


class FederatorError(Exception):
    """The federator cannot start or continue. The text says what to do."""


class Federator:
    """A running member, and the `EdgeHost` of its edge. Interest that the edge reports before
    `edge.start` returns is part of the first announcement. Messages that other members publish
    before a later report may be missed. The edge applies the filters for export and import. While a
    destination's queue is full and `when_full` is `wait`, messages of QoS 1 and 2 and their `done`
    wait here. The edge's window bounds their number. With `drop-oldest`, `done` is never delayed,
    and the dropped messages are counted."""

    def __init__(
        self,
        settings: Federation,
        edge: Edge,
        config: FederationConfig | None = None,
        state: MemberStorage | None = None,
    ) -> None:
        """`config`: replaces the one derived from the settings. `state`: where the member's state
        is; None: in the directory of the settings."""
        self.settings = settings
        self.config = config or member_config(settings)
        self.counters = Counters()
        self._edge = edge
        self._state = state or MemberFiles(Path(settings.data))
        self._identity: Identity | None = None
        self._member: FederationMember | None = None
        self._store: CustodyStore | None = None
        self._stored: StoredMember | None = None
        self._links: MemberLinks | None = None
        self.auth: PeerAuth | None = None
        """The credentials for other members, once loaded. A reload renews them."""
        self._managing: NeighbourSources | None = None
        self._publications = Publications(
            self._publish,
            waits=settings.when_full == "wait",
            refuse=self._refuse,
            has_failed=lambda: self._has_failed,
        )
        self._deliveries = Deliveries(edge, self._passed, self.counters.dropped)
        # The epoch that others know although this start has not used it; 0: none.
        self._disputed_epoch = 0
        self._effects: deque[Effect] = deque()
        self._is_carrying_out = False
        self._is_flush_scheduled = False
        self._is_stopped = False
        self._has_edge = False
        self._failure: asyncio.Future[FederatorError] | None = None
        # Bound once: a look-up of the running loop for each message is measurable.
        self._clock: Callable[[], float]
        # The counts of `MADE_UP` that were last logged.
        self._forged: Counter[str] = Counter()
        # Interest that the edge reports before the member exists.
        self._interest_before_start: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._noticing: InterestPersister | None = None
        self._retention: RetainedSync | None = None

    # Start and stop

    @property
    def node(self) -> bytes:
        """The member's id, available after `open`."""
        assert self._identity is not None, "not opened"
        return self._identity.node

    @property
    def epoch(self) -> int:
        """The epoch of this start."""
        assert self._identity is not None, "not opened"
        return self._identity.epoch

    @property
    def member(self) -> FederationMember:
        assert self._member is not None, "not started"
        return self._member

    @property
    def links(self) -> MemberLinks:
        assert self._links is not None, "not started"
        return self._links

    @property
    def store(self) -> CustodyStore:
        assert self._store is not None, "not opened"
        return self._store

    async def open(self) -> None:
        """Takes a new epoch and reads the state, before `start`. Raises `FederatorError`."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._failure = loop.create_future()
        self._complaints = Complaints(loop.time, "federation")
        try:
            self._identity = await self._state.begin(self.settings.id)
            store = CustodyStore(self._state, self)
            self._stored = await store.open()
            self._store = store
        except (BadIdentity, MemberStoreError, MemberStoreFull) as error:
            raise FederatorError(str(error)) from error
        except OSError as error:
            raise FederatorError(f"{self.settings.data}: {error.strerror or error}") from error
        finally:
            if self._stored is None:
                await self._state.close()

    async def start(self) -> None:
        """Starts links, edge and member. Raises `FederatorError` when one of them cannot start."""
        if self._identity is None:
            await self.open()
        try:
            await self._start()
        except (SecretError, TlsError, InvalidFrame, BadEntry) as error:
            await self.stop()
            raise FederatorError(str(error)) from error
        except OSError as error:
            await self.stop()
            raise FederatorError(f"federation: {error.strerror or error}") from error
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        settings, identity, kept = self.settings, self._identity, self._stored
        assert identity is not None
        assert kept is not None
        self.auth = auth = await asyncio.to_thread(PeerAuth.load, settings)
        signing = await asyncio.to_thread(signing_of, settings)
        announced = identity_of(
            identity.node, settings.name, settings.address, settings.site, identity.epoch
        )
        bounds = replace(BOUNDS, send_bytes_max=settings.link_buffer_bytes)
        self._links = MemberLinks(self, announced, auth, bounds, epoch=identity.epoch)
        self._managing = NeighbourSources(self, self._state)
        self._has_edge = True
        # First, so that the interest it reports at once is part of the first announcement.
        await self._edge.start(self)
        self._member = FederationMember(
            identity,
            settings.address,
            self.config,
            self._now(),
            self._interest_before_start.elements(),
            stored=[aged(data, age_s) for data, age_s in kept.custody],
            positions=kept.positions,
            former=kept.former,
            remembered=kept.memory,
            retained=kept.retained.values(),
            wall_s=time.time() if isinstance(self._edge, RetainingEdge) else None,
            signing=signing,
            disputed=self._state.disputed,
            may_move=self._state.may_move,
        )
        if isinstance(self._edge, RetainingEdge):
            call = partial(self._call, "a retained message")
            self._retention = RetainedSync(self._edge, self.store, kept.retained, call)
        self._stored = None
        attempt = partial(self._attempt, "its memory of other members")
        self._noticing = InterestPersister(
            attempt, self._member, self.store, self._set_wanted_filters, bool(kept.memory)
        )
        self._publications.connect(self._member, self.store)
        logger.info(
            "federation_member name=%r node=%s epoch=%d custody=%d",
            settings.name,
            identity.node.hex(),
            identity.epoch,
            len(self._member.custody),
        )
        await self._links.start(settings.listen)
        self._managing.start()
        if self._retention is not None:
            self._retention.start()
            if self._deliveries.is_up:
                self._retention.up()
        self._call("the start", lambda member, now: None)

    async def stop(self) -> None:
        """Stops the process part. The member remains: messages for it wait at their origins."""
        if self._is_stopped:
            return
        self._is_stopped = True
        # Sources of input stop first, so that the store's last write includes everything.
        if self._managing is not None:
            await self._managing.stop()
        if self._has_edge:
            await self._edge.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._retention is not None:
            self._retention.stop()
        if self._links is not None:
            await self._links.stop()
        if self._noticing is not None:
            self._noticing.stop()
        if self._disputed_epoch:
            try:
                await self._state.dispute(self._disputed_epoch)
            except (OSError, MemberStoreError) as error:
                # The next start has the same conflict, and stores it then.
                logger.error("federation_dispute_not_stored error=%r", str(error))
        if self._store is not None:
            await self._store.close()

    async def leave(self) -> None:
        """Leaves the federation for good and stops. Other members drop messages for this one."""
        self._call("leaving", lambda member, now: member.leave(now))
        if self._managing is not None:
            await self._managing.leave()
        await self.stop()

    async def failed(self) -> FederatorError:
        """Waits until the federator cannot continue. The caller still has to call `stop`."""
        assert self._failure is not None, "not opened"
        return await asyncio.shield(self._failure)

    @property
    def _has_failed(self) -> bool:
        return self._failure is not None and self._failure.done()

    def _fail(self, text: str) -> None:
        assert self._failure is not None
        if not self._failure.done():
            logger.critical("federation_failed error=%r", text)
            self._failure.set_result(FederatorError(text))
        self._effects.clear()

    # Status

    def status(self) -> dict[str, object]:
        """Returns the status for people and the API, as plain values that JSON can express."""
        return status_of(
            self.settings,
            self.epoch,
            self.member,
            self.links,
            self.store,
            self._publications,
            self._deliveries,
            self.counters,
            self._managing.client if self._managing is not None else None,
            self._now(),
        )

    def mesh(self, topic: str) -> Mesh:
        return self.member.mesh(topic)

    # EdgeHost

    def publish(self, message: Message, done: Callable[[], None]) -> None:
        self._publications.accept(message, done)

    def change_interest(self, added: Iterable[str], removed: Iterable[str]) -> None:
        if self._member is None:
            self._interest_before_start.update(added)
            self._interest_before_start.subtract(removed)
        else:
            self._call("interest", lambda member, now: member.local_interest(added, removed, now))

    def retained_removed(self, removals: Mapping[str, int]) -> None:
        # Before the member exists no report is needed: `up` reads everything that is retained.
        if self._retention is not None:
            self._retention.removed(removals)

    def edge_up(self) -> None:
        logger.info("federation_edge_up")
        self._deliveries.up(self._now())
        if self._retention is not None:
            self._retention.up()

    def edge_down(self, reason: str) -> None:
        if self._deliveries.is_up:
            logger.warning("federation_edge_down reason=%r", reason)
        self._deliveries.down()
        if self._retention is not None:
            self._retention.down()

    # LinksOwner

    def link_up(self, peer: bytes) -> None:
        policy = link_policy(self.settings)
        self._call(_link(peer), lambda member, now: member.link_up(peer, now, policy))

    def link_down(self, peer: bytes) -> None:
        self._call(_link(peer), lambda member, now: member.link_down(peer, now))

    def link_busy(self, peer: bytes, is_busy: bool) -> None:
        self._call(_link(peer), lambda member, now: member.link_busy(peer, is_busy))

    def link_frame(self, peer: bytes, data: bytes) -> None:
        # Malformed frames are rejected by the member itself.
        self._call(f"a frame of {peer.hex()}", lambda member, now: member.frame(peer, data, now))

    def link_stirred(self, peer: bytes) -> None:
        def note(member: FederationMember, now: float) -> None:
            if peer in member.links:
                member.links.note_received(peer, now)

        self._call(_link(peer), note)

    def found(self, address: str, peer: bytes) -> None:
        assert self._managing is not None
        self._managing.found(address, peer)

    def set_desired(self, links: dict[bytes, str]) -> None:
        self._call("the topology", lambda member, now: member.desired_topology(links, now))

    # StoreOwner

    def on_stored(self, ids: list[MessageId]) -> None:
        self._call("a store", lambda member, now: member.all_stored(ids, now))
        for id in ids:
            if not self._has_failed:
                self._publications.confirm(id)

    def on_broken(self, error: MemberStoreError) -> None:
        self._fail(f"{error}; nothing is confirmed any more")

    def _refuse(self, reason: str, text: str) -> None:
        self.counters.dropped[reason] += 1
        self._complaints.say(reason, reason, text)

    def _passed(self, origin: bytes, position: Position, ids: list[MessageId]) -> None:
        self.store.pass_to(origin, position, ids)

    def _publish(self, message: Message) -> MessageId | None:
        def publish(member: FederationMember, now: float) -> MessageId | None:
            if message.is_repeatable and member.remote.is_young(message.topic):
                return member.local_publish(replace(message, is_repeatable=False), now)
            return member.local_publish(message, now)

        return self._call("a publication", publish)

    # Effects of the member

    def _now(self) -> float:
        return self._clock()

    def _call(self, what: str, input: Callable[[FederationMember, float], Result]) -> Result | None:
        """Applies an input to the member, carries out its effects, and returns its result."""
        result = self._attempt(what, input)
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        return result

    def _attempt(
        self, what: str, work: Callable[[FederationMember, float], Result]
    ) -> Result | None:
        """Works with the member and carries out its effects. Returns None if it has failed.

        After an error the state of the member may be wrong, so it ends and is rebuilt from the
        store. The broker around it keeps running. Nothing works with a failed member: it may
        conclude that a message can be deleted.
        """
        if self._has_failed:
            return None
        try:
            result = work(self.member, self._now())
            self._carry_out_effects()
        except Exception as error:
            logger.critical("federation_input_failed input=%r", what, exc_info=error)
            self._fail(f"{what} made this member fail: {error!r}")
            return None
        return result

    def _carry_out_effects(self) -> None:
        """Carries out effects in the order in which the member produced them. A call from within an
        effect only queues its own effects, behind those already queued."""
        self._effects.extend(self.member.take_effects())
        if self._is_carrying_out:
            return
        self._is_carrying_out = True
        try:
            while self._effects:
                self._carry_out(self._effects.popleft())
        finally:
            self._is_carrying_out = False

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self.counters.sent(effect.data)
            self.links.forward(effect.peer, effect.data)
        elif isinstance(effect, DeliverLocally):
            self.counters.delivered += 1
            self.counters.hops[effect.hops] += 1
            if effect.message.is_retained and self._retention is not None:
                self._retention.delivered(effect.message.topic)
            self._deliveries.accept(effect, self._now())
        elif isinstance(effect, Store):
            assert self._noticing is not None
            self._noticing.before_custody(self.member, effect.data)
            self.store.add(effect.id, effect.data, effect.may_wait)
        elif isinstance(effect, Delete):
            self.store.remove(effect.id)
            # The member gave the message up before it was durable: it has no destination any more.
            self._publications.confirm(effect.id)
        elif isinstance(effect, Dial):
            self.links.dial(effect.node, effect.address)
        elif isinstance(effect, CloseLink):
            self.links.disconnect(effect.peer, effect.reason)
        elif isinstance(effect, Dropped):
            self.counters.count_lost(effect, self._complaints)
        elif isinstance(effect, IdentityConflict):
            self._conflict(effect.epoch)
        else:
            # Retained effects exist only with a wall time, and so with a RetainingEdge.
            assert self._retention is not None
            self._retention.carry_out(effect)

    def _set_wanted_filters(self, filters: frozenset[str]) -> None:
        self._edge.set_wanted_filters(filters)
        if self._retention is not None:
            self._retention.set_wanted_filters(filters)

    def _conflict(self, epoch: int) -> None:
        self._disputed_epoch = epoch
        self._fail(
            f"others know start {epoch} of member {self.node.hex()}, and this is {self.epoch}: its"
            " directory is an old copy, or another process has the same id. Start again, with a"
            " later one; if this comes back, give one of the two a directory of its own"
        )

    def _flush(self) -> None:
        """Does the deferred work once for all inputs of a turn of the loop."""
        self._is_flush_scheduled = False
        if not self._is_stopped:
            self._attempt("the end of a turn", self._finish_turn)

    def _finish_turn(self, member: FederationMember, now: float) -> None:
        self._arm(member.timer(now))
        if self._noticing is not None:
            self._noticing.on_input(member)
        self._publications.release()

    def _arm(self, at: float) -> None:
        loop = asyncio.get_running_loop()
        if at != float("inf") and (self._timer is None or at < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._call("a timer", lambda member, now: member.handle_timers(now))
        for reason, text in MADE_UP.items():
            count = self.member.counts[reason]
            if count > self._forged[reason]:
                self._forged[reason] = count
                self._complaints.say(reason, reason, f"{count} announcements {text}")
