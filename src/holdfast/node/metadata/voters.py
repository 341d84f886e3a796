"""Chooses the nodes that vote on the metadata. The Raft leader chooses, one change at a time.

There are one, three or five voters. An even number needs one more live voter and tolerates no more
failures. So a cluster of two has one voter: with two, neither would survive alone. It gets three
when a third node, or a witness, is there. Between two odd numbers there is an even one until a
change is committed. Every other node is a learner, ready to replace a voter that is down. A
gateway never votes.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from holdfast.node.metadata.model import GATEWAY, VOTERS_MAX, WITNESS, NodeInfo, NodePhase
from holdfast.node.metadata.state_machine import node_of, peer_id
from holdfast.node.raft.log import Membership


@dataclass(frozen=True)
class HandOver:
    """The decision that another peer shall lead."""

    peer: str


def plan(
    own: str,
    membership: Membership,
    nodes: Mapping[str, NodeInfo],
    leaving: Collection[str],
    is_live: Callable[[str], bool],
) -> Membership | HandOver | None:
    """The next step; None if the membership is right or nothing can be done now.

    `own` is the leader's peer id. `leaving` are nodes to be removed, which must stop voting even
    without a replacement. `is_live` is true for a peer that replies and has every committed entry.
    """
    wanted = {peer_id(node.node_id, node.incarnation): node for node in nodes.values()}
    membership_now = _with_learners(membership, wanted)
    if membership_now != membership:
        return membership_now
    voters = membership.voters
    bad = [voter for voter in voters if not _is_good(voter, own, wanted, leaving)]
    if own in bad:
        heirs = [voter for voter in voters if voter not in bad and is_live(voter)]
        if heirs:
            return HandOver(heirs[0])
    spares = [
        member
        for member in membership.learners
        if _is_good(member, own, wanted, leaving) and is_live(member)
    ]
    spares.sort(key=lambda member: (wanted[member].role != WITNESS, member))
    # A node with another disk replaces its old peer. A peer whose node is removed has no such
    # replacement.
    going = {voter for voter in bad if node_of(voter) in leaving or node_of(voter) not in nodes}
    step = _step(own, membership, bad, spares, going, is_live)
    if step is not None and _has_live_majority(own, step, is_live):
        return step
    return None


def _with_learners(membership: Membership, wanted: Collection[str]) -> Membership:
    for learner in membership.learners:
        if learner not in wanted:
            membership = membership.without(learner)
    for member in sorted(wanted):
        if member not in membership.members:
            membership = membership.with_learner(member)
    return membership


def _is_good(
    member: str, own: str, wanted: Mapping[str, NodeInfo], leaving: Collection[str]
) -> bool:
    node = wanted.get(member)
    if node is None or node.node_id in leaving or node.state == NodePhase.DRAINING:
        return False
    if node.role == GATEWAY:
        return False
    # This node runs, whatever the metadata says.
    return node.state == NodePhase.UP or member == own


def _step(
    own: str,
    membership: Membership,
    bad: list[str],
    spares: list[str],
    going: Collection[str],
    is_live: Callable[[str], bool],
) -> Membership | None:
    count = len(membership.voters)
    others = [voter for voter in bad if voter != own]
    # Peers that do not reply come first.
    others.sort(key=lambda voter: (voter not in going, is_live(voter), voter))
    if count % 2 == 0:
        if others:
            return membership.with_learner(others[0])
        if spares:
            return membership.with_voter(spares[0])
        rest = sorted(
            (voter for voter in membership.voters if voter != own),
            key=lambda voter: (not is_live(voter), voter),
        )
        return membership.with_learner(rest[-1])
    if bad and spares:
        return membership.with_voter(spares[0])
    if others and (others[0] in going or (len(bad) >= 2 and count >= VOTERS_MAX)):
        return membership.with_learner(others[0])
    if not bad and len(spares) >= 2 and count + 2 <= VOTERS_MAX:
        return membership.with_voter(spares[0])
    return None


def _has_live_majority(own: str, membership: Membership, is_live: Callable[[str], bool]) -> bool:
    """True if the membership's majority is live. A change that fails this test could not be
    committed and would block the next one."""
    live = sum(1 for voter in membership.voters if voter == own or is_live(voter))
    return live >= membership.majority
