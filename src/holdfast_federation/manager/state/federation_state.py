"""Desired state of a federation, and its changes. Pure: a change takes a state and returns the next
one, with the next revision.
"""

from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from holdfast_federation.manager.graph.graph import Graph, Link, graph_of, link_of
from holdfast_federation.manager.graph.placement import (
    Latency,
    place,
    rebalance,
    within_rules,
)
from holdfast_federation.manager.graph.repair import Cost, GraphRules, Repaired, repair

Rule: TypeAlias = Literal["pin", "forbid", "none"]
DEGREE_MIN: Final = 2


class ChangeRefused(Exception):
    """The change contradicts the state; the text says why and what to do."""


class Member(Struct, frozen=True, kw_only=True):
    """A member of the federation."""

    id: int
    ip: str
    """The URL of its broker, unique: `tcp://host:port` in the published form."""
    uuid: str = ""
    """Its unique identity; empty for a member that supports only the published protocol."""
    epoch: int = 0
    """A number that grows with each start of the member."""
    advertise: str = ""
    """The address at which other members connect to it."""
    labels: dict[str, str] = {}
    capacity: int = 0
    """The most neighbours that it accepts; 0: the federation's limit."""
    token_hash: str = ""
    certificate: str = ""
    """The name of the certificate with which it joined. Only a caller with this name speaks for it.
    """
    joined_at_s: float = 0.0
    """The time of its join, in seconds since 1970."""
    is_vouched: bool = True
    """True if the operator vouches for `ip`. The manager logs in there."""


class JoinToken(Struct, frozen=True, kw_only=True):
    """A token that admits one member once."""

    expires_at_s: float
    used_by: int | None = None
    vouched_ip: str = ""
    """The broker of a member that was taken for dead, if the operator vouches for that."""


@dataclass(frozen=True)
class FederationState:
    """The members, links, rules and tokens, with their revision."""

    revision: int = 0
    next_id: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    links: frozenset[Link] = frozenset()
    pinned: frozenset[Link] = frozenset()
    forbidden: frozenset[Link] = frozenset()
    tokens: dict[str, JoinToken] = field(default_factory=dict)
    """The join tokens by hash."""

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
    """The limits of the settings."""

    degree_max: int

    def rules(self, state: FederationState) -> GraphRules:
        def limit(node: int) -> int:
            member = state.members.get(node)
            return min(self.degree_max, (member and member.capacity) or self.degree_max)

        return GraphRules(limit, state.pinned, state.forbidden)


@dataclass(frozen=True)
class Joined:
    """The result of a join."""

    state: FederationState
    member: Member
    is_new: bool
    problems: tuple[str, ...]


def join(
    state: FederationState, wanted: Member, policy: Policy, latency: Latency, cost: Cost
) -> Joined:
    """Adds a member, or finds it again by its uuid, then by its broker's address. It then keeps its
    id and its links. `wanted.id` is ignored.

    Raises ChangeRefused for an epoch before the known one.
    """
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
    state = replace(state, members=state.members | {known.id: member})
    repaired = within_rules(state.graph(), policy.rules(state), cost)
    state = replace(state, links=repaired.links)
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
    placement = place(state.graph(), rules, latency, cost)
    member = msgspec.structs.replace(wanted, id=state.next_id)
    links = state.links - placement.removed
    links |= {link_of(member.id, neighbour) for neighbour in placement.neighbours}
    state = replace(state, next_id=state.next_id + 1, members=state.members | {member.id: member})
    graph = graph_of(state.members, links)
    repaired = repair(graph, policy.rules(state), cost)
    state = replace(state, links=repaired.links)
    return Joined(_next(state), member, True, repaired.problems)


@dataclass(frozen=True)
class StateChange:
    """The next state, and the reasons why its graph falls short of its redundancy."""

    state: FederationState
    problems: tuple[str, ...]


def leave(
    state: FederationState, nodes: list[int], policy: Policy, cost: Cost, readmit_until_s: float = 0
) -> StateChange:
    """Removes members, and repairs once for all of them. Unknown ids are ignored. Until
    `readmit_until_s` their tokens admit them once more."""
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
    """Returns the rules by link. Raises ValueError for a link of a member with itself, or for two
    rules of one link."""
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
    """Sets rules of links. Raises ChangeRefused if no safe links satisfy them."""
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
    """Exchanges expensive links for cheap ones."""
    return _relinked(state, rebalance(state.graph(), policy.rules(state), cost))


def repaired(state: FederationState, policy: Policy, cost: Cost) -> StateChange:
    """Repairs the links after a change of limits. Returns the same state without one."""
    found = within_rules(state.graph(), policy.rules(state), cost)
    if found.links == state.links:
        return StateChange(state, found.problems)
    return _relinked(state, found)


def with_token(
    state: FederationState, token_hash: str, token: JoinToken, now_s: float
) -> FederationState:
    """Adds a join token, and removes the expired ones."""
    tokens = {each: value for each, value in state.tokens.items() if value.expires_at_s > now_s}
    return _next(replace(state, tokens=tokens | {token_hash: token}))


def with_token_used(state: FederationState, token_hash: str, by: int) -> FederationState:
    """Marks a token as used. It has no revision of its own, because it is part of the join."""
    token = state.tokens[token_hash]
    used = JoinToken(expires_at_s=token.expires_at_s, used_by=by)
    return replace(state, tokens=state.tokens | {token_hash: used})


def _next(state: FederationState) -> FederationState:
    return replace(state, revision=state.revision + 1)


def _relinked(state: FederationState, found: Repaired) -> StateChange:
    return StateChange(_next(replace(state, links=found.links)), found.problems)


def _without(state: FederationState, node: int) -> FederationState:
    return replace(
        state,
        links=frozenset(link for link in state.links if node not in link),
        members={each: member for each, member in state.members.items() if each != node},
        pinned=frozenset(link for link in state.pinned if node not in link),
        forbidden=frozenset(link for link in state.forbidden if node not in link),
    )
