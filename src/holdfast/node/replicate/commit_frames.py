"""Announces the high watermarks of the partitions led here to their followers (COMMIT).

A commit that a node does not need at once leaves with the next frame to it. Without that, each
record wakes each follower once more, and most followers deliver nothing of it.

- A node needs a commit at once if it delivers one of the records or gets state from it (`needing`),
  or if its clients or barriers wait for it (`await_commits`).
- Every other commit waits for HOLD_S at most, and only if batches to its node leave often. So a
  single record is committed everywhere at once.
- A held commit of a partition that is not led any more never leaves. Counter-example: the next
  leader has committed other records up to a higher watermark here. A node that still follows this
  one would commit its own tail.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from holdfast.node.frame_kinds import COMMIT
from holdfast.node.replicate.codec import OFFSET_ENTRY
from holdfast.node.replicate.effects import Send
from holdfast.node.replicate.progress import IDLE, LedPartition, Peer
from holdfast.node.replicate.state import ReplicaState

HOLD_S: Final = 0.02
"""The longest time in seconds that a commit waits for another frame to a node that does not need it
at once."""
LOOKED_AT_MAX: Final = 4
"""The most partitions, and records of each, that are looked at for the nodes that need their
commits. More are sent at once: at full speed the next frame is near, and looking costs more."""


class CommitFrames:
    """The high watermarks that followers have not been sent yet."""

    def __init__(
        self, state: ReplicaState, led: Sequence[LedPartition | None], peers: Mapping[str, Peer]
    ) -> None:
        self._state = state
        self._led = led
        self._peers = peers
        # Partitions whose high watermark has moved, with the one before.
        self._moved: list[tuple[LedPartition, int]] = []
        self.needing: Callable[[int, int, int], Collection[str] | None] = (
            lambda partition, begin, end: None
        )
        """The nodes that need the commit of the records [begin, end) of a partition at once; None:
        each of them. PartEffects sets it."""

    def note_moved(self, led: LedPartition, before: int) -> None:
        """Notes that the high watermark of a partition has moved."""
        self._moved.append((led, before))

    def flush(self) -> None:
        """Sends the followers the high watermarks that have moved, or lets them wait."""
        moved = self._moved
        if not moved:
            return
        self._moved = []
        now = self._state.now
        marks = self._state.log.high_watermark
        needing: list[Collection[str] | None] = [None] * len(moved)
        if len(moved) <= LOOKED_AT_MAX:
            for number, (led, at) in enumerate(moved):
                if marks[led.partition] - at <= LOOKED_AT_MAX:
                    needing[number] = self.needing(led.partition, at, marks[led.partition])
        for peer in self._peers.values():
            if not peer.is_connected:
                continue
            may_wait = peer.replicated_at - peer.replicated_before <= HOLD_S
            for number, (led, _) in enumerate(moved):
                progress = led.followers.get(peer.node)
                if progress is None or progress.state == IDLE:
                    continue
                if not peer.held:
                    peer.held_at = now
                peer.held[led.partition] = led
                nodes = needing[number]
                if nodes is None or peer.node in nodes or led.partition in peer.awaited:
                    may_wait = False
            if peer.held and not may_wait:
                self._send(peer)

    def _send(self, peer: Peer) -> None:
        marks = self._state.log.high_watermark
        entries = []
        for partition, led in peer.held.items():
            if led.is_led:
                entries.append(OFFSET_ENTRY.pack(partition, led.epoch, marks[partition]))
            if peer.awaited.get(partition, marks[partition] + 1) <= marks[partition]:
                del peer.awaited[partition]
        peer.held = {}
        if entries:
            self._state.effects.append(Send(peer.node, COMMIT, b"".join(entries)))

    def is_holding(self) -> bool:
        """Whether commits wait for other frames."""
        return any(peer.held for peer in self._peers.values())

    def send_held(self, nodes: Collection[str], now: float) -> None:
        """Sends the commits that wait for these nodes, and those that have waited for HOLD_S."""
        for peer in self._peers.values():
            if peer.held and (peer.node in nodes or now >= peer.held_at + HOLD_S):
                self._send(peer)

    def await_commits(self, node: str, partitions: Iterable[int]) -> None:
        """Sends a node each commit of these partitions at once, up to the present ends of the logs:
        its clients or its barriers wait for them."""
        peer = self._peers.get(node)
        if peer is None or not peer.is_connected:
            return
        log = self._state.log
        for partition in partitions:
            end = log.next_offset[partition]
            if self._led[partition] is not None and log.high_watermark[partition] < end:
                peer.awaited[partition] = end
        if peer.held:
            self._send(peer)

    def timer(self) -> float | None:
        """Returns the time at which a commit has waited for HOLD_S, or None."""
        times = [peer.held_at + HOLD_S for peer in self._peers.values() if peer.held]
        return min(times, default=None)

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        assert not self._moved, "commits are left after the turn"
        for peer in self._peers.values():
            assert peer.is_connected or not (peer.held or peer.awaited), "for a lost link"
            assert not peer.held.keys() & peer.awaited.keys(), "an awaited commit is held back"
