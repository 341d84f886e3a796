"""Records of one shared group that are assigned to this node."""

from collections.abc import Callable
from typing import Final

from holdfast.node.context import ClusterContext
from holdfast.node.delivery.delivery import note_blocked, note_room
from holdfast.node.delivery.transmission import can_send
from holdfast.node.groups.control_frames import Place
from holdfast.node.groups.sent_records import SentRecords
from holdfast.node.node_state import NodeState
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.session.connection import OPEN
from holdfast.node.session.session import Group
from holdfast.node.state.replicated import ReplicatedState

LIMIT_MAX: Final = 2000
"""The most records of one group at one node, whatever the capacity of its members."""
FINISHED_MAX: Final = 100_000
"""The most finished records of one group that the log does not have as finished. With them the node
wants no further records: a new coordinator must know each finished one."""
REFUSED_MAX: Final = 100_000
"""The most denied records of one group that the node remembers."""


class AgentContext:
    """The parts of a cluster node that its agent in shared groups uses."""

    def __init__(
        self,
        state: NodeState,
        cluster: ClusterContext,
        forwarding: RecordForwarder,
        replicated: ReplicatedState,
        after_newest: Callable[[int, Callable[[], None]], None] | None = None,
    ) -> None:
        """`after_newest`: in place of that of `forwarding`."""
        self.state = state
        self.cluster = cluster
        self.forwarding = forwarding
        self.replicated = replicated
        self.after_newest = after_newest or forwarding.after_newest


class NodeAssignments:
    """The records of one group that are assigned to this node, and what the coordinator knows of
    them."""

    def __init__(self, key: str, home: int) -> None:
        self.key = key
        self.home = home
        # None: no client here has subscribed.
        self.group: Group | None = None
        self.assigned: dict[Place, None] = {}
        self.finished: dict[Place, None] = {}
        # The finished and the returned records that are not reported yet.
        self.done: list[Place] = []
        self.returned: list[Place] = []
        # Those of `returned` that no member here may read.
        self.denied: list[Place] = []
        # The records denied since members last joined or left, and those assigned again since.
        self.refused: dict[Place, None] = {}
        self.again: dict[Place, None] = {}
        # `Group.changes` when the coordinator was last informed of joined or left members.
        self.changes = 0
        # The start of the group, if it begins at this node, until the log has its positions.
        self.start: list[int] | None = None
        self.announces_start = False
        # The capacity as last reported to the coordinator.
        self.members = 0
        self.durable = 0
        self.limit = 0
        self.queued_at = -1.0
        # The records that are in no table, and whether their progress will be logged.
        self.sent = SentRecords()
        self.is_in_progress = False

    def check(self) -> None:
        """Raises `AssertionError` for a record in two of the states."""
        assert not self.assigned.keys() & self.finished.keys(), "a finished record is assigned"
        assert not self.assigned.keys() & set(self.returned), "a returned record is assigned"
        assert len(set(self.done)) == len(self.done), "a record is finished twice"
        assert self.finished.keys() >= set(self.done), "a finished record is forgotten"
        for partition, offsets in self.sent.offsets.items():
            assert len(set(offsets)) == len(offsets), "a record was sent twice"
            for offset in offsets:
                assert (partition, offset) not in self.assigned, "a listed record is in no table"

    def finish(self, place: Place) -> None:
        """Marks an assigned record as finished; the next report has it."""
        del self.assigned[place]
        self.done.append(place)
        self.finished[place] = None

    def return_record(self, place: Place) -> None:
        """Returns an assigned record to the coordinator; the next report has it."""
        del self.assigned[place]
        self.returned.append(place)

    def deny(self, place: Place) -> None:
        """Returns a record that no member here may read."""
        self.return_record(place)
        self.denied.append(place)
        self.refused[place] = None
        if len(self.refused) > REFUSED_MAX:
            del self.refused[next(iter(self.refused))]

    def measure(self, state: NodeState) -> bool:
        """Measures the capacity of the members here. Returns False if it has not changed."""
        members = 0
        durable = 0
        limit = len(self.assigned)
        group = self.group
        if group is not None:
            for member in list(group.connected):
                session = member.session
                connection = session.connection
                if connection is None or connection.state != OPEN:
                    continue
                members += 1
                durable += session.is_durable()
                if group.returned:
                    continue
                if can_send(state, session):
                    note_room(group, member)
                    limit += session.inflight_max - len(session.inflight)
                else:
                    # The group is measured again when the session has capacity.
                    note_blocked(state, group, member)
        limit = min(limit, LIMIT_MAX)
        if len(self.finished) + len(self.assigned) >= FINISHED_MAX:
            limit = 0
        if (members, durable, limit) == (self.members, self.durable, self.limit):
            return False
        self.members = members
        self.durable = durable
        self.limit = limit
        return True
