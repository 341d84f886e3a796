"""Simulated nodes that agree on the cluster metadata: the production MetaStore over RaftFiles on a
simulated disk, with a network that delays, loses, reorders and repeats, and clocks of their own.

What is checked, always:

- a term has one leader, and it has every entry that was ever committed;
- two logs with the same term at an index are equal up to there;
- every node applies the same entries in the same order, to the same metadata;
- an answer to a proposal is what the agreed order says: Accepted with that version, or Refused;
  what was answered before another was proposed comes before it; nothing is applied twice.

At the end all is mended, and then: one leader, every node's proposal is answered, all nodes come to
the same metadata and to an odd number of voters.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from holdfast.io.disk.raft_files import RaftFiles
from holdfast.node.frame_kinds import RAFT
from holdfast.node.metadata import store as metastore
from holdfast.node.metadata.commands import ChangePartitions, RemoveNode
from holdfast.node.metadata.effects import Persist, ProposalDone, Send
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, NodePhase, PartitionInfo
from holdfast.node.metadata.requests import Accepted, Outcome, RequestRefused
from holdfast.node.metadata.state_machine import MetaState, peer_id
from holdfast.node.metadata.store import MetaStore
from holdfast.node.raft import leader as raft_leading
from holdfast.node.raft import node as raft
from holdfast.node.raft.codec import decode_message
from holdfast.node.raft.log import EntryKind, LogEntry, Membership
from holdfast.node.raft.messages import VoteReply, VoteRequest
from holdfast.node.raft.state import RaftTiming, Write
from tests.sim.disk import Crash, SimDisk
from tests.sim.schedule import VirtualTime, Wrong

PARTITIONS = 4
TROUBLE_S = 6.0
"""How long things go wrong in a world."""
MEND_S = 20.0
"""How long they may take to be right again."""


@dataclass
class Asked:
    node: str
    asked_at: float
    request_id: str
    answered_at: float = float("inf")
    outcome: Outcome | None = None


class RecordingStore(MetaStore):
    """Tells the world what it applies."""

    world: "World"

    def _apply(self, entry: LogEntry) -> None:
        super()._apply(entry)
        self.world.note_applied(self, entry)

    @property
    def raft(self):  # type: ignore[no-untyped-def]
        return self._raft._raft


@dataclass
class Node:
    name: str
    index: int
    incarnation: str
    disk: SimDisk
    clock_rate: float
    clock_offset: float
    store: RecordingStore | None = None
    files: RaftFiles | None = None
    life: int = 0
    """Which start of the process."""
    timer_at: float = float("inf")
    writes: list[Write] = field(default_factory=list)
    busy: bool = False
    asked: dict[int, Asked] = field(default_factory=dict)
    paused_until: float = 0.0

    def clock(self, time: float) -> float:
        return self.clock_offset + time * self.clock_rate

    def time(self, clock: float) -> float:
        return (clock - self.clock_offset) / self.clock_rate


class World(VirtualTime):
    store_class: type[RecordingStore] = RecordingStore
    files_class: type[RaftFiles] = RaftFiles

    def __init__(self, seed: int, size: int = 0) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        chance = self.chance
        self.size = size or chance.choice((3, 3, 5))
        self.nodes: dict[str, Node] = {}
        self.delay_s = chance.choice((0.001, 0.005, 0.02))
        self.loss = chance.choice((0.0, 0.01, 0.1))
        self.repeat = chance.choice((0.0, 0.02))
        self.reorder = chance.choice((0.0, 0.3))
        self.disk_s = chance.choice((0.0005, 0.005, 0.03))
        self.fault_s = chance.choice((0.15, 0.4, 1.0))
        self.append_bytes = chance.choice((1, 1, 200, 1 << 20))
        """Of entries in one message; few make it likely that a log is replicated in part."""
        self.vote_crash = chance.choice((0.0, 0.0, 0.3))
        """How often a node crashes when it has voted."""
        self.timing = RaftTiming(
            election_max_s=chance.choice((0.35, 0.6)), election_step_s=chance.choice((0.0, 0.03))
        )
        self.compact_entries = chance.choice((8, 30, 1000))
        self.cut: set[tuple[str, str]] = set()
        self.is_mended = False
        self.trace: list[str] = []
        # What was agreed.
        self.agreed: dict[int, LogEntry] = {}
        self.agreed_metadata: dict[int, ClusterMetadata | None] = {}
        self.leaders: dict[int, str] = {}
        self.asked: list[Asked] = []
        self.elections = 0
        self._faults = [
            self._crash,
            self._crash,
            self._crash_all,
            self._crash_leader,
            self._cut_off,
            self._cut_one_way,
            self._down,
            self._hand_over,
            self._heal,
            self._pause,
            self._remove,
            self._tell_gone,
            self._wipe,
        ]
        for index in range(self.size):
            self._make_node(f"n{index + 1}", index)

    # Running

    def play(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self._patch = patch
            patch.setattr(raft_leading, "APPEND_BYTES_MAX", self.append_bytes)
            patch.setattr(metastore, "COMPACT_ENTRIES", self.compact_entries)
            patch.setattr(raft, "KEEP_ENTRIES", self.chance.choice((0, 5)))
            self._run()

    def _run(self) -> None:
        for node in self.nodes.values():
            self._start(node)
        first = self.nodes["n1"]
        assert first.store is not None
        now = first.clock(self.now)
        first.store.create_cluster("c", PARTITIONS, 3, 1, self._info(first), now)
        self._carry_out(first)
        for node in list(self.nodes.values())[1:]:
            self.at(0.2 + self.chance.random() * 1.5, self._join_later(node))
        self.at(0.5, self._fault)
        self.at(0.3, self._client)
        self.advance(TROUBLE_S)
        self._mend()
        self.advance_or(self._is_settled, TROUBLE_S + MEND_S, every=64)
        if not self._is_settled():
            raise Wrong("the nodes do not agree in the end: " + self._state())
        self._last_proposals()
        self.check_logs()
        self.check_answers()

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now:9.4f} {text}")

    # Nodes

    def _make_node(self, name: str, index: int) -> None:
        chance = self.chance
        self.nodes[name] = Node(
            name,
            index,
            f"{name}a",
            SimDisk(),
            1.0 + (chance.random() - 0.5) * 0.1,
            chance.random() * 1000,
        )

    def _info(self, node: Node) -> NodeInfo:
        return NodeInfo(node.name, node.incarnation, f"{node.name}:1883", "", "")

    def _start(self, node: Node) -> None:
        node.life += 1
        member = peer_id(node.name, node.incarnation)
        is_new = "raft" not in node.disk.list("")
        node.files = self.files_class(node.disk, member, is_new=is_new)
        node.writes = []
        node.busy = False
        node.asked = {}
        node.timer_at = float("inf")
        store = self.store_class.__new__(self.store_class)
        store.world = self
        node.store = store
        state = node.files.state
        RecordingStore.__init__(
            store,
            node.name,
            node.incarnation,
            state,
            nonce=f"{node.life}",
            random=self.chance.random,
            now=node.clock(self.now),
            timing=self.timing,
        )
        self.note(f"{node.name} starts: term {state.term} log to {store.raft.log.last_index}")
        self._carry_out(node)

    def _stop(self, node: Node, how: str) -> None:
        """kill, or power: what was not synced may be lost, and a write in progress torn."""
        if node.store is None:
            return
        self.note(f"{node.name} ends: {how}")
        chance = self.chance
        if node.writes and chance.random() < 0.7:
            # The write at hand gets as far as it gets.
            node.disk.crash_at = node.disk.steps + chance.randint(1, 3)
            assert node.files is not None
            try:
                node.files.write(node.writes[0])
            except Crash:
                pass
        node.disk.crash_at = -1
        if how == "power":
            survival = chance.choice(("none", "all", "torn", "sectors"))
            node.disk = node.disk.after_crash(survival, chance.randrange(1 << 30))
        node.store = None
        node.files = None
        node.life += 1

    def input(self, node: Node, call: Callable[[RecordingStore, float], object]) -> None:
        store = node.store
        if store is None:
            return
        call(store, node.clock(self.now))
        self._carry_out(node)

    def _carry_out(self, node: Node) -> None:
        store = node.store
        assert store is not None
        effects, store.effects = store.effects, []
        for effect in effects:
            if isinstance(effect, Send):
                self._send(node, effect)
                self._maybe_crash_voter(node, effect)
            elif isinstance(effect, Persist):
                node.writes.append(effect.write)
            elif isinstance(effect, ProposalDone):
                asked = node.asked.pop(effect.request, None)
                if asked is not None:
                    asked.outcome = effect.outcome
                    asked.answered_at = self.now
        self._check_leader(store)
        self._write_next(node)
        self._arm(node)

    def _arm(self, node: Node) -> None:
        store = node.store
        assert store is not None
        when = max(self.now + 1e-6, node.time(store.timer()), node.paused_until)
        if when < node.timer_at - 1e-9:
            node.timer_at = when
            life = node.life
            self.at(when, lambda: self._timer(node, life, when))

    def _timer(self, node: Node, life: int, when: float) -> None:
        if node.life != life or node.timer_at != when:
            return
        node.timer_at = float("inf")
        if self.now < node.paused_until:
            self._arm(node)
            return
        self.input(node, lambda store, now: store.handle_timers(now))

    def _write_next(self, node: Node) -> None:
        if node.busy or not node.writes:
            return
        node.busy = True
        life = node.life
        self.after(self.chance.expovariate(1 / self.disk_s), lambda: self._write_done(node, life))

    def _write_done(self, node: Node, life: int) -> None:
        if node.life != life:
            return
        assert node.files is not None
        node.files.write(node.writes.pop(0))
        node.busy = False
        self.input(node, lambda store, now: store.persisted(now))

    # Network

    def _send(self, node: Node, send: Send) -> None:
        chance = self.chance
        copies = 1
        if not self.is_mended:
            if chance.random() < self.loss:
                return
            copies += chance.random() < self.repeat
        for _ in range(copies):
            delay_s = self.delay_s * (0.5 + chance.random())
            if not self.is_mended and chance.random() < self.reorder:
                delay_s *= 1 + 10 * chance.random()
            self.after(delay_s, lambda: self._deliver(node.name, send))

    def _deliver(self, sender: str, send: Send) -> None:
        receiver = self.nodes.get(send.node_id)
        if receiver is None or (sender, send.node_id) in self.cut:
            return
        if receiver.store is not None and self.now < receiver.paused_until:
            self.at(receiver.paused_until, lambda: self._deliver(sender, send))
            return
        self.input(
            receiver,
            lambda store, now: store.handle_frame(sender, send.kind, send.payload, now),
        )

    # Trouble

    def _maybe_crash_voter(self, node: Node, send: Send) -> None:
        """Just after it has voted: what it must not forget."""
        if self.is_mended or send.kind != RAFT or self.chance.random() >= self.vote_crash:
            return
        message = decode_message(send.payload)[2]
        if isinstance(message, (VoteReply, VoteRequest)) and not message.is_trial:
            self.after(0.0, lambda: self._crash_briefly(node))

    def _crash_briefly(self, node: Node) -> None:
        self._stop(node, "power")
        life = node.life
        self.after(0.002, lambda: self._restart(node, life))

    def _join_later(self, node: Node) -> Callable[[], None]:
        def join() -> None:
            leader = self._leader()
            if leader is not None and leader.store is not None:
                self.input(leader, lambda store, now: store.admit(self._info(node), now))
            if not self._is_known(node):
                self.after(0.3, join)

        return join

    def _is_known(self, node: Node) -> bool:
        if not self.agreed_metadata:
            return False
        metadata = self.agreed_metadata[max(self.agreed_metadata)]
        known = metadata.nodes.get(node.name) if metadata is not None else None
        return known is not None and known.incarnation == node.incarnation

    def _leader(self) -> Node | None:
        leaders = [node for node in self.nodes.values() if node.store and node.store.is_leader]
        return max(leaders, key=lambda node: node.store.term if node.store else 0, default=None)

    def _fault(self) -> None:
        if self.is_mended:
            return
        chance = self.chance
        chance.choice(self._faults)()
        self.after(chance.expovariate(1 / self.fault_s), self._fault)

    def _crash(self) -> None:
        self._crash_node(self.chance.choice(list(self.nodes.values())))

    def _crash_node(self, node: Node) -> None:
        self._stop(node, self.chance.choice(("kill", "power")))
        life = node.life
        delay_s = self.chance.choice((0.01, 0.1, 0.5, 1.5))
        self.after(delay_s, lambda: self._restart(node, life))

    def _restart(self, node: Node, life: int) -> None:
        if node.store is None and node.life == life:
            self._start(node)

    def _crash_leader(self) -> None:
        leader = self._leader()
        if leader is not None:
            self._crash_node(leader)

    def _crash_all(self) -> None:
        if self.chance.random() < 0.3:
            for node in self.nodes.values():
                self._crash_node(node)

    def _cut_off(self) -> None:
        names = list(self.nodes)
        part = set(self.chance.sample(names, self.chance.randint(1, len(names) - 1)))
        self.cut = {(a, b) for a in names for b in names if (a in part) != (b in part)}
        self.note(f"cut off {sorted(part)}")

    def _cut_one_way(self) -> None:
        a, b = self.chance.sample(list(self.nodes), 2)
        self.cut.add((a, b))
        self.note(f"cut {a} to {b}")

    def _heal(self) -> None:
        self.cut = set()
        self.note("healed")

    def _pause(self) -> None:
        node = self.chance.choice(list(self.nodes.values()))
        node.paused_until = self.now + self.chance.choice((0.1, 0.4, 1.0))

    def _tell_gone(self) -> None:
        """The failure detectors of some nodes tell that a process is dead; they may be wrong."""
        gone = self.chance.choice(list(self.nodes))
        for node in self.nodes.values():
            if node.name != gone and self.chance.random() < 0.8:
                self.input(node, lambda store, now: store.leader_down(gone, now))

    def _hand_over(self) -> None:
        leader = self._leader()
        if leader is not None:
            self.input(leader, lambda store, now: store.transfer_leadership(now))

    def _down(self) -> None:
        """The controller takes a node for dead, or for alive again."""
        leader = self._leader()
        if leader is None or leader.store is None or leader.store.metadata is None:
            return
        info = self.chance.choice(list(leader.store.metadata.nodes.values()))
        state = self.chance.choice((NodePhase.UP, NodePhase.UP, NodePhase.DOWN))
        self._ask(leader, _node_change(replace(info, state=state)))

    def _remove(self) -> None:
        """And after a while it asks to come back, in vain as long as it has its disk."""
        leader = self._leader()
        names = [name for name in self.nodes if name != "n1"]
        if leader is None or leader.store is None or self.chance.random() < 0.5:
            return
        node = self.nodes[self.chance.choice(names)]
        self.note(f"{leader.name} removes {node.name}")
        known = leader.store.metadata.nodes.get(node.name) if leader.store.metadata else None
        self._ask(leader, RemoveNode(node.name, known.version if known else 0))
        self.after(1.0, self._join_later(node))

    def _wipe(self) -> None:
        """A disk is lost, where that is one fault at most: everybody has what is committed."""
        node = self.chance.choice(list(self.nodes.values()))
        top = max(self.agreed, default=0)
        others = [other for other in self.nodes.values() if other is not node]
        for other in others:
            store = other.store
            if store is None or store.raft.durable_index < top or store.raft.commit < top:
                return
        members = others[0].store.membership if others[0].store is not None else Membership()
        live = {peer_id(other.name, other.incarnation) for other in self.nodes.values()}
        if not live.issuperset(members.members) or len(members.voters) < 3:
            return
        self._stop(node, "kill")
        self.note(f"{node.name} is wiped")
        node.disk = SimDisk()
        node.incarnation += "x"
        self._start(node)
        self.after(0.3, lambda: self._enter_wiped(node))

    def _enter_wiped(self, node: Node) -> None:
        """The controller's part."""
        leader = self._leader()
        if leader is not None and leader.store is not None and leader.store.metadata is not None:
            metadata = leader.store.metadata
            known = metadata.nodes.get(node.name)
            if known is None or known.incarnation == node.incarnation:
                return
            changes = [
                (number, old.version, _without(old, node.name))
                for number, old in enumerate(metadata.partitions)
                if node.name in old.in_sync
            ]
            info = self._info(node)
            self._ask(leader, ChangePartitions(tuple(changes), ((known.version, info),)))
        self.after(0.3, lambda: self._enter_wiped(node))

    # Clients

    def _client(self) -> None:
        """Changes a partition, as it was when the node looked, or a moment ago."""
        if self.is_mended:
            return
        node = self.chance.choice(list(self.nodes.values()))
        self.after(self.chance.expovariate(1 / 0.05), self._client)
        self._change_something(node)

    def _change_something(self, node: Node) -> Asked | None:
        metadata = node.store.metadata if node.store is not None else None
        if metadata is None:
            return None
        number = self.chance.randrange(PARTITIONS)
        old = metadata.partitions[number]
        new = replace(old, epoch=old.epoch + 1)
        return self._ask(node, ChangePartitions(((number, old.version, new),)))

    def _ask(self, node: Node, command: ChangePartitions | RemoveNode) -> Asked:
        store = node.store
        assert store is not None
        request = store.propose(command, node.clock(self.now))
        asked = Asked(node.name, self.now, f"{node.name}.{node.life}.{request}")
        self.asked.append(asked)
        node.asked[request] = asked
        self._carry_out(node)
        return asked

    # The end

    def _mend(self) -> None:
        self.note("mended")
        self.is_mended = True
        self._patch.setattr(raft_leading, "APPEND_BYTES_MAX", 1 << 20)
        self.cut = set()
        for node in self.nodes.values():
            node.paused_until = 0.0
            if node.store is None:
                self._start(node)
            else:
                node.timer_at = float("inf")
                self._arm(node)
        self.after(0.5, self._bring_up)

    def _bring_up(self) -> None:
        """All nodes are alive: the controller sees that, and those removed come back."""
        leader = self._leader()
        if leader is not None and leader.store is not None and leader.store.metadata is not None:
            for info in leader.store.metadata.nodes.values():
                if info.state != NodePhase.UP:
                    self._ask(leader, _node_change(replace(info, state=NodePhase.UP)))
            removed = leader.store.metadata.removed
            for node in self.nodes.values():
                if (node.name, node.incarnation) in removed:
                    self._start_empty(node)
                if leader.store is not None:
                    self.input(leader, lambda store, now, n=node: store.admit(self._info(n), now))
        self.after(0.5, self._bring_up)

    def _start_empty(self, node: Node) -> None:
        """A node that was removed comes back with an empty disk only."""
        if node.store is not None:
            self._stop(node, "kill")
        self.note(f"{node.name}, which was removed, is wiped")
        node.disk = SimDisk()
        node.incarnation += "r"
        self._start(node)

    def _is_settled(self) -> bool:
        """A removal that is asked for may still be carried out."""
        if any(node.asked for node in self.nodes.values()):
            return False
        stores = [node.store for node in self.nodes.values() if node.store is not None]
        leaders = [store for store in stores if store.is_leader]
        if len(leaders) != 1 or len(stores) < self.size:
            return False
        top = leaders[0]
        metadata = top.metadata
        return (
            metadata is not None
            and len(metadata.nodes) == self.size
            and len(metadata.voters) == self.size
            and all(info.state == NodePhase.UP for info in metadata.nodes.values())
            and all(store.metadata == metadata for store in stores)
            and all(store.raft.commit == top.raft.log.last_index for store in stores)
        )

    def _last_proposals(self) -> None:
        last = [self._change_something(node) for node in self.nodes.values()]
        self.advance(self.now + 3.0)
        for asked in last:
            if asked is None or not isinstance(asked.outcome, (Accepted, RequestRefused)):
                raise Wrong(f"a proposal in a healthy cluster got no answer: {asked}")

    def _state(self) -> str:
        return "; ".join(
            f"{node.name} {node.store.raft.role} term {node.store.term} "
            f"log {node.store.raft.log.last_index} commit {node.store.raft.commit} "
            f"{node.store.membership} {node.store.metadata and node.store.metadata.nodes}"
            for node in self.nodes.values()
            if node.store is not None
        )

    # Checks

    def note_applied(self, store: MetaStore, entry: LogEntry) -> None:
        known = self.agreed.setdefault(entry.index, entry)
        if known != entry:
            raise Wrong(f"{store.node_id} applies {entry}, others have applied {known}")
        metadata = self.agreed_metadata.setdefault(entry.index, store.metadata)
        if metadata != store.metadata:
            raise Wrong(f"{store.node_id} has other metadata at {entry.index}")

    def _check_leader(self, store: RecordingStore) -> None:
        if not store.is_leader:
            return
        member = store.raft.peer
        known = self.leaders.get(store.term)
        if known == member:
            return
        if known is not None:
            raise Wrong(f"term {store.term} has two leaders, {known} and {member}")
        self.note(f"{member} leads term {store.term}")
        self.leaders[store.term] = member
        self.elections += 1
        log = store.raft.log
        for index, entry in self.agreed.items():
            if index > log.base_index and log.term_at(index) != entry.term:
                raise Wrong(f"leader {member} of term {store.term} lacks entry {index}")
        self.check_logs()

    def check_logs(self) -> None:
        logs = [node.store.raft.log for node in self.nodes.values() if node.store is not None]
        for count, a in enumerate(logs):
            for b in logs[count + 1 :]:
                _check_match(a, b)

    def check_answers(self) -> None:
        """The agreed order, applied by itself, gives the answers that were given."""
        state = MetaState()
        place: dict[str, int] = {}
        right: dict[str, Outcome] = {}
        for index in sorted(self.agreed):
            entry = self.agreed[index]
            if entry.kind == EntryKind.MEMBERS:
                state.set_voters(Membership.decode(entry.data).voters)
            if entry.kind != EntryKind.COMMAND:
                continue
            before = state.metadata
            request_id = state.apply(entry.data)
            if request_id not in place:
                place[request_id] = index
                outcome = state.outcome(request_id)
                assert outcome is not None
                right[request_id] = outcome
            elif state.metadata is not before:
                raise Wrong(f"request {request_id} was carried out twice")
        answered = [
            each for each in self.asked if isinstance(each.outcome, (Accepted, RequestRefused))
        ]
        for asked in answered:
            if right.get(asked.request_id) != asked.outcome:
                raise Wrong(f"{asked} was answered; right is {right.get(asked.request_id)}")
        _check_order(answered, self.asked, place)


