"""Home partitions of shared groups that a node leads."""

from collections.abc import Callable
from typing import Final

from holdfast.log.partition import partition_of
from holdfast.node.context import ClusterContext
from holdfast.node.groups.group_state import Coordination
from holdfast.node.node_state import NodeState
from holdfast.node.reads.read_barrier import Barriers
from holdfast.protocol.topics.names import InvalidFilter, split_shared

START_WAIT_S: Final = 2.0
"""The longest time in seconds that a new coordinator waits for the reports of the nodes."""

OPEN_WAIT_S: Final = 5.0
"""The time in seconds after which a home is opened for QoS 1 although its barrier has not reached
every partition. QoS 2 records wait for the barrier."""


class Home:
    """A home partition that this node leads.

    `begins_at`: the log end when the leadership began. The records of earlier coordinators are
    below it.
    """

    def __init__(
        self, partition: int, epoch: int, since: float, barrier: int, begins_at: int
    ) -> None:
        self.partition = partition
        self.begins_at = begins_at
        self.epoch = epoch
        self.since = since
        self.barrier = barrier
        # The barrier after which the subscriptions are applied that nodes of an older version have
        # made. -1: there is such a node, or none was looked for.
        self.members_barrier = -1
        # The (group, client id, session epoch) of member records to append before the MEMBERS
        # record. None: it is too early for that.
        self.unconfirmed: list[tuple[str, str, int]] | None = None
        # True once this coordinator has appended the MEMBERS record.
        self.is_confirmed = False
        # The nodes that have reported, with the number of their TELL.
        self.reported: dict[str, int] = {}
        self.is_open = False
        # True once the barrier is passed: the log shows which QoS 2 records sessions have kept.
        self.is_certain = False
        self.groups: dict[str, Coordination] = {}
        # The groups whose end this coordinator has appended, until it is applied or ignored here.
        self.ended: set[str] = set()


class LedHomes:
    """The homes of one coordinator, by partition, with their groups."""

    def __init__(self, state: NodeState, context: ClusterContext) -> None:
        self._state = state
        self._context = context
        self.led: dict[int, Home] = {}
        self.group_count = 0
        # Announces the filter of a group, while partitions are fed to this node. Feeds sets it.
        self.announce: Callable[[Coordination], None] = lambda coordination: None
        # Those that are not open yet.
        self.opening: dict[Home, None] = {}

    def coordination(self, home: Home, key: str) -> Coordination:
        coordination = home.groups.get(key)
        if coordination is None:
            coordination = Coordination(key, home.partition, home.epoch, self._state)
            coordination.is_kept = key in self._state.recorded.queues
            home.groups[key] = coordination
            self.group_count += 1
            if self._context.unstored:
                self.announce(coordination)
            cursor = coordination.cursor
            self._state.subscriptions.add(cursor.filter, cursor, cursor)
            self._state.change_routes()
        return coordination

    def announce_all(self) -> None:
        """Announces the filters of all groups, before the first partition is fed."""
        for home in self.led.values():
            for coordination in home.groups.values():
                self.announce(coordination)

    def remove(self, home: Home, key: str) -> None:
        """Removes a group that is over."""
        del home.groups[key]
        self.group_count -= 1

    def count_again(self) -> None:
        """Counts the groups after a home has changed its leader."""
        self.group_count = sum([len(home.groups) for home in self.led.values()])

    def find(self, key: str) -> Coordination | None:
        """Returns the state of a group whose home this node leads."""
        home = self.led.get(self.home_of(key))
        return None if home is None else home.groups.get(key)

    def home_of(self, key: str) -> int:
        return partition_of(key.encode(), self._state.config.partitions)

    def has_reported(self, coordination: Coordination, node: str) -> bool:
        return node in self.led[coordination.home].reported

    def may_start(self, home: Home) -> bool:
        """True if every data node that is not down has reported, or START_WAIT_S has passed."""
        if self._context.metadata is not None and self._state.now >= home.since + START_WAIT_S:
            return True
        return self.all_reported(home)

    def all_reported(self, home: Home) -> bool:
        """True if every data node that is not down has reported."""
        metadata = self._context.metadata
        return metadata is not None and all(
            node in home.reported or not info.has_clients or self._context.is_gone(node)
            for node, info in metadata.nodes.items()
        )

    def pop_ready(self, barriers: Barriers) -> list[Home]:
        """Removes and returns the homes whose groups may be opened now."""
        ready = [
            home
            for home in self.opening
            if self._state.delivered[home.partition] >= home.begins_at
            and self._is_reached(home, barriers)
            and self.may_start(home)
        ]
        for home in ready:
            del self.opening[home]
        return ready

    def _is_reached(self, home: Home, barriers: Barriers) -> bool:
        home.is_certain = barriers.has_passed(home.barrier)
        is_late = self._state.now >= home.since + OPEN_WAIT_S
        return home.is_certain or (is_late and len(barriers.lacking(home.barrier)) > 0)

    def unreported(self) -> dict[str, list[tuple[int, int]]]:
        """Returns the connected data nodes without a current report, with the partitions and epochs
        of those homes.

        A node reports as soon as it is up again. This node may apply the metadata that had it as
        down only after that report, and then drops the report.
        """
        metadata = self._context.metadata
        found: dict[str, list[tuple[int, int]]] = {}
        if metadata is None:
            return found
        for node in (self._context.node_id, *sorted(self._context.connected)):
            info = metadata.nodes.get(node)
            if info is None or not info.has_clients or self._context.is_gone(node):
                continue
            homes = [
                (home.partition, home.epoch)
                for home in self.led.values()
                if node not in home.reported
            ]
            if homes:
                found[node] = homes
        return found


def is_group(key: str) -> bool:
    """True if `key` is the key of a shared group: a filter with `$share/`."""
    try:
        split_shared(key)
    except InvalidFilter:
        return False
    return True
