"""The controller: it assigns replicas and leaders. It runs on the Raft leader only.

It compares the actual state (the metadata, and the health that the detector sees) with the wanted
state, and proposes the difference. It keeps no state that it could not compute again, so a node
that becomes Raft leader makes a new one. Every proposal is a compare-and-set. So a late or repeated
one changes nothing, and neither does one from a controller that does not know yet that it is
deposed.

There is never an unclean leader: if all in-sync replicas are dead, the partition waits for one of
them.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from holdfast.node.failure.health import Health
from holdfast.node.metadata.commands import ChangePartitions, Command, SetReplication
from holdfast.node.metadata.model import (
    DATA,
    NOT_PLACED,
    ClusterMetadata,
    NodeInfo,
    NodePhase,
    PartitionInfo,
)
from holdfast.node.placement.planning import (
    NodeConditions,
    advanced,
    conditions_of,
    is_led_by_another,
    lacks_replica,
    last_copies,
    next_replication,
    relieved,
    repaired,
    useless,
    wanted_replicas,
    with_leader,
    with_new_replicas,
)
from holdfast.node.placement.ring import Assignment

FOREVER: Final = float("inf")
STEADY: Final = 10.0


class ControllerConfig(Struct, frozen=True):
    """The times and bounds of the controller."""

    replace_after_s: float = 10.0
    """The seconds after which the replicas of a dead node are made elsewhere."""
    balance_after_s: float = 5.0
    """The seconds that a node that was down must be up before it gets its leaderships back. They
    double when it is down again before it was up for STEADY times as long, so that the
    leaderships of a node that comes and goes do not go back and forth."""
    balance_after_s_max: float = 600.0
    """The most seconds of such a wait."""
    moves_max: int = 16
    """The most partitions that have replicas being added at the same time."""
    leader_moves_max: int = 8
    """The most leaders moved every `leader_moves_every_s` only because others are preferred."""
    leader_moves_every_s: float = 0.2
    """The interval in seconds between such moves."""
    changes_max: int = 512
    """The most partitions in one command, which is one entry of the metadata log."""
    proposal_timeout_s: float = 2.0
    """The seconds after which a proposal without a result is made again."""
    pace_s: float = 0.02
    """The seconds between two comparisons when only the metadata has changed. So changes that
    partition leaders make one by one are compared together."""
    retry_s: float = 0.02
    """The seconds before a refused change is proposed again, if it is still needed."""


class _Pending(Struct, frozen=True):
    """A proposal under way for one version of a partition or node, until a time."""

    version: int
    until: float


Change = tuple[int, int, PartitionInfo]


class Controller:
    """The controller of a cluster. The driver calls `step` when the metadata or the health has
    changed, and when `timer` is due."""

    def __init__(self, node_id: str, config: ControllerConfig) -> None:
        self.node_id = node_id
        self._config = config
        self._metadata: ClusterMetadata | None = None
        self._health: Health | None = None
        self._reviewed_at = -FOREVER
        self._next_at = FOREVER
        self._down_since: dict[str, float] = {}
        self._up_since: dict[str, float] = {}
        """The time since which a node that was down is up."""
        self._waits_s: dict[str, float] = {}
        """The seconds for which a node must be up, unless they are `balance_after_s`."""
        self._leaders_moved_at = -FOREVER
        self._pending_partitions: dict[int, _Pending] = {}
        self._pending_nodes: dict[str, _Pending] = {}
        self._step_again_at = -FOREVER
        """The time before which no step of the replication is proposed again."""
        self._wanted_for: tuple[object, ...] = ()
        self._wanted: Assignment = ()

    def timer(self) -> float | None:
        return self._next_at if self._next_at != FOREVER else None

    def step(self, metadata: ClusterMetadata, health: Health, now: float) -> list[Command]:
        """The commands to propose now, all at once; they do not depend on one another."""
        if metadata is not self._metadata:
            self._wake(self._reviewed_at + self._config.pace_s)
        if health is self._health and now < self._next_at:
            return []
        self._metadata = metadata
        self._reviewed_at = now
        self._health = health
        self._next_at = FOREVER
        self._forget_pending(metadata, now)
        self._note_states(metadata, now)
        nodes = self._node_changes(metadata, health)
        standing = conditions_of(metadata, nodes, health)
        wanted = self._wanted_replicas(metadata, now)
        urgent, ordinary, free = self._changes(metadata, wanted, standing)
        if free:
            ordinary += self._begin_moves(metadata, wanted, standing, free)
            begun_here = {number for number, _, _ in ordinary}
            free = [number for number in free if number not in begun_here]
            ordinary += self._prefer_leaders(metadata, standing, free, now)
        commands = self._commands(nodes, urgent, ordinary, standing, now)
        return commands + self._resize(metadata, now)

    def _resize(self, metadata: ClusterMetadata, now: float) -> list[Command]:
        """The next step towards the wanted replication, one at a time. The metadata refuse one that
        is made from other settings than those in force."""
        command = next_replication(metadata)
        if command is None:
            return []
        commands: list[Command] = []
        if now >= self._step_again_at:
            self._step_again_at = now + self._config.proposal_timeout_s
            commands.append(command)
        self._wake(self._step_again_at)
        return commands

    def note_outcome(self, command: Command, now: float) -> None:
        """Notes that a command was accepted or refused. Changes that are still needed may be
        proposed again after `retry_s`."""
        until = now + self._config.retry_s
        if isinstance(command, SetReplication):
            self._step_again_at = until
            self._wake(until)
        if not isinstance(command, ChangePartitions):
            return
        for number, version, _ in command.changes:
            if number in self._pending_partitions:
                self._pending_partitions[number] = _Pending(version, until)
        for version, info in command.nodes:
            if info.node_id in self._pending_nodes:
                self._pending_nodes[info.node_id] = _Pending(version, until)
        self._wake(until)

    def _wake(self, at: float) -> None:
        self._next_at = min(self._next_at, at)

    def _forget_pending(self, metadata: ClusterMetadata, now: float) -> None:
        partitions = metadata.partitions
        self._pending_partitions = {
            number: pending
            for number, pending in self._pending_partitions.items()
            if partitions[number].version == pending.version and now < pending.until
        }
        self._pending_nodes = {
            node: pending
            for node, pending in self._pending_nodes.items()
            if node in metadata.nodes
            and metadata.nodes[node].version == pending.version
            and now < pending.until
        }
        for pending in (*self._pending_partitions.values(), *self._pending_nodes.values()):
            self._wake(pending.until)

    def _note_states(self, metadata: ClusterMetadata, now: float) -> None:
        for node, info in metadata.nodes.items():
            if info.state == NodePhase.DOWN:
                self._down_since.setdefault(node, now)
                since = self._up_since.pop(node, None)
                if since is not None:
                    self._waits_s[node] = self._next_wait_s(node, now - since)
            elif self._down_since.pop(node, None) is not None:
                self._up_since[node] = now
        for known in (self._down_since, self._up_since, self._waits_s):
            for node in [node for node in known if node not in metadata.nodes]:
                del known[node]

    def _next_wait_s(self, node: str, up_s: float) -> float:
        """The next wait of a node that is down after it was up for `up_s`."""
        least_s = self._config.balance_after_s
        wait_s = self._waits_s.get(node, least_s)
        is_steady = up_s >= STEADY * wait_s
        return least_s if is_steady else min(2 * wait_s, self._config.balance_after_s_max)

    def _node_changes(self, metadata: ClusterMetadata, health: Health) -> dict[str, NodeInfo]:
        """The new entries of nodes: down, up again, or with another disk. A node whose disk does
        not respond, or is damaged, counts as dead, whatever else of it runs."""
        changes = {}
        wiped: set[str] = set()
        ill = useless(metadata, health)
        for node, info in metadata.nodes.items():
            if node in self._pending_nodes:
                continue
            presence = health.present.get(node)
            changed = info
            if presence is not None:
                changed = replace(
                    info,
                    incarnation=presence.incarnation,
                    peer_address=presence.peer_address,
                    client_address=presence.client_address,
                    admin_address=presence.admin_address,
                )
            if presence is None or node in ill:
                if info.state == NodePhase.UP and (node in health.dead or node in ill):
                    changed = replace(changed, state=NodePhase.DOWN)
            elif info.state == NodePhase.DOWN:
                changed = replace(changed, state=NodePhase.UP)
            if changed == info:
                continue
            if changed.incarnation != info.incarnation and self._is_in_sync_in_pending(node):
                # The node must leave all in-sync sets in the command that changes its disk. A
                # pending change of such a set would make that command too old.
                continue
            if changed.incarnation != info.incarnation:
                wiped.add(node)
                if last_copies(metadata, wiped):
                    # The old disk may only be unmounted. An operator decides, see
                    # operations.unsafe_recover.
                    wiped.discard(node)
                    continue
            changes[node] = changed
        return changes

    def _is_in_sync_in_pending(self, node: str) -> bool:
        partitions = self._metadata.partitions if self._metadata is not None else ()
        return any(node in partitions[number].in_sync for number in self._pending_partitions)

    def _wanted_replicas(self, metadata: ClusterMetadata, now: float) -> Assignment:
        """The wanted replicas of all partitions. They are computed again only when the eligible
        nodes, their zones or the replication factor change, so that a plan is carried out to its
        end."""
        usable = set()
        given_up = set()
        for node, info in metadata.nodes.items():
            if info.role != DATA or info.state == NodePhase.DRAINING:
                continue
            replace_at = self._down_since.get(node, FOREVER) + self._config.replace_after_s
            if now < replace_at:
                usable.add(node)
                self._wake(replace_at)
            else:
                given_up.add(node)
        factor, placed = metadata.replication_factor, metadata.placement or NOT_PLACED
        wanted_for = (frozenset(usable), frozenset(given_up), factor, placed.traits)
        if wanted_for != self._wanted_for or len(self._wanted) != len(metadata.partitions):
            self._wanted_for = wanted_for
            self._wanted = wanted_replicas(metadata, usable, given_up)
        return self._wanted

    def _changes(
        self, metadata: ClusterMetadata, wanted: Assignment, standing: NodeConditions
    ) -> tuple[list[Change], list[Change], list[int]]:
        """Changes after failures, changes of plan, and the free partitions. A free partition needs
        neither, but is not in its wanted state."""
        urgent: list[Change] = []
        ordinary: list[Change] = []
        free: list[int] = []
        pending = self._pending_partitions
        min_insync = metadata.min_insync
        lacking = standing.absent | standing.wiped | standing.incomplete.keys()
        for number, info in enumerate(metadata.partitions):
            replicas = info.replicas
            if (
                info.leader == replicas[0]
                and info.leader in standing.willing
                and replicas == wanted[number]
                and not info.adding
                and lacking.isdisjoint(info.in_sync)
            ):
                continue
            if number in pending:
                continue
            here = standing.for_partition(number, info)
            changed = repaired(info, here, min_insync)
            if changed is not info:
                urgent.append((number, info.version, changed))
                continue
            changed = advanced(relieved(info, here), wanted[number], here, min_insync)
            if changed is not info:
                ordinary.append((number, info.version, changed))
            else:
                free.append(number)
        return urgent, ordinary, free

    def _begin_moves(
        self,
        metadata: ClusterMetadata,
        wanted: Assignment,
        standing: NodeConditions,
        free: Iterable[int],
    ) -> list[Change]:
        """Adds missing replicas, first where the fewest are in sync."""
        if metadata.is_paused:
            return []
        partitions = metadata.partitions
        room = self._config.moves_max - len(self._pending_partitions)
        room -= sum(1 for info in partitions if not standing.absent.issuperset(info.adding))
        if room <= 0:
            return []
        waiting = sorted(
            (len(partitions[number].in_sync), number)
            for number in free
            if lacks_replica(partitions[number], wanted[number], standing)
        )
        return [
            (
                number,
                partitions[number].version,
                with_new_replicas(partitions[number], wanted[number], standing),
            )
            for _, number in waiting[:room]
        ]

    def _prefer_leaders(
        self, metadata: ClusterMetadata, standing: NodeConditions, free: Iterable[int], now: float
    ) -> list[Change]:
        """Returns some partitions to their preferred leaders."""
        steady = self._steady(standing, now)
        movable = [
            number
            for number in free
            if is_led_by_another(info := metadata.partitions[number])
            and info.replicas[0] in steady
            and not info.adding
        ]
        if not movable:
            return []
        next_at = self._leaders_moved_at + self._config.leader_moves_every_s
        if now < next_at:
            self._wake(next_at)
            return []
        self._leaders_moved_at = now
        if len(movable) > self._config.leader_moves_max:
            self._wake(now + self._config.leader_moves_every_s)
        moves = []
        for number in movable[: self._config.leader_moves_max]:
            info = metadata.partitions[number]
            moves.append((number, info.version, with_leader(info, info.replicas[0])))
        return moves

    def _steady(self, standing: NodeConditions, now: float) -> set[str]:
        """The willing nodes that have been up for long enough."""
        steady = set()
        for node in standing.willing:
            wait_s = self._waits_s.get(node, self._config.balance_after_s)
            at = self._up_since.get(node, -FOREVER) + wait_s
            if now >= at:
                steady.add(node)
            else:
                self._wake(at)
        return steady

    def _commands(
        self,
        nodes: dict[str, NodeInfo],
        urgent: list[Change],
        ordinary: list[Change],
        standing: NodeConditions,
        now: float,
    ) -> list[Command]:
        """The commands for these changes. Urgent changes and those of nodes come first, so the
        others cannot delay them. A node with a new disk leaves all in-sync sets in the command that
        announces it."""
        metadata = self._metadata
        assert metadata is not None
        node_changes = tuple((metadata.nodes[node].version, nodes[node]) for node in sorted(nodes))
        first = len(urgent) if standing.wiped else self._config.changes_max
        commands: list[Command] = []
        if node_changes or urgent:
            commands.append(ChangePartitions(tuple(urgent[:first]), node_changes))
        for rest in (urgent[first:], ordinary):
            for start in range(0, len(rest), self._config.changes_max):
                chunk = rest[start : start + self._config.changes_max]
                commands.append(ChangePartitions(tuple(chunk)))
        if not commands:
            return commands
        until = now + self._config.proposal_timeout_s
        for number, version, _ in (*urgent, *ordinary):
            self._pending_partitions[number] = _Pending(version, until)
        for version, info in node_changes:
            self._pending_nodes[info.node_id] = _Pending(version, until)
        self._wake(until)
        return commands
