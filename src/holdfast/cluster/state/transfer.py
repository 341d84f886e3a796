"""Images for partitions whose log here begins behind records that are gone.

What was derived from those records (sessions, retained messages, places of producers) is not to be
had from the log. So the node asks the partition's leader for its images of it, as they are once
everything below some offset was applied there, and goes on from that offset with the log.

- Of a partition in `missing` nothing is known here, or a part. It is neither followed nor led
  (Replication.hold), so nobody counts this node as one that has it.
- It is followed again when the images that have come are in a snapshot on the disk: a restart
  would find the log, and no images. Until then it is `unsaved`.
- A restart needs no mark to know: the log of such a partition begins behind the newest snapshot.
- Whoever has the images may give them: what is in there is committed. Leaders are asked because
  they have them.

One node is asked at a time, for all partitions that it leads. Its answer comes in pieces that this
node asks for one by one; each is the work of one turn there. What was there before is dropped
first; if the link is lost everything begins anew.
"""

import struct
from collections.abc import Iterator
from typing import Final

from holdfast.broker.state import NodeState
from holdfast.cluster.context import ClusterContext, fields_of, number_of
from holdfast.cluster.frame_kinds import IMAGE, IMAGE_REQUEST, BadFrame
from holdfast.cluster.publish.apply import Applier
from holdfast.cluster.state.entries import FIRED, Entry, drop, entries, take
from holdfast.cluster.state.replicated import ReplicatedState
from holdfast.storage.record import CorruptBatch

PIECE_BYTES: Final = 32 << 10
"""An IMAGE is closed at this size; a single larger entry makes one of its own."""
PIECE_PAUSES: Final = 4
"""So many times 64 sessions, topics or producers are looked at for one piece."""
DROP_PAUSES: Final = 4
"""As many for each turn in which the old images are dropped."""
ASK_AGAIN_S: Final = 0.1
"""Whom we asked did not have them either, or not yet."""
ANSWER_S: Final = 5.0
"""Then a node that does not answer is asked anew."""

_HEAD: Final = struct.Struct("<QI?H")
"""Number of the request, number of the piece, whether it is the last, partitions."""
_GRANT: Final = struct.Struct("<HQ")
"""In the first piece: a partition, and the offset up to which everything is applied."""
_ENTRY: Final = struct.Struct("<HBI")


class Asked:
    """What is on its way here."""

    def __init__(self, number: int, node: str, partitions: set[int], now: float) -> None:
        self.number = number
        self.node = node
        self.partitions = partitions
        # The piece that comes next; -1: the old images are being dropped.
        self.piece = -1
        self.heard_at = now
        self.offsets: dict[int, int] = {}
        self.dropping: Iterator[None] = iter(())


class Given:
    """What is on its way to another node."""

    def __init__(self, number: int, grants: dict[int, int], source: Iterator[Entry | None]) -> None:
        self.number = number
        self.piece = 0
        self.grants = grants
        self.source = source


