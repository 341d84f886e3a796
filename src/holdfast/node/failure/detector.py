"""Detects failures: which nodes this one hears, which it suspects, and which are dead.

Every node sends a heartbeat to every other, from inside its event loop. A node is *suspected* when
it was silent for `suspect_s`. It is suspected at once when its socket is closed and its address
refuses connections. It is *dead* when another node that we hear suspects it too, because a failed
link between two nodes is a failure of neither.

There are three exceptions to the second opinion. A node that was stopping in good order needs none.
If no other node is left to ask, ours is enough. If all others have unwell loops for
`alone_after_s`, or are silent and were not before, ours is enough after that time. The majority
that agrees on the metadata decides whether anything follows from it. Counter-example: a Raft leader
is cut off from all others for a moment, and its verdict on them is agreed once they hear it again.

Our own pauses are the commonest reason for silence. A node whose loop was late by more than
`lag_max_s` counts no silence until its loop has run well for `well_after_s`. The silence then
counts from the end of the pause ("local health", arXiv 1707.00788). A refused connection is a fact,
paused or not.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from holdfast.node.failure.health import Health, Presence
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.metadata.model import NODE_ID, NODES_MAX

_HEAD: Final = Struct(">QIBH")
_COUNT: Final = Struct(">H")
_SEQUENCE: Final = Struct(">Q")
_LEAVING: Final = 1
_UNWELL: Final = 2
_STALLED: Final = 4
_DAMAGED: Final = 8
_FULL: Final = 16
_ASKS_TO_STOP: Final = 32
_LAG_MAX_MS: Final = (1 << 32) - 1


@dataclass
class Heartbeat:
    """The content of one heartbeat.

    The payload is big-endian: u64 sequence, u32 lag of the loop in ms, u8 flags, u16 count of
    suspected nodes; then each as u8 length and ASCII id. A u16 count of heard nodes follows; then
    each as u8 length, ASCII id and u64 sequence.
    """

    sequence: int
    """The number of the heartbeat of this sender; the higher one is newer."""
    lag_s: float = 0.0
    """The worst lateness of the sender's event loop since its last heartbeat, in seconds."""
    is_leaving: bool = False
    """The sender stops in good order and waits to be relieved of its leaderships."""
    is_well: bool = True
    """The sender's loop runs well, so its suspicions are complete."""
    suspected: frozenset[str] = frozenset()
    """The nodes that the sender suspects."""
    is_stalled: bool = False
    """The sender's disk has not finished a write for too long."""
    is_damaged: bool = False
    """The sender's log is damaged."""
    received: Mapping[str, int] = field(default_factory=dict)
    """The newest heartbeat of each node that came over the present link."""
    is_full: bool = False
    """The sender's disk has no room for more of the log."""
    asks_to_stop: bool = False
    """The sender will stop as soon as the others can do without it."""

    def announced(self) -> tuple[bool, ...]:
        """The part of the health that the sender tells of itself."""
        return self.is_leaving, self.is_stalled, self.is_damaged, self.is_full, self.asks_to_stop

    def hears(self, node: str) -> bool:
        """Whether the sender has a link to a node, and does not suspect it."""
        return node in self.received and node not in self.suspected


def encode_heartbeat(beat: Heartbeat) -> bytes:
    lag_ms = min(int(beat.lag_s * 1000), _LAG_MAX_MS)
    flags = _LEAVING * beat.is_leaving | _UNWELL * (not beat.is_well)
    flags |= _STALLED * beat.is_stalled | _DAMAGED * beat.is_damaged
    flags |= _FULL * beat.is_full | _ASKS_TO_STOP * beat.asks_to_stop
    head = _HEAD.pack(beat.sequence, lag_ms, flags, len(beat.suspected))
    heard = [_COUNT.pack(len(beat.received))]
    for name, sequence in beat.received.items():
        heard.append(_encode_names((name,)) + _SEQUENCE.pack(sequence))
    return head + _encode_names(beat.suspected) + b"".join(heard)


def _encode_names(names: Collection[str]) -> bytes:
    return b"".join(bytes([len(name)]) + name.encode("ascii") for name in sorted(names))


