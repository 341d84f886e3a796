"""The state of a federation as the manager wants it, and the changes of it. Pure: a change takes
a state and returns the next one, with the next revision."""

from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from holdfast.federation.manager.graph.graph import Graph, Link, graph_of, link_of
from holdfast.federation.manager.graph.placement import Latency, Strategy, place
from holdfast.federation.manager.graph.rebalance import rebalance, within_rules
from holdfast.federation.manager.graph.repair import Cost, GraphRules, Repaired, repair

Action: TypeAlias = Literal["NEW", "REMOVE"]
Rule: TypeAlias = Literal["pin", "forbid", "none"]
DEGREE_MIN: Final = 2


class ChangeRefused(Exception):
    """The change contradicts the state; the text says why and what to do."""


class Member(Struct, frozen=True, kw_only=True):
    id: int
    ip: str
    """URL of its broker, unique: `tcp://host:port` in the published form."""
    uuid: str = ""
    """Unique; empty: a member that knows only the published protocol."""
    epoch: int = 0
    """Grows with each start of the member."""
    advertise: str = ""
    """Where other members dial it."""
    labels: dict[str, str] = {}
    capacity: int = 0
    """Neighbours it can bear; 0: as the federation's limit says."""
    token_hash: str = ""
    certificate: str = ""
    """Name of the one it showed when it joined; only who shows one of this name speaks for it."""
    joined_at_s: float = 0.0
    """Seconds since 1970."""
    is_vouched: bool = True
    """The operator vouches for `ip`: the manager logs in there."""


class JoinToken(Struct, frozen=True, kw_only=True):
    expires_at_s: float
    used_by: int | None = None
    vouched_ip: str = ""
    """Of a member that was taken for dead: its broker, if the operator vouches for that."""


class PendingAnnouncement(Struct, frozen=True, kw_only=True):
    """What a member of the published protocol must still be told about a neighbour."""

    receiver: int
    about: int
    ip: str
    action: Action


@dataclass(frozen=True)
class FederationState:
    revision: int = 0
    next_id: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    links: frozenset[Link] = frozenset()
    pinned: frozenset[Link] = frozenset()
    forbidden: frozenset[Link] = frozenset()
    tokens: dict[str, JoinToken] = field(default_factory=dict)
    """By hash."""
    announcements: dict[Link, PendingAnnouncement] = field(default_factory=dict)
    """By receiver and the neighbour it is about: the newest is all that counts."""

    def graph(self) -> Graph:
        return graph_of(self.members, self.links)

    def neighbours(self, node: int) -> list[int]:
        return sorted(sum(link) - node for link in self.links if node in link)

    def by_uuid(self, uuid: str) -> Member | None:
        return next((each for each in self.members.values() if uuid and each.uuid == uuid), None)

    def by_ip(self, ip: str) -> Member | None:
        return next((each for each in self.members.values() if each.ip == ip), None)


@dataclass(frozen=True)
class Policy:
    degree_max: int
    strategy: Strategy = "default"

    def rules(self, state: FederationState) -> GraphRules:
        def limit(node: int) -> int:
            member = state.members.get(node)
            return min(self.degree_max, (member and member.capacity) or self.degree_max)

        return GraphRules(limit, state.pinned, state.forbidden)


@dataclass(frozen=True)
class Joined:
    state: FederationState
    member: Member
    is_new: bool
    problems: tuple[str, ...]


def join(
    state: FederationState, wanted: Member, policy: Policy, latency: Latency, cost: Cost
) -> Joined:
    """Take a member in, or find it again by its uuid, then by its broker's address: it keeps its
    id and its links. `wanted.id` is not looked at. Raises Refused for an epoch of the past."""
    known = state.by_uuid(wanted.uuid)
    ghost = state.by_ip(wanted.ip)
    if known is None:
        known, ghost = ghost, None
    if known is None:
        return _admit(state, wanted, policy, latency, cost)
    if known.uuid == wanted.uuid and wanted.epoch < known.epoch:
        raise ChangeRefused(
            f"member {known.id} has been here with epoch {known.epoch}, after {wanted.epoch}: is"
            " this an old copy of its data? Remove the member, or give it a uuid of its own"
        )
    if ghost is not None and ghost.id != known.id:
        # Its broker's address has gone to another member: it cannot be there any more.
        state = _without(state, ghost.id)
    member = _renewed(known, wanted)
    told = {key: value for key, value in state.announcements.items() if key[0] != known.id}
    state = replace(state, members=state.members | {known.id: member}, announcements=told)
    repaired = within_rules(state.graph(), policy.rules(state), cost)
    state = _linked(state, repaired.links, frozenset({known.id}))
    if known.ip != wanted.ip:
        state = _announce_move(state, known, member)
    return Joined(_next(state), member, False, repaired.problems)


def _renewed(known: Member, wanted: Member) -> Member:
    return msgspec.structs.replace(
        wanted,
        id=known.id,
        token_hash=wanted.token_hash or known.token_hash,
        certificate=wanted.certificate or known.certificate,
        joined_at_s=known.joined_at_s,
    )


def _admit(
    state: FederationState, wanted: Member, policy: Policy, latency: Latency, cost: Cost
) -> Joined:
    rules = policy.rules(state)
    placement = place(state.graph(), rules, policy.strategy, latency, cost)
    member = msgspec.structs.replace(wanted, id=state.next_id)
    links = state.links - placement.removed
    links |= {link_of(member.id, neighbour) for neighbour in placement.neighbours}
    state = replace(state, next_id=state.next_id + 1, members=state.members | {member.id: member})
    graph = graph_of(state.members, links)
    repaired = repair(graph, policy.rules(state), cost)
    state = _linked(state, repaired.links, frozenset({member.id}))
    return Joined(_next(state), member, True, repaired.problems)


