"""Which nodes vote on the metadata. Run by the Raft leader, one change at a time.

One, three or five voters: with an even number one more must be alive, and none more may fail. So a
cluster of two has one voter (with two, neither would survive alone), and gets three when a third
node, or a witness, is there. Between two odd numbers there is an even one for as long as it takes
to commit a change. Every other node is a learner, ready to take the place of a voter that is down.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from holdfast.cluster.metadata.model import VOTERS_MAX, WITNESS, NodeInfo, NodePhase
from holdfast.cluster.metadata.state_machine import member_id, node_of
from holdfast.cluster.raft.log import Membership


@dataclass(frozen=True)
class HandOver:
    """Another member shall lead."""

    member: str


def plan(
    own: str,
    membership: Membership,
    nodes: Mapping[str, NodeInfo],
    leaving: Collection[str],
    is_live: Callable[[str], bool],
) -> Membership | HandOver | None:
    """The next step, None if all is as it should be or nothing can be done now.

    `own`: the leader's member id. `leaving`: nodes to be removed, which must stop voting even if
    nobody takes their place. `is_live`: the member answers and has what is committed.
    """
    wanted = {member_id(node.node_id, node.incarnation): node for node in nodes.values()}
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
    # A node with another disk takes the place of the one it was; of one that is gone nobody does.
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
    # We run, whatever the cluster thinks.
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
    # Those that do not answer first.
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
    live = sum(1 for voter in membership.voters if voter == own or is_live(voter))
    return live >= membership.majority