def decode_heartbeat(payload: bytes) -> Heartbeat:
    """The heartbeat in a payload. Flags that this version does not know are ignored.

    Raises `BadFrame` if the payload is invalid.
    """
    if len(payload) < _HEAD.size:
        raise BadFrame(f"heartbeat of {len(payload)} bytes, at least {_HEAD.size} are needed")
    sequence, lag_ms, flags, count = _HEAD.unpack_from(payload)
    _check_count(count)
    names = set()
    position = _HEAD.size
    for _ in range(count):
        name, position = _decode_name(payload, position)
        names.add(name)
    heard, position = _decode_received(payload, position)
    if position != len(payload):
        raise BadFrame(f"heartbeat with {len(payload) - position} bytes too many")
    is_leaving = bool(flags & _LEAVING)
    return Heartbeat(
        sequence,
        lag_ms / 1000,
        is_leaving,
        not flags & _UNWELL,
        frozenset(names),
        bool(flags & _STALLED),
        bool(flags & _DAMAGED),
        heard,
        bool(flags & _FULL),
        bool(flags & _ASKS_TO_STOP),
    )


def _check_count(count: int) -> None:
    if count > NODES_MAX:
        raise BadFrame(f"heartbeat that names {count} nodes, a cluster has {NODES_MAX}")


def _decode_name(payload: bytes, position: int) -> tuple[str, int]:
    """The name at `position`, and the position after it."""
    end = position + 1 + (payload[position] if position < len(payload) else 0)
    name = payload[position + 1 : end].decode("latin-1")
    if end > len(payload) or NODE_ID.fullmatch(name) is None:
        raise BadFrame(f"heartbeat with a node id that is none at byte {position}")
    return name, end


def _decode_received(payload: bytes, position: int) -> tuple[dict[str, int], int]:
    """The heard nodes at `position`, and the position after them."""
    if len(payload) < position + _COUNT.size:
        raise BadFrame("heartbeat without the list of nodes that the sender receives from")
    (count,) = _COUNT.unpack_from(payload, position)
    _check_count(count)
    position += _COUNT.size
    heard: dict[str, int] = {}
    for _ in range(count):
        name, position = _decode_name(payload, position)
        if len(payload) < position + _SEQUENCE.size:
            raise BadFrame(f"heartbeat that ends in the sequence of {name}")
        (heard[name],) = _SEQUENCE.unpack_from(payload, position)
        position += _SEQUENCE.size
    return heard, position


NEVER: Final = float("-inf")
UNHEARD: Final = 0.7
"""The part of the time until suspicion after which the other nodes may be asked for a way to the
silent one, so that a link through one of them is there before the suspicion."""
JOINS: Final = 0.5
"""The part of `heartbeat_s` by which a heartbeat leaves early, to leave together with those of the
other nodes. With less, groups of nodes at even distances stay apart."""
REMEMBERED: Final = 100
"""The number of our heartbeats whose send times are kept."""


@dataclass(frozen=True)
class DetectorConfig:
    """The times of failure detection, in seconds."""

    heartbeat_s: float = 0.1
    """The interval between two heartbeats."""
    suspect_s: float = 0.5
    """The silence after which a node is suspected."""
    lag_max_s: float = 0.2
    """The lateness of our own loop above which it is not well."""
    well_after_s: float = 0.5
    """The time without lag after which our loop is well again."""
    first_contact_s: float = 2.0
    """The grace for a node not heard since we started, or since it joined. Nodes that are switched
    on together do not listen at the same moment."""

    start_alone_after_s: float = 60.0
    """The seconds after our start for which a node that we have not heard may have more than our
    disk, so that nothing is decided without it: a start is not a failure."""
    alone_after_s: float = 2.0
    """The age at which our suspicion counts although the loops of all others are unwell."""


@dataclass(frozen=True)
class Beat:
    """A heartbeat to send to every connected node."""

    payload: bytes


@dataclass(frozen=True)
class Suspected:
    """A node became suspected, with the reason as text."""

    node: str
    reason: str


@dataclass(frozen=True)
class HeardAgain:
    """A suspected node was heard again."""

    node: str


DetectorEffect = Beat | Suspected | HeardAgain


NO_BEAT: Final = Heartbeat(-1)
"""The state of a node that has sent no heartbeat over its link."""


