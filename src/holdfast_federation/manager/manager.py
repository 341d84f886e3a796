"""The manager: it handles requests and probes, changes the desired state, and serves watchers.

A change is decided in one step without `await`, when its turn comes (`changes`). Otherwise two
joins could read the same free capacity before their `await` and both take it.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from msgspec import UNSET

from holdfast_federation.manager.brokers import Brokers, broker_url
from holdfast_federation.manager.graph.graph import Link
from holdfast_federation.manager.graph.health import (
    UNKNOWN_MS,
    HealthVerdict,
    MemberHealth,
    Reports,
    RoundTrips,
    measured_ms,
)
from holdfast_federation.manager.messages import Desired, JoinAnswer, JoinRequest, Neighbor, Report
from holdfast_federation.manager.settings import ManagerSettings
from holdfast_federation.manager.state import federation_state as desired
from holdfast_federation.manager.state.changes import Changes, StoredChange, TooMany
from holdfast_federation.manager.state.federation_state import (
    DEGREE_MIN,
    ChangeRefused,
    FederationState,
    JoinToken,
    Member,
    Policy,
    Rule,
)
from holdfast_federation.manager.state.store import StateStore

MEMBERS_MAX: Final = 10_000
"""The most members of a federation."""
REPORT_FRESH_INTERVALS: Final = 3
WATCHERS_MAX: Final = 2_000
TOKENS_MAX: Final = 10_000
READMIT_S: Final = 30 * 86_400.0
"""The seconds for which a member that was removed as dead may rejoin with its token, as a new
member."""


class NoSuchMember(Exception):
    """There is no member with this id: status 404."""


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Manager:
    """The manager's core: it decides the changes that requests and probes cause."""

    def __init__(
        self,
        settings: ManagerSettings,
        store: StateStore,
        brokers: Brokers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the state from the database, and block meanwhile. Raises StateStoreError when the
        database fails."""
        self.settings = settings
        self.health = MemberHealth()
        self.round_trips = RoundTrips()
        self.reports = Reports(clock, REPORT_FRESH_INTERVALS * settings.probe_interval_s)
        self.problems: tuple[str, ...] = ()
        """The reasons why the graph falls short of its redundancy."""
        self.counts: Counter[str] = Counter()
        self.clock = clock
        self.brokers = brokers
        self._policy = Policy(settings.degree_max)
        self._watchers = 0
        self._is_ending = False
        self.changes = Changes(store)

    @property
    def state(self) -> FederationState:
        """The desired state as it was last stored."""
        return self.changes.state

    async def repair(self) -> None:
        """Repairs the graph by the present limits, which may differ from those of the run before.

        Raises StateStoreError when the database fails.
        """

        def decide() -> StoredChange[None] | None:
            changed = desired.repaired(self.state, self._policy, self.round_trips.cost)
            if changed.state is self.state:
                self.problems = changed.problems
                return None
            return self._change(changed, "manager", "repair", "the limits have changed")

        await self.changes.apply(decide)

    def _change(
        self, changed: desired.StateChange, actor: str, action: str, detail: str
    ) -> StoredChange[None]:
        def then() -> None:
            self.problems = changed.problems

        return StoredChange(changed.state, actor, action, detail, then)

    def adopted(self, before: FederationState) -> None:
        """Adopts a state that was read again after the database had failed.

        Another manager may have changed it, or a change of this one was stored after all. Health
        starts afresh: the manager refused reports meanwhile, so silence proves no failure.
        """
        self.health = MemberHealth()
        self.reports.clear()
        for node, member in before.members.items():
            if self.state.members.get(node) != member:
                self.round_trips.forget(node)
        found = desired.repaired(self.state, self._policy, self.round_trips.cost)
        self.problems = found.problems

    def release_watchers(self) -> None:
        """Replies to all watchers at once, now and from now on, because the manager is stopping."""
        self._is_ending = True
        self.changes.wake()

    async def stop(self) -> None:
        """Stops after the change in progress."""
        await self.changes.stop()

    async def join(
        self,
        request: JoinRequest,
        actor: str,
        join_token: str = "",
        certificate: str = "",
        gives_token: bool = False,
        check: Callable[[], None] = lambda: None,
        is_vouched: bool = True,
    ) -> JoinAnswer:
        """Adds a member to the federation and chooses its links.

        - `join_token`: the hash of the token that admits it; the join consumes it.
        - `certificate`: the name of the certificate that the caller presented.
        - `gives_token`: the member needs a token of its own.
        - `check`: called last; it raises for a caller that may not join.
        - `is_vouched`: the operator vouches for the address.

        Raises ValueError for an invalid address, ChangeRefused, NoSuchMember, TooMany or
        StateStoreError.
        """
        ip = broker_url(request.ip)
        if 0 < request.capacity < DEGREE_MIN:
            raise ValueError(
                f"capacity {request.capacity}: a member needs room for {DEGREE_MIN} neighbours"
            )
        round_trip_ms = await self.brokers.round_trip_ms(ip, is_vouched)
        token = secrets.token_urlsafe(32) if gives_token else ""
        wanted = Member(
            id=-1,
            ip=ip,
            uuid=request.uuid,
            epoch=request.epoch,
            advertise=request.advertise,
            labels=request.labels,
            capacity=request.capacity,
            token_hash=hash_of(token) if token else "",
            certificate=certificate,
            joined_at_s=time.time(),
            is_vouched=is_vouched,
        )
        latency = self._latency(request)

        def decide() -> StoredChange[JoinAnswer]:
            check()
            before = self.state
            token_state = before.tokens.get(join_token)
            if join_token and (token_state is None or token_state.used_by is not None):
                raise ChangeRefused("this join token has been used in the meantime: make a new one")
            if len(before.members) >= MEMBERS_MAX:
                raise TooMany(f"there are {MEMBERS_MAX} members, more than that are not taken")
            joined = desired.join(before, wanted, self._policy, latency, self.round_trips.cost)
            member, state = joined.member, joined.state
            if join_token:
                state = desired.with_token_used(state, join_token, member.id)

            def then() -> JoinAnswer:
                self.problems = joined.problems
                self._forget([member.id, *(set(before.members) - set(state.members))])
                self._measured(member.id, round_trip_ms, request)
                self.counts["joins"] += 1
                return self._join_answer(member, token)

            action = "join" if joined.is_new else "rejoin"
            return StoredChange(state, actor, action, f"{member.id} {ip}", then)

        answer = await self.changes.apply(decide)
        assert answer is not None
        return answer

    def _measured(self, node: int, round_trip_ms: float | None, request: JoinRequest) -> None:
        self.round_trips.add_measurement(node, round_trip_ms)
        for other, trip_ms in request.rtts.items():
            if other in self.state.members:
                self.round_trips.link_measured(node, other, trip_ms)

    def _latency(self, request: JoinRequest) -> Callable[[int], float]:
        """Returns the latencies as the newcomer measured them, else as the manager did."""
        if not request.rtts:
            return self.round_trips.latency
        trips = request.rtts
        return lambda node: measured if (measured := trips.get(node)) is not None else UNKNOWN_MS

    def _join_answer(self, member: Member, token: str) -> JoinAnswer:
        return JoinAnswer(
            id=member.id,
            ip="",
            neighbors=self.neighbors(member.id),
            redundancy=self.settings.redundancy,
            core_ann_interval=self.settings.core_ann_interval_ns,
            beacon_interval=self.settings.beacon_interval_ns,
            revision=self.state.revision if member.uuid else UNSET,
            token=token or UNSET,
        )

    def neighbors(self, node: int) -> list[Neighbor]:
        """Returns the desired neighbours of a member."""
        members = [self.state.members[each] for each in self.state.neighbours(node)]
        return [Neighbor(each.id, each.ip, each.advertise or UNSET) for each in members]

    def member(self, node: int) -> Member:
        """Returns a member. Raises NoSuchMember when it was removed or never joined."""
        found = self.state.members.get(node)
        if found is None:
            raise NoSuchMember(f"there is no member {node}: it was removed, or never joined")
        return found

    async def leave(self, node: int, actor: str) -> None:
        """Removes a member at its own request. Raises NoSuchMember or StateStoreError."""

        def leaving() -> list[int]:
            self.member(node)
            return [node]

        await self._remove(leaving, actor, "leave")

    async def remove_dead(self) -> None:
        """Removes members that count as dead. Raises StateStoreError when the database fails."""
        until_s = time.time() + READMIT_S
        await self._remove(lambda: list(self.verdict().dead), "manager", "dead", until_s)

    async def _remove(
        self,
        nodes_of: Callable[[], list[int]],
        actor: str,
        action: str,
        readmit_until_s: float = 0,
    ) -> None:
        """Removes the members that `nodes_of` returns when the change has its turn. A list made
        before it could name a member that has reported since."""

        def decide() -> StoredChange[None] | None:
            nodes = nodes_of()
            if not nodes:
                return None
            changed = desired.leave(
                self.state, nodes, self._policy, self.round_trips.cost, readmit_until_s
            )

            def then() -> None:
                self.problems = changed.problems
                self._forget(nodes)
                self.counts["removals"] += len(nodes)

            detail = " ".join(str(node) for node in nodes)
            return StoredChange(changed.state, actor, action, detail, then)

        await self.changes.apply(decide)

    def _forget(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self.health.forget(node)
            self.round_trips.forget(node)
            self.reports.forget(node)

    async def set_rules(self, rules: dict[Link, Rule], actor: str) -> None:
        """Sets rules of links. Raises ChangeRefused or StateStoreError."""
        text = " ".join(f"{low}-{high}:{rule}" for (low, high), rule in rules.items())

        def decide() -> StoredChange[None]:
            changed = desired.set_rules(self.state, rules, self._policy, self.round_trips.cost)
            return self._change(changed, actor, "links", text)

        await self.changes.apply(decide)

    async def rebalance(self, actor: str) -> None:
        """Exchanges expensive links for cheap ones. Raises StateStoreError."""

        def decide() -> StoredChange[None]:
            changed = desired.rebalanced(self.state, self._policy, self.round_trips.cost)
            moved = len(changed.state.links - self.state.links)
            return self._change(changed, actor, "rebalance", f"{moved} new links")

        await self.changes.apply(decide)

    async def report(self, node: int, report: Report) -> Desired:
        """Takes a member's report of its links and returns the links that it should have.

        Raises NoSuchMember, StateStoreError, or ChangeRefused when the report has an earlier epoch
        than the member.
        """
        member = self.member(node)
        if report.epoch < member.epoch:
            raise ChangeRefused(
                f"member {node} has joined with epoch {member.epoch} since {report.epoch}: join"
                " again"
            )
        self.reports.received(node, report)
        for link in report.links:
            if link.up and link.peer in self.state.members:
                self.round_trips.link_measured(node, link.peer, measured_ms(link.rtt_ms))
        self.changes.check_current()
        self.member(node)
        return Desired(self.state.revision, self.neighbors(node))

    async def new_join_token(self, valid_s: float, actor: str) -> tuple[str, float]:
        """Returns a new join token and its time of expiry. Raises TooMany or StateStoreError."""
        now_s = time.time()
        token = "join-" + secrets.token_urlsafe(24)
        expires_at_s = now_s + valid_s

        def decide() -> StoredChange[None]:
            if len(self.state.tokens) >= TOKENS_MAX:
                raise TooMany(f"there are {TOKENS_MAX} join tokens: wait until some expire")
            made = JoinToken(expires_at_s=expires_at_s)
            after = desired.with_token(self.state, hash_of(token), made, now_s)
            return StoredChange(
                after, actor, "join-token", f"valid for {valid_s:g} s", lambda: None
            )

        await self.changes.apply(decide)
        return token, expires_at_s

    async def changed_since(self, revision: int, timeout_s: float) -> bool:
        """Waits, up to a limit, until the state has another revision, and returns whether it has.

        Raises TooMany, or StateStoreError when the state is not known.
        """
        if self._watchers >= WATCHERS_MAX:
            raise TooMany(f"{WATCHERS_MAX} watch already: ask again later")
        self._watchers += 1
        try:
            async with asyncio.timeout(timeout_s):
                while self.state.revision == revision and not self._is_ending:
                    await self.changes.changed.wait()
        except TimeoutError:
            pass
        finally:
            self._watchers -= 1
        self.changes.check_current()
        return self.state.revision != revision

    def verdict(self) -> HealthVerdict:
        def is_reported_up(node: int) -> bool:
            return self.reports.is_up(node, self.state.neighbours(node))

        return self.health.judge(self.state.members, is_reported_up)
