"""The failure detector of one node: whom it hears, whom it suspects, who is dead.

Every node sends a heartbeat from inside its event loop to every other. A node is *suspected* when
it was silent for `suspect_s`, or at once when its socket is closed and nobody listens at its
address any more. It is *dead* when another node that we hear says so too: a link that fails
between two nodes is no failure of either. A node that was about to stop in good order needs no
second opinion, nor does anybody where there is nobody left to ask, or nobody for `alone_after_s`
whose own loop runs well. Whether something may follow from that is decided by the majority that
agrees on the metadata.

Our own pauses are the commonest reason to hear nobody. A node whose loop was late by more than
`lag_max_s` counts nobody's silence until it has run well for `well_after_s`, and then from the end
of its pause ("local health", arXiv 1707.00788). A refused connection is a fact, paused or not.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from holdfast.cluster.failure.health import Health, Presence
from holdfast.cluster.failure.heartbeat import Heartbeat, decode_heartbeat, encode_heartbeat

NEVER: Final = float("-inf")
REMEMBERED: Final = 100
"""Heartbeats of ours whose times are known."""


@dataclass(frozen=True)
class DetectorConfig:
    heartbeat_s: float = 0.1
    suspect_s: float = 0.5
    lag_max_s: float = 0.2
    well_after_s: float = 0.5
    first_contact_s: float = 2.0
    """Grace for a node that we have not heard since we started, or since it joined: nodes that
    are switched on together do not listen at the same moment."""

    alone_after_s: float = 2.0
    """When our suspicion counts though all others are too busy to have an opinion."""


@dataclass(frozen=True)
class Beat:
    """To be sent to every connected node, as HEARTBEAT."""

    payload: bytes


@dataclass(frozen=True)
class Suspected:
    node: str
    reason: str


@dataclass(frozen=True)
class HeardAgain:
    node: str


DetectorEffect = Beat | Suspected | HeardAgain


@dataclass
class _Peer:
    since: float
    """When we began to expect it, or to hear it after all."""
    presence: Presence | None = None
    """None: not connected."""
    heard_at: float = NEVER
    is_refused: bool = False
    is_leaving: bool = False
    is_stalled: bool = False
    is_damaged: bool = False
    is_full: bool = False
    is_suspected: bool = False
    suspected_at: float = NEVER
    sequence: int = -1
    is_well: bool = True
    suspects: frozenset[str] = field(default_factory=frozenset)
    """What it said last."""
    acknowledged_at: float = NEVER
    """When the newest of our heartbeats was sent of which it said that it has come."""


class Detector:
    """Call `handle_timers` when `timer` says, and carry `effects` out after every call. Answers
    are those of the last call of `handle_timers` or of an event, so a pause between them and now
    accuses nobody."""

    def __init__(
        self, node_id: str, presence: Presence, config: DetectorConfig, now: float
    ) -> None:
        self.effects: list[DetectorEffect] = []
        self._is_leaving = False
        self._is_stalled = False
        self._is_damaged = False
        self._is_full = False
        self._node_id = node_id
        self._presence = presence
        self._config = config
        self._members: frozenset[str] = frozenset()
        self._peers: dict[str, _Peer] = {}
        self._sequence = 0
        # When the last ones were sent, the newest at the end.
        self._sent_at: deque[float] = deque(maxlen=REMEMBERED)
        self._beat_at = now
        self._silence_at = now + config.suspect_s
        self._well_at = now
        self._worst_lag_s = 0.0
        self._health = Health()

    def set_members(self, nodes: Collection[str], now: float) -> None:
        """All nodes of the cluster, witnesses too: who is expected, and whose opinion counts."""
        self._members = frozenset(nodes) - {self._node_id}
        for node in self._members:
            self._peer(node, now)
        for node, peer in list(self._peers.items()):
            if node not in self._members and peer.presence is None:
                del self._peers[node]

    def connected(self, node: str, presence: Presence, now: float) -> None:
        peer = self._peer(node, now)
        peer.presence = presence
        peer.is_refused = False
        peer.is_leaving = False
        peer.is_stalled = False
        peer.is_damaged = False
        peer.is_full = False
        peer.sequence = -1
        peer.suspects = frozenset()
        self.heard(node, now)

    def closed(self, node: str, refused: bool, now: float) -> None:
        """The link is gone. `refused`: and a new one was refused, because nobody listens there;
        may be told later than the end itself, and again."""
        peer = self._peers.get(node)
        if peer is None:
            return
        if node not in self._members:
            del self._peers[node]
            return
        peer.presence = None
        peer.is_refused = refused
        if refused and self._is_expected(peer, now):
            self._suspect(node, peer, "nobody listens at its address", now)

    def heard(self, node: str, now: float) -> None:
        """A frame of any kind has come: bulk data may hold heartbeats up."""
        peer = self._peers.get(node)
        if peer is None or peer.presence is None:
            return
        peer.heard_at = max(peer.heard_at, now)
        if peer.is_suspected:
            peer.is_suspected = False
            self.effects.append(HeardAgain(node))

    def handle_heartbeat(self, node: str, payload: bytes, now: float) -> None:
        """Raises BadFrame."""
        beat = decode_heartbeat(payload)
        self.heard(node, now)
        peer = self._peers.get(node)
        if peer is None or peer.presence is None or beat.sequence <= peer.sequence:
            return
        peer.sequence = beat.sequence
        peer.is_leaving = beat.is_leaving
        peer.is_stalled = beat.is_stalled
        peer.is_damaged = beat.is_damaged
        peer.is_full = beat.is_full
        peer.is_well = beat.is_well
        peer.suspects = beat.suspected
        age = self._sequence - beat.heard.get(self._node_id, 0)
        if 0 <= age < len(self._sent_at):
            sent_at = self._sent_at[-1 - age]
            peer.acknowledged_at = max(peer.acknowledged_at, sent_at)

    def acknowledged_at(self, node: str) -> float:
        """When a heartbeat of ours was sent that this node has heard, and has said so: it takes us
        for dead at `suspect_s` after that at the earliest. NEVER: there was none."""
        peer = self._peers.get(node)
        return NEVER if peer is None else peer.acknowledged_at

    def loop_lag(self, lag_s: float, now: float) -> None:
        """Our event loop was late by that much, as the driver has found."""
        self._worst_lag_s = max(self._worst_lag_s, lag_s)
        if lag_s <= self._config.lag_max_s:
            return
        self._well_at = now + self._config.well_after_s
        for peer in self._peers.values():
            # What was sent to us meanwhile may not have been read yet.
            if not peer.is_suspected and peer.heard_at != NEVER:
                peer.heard_at = now

    def leave(self, now: float) -> None:
        """This node will stop in good order: it asks to be relieved of what it leads."""
        self._is_leaving = True
        self._beat_at = now

    def set_stalled(self, is_stalled: bool, now: float) -> None:
        """The disk of this node does not answer, or does so again."""
        self._is_stalled = is_stalled
        self._beat_at = now

    def set_damaged(self, now: float) -> None:
        """The log of this node is not what it was, and will not be again."""
        self._is_damaged = True
        self._beat_at = now

    def set_full(self, is_full: bool, now: float) -> None:
        """The disk of this node has no room for more of the log, or has some again."""
        self._is_full = is_full
        self._beat_at = now

    def timer(self) -> float | None:
        return min(self._beat_at, self._silence_at)

    def handle_timers(self, now: float) -> None:
        due = min(self._beat_at, self._silence_at)
        if now > due:
            self.loop_lag(now - due, now)
        self._find_silent(now)
        if now >= self._beat_at:
            self._beat(now)

    def suspects(self, now: float) -> frozenset[str]:
        """Members that we do not hear. While our own loop is not well, only those whom nobody
        can reach: the others cannot be told from our own pauses."""
        return frozenset(
            node
            for node in self._members
            if (peer := self._peers[node]).is_suspected
            and (peer.is_refused or now >= self._well_at)
        )

    def confirmed(self, node: str, now: float) -> bool:
        return node in self.suspects(now) and self._is_seconded(node, now)

    def health(self, now: float) -> Health:
        """The same object as long as nothing has changed."""
        present = {self._node_id: self._presence}
        leaving = {self._node_id} if self._is_leaving else set()
        stalled = {self._node_id} if self._is_stalled else set()
        damaged = {self._node_id} if self._is_damaged else set()
        full = {self._node_id} if self._is_full else set()
        for node, peer in self._peers.items():
            if peer.presence is not None and not peer.is_suspected:
                present[node] = peer.presence
                if peer.is_leaving:
                    leaving.add(node)
                if peer.is_stalled:
                    stalled.add(node)
                if peer.is_damaged:
                    damaged.add(node)
                if peer.is_full:
                    full.add(node)
        suspected = self.suspects(now)
        dead = frozenset(node for node in suspected if self._is_seconded(node, now))
        ill = (frozenset(stalled), frozenset(damaged), frozenset(full))
        health = Health(present, suspected, dead, frozenset(leaving), *ill)
        if health != self._health:
            self._health = health
        return self._health

    def _peer(self, node: str, now: float) -> _Peer:
        peer = self._peers.get(node)
        if peer is None:
            peer = self._peers[node] = _Peer(now)
        return peer

    def _is_expected(self, peer: _Peer, now: float) -> bool:
        return peer.heard_at != NEVER or now >= peer.since + self._config.first_contact_s

    def _find_silent(self, now: float) -> None:
        """Suspects who is due; says when the next will be."""
        self._silence_at = now + self._config.suspect_s
        for node in self._members:
            peer = self._peers[node]
            if peer.is_suspected:
                continue
            if peer.heard_at == NEVER:
                due = peer.since + self._config.first_contact_s
            else:
                due = max(peer.heard_at + self._config.suspect_s, self._well_at)
            if now >= due:
                never = "never heard"
                silent = f"silent for {now - peer.heard_at:.2f} s"
                self._suspect(node, peer, never if peer.heard_at == NEVER else silent, now)
            else:
                self._silence_at = min(self._silence_at, due)

    def _suspect(self, node: str, peer: _Peer, reason: str, now: float) -> None:
        if peer.is_suspected:
            return
        peer.is_suspected = True
        peer.suspected_at = now
        self.effects.append(Suspected(node, reason))
        # The others wait for our opinion.
        self._beat_at = now

    def _beat(self, now: float) -> None:
        self._beat_at = now + self._config.heartbeat_s
        self._sequence += 1
        self._sent_at.append(now)
        heard = {
            node: peer.sequence
            for node, peer in self._peers.items()
            if peer.presence is not None and peer.sequence > 0
        }
        beat = Heartbeat(
            self._sequence,
            self._worst_lag_s,
            self._is_leaving,
            now >= self._well_at,
            self.suspects(now),
            self._is_stalled,
            self._is_damaged,
            heard,
            self._is_full,
        )
        self._worst_lag_s = 0.0
        self.effects.append(Beat(encode_heartbeat(beat)))

    def _is_seconded(self, node: str, now: float) -> bool:
        suspect = self._peers[node]
        if suspect.is_leaving:
            return True
        others = [
            peer
            for name, peer in self._peers.items()
            if name != node
            and name in self._members
            and peer.presence is not None
            and not peer.is_suspected
        ]
        if any(node in peer.suspects for peer in others):
            return True
        if any(peer.is_well for peer in others):
            return False
        return not others or now >= suspect.suspected_at + self._config.alone_after_s