@dataclass(frozen=True)
class StateChange:
    state: FederationState
    problems: tuple[str, ...]


def leave(
    state: FederationState, nodes: list[int], policy: Policy, cost: Cost, readmit_until_s: float = 0
) -> StateChange:
    """Remove members, dead or leaving, and repair once for all of them. Ids that are unknown are
    passed over. Until `readmit_until_s` their tokens let them join anew, once."""
    for node in nodes:
        if node in state.members:
            member = state.members[node]
            token_hash = member.token_hash
            state = _without(state, node)
            if token_hash and readmit_until_s:
                vouched_ip = member.ip if member.is_vouched else ""
                readmitted = JoinToken(expires_at_s=readmit_until_s, vouched_ip=vouched_ip)
                state = replace(state, tokens=state.tokens | {token_hash: readmitted})
    return _relinked(state, repair(state.graph(), policy.rules(state), cost))


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


def set_rules(
    state: FederationState, rules: dict[Link, Rule], policy: Policy, cost: Cost
) -> StateChange:
    """Raises Refused when no links satisfy them and keep the members safe."""
    for link in rules:
        unknown = [str(node) for node in link if node not in state.members]
        if unknown:
            raise ChangeRefused(f"there is no member {' and no member '.join(unknown)}")
    pinned = {link for link in state.pinned if link not in rules}
    forbidden = {link for link in state.forbidden if link not in rules}
    pinned |= {link for link, rule in rules.items() if rule == "pin"}
    forbidden |= {link for link, rule in rules.items() if rule == "forbid"}
    state = replace(state, pinned=frozenset(pinned), forbidden=frozenset(forbidden))
    found = within_rules(state.graph(), policy.rules(state), cost)
    if found.problems and len(state.members) > DEGREE_MIN:
        raise ChangeRefused("; ".join(found.problems))
    return _relinked(state, found)


def rebalanced(state: FederationState, policy: Policy, cost: Cost) -> StateChange:
    return _relinked(state, rebalance(state.graph(), policy.rules(state), cost))


def repaired(state: FederationState, policy: Policy, cost: Cost) -> StateChange:
    """After a change of the limits. The same state, with its revision, if nothing is to do."""
    found = within_rules(state.graph(), policy.rules(state), cost)
    if found.links == state.links:
        return StateChange(state, found.problems)
    return _relinked(state, found)


def announced(state: FederationState, done: PendingAnnouncement) -> FederationState:
    """A member has been told. What was decided in the meantime stays."""
    key = (done.receiver, done.about)
    if state.announcements.get(key) != done:
        return state
    left = {each: value for each, value in state.announcements.items() if each != key}
    return _next(replace(state, announcements=left))


def with_token(
    state: FederationState, token_hash: str, token: JoinToken, now_s: float
) -> FederationState:
    """Also forgets the tokens that have expired."""
    tokens = {each: value for each, value in state.tokens.items() if value.expires_at_s > now_s}
    return _next(replace(state, tokens=tokens | {token_hash: token}))


def with_token_used(state: FederationState, token_hash: str, by: int) -> FederationState:
    """Within the change that it allowed: no revision of its own."""
    token = state.tokens[token_hash]
    used = JoinToken(expires_at_s=token.expires_at_s, used_by=by)
    return replace(state, tokens=state.tokens | {token_hash: used})


def _next(state: FederationState) -> FederationState:
    return replace(state, revision=state.revision + 1)


def _relinked(state: FederationState, found: Repaired) -> StateChange:
    return StateChange(_next(_linked(state, found.links, frozenset())), found.problems)


def _without(state: FederationState, node: int) -> FederationState:
    gone = state.members[node]
    state = replace(
        state,
        members={each: member for each, member in state.members.items() if each != node},
        announcements={key: value for key, value in state.announcements.items() if key[0] != node},
        pinned=frozenset(link for link in state.pinned if node not in link),
        forbidden=frozenset(link for link in state.forbidden if node not in link),
    )
    for link in state.links:
        if node in link:
            state = _announce(state, sum(link) - node, gone, "REMOVE")
    return replace(state, links=frozenset(link for link in state.links if node not in link))


def _linked(
    state: FederationState, links: frozenset[Link], told: frozenset[int]
) -> FederationState:
    """With these links. `told` learn theirs in the answer to what they asked."""
    members = state.members
    changes: list[tuple[frozenset[Link], Action]] = [
        (state.links - links, "REMOVE"), (links - state.links, "NEW")
    ]  # fmt: skip
    for changed, action in changes:
        for one, other in sorted(changed):
            for receiver, about in ((one, other), (other, one)):
                if receiver not in told:
                    state = _announce(state, receiver, members[about], action)
    return replace(state, links=links)


def _announce_move(state: FederationState, known: Member, member: Member) -> FederationState:
    """The published announcement has no change of address: a neighbour hears it as a new one."""
    for neighbour in state.neighbours(known.id):
        state = _announce(state, neighbour, member, "NEW")
    return state


def _announce(
    state: FederationState, receiver: int, about: Member, action: Action
) -> FederationState:
    member = state.members.get(receiver)
    if member is None or member.uuid:
        return state
    item = PendingAnnouncement(receiver=receiver, about=about.id, ip=about.ip, action=action)
    return replace(state, announcements=state.announcements | {(receiver, about.id): item})
