"""The manager: takes requests and probes, changes the desired state, and lets others watch it.

Everything that changes the state runs in one go in the event loop, from the decision to the commit
of its transaction, so changes never overlap; the file takes a few milliseconds each time.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from msgspec import UNSET

from holdfast.topology import desired
from holdfast.topology.announcing import Schedule, announce_all, is_confirmed
from holdfast.topology.brokers import Brokers, broker_url
from holdfast.topology.desired import (
    DEGREE_MIN,
    Federation,
    JoinToken,
    Member,
    Policy,
    Refused,
    Rule,
)
from holdfast.topology.graph import Link, link_of
from holdfast.topology.health import Health, Verdict
from holdfast.topology.messages import Desired, JoinAnswer, JoinRequest, Neighbor, Report
from holdfast.topology.round_trips import UNKNOWN_MS, RoundTrips, measured_ms
from holdfast.topology.settings import Settings
from holdfast.topology.store import AuditLine, Store, StoreError

logger = logging.getLogger("holdfast.topology")

MEMBERS_MAX: Final = 10_000
PROBES_AT_ONCE: Final = 32
REPORT_FRESH_INTERVALS: Final = 3
WATCHERS_MAX: Final = 2_000
TOKENS_MAX: Final = 10_000
READMIT_S: Final = 30 * 86_400.0
"""How long a member that was taken for dead may come back with its token, as a new member."""


class NoSuchMember(Exception):
    pass


class TooMany(Exception):
    """A bound of the manager's is reached; the text names it."""


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Manager:
    def __init__(
        self,
        settings: Settings,
        store: Store,
        brokers: Brokers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises StoreError."""
        self.settings = settings
        self.store = store
        self.state: Federation = store.load()
        self.health = Health()
        self.round_trips = RoundTrips()
        self.reports: dict[int, tuple[float, Report]] = {}
        """The newest report of each member, and when it came."""
        self.problems: tuple[str, ...] = ()
        """Why the links are not as safe as they should be."""
        self.counts: Counter[str] = Counter()
        self.clock = clock
        self._brokers = brokers
        self._policy = Policy(
            settings.degree_max, "paper" if settings.strategy == "paper" else "default"
        )
        self._schedule = Schedule()
        self._changed = asyncio.Event()
        self._watchers = 0
        self._is_ending = False
        self.tasks: list[asyncio.Task[None]] = []
        """What probes and announces; none of it ends by itself but by a defect."""
        changed = desired.repaired(self.state, self._policy, self.round_trips.cost)
        self.problems = changed.problems
        if changed.state is not self.state:
            self._commit(changed.state, "manager", "repair", "the limits have changed")

    def start(self) -> None:
        self.tasks = [
            asyncio.create_task(self._probe_for_ever()),
            asyncio.create_task(self._announce_for_ever()),
        ]

    def release_watchers(self) -> None:
        """Answer who waits for a change, now and from now on: the end is near."""
        self._is_ending = True
        self._wake()

    def _wake(self) -> None:
        """Who waits, once: an event that stayed set would be one that nobody can wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.store.close()

    def _commit(self, after: Federation, actor: str, action: str, detail: str = "") -> None:
        """Raises StoreError; then nothing has changed."""
        line = AuditLine(
            at_s=time.time(), revision=after.revision, actor=actor, action=action, detail=detail
        )
        self.store.save(self.state, after, line)
        self.state = after
        logger.info("%s actor=%s revision=%d %s", action, actor, after.revision, detail)
        self._wake()

    async def join(
        self,
        request: JoinRequest,
        actor: str,
        join_token: str = "",
        by_member: int | None = None,
        gives_token: bool = False,
    ) -> JoinAnswer:
        """`join_token`: the hash of the token that lets it in, used up by this; `by_member`: who
        asks, with its own token; `gives_token`: it needs one. Raises ValueError for an address
        that is none, Refused, NoSuchMember, TooMany, StoreError."""
        ip = broker_url(request.ip)
        if 0 < request.capacity < DEGREE_MIN:
            raise ValueError(
                f"capacity {request.capacity}: a member needs room for {DEGREE_MIN} neighbours"
            )
        round_trip_ms = await self._brokers.round_trip_ms(ip)
        if by_member is not None:
            self.member(by_member)
        token_state = self.state.tokens.get(join_token)
        if join_token and (token_state is None or token_state.used_by is not None):
            raise Refused("this join token has been used in the meantime: make a new one")
        if len(self.state.members) >= MEMBERS_MAX:
            raise TooMany(f"there are {MEMBERS_MAX} members, more than that are not taken")
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
            joined_at_s=time.time(),
        )
        trips = self.round_trips
        joined = desired.join(self.state, wanted, self._policy, self._latency(request), trips.cost)
        state, member = joined.state, joined.member
        if join_token:
            state = desired.with_token_used(state, join_token, member.id)
        gone = [node for node in self.state.members if node not in state.members]
        self._commit(state, actor, "join" if joined.is_new else "rejoin", f"{member.id} {ip}")
        self.problems = joined.problems
        self._forget([*gone, member.id])
        trips.member_measured(member.id, round_trip_ms)
        for other, trip_ms in request.rtts.items():
            if other in state.members:
                trips.link_measured(member.id, other, trip_ms)
        self.counts["joins"] += 1
        return self._join_answer(member, token)

    def _latency(self, request: JoinRequest) -> Callable[[int], float]:
        """Of the members as the newcomer measured them; without that, as the manager did. The
        published rule knows the manager's measurement only."""
        if self._policy.strategy == "paper" or not request.rtts:
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
        members = [self.state.members[each] for each in self.state.neighbours(node)]
        return [Neighbor(each.id, each.ip, each.advertise or UNSET) for each in members]

    def member(self, node: int) -> Member:
        """Raises NoSuchMember."""
        found = self.state.members.get(node)
        if found is None:
            raise NoSuchMember(f"there is no member {node}: it was removed, or never joined")
        return found

    def leave(self, node: int, actor: str) -> None:
        """Raises NoSuchMember, StoreError."""
        self.member(node)
        self._remove([node], actor, "leave")

    def _remove(
        self, nodes: list[int], actor: str, action: str, readmit_until_s: float = 0
    ) -> None:
        changed = desired.leave(
            self.state, nodes, self._policy, self.round_trips.cost, readmit_until_s
        )
        self._commit(changed.state, actor, action, " ".join(str(node) for node in nodes))
        self.problems = changed.problems
        self._forget(nodes)
        self.counts["removals"] += len(nodes)

    def _forget(self, nodes: list[int]) -> None:
        for node in nodes:
            self.health.forget(node)
            self.round_trips.forget(node)
            self.reports.pop(node, None)

    def set_rules(self, rules: dict[Link, Rule], actor: str) -> None:
        """Raises Refused, StoreError."""
        changed = desired.set_rules(self.state, rules, self._policy, self.round_trips.cost)
        text = " ".join(f"{low}-{high}:{rule}" for (low, high), rule in rules.items())
        self._commit(changed.state, actor, "links", text)
        self.problems = changed.problems

    def rebalance(self, actor: str) -> None:
        """Raises StoreError."""
        before = self.state.links
        changed = desired.rebalanced(self.state, self._policy, self.round_trips.cost)
        moved = len(changed.state.links - before)
        self._commit(changed.state, actor, "rebalance", f"{moved} new links")
        self.problems = changed.problems

    def report(self, node: int, report: Report) -> Desired:
        """What a member says of its links, and what it should have. Raises NoSuchMember, Refused
        for a report of an earlier life of the member, StoreError."""
        member = self.member(node)
        if report.epoch < member.epoch:
            raise Refused(
                f"member {node} has joined with epoch {member.epoch} since {report.epoch}: join"
                " again"
            )
        self.reports[node] = (self.clock(), report)
        for link in report.links:
            if link.up and link.peer in self.state.members:
                self.round_trips.link_measured(node, link.peer, measured_ms(link.rtt_ms))
        for announcement in list(self.state.announcements.values()):
            if announcement.receiver == node and is_confirmed(announcement, report):
                after = desired.announced(self.state, announcement)
                self._commit(after, "manager", "announced", f"{node} {announcement.about}")
        return Desired(self.state.revision, self.neighbors(node))

    def new_join_token(self, valid_s: float, actor: str) -> tuple[str, float]:
        """The token and when it expires. Raises TooMany, StoreError."""
        now_s = time.time()
        if len(self.state.tokens) >= TOKENS_MAX:
            raise TooMany(f"there are {TOKENS_MAX} join tokens: wait until some expire")
        token = "join-" + secrets.token_urlsafe(24)
        expires_at_s = now_s + valid_s
        after = desired.with_token(
            self.state, hash_of(token), JoinToken(expires_at_s=expires_at_s), now_s
        )
        self._commit(after, actor, "join-token", f"valid for {valid_s:g} s")
        return token, expires_at_s

    async def changed_since(self, revision: int, timeout_s: float) -> bool:
        """Wait until the state has another revision, at most so long; whether it has. Raises
        TooMany."""
        if self._watchers >= WATCHERS_MAX:
            raise TooMany(f"{WATCHERS_MAX} watch already: ask again later")
        self._watchers += 1
        try:
            async with asyncio.timeout(timeout_s):
                while self.state.revision == revision and not self._is_ending:
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._watchers -= 1
        return self.state.revision != revision

    def fresh_report(self, node: int) -> Report | None:
        found = self.reports.get(node)
        limit_s = REPORT_FRESH_INTERVALS * self.settings.probe_interval_s
        return found[1] if found is not None and self.clock() - found[0] <= limit_s else None

    def is_reported_up(self, node: int) -> bool:
        """Whether a neighbour has lately said that its link to this member works."""
        for neighbour in self.state.neighbours(node):
            report = self.fresh_report(neighbour)
            if report and any(link.peer == node and link.up for link in report.links):
                return True
        return False

    def link_up(self, link: Link) -> bool | None:
        """None: neither end has lately reported it."""
        said = [
            each.up
            for node, other in (link, link[::-1])
            if (report := self.fresh_report(node)) is not None
            for each in report.links
            if each.peer == other
        ]
        return all(said) if said else None

    def verdict(self) -> Verdict:
        return self.health.judge(self.state.members, self.is_reported_up)

    async def probe_all(self) -> None:
        """One round: probe everybody, and remove who is dead."""
        slots = asyncio.Semaphore(PROBES_AT_ONCE)

        async def probe(member: Member) -> tuple[Member, float | None]:
            async with slots:
                return member, await self._brokers.round_trip_ms(member.ip)

        for member, trip_ms in await asyncio.gather(
            *(probe(each) for each in self.state.members.values())
        ):
            if self.state.members.get(member.id) != member:
                # It has left, or joined again, since.
                continue
            # A member that used to report and is silent does not live, whatever its broker does.
            is_silent = member.id in self.reports and self.fresh_report(member.id) is None
            succeeded = measured_ms(trip_ms) is not None and not is_silent
            self.health.probed(member.id, succeeded)
            self.round_trips.member_measured(member.id, trip_ms)
            self.counts["probes_failed"] += not succeeded
        dead = list(self.verdict().dead)
        if dead:
            self._remove(dead, "manager", "dead", time.time() + READMIT_S)

    async def _probe_for_ever(self) -> None:
        while True:
            start = self.clock()
            try:
                await self.probe_all()
            except StoreError as error:
                logger.error("not_repaired error=%r", str(error))
            await asyncio.sleep(max(0.0, start + self.settings.probe_interval_s - self.clock()))

    async def announce_due(self) -> None:
        """One round of announcements."""
        state = self.state
        due = self._schedule.due(state.announcements, self.clock())
        addresses = {each.receiver: state.members[each.receiver].ip for each in due}
        told = await announce_all(self._brokers, addresses, due)
        for announcement in due:
            is_enough = self._schedule.sent(announcement, announcement in told, self.clock())
            if is_enough and announcement.receiver not in self.reports:
                after = desired.announced(self.state, announcement)
                if after is not self.state:
                    detail = f"{announcement.receiver} {announcement.about}"
                    self._commit(after, "manager", "announced", detail)

    async def _announce_for_ever(self) -> None:
        while True:
            changed = self._changed
            try:
                await self.announce_due()
            except StoreError as error:
                logger.error("not_announced error=%r", str(error))
            due = self._schedule.timer() if self.state.announcements else None
            try:
                async with asyncio.timeout(None if due is None else max(0.05, due - self.clock())):
                    await changed.wait()
            except TimeoutError:
                pass


def rules_of(rules: list[tuple[int, int, Rule]]) -> dict[Link, Rule]:
    """Raises ValueError for a link of a member with itself, or two rules for one link."""
    found: dict[Link, Rule] = {}
    for one, other, rule in rules:
        if one == other:
            raise ValueError(f"a link has two ends, this one has {one} twice")
        link = link_of(one, other)
        if found.setdefault(link, rule) != rule:
            raise ValueError(f"link {link[0]}-{link[1]} is both {found[link]} and {rule}")
    return found