@dataclass
class _Peer:
    """The last reports of another node. An unset `presence` means that it is not connected."""

    since: float
    """The time since which we expect it."""
    presence: Presence | None = None
    """Its part of the handshake; None: it is not connected."""
    received_at: float = NEVER
    is_refused: bool = False
    is_suspected: bool = False
    suspected_at: float = NEVER
    beat: Heartbeat = field(default_factory=lambda: NO_BEAT)
    """Its last heartbeat over the present link."""
    acknowledged_at: float = NEVER
    """The send time of the newest of our heartbeats that it has confirmed."""


class Detector:
    """The failure detector. The driver calls `handle_timers` when `timer` is due, and carries out
    `effects` after every call. Reads return the state of the last event or `handle_timers` call, so
    a pause since then suspects no node."""

    def __init__(
        self, node_id: str, presence: Presence, config: DetectorConfig, now: float
    ) -> None:
        self.effects: list[DetectorEffect] = []
        # What our heartbeats announce of us.
        self._own = Heartbeat(0)
        # Per node the partitions of which it may lack acknowledged records.
        self._incomplete: dict[str, frozenset[int]] = {}
        # The number of our first heartbeat that asks to stop; 0: none.
        self._asked = 0
        self._node_id = node_id
        self._presence = presence
        self._config = config
        self._members: frozenset[str] = frozenset()
        self._peers: dict[str, _Peer] = {}
        self._sequence = 0
        # The send times of our last heartbeats, the newest at the end.
        self._sent_at: deque[float] = deque(maxlen=REMEMBERED)
        self._beat_at = now
        self._silence_at = now + config.suspect_s
        self._alone_at = now + config.start_alone_after_s
        self._well_at = now
        self._worst_lag_s = 0.0
        self._health = Health()
        # Whether `_health` holds until the next input.
        self._is_known = False

    def set_members(self, nodes: Collection[str], now: float) -> None:
        """Sets the nodes of the cluster, witnesses too. Each is expected; its opinion counts."""
        self._is_known = False
        self._members = frozenset(nodes) - {self._node_id}
        for node in sorted(self._members):
            self._peer(node, now)
        for node, peer in list(self._peers.items()):
            if node not in self._members and peer.presence is None:
                del self._peers[node]

    def connected(self, node: str, presence: Presence, now: float) -> None:
        """Notes a new link; the state reported over the old one is forgotten."""
        self._is_known = False
        peer = self._peer(node, now)
        peer.presence = presence
        peer.is_refused = False
        peer.beat = NO_BEAT
        self.note_frame(node, now)

    def closed(self, node: str, refused: bool, now: float) -> None:
        """Notes that the link ended. With `refused` the address refused a new one. That may be
        reported later than the end itself, and repeatedly."""
        peer = self._peers.get(node)
        if peer is None:
            return
        self._is_known = False
        if node not in self._members:
            del self._peers[node]
            return
        peer.presence = None
        peer.is_refused = refused
        if refused and self._is_expected(peer, now):
            self._suspect(node, peer, "nothing listens at its address", now)

    def note_frame(self, node: str, now: float) -> None:
        """Notes a frame of any kind, because bulk data may delay heartbeats."""
        peer = self._peers.get(node)
        if peer is None or peer.presence is None:
            return
        if peer.received_at == NEVER:
            self._is_known = False
        peer.received_at = max(peer.received_at, now)
        if peer.is_suspected:
            self._is_known = False
            peer.is_suspected = False
            self.effects.append(HeardAgain(node))

    def handle_heartbeat(self, node: str, payload: bytes, now: float) -> None:
        """Processes a heartbeat; one that was overtaken changes nothing.

        Raises `BadFrame` if the payload is invalid.
        """
        beat = decode_heartbeat(payload)
        self.note_frame(node, now)
        peer = self._peers.get(node)
        if peer is None or peer.presence is None or beat.sequence <= peer.beat.sequence:
            return
        if beat.announced() != peer.beat.announced():
            self._is_known = False
        peer.beat = beat
        age = self._sequence - beat.received.get(self._node_id, 0)
        if 0 <= age < len(self._sent_at):
            sent_at = self._sent_at[-1 - age]
            peer.acknowledged_at = max(peer.acknowledged_at, sent_at)
        if now < self._beat_at <= now + JOINS * self._config.heartbeat_s:
            # The heartbeats of all nodes leave at about the same moment, so a node wakes up a few
            # times for all of them. None leaves later than without this.
            self._beat_at = now

    def acknowledged_at(self, node: str) -> float:
        """The send time of our newest heartbeat that this node has confirmed; NEVER without one.
        The node suspects us at `suspect_s` after that at the earliest."""
        peer = self._peers.get(node)
        return NEVER if peer is None else peer.acknowledged_at

    def loop_lag(self, lag_s: float, now: float) -> None:
        """Notes the lateness of our event loop, as the driver measured it."""
        self._worst_lag_s = max(self._worst_lag_s, lag_s)
        if lag_s <= self._config.lag_max_s:
            return
        self._well_at = now + self._config.well_after_s
        for peer in self._peers.values():
            # Frames that arrived during the pause may be unread, so the silence counts from now.
            if not peer.is_suspected and peer.received_at != NEVER:
                peer.received_at = now

    def resume(self, now: float) -> None:
        """Begins to send heartbeats again. There was no other node, so the timers did not run."""
        self._beat_at = self._silence_at = now

    def leave(self, now: float) -> None:
        """Announces that this node stops in good order and asks to be relieved of its
        leaderships."""
        self._own.is_leaving = True
        self._announce(now)

    def _announce(self, now: float) -> None:
        """Sends a heartbeat at once, because what this node reports of itself has changed."""
        self._is_known = False
        self._beat_at = now

    def ask_to_stop(self, now: float) -> None:
        """Announces that this node will stop as soon as the others can do without it."""
        self._own.asks_to_stop = True
        self._asked = self._sequence + 1
        self._announce(now)

    def is_asking_known(self) -> bool:
        """Whether each node that is heard has confirmed `ask_to_stop`.

        The heartbeat that confirms it has also announced whether that node leaves or asks itself.
        So of two nodes that ask at the same time, one knows of the other before it leaves.
        """
        return bool(self._asked) and all(
            peer.beat.received.get(self._node_id, 0) >= self._asked
            for peer in self._peers.values()
            if peer.presence is not None and not peer.is_suspected
        )

    def set_stalled(self, is_stalled: bool, now: float) -> None:
        """Announces whether the disk of this node responds."""
        self._own.is_stalled = is_stalled
        self._announce(now)

    def set_damaged(self, now: float) -> None:
        """Announces that the log of this node is damaged. That state does not end."""
        self._own.is_damaged = True
        self._announce(now)

    def set_full(self, is_full: bool, now: float) -> None:
        """Announces whether the disk of this node is full."""
        self._own.is_full = is_full
        self._announce(now)

    def set_incomplete(self, node: str, partitions: frozenset[int]) -> None:
        """Notes the partitions of which a node may lack acknowledged records."""
        if self._incomplete.get(node) != partitions:
            self._is_known = False
            self._incomplete[node] = partitions

    def timer(self) -> float:
        return min(self._beat_at, self._silence_at)

    def handle_timers(self, now: float) -> bool:
        """Finds silent nodes, and sends a heartbeat if it is due. Returns True if it was."""
        due = min(self._beat_at, self._silence_at)
        if now > due:
            self.loop_lag(now - due, now)
        self._find_silent(now)
        if now < self._beat_at:
            return False
        self._beat(now)
        return True

    def suspects(self, now: float) -> frozenset[str]:
        """The nodes that we suspect. While our own loop is unwell, only those whose address refuses
        connections count, because other silence may be our own pause."""
        return frozenset(
            node
            for node in self._members
            if (peer := self._peers[node]).is_suspected
            and (peer.is_refused or now >= self._well_at)
        )

    def unheard(self, now: float) -> dict[str, list[str]]:
        """The nodes that are silent for most of the time until suspicion, or longer, whatever their
        link; each with the nodes that hear it by their last heartbeat, and that this one hears.
        While our own loop is unwell there are none."""
        if now < self._well_at:
            return {}
        suspect_s, contact_s = self._config.suspect_s, self._config.first_contact_s
        return {
            node: [
                name
                for name, other in self._peers.items()
                if other.beat.hears(node) and other.presence is not None and not other.is_suspected
            ]
            for node in sorted(self._members)
            if not (peer := self._peers[node]).beat.is_leaving
            and now >= max(peer.received_at + UNHEARD * suspect_s, peer.since + UNHEARD * contact_s)
        }

    def health(self, now: float) -> Health:
        """The health of all nodes; the same object while nothing has changed.

        Time alone changes it only while a node is suspected or was never heard.
        """
        if self._is_known:
            return self._health
        health = self._find_health(now)
        if health != self._health:
            self._health = health
        suspects = any(peer.is_suspected for peer in self._peers.values())
        self._is_known = not (health.unmet or suspects)
        return self._health

    def check(self, now: float) -> None:
        """Raises `AssertionError` if the health is another one than the known one."""
        assert not self._is_known or self._find_health(now) == self._health, "the known health"

    def _find_health(self, now: float) -> Health:
        present = {self._node_id: self._presence}
        beats = {self._node_id: self._own}
        # The link of a node that leaves closes before the node is suspected. Counter-example: in
        # between it counts as a node that stays, and is given back the partitions that it has left.
        leaving = {self._node_id} if self._own.is_leaving else set()
        for node, peer in self._peers.items():
            if peer.beat.is_leaving and not peer.is_suspected:
                leaving.add(node)
            if peer.presence is not None and not peer.is_suspected:
                present[node] = peer.presence
                beats[node] = peer.beat
        suspected = self.suspects(now)
        is_met = now >= self._alone_at
        return Health(
            present,
            suspected,
            frozenset(node for node in suspected if self._is_seconded(node, now)),
            frozenset(leaving),
            frozenset(node for node, beat in beats.items() if beat.is_stalled),
            frozenset(node for node, beat in beats.items() if beat.is_damaged),
            frozenset(node for node, beat in beats.items() if beat.is_full),
            {node: each for node, each in self._incomplete.items() if node in present},
            frozenset(node for node, beat in beats.items() if beat.asks_to_stop),
            frozenset(
                node
                for node in self._members
                if self._peers[node].received_at == NEVER and not is_met
            ),
        )

    def _peer(self, node: str, now: float) -> _Peer:
        peer = self._peers.get(node)
        if peer is None:
            self._is_known = False
            peer = self._peers[node] = _Peer(now)
        return peer

    def _is_expected(self, peer: _Peer, now: float) -> bool:
        return peer.received_at != NEVER or now >= peer.since + self._config.first_contact_s

    def _find_silent(self, now: float) -> None:
        """Suspects the nodes that are silent for too long, and sets the time of the next check."""
        self._silence_at = now + self._config.suspect_s
        for node in self._members:
            peer = self._peers[node]
            if peer.is_suspected:
                continue
            if peer.received_at == NEVER:
                due = peer.since + self._config.first_contact_s
            else:
                due = max(peer.received_at + self._config.suspect_s, self._well_at)
            if now >= due:
                never = "never heard"
                silent = f"silent for {now - peer.received_at:.2f} s"
                self._suspect(node, peer, never if peer.received_at == NEVER else silent, now)
            else:
                self._silence_at = min(self._silence_at, due)

    def _suspect(self, node: str, peer: _Peer, reason: str, now: float) -> None:
        if peer.is_suspected:
            return
        peer.is_suspected = True
        peer.suspected_at = now
        self.effects.append(Suspected(node, reason))
        # The others wait for our opinion.
        self._announce(now)

    def _beat(self, now: float) -> None:
        self._beat_at = now + self._config.heartbeat_s
        self._sequence += 1
        self._sent_at.append(now)
        heard = {
            node: peer.beat.sequence
            for node, peer in self._peers.items()
            if peer.presence is not None and peer.beat.sequence > 0
        }
        beat = Heartbeat(
            self._sequence,
            self._worst_lag_s,
            self._own.is_leaving,
            now >= self._well_at,
            self.suspects(now),
            self._own.is_stalled,
            self._own.is_damaged,
            heard,
            self._own.is_full,
            self._own.asks_to_stop,
        )
        self._worst_lag_s = 0.0
        self.effects.append(Beat(encode_heartbeat(beat)))

    def _is_seconded(self, node: str, now: float) -> bool:
        suspect = self._peers[node]
        if suspect.beat.is_leaving:
            return True
        others = [
            peer
            for name, peer in self._peers.items()
            if name != node
            and name in self._members
            and peer.presence is not None
            and not peer.is_suspected
        ]
        if any(node in peer.beat.suspected for peer in others):
            return True
        if any(peer.beat.is_well for peer in others):
            return False
        alone_at = now - self._config.alone_after_s
        lost = [self._peers[name] for name in self._members if name != node]
        is_last = not others and all(
            peer.is_suspected and peer.suspected_at <= alone_at for peer in lost
        )
        return is_last or suspect.suspected_at <= alone_at