def _check_order(answered: list[Asked], asked: list[Asked], place: dict[str, int]) -> None:
    """What was answered before another was asked is before it."""
    ends = sorted((each.answered_at, place[each.request_id]) for each in answered)
    starts = sorted((each.asked_at, place.get(each.request_id, 1 << 60)) for each in asked)
    highest = done = 0
    for time, index in starts:
        while done < len(ends) and ends[done][0] < time:
            highest = max(highest, ends[done][1])
            done += 1
        if index <= highest:
            raise Wrong(f"entry {index} was asked for after entry {highest} was answered")


def _check_match(a, b) -> None:  # type: ignore[no-untyped-def]
    low = max(a.base_index, b.base_index)
    high = min(a.last_index, b.last_index)
    while high > low and a.term_at(high) != b.term_at(high):
        high -= 1
    if high > low and a.entries(low + 1, high + 1) != b.entries(low + 1, high + 1):
        raise Wrong(f"two logs agree at {high}, and differ before")


def _node_change(info: NodeInfo) -> ChangePartitions:
    return ChangePartitions((), ((info.version, info),))


def _without(old: PartitionInfo, name: str) -> PartitionInfo:
    in_sync = tuple(other for other in old.in_sync if other != name)
    leader = in_sync[0] if in_sync and old.leader == name else old.leader
    if not in_sync:
        leader = ""
    return replace(old, in_sync=in_sync, leader=leader, epoch=old.epoch + 1)