class Transfer:
    def __init__(
        self, state: NodeState, fabric: ClusterContext, images: ReplicatedState, applier: Applier
    ) -> None:
        self._state = state
        self._fabric = fabric
        self._images = images
        self._applier = applier
        # At a start the member puts those in whose logs begin behind the snapshot.
        self.missing: set[int] = set()
        # Partition -> number of the images that have come.
        self.unsaved: dict[int, int] = {}
        # Partitions that may be followed again; the member takes them.
        self.released: list[int] = []
        self._number = 0
        self._asked: Asked | None = None
        self._ask_at = 0.0
        self._given: dict[str, Given] = {}
        # False: the log that the images here were made from was damaged.
        self.may_give = True
        self.received = 0
        self.sent = 0

    @property
    def is_whole(self) -> bool:
        return not self.missing and not self.unsaved

    def offsets(self) -> list[int]:
        """For a snapshot: where the records begin that must be applied over it; 0 where it has no
        images."""
        offsets = list(self._fabric.journal.high_watermark)
        for partition in self.missing:
            offsets[partition] = 0
        return offsets

    # At the node that lacks them

    def restarted(self, partition: int, offset: int) -> None:
        """The log begins at the offset now."""
        if self._asked is not None:
            self._asked.partitions.discard(partition)
        self.unsaved.pop(partition, None)
        if max(self._state.delivered[partition], self._applier.starts[partition]) < offset:
            self.missing.add(partition)
            for node, given in list(self._given.items()):
                if partition in given.grants:
                    del self._given[node]
        elif partition not in self.missing:
            self._came(partition)
        self._state.delivered[partition] = offset

    def give_up(self, partition: int) -> None:
        """There is nobody who has them."""
        if self._asked is not None:
            self._asked.partitions.discard(partition)
        self.missing.discard(partition)
        self.unsaved.pop(partition, None)

    def _came(self, partition: int) -> None:
        self._number += 1
        self.missing.discard(partition)
        self.unsaved[partition] = self._number

    def step(self, now: float) -> None:
        """Once a turn."""
        asked = self._asked
        if asked is None:
            if self.missing and now >= self._ask_at:
                self._begin(now)
            asked = self._asked
            if asked is None:
                return
        if not asked.partitions or now > asked.heard_at + ANSWER_S:
            self._asked = None
        elif asked.piece < 0:
            asked.heard_at = now
            for _ in range(DROP_PAUSES):
                if next(asked.dropping, True):
                    asked.piece = 0
                    self._ask(asked)
                    return

    def _begin(self, now: float) -> None:
        led: dict[str, set[int]] = {}
        for partition in sorted(self.missing):
            leader = self._fabric.leader(partition)
            if leader in self._fabric.connected:
                led.setdefault(leader, set()).add(partition)
        if not led:
            self._ask_at = now + ASK_AGAIN_S
            return
        node = max(led, key=lambda name: len(led[name]))
        self._number += 1
        asked = Asked(self._number, node, led[node], now)
        asked.dropping = drop(self._images, frozenset(asked.partitions))
        self._asked = asked

    def _ask(self, asked: Asked) -> None:
        fields: dict[str, object] = {"request": asked.number, "piece": asked.piece}
        if not asked.piece:
            delivered = self._state.delivered
            fields["partitions"] = [
                [partition, delivered[partition]] for partition in sorted(asked.partitions)
            ]
        self._fabric.send_fields(asked.node, IMAGE_REQUEST, fields)

    def handle_image(self, node: str, payload: bytes) -> None:
        """Raises BadFrame."""
        try:
            number, piece, is_last, count = _HEAD.unpack_from(payload)
            at = _HEAD.size + count * _GRANT.size
            grants = dict(_GRANT.iter_unpack(payload[_HEAD.size : at]))
            asked = self._asked
            if asked is None or asked.node != node or asked.number != number:
                return
            if piece != asked.piece:
                raise BadFrame(f"piece {piece} of images, {asked.piece} is due")
            if not piece:
                asked.offsets = grants
                asked.partitions.intersection_update(grants)
            self._take(asked, payload, at)
        except (
            *(struct.error, ValueError, KeyError, TypeError, AssertionError, AttributeError),
            CorruptBatch,
        ) as error:
            raise BadFrame(f"images: {error!r}") from None
        now = asked.heard_at = self._state.now
        self.received += len(payload)
        if not is_last:
            asked.piece += 1
            self._ask(asked)
            return
        self._asked = None
        if not asked.partitions:
            self._ask_at = now + ASK_AGAIN_S
        for partition in sorted(asked.partitions):
            self._applier.starts[partition] = asked.offsets[partition]
            self._came(partition)
        self._state.note(
            "info",
            "images_received",
            {"node": node, "partitions": len(asked.partitions), "missing": len(self.missing)},
        )

    def _take(self, asked: Asked, payload: bytes, at: int) -> None:
        while at < len(payload):
            partition, kind, length = _ENTRY.unpack_from(payload, at)
            at += _ENTRY.size
            data = payload[at : at + length]
            if len(data) != length:
                raise BadFrame("images: an entry is cut off")
            at += length
            if partition in asked.partitions or kind == FIRED:
                take(self._images, partition, kind, data)

    def wants_save(self) -> bool:
        """A snapshot is to be taken: nothing more can be had now."""
        return bool(self.unsaved) and self._asked is None

    def begin_save(self) -> dict[int, int]:
        """For `saved`: what a snapshot that is begun now will have."""
        return dict(self.unsaved)

    def saved(self, covered: dict[int, int]) -> None:
        """Such a snapshot is durable, and so is the log before it."""
        for partition, number in covered.items():
            if self.unsaved.get(partition) == number:
                del self.unsaved[partition]
                self.released.append(partition)

    def take_released(self) -> list[int]:
        released = self.released
        self.released = []
        return released

    def disconnected(self, node: str) -> None:
        self._given.pop(node, None)
        if self._asked is not None and self._asked.node == node:
            self._asked = None

    def timer(self) -> float | None:
        if self._asked is not None:
            return 0.0 if self._asked.piece < 0 else self._asked.heard_at + ANSWER_S
        return self._ask_at if self.missing else None

    # At the node that has them

    def handle_request(self, node: str, payload: bytes) -> None:
        """Raises BadFrame."""
        fields = fields_of(payload, "request", "piece")
        number = number_of(fields, "request")
        piece = number_of(fields, "piece")
        if not piece:
            self._given[node] = self._give(number, fields.get("partitions"))
        given = self._given.get(node)
        if given is None:
            # Lost here meanwhile: it will ask anew.
            return
        if given.number != number or given.piece != piece:
            raise BadFrame(f"asks for piece {piece} of images {number}")
        self._send(node, given)

    def _give(self, number: int, wanted: object) -> Given:
        if not isinstance(wanted, list):
            raise BadFrame("asks for images without partitions")
        delivered = self._state.delivered
        grants: dict[int, int] = {}
        for entry in wanted:
            if (
                not isinstance(entry, list)
                or len(entry) != 2
                or not all(isinstance(each, int) for each in entry)
            ):
                raise BadFrame("asks for images of what is no partition")
            partition, needed = entry
            if not 0 <= partition < len(delivered):
                raise BadFrame(f"asks for images of partition {partition}")
            applied = max(delivered[partition], self._applier.starts[partition])
            if self.may_give and partition not in self.missing and applied >= needed:
                grants[partition] = applied
        source: Iterator[Entry | None] = iter(())
        if grants:
            source = entries(self._images, frozenset(grants))
        return Given(number, grants, source)

    def _send(self, node: str, given: Given) -> None:
        parts: list[bytes] = []
        size = pauses = 0
        is_last = True
        for entry in given.source:
            if entry is None:
                pauses += 1
            else:
                partition, kind, data = entry
                parts.append(_ENTRY.pack(partition, kind, len(data)))
                parts.append(data)
                size += len(data)
            if pauses > PIECE_PAUSES or size >= PIECE_BYTES:
                is_last = False
                break
        grants = {} if given.piece else given.grants
        head = [_HEAD.pack(given.number, given.piece, is_last, len(grants))]
        head += [_GRANT.pack(partition, offset) for partition, offset in grants.items()]
        self.sent += size
        self._fabric.send(node, IMAGE, b"".join(head + parts))
        given.piece += 1
        if is_last:
            del self._given[node]
