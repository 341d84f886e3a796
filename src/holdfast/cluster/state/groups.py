"""Where shared groups stand by what the log says, on every node.

Their CURSOR records are written by their coordinator, under the epoch of their home partition: what
one has written that was deposed meanwhile counts for nothing. A record that says nothing ends the
group. Every record sets values, see node.recovery.

Invariant: until a group ends, its positions never go back. Each says that everything before it is
finished, and nothing else remembers that: a lower one would let the next coordinator hand all of it
out again, QoS 2 records included.
"""

from typing import Final

from holdfast.broker.session.session import Session
from holdfast.broker.session.state import decode_cursor
from holdfast.broker.state import NodeState
from holdfast.storage.record import Record

DONE_MAX: Final = 100_000
"""Offsets of one group that are finished above its positions. More are not remembered, so another
coordinator may hand those records out again."""


class GroupPositions:
    def __init__(self, state: NodeState, positions: dict[str, list[int]]) -> None:
        """`positions`: first unfinished offset per partition, by group; changed here."""
        self._state = state
        self.positions = positions
        # Per partition the offsets at or above the position that are finished.
        self.done: dict[str, dict[int, set[int]]] = {}
        self.epochs: dict[str, int] = {}
        # Grows with every record.
        self.version = 0
        # Groups with DONE_MAX offsets.
        self._full: set[str] = set()
        # Groups that have ended since `take_dropped` was called.
        self._dropped: set[str] = set()

    def apply(self, record: Record) -> None:
        self.version += 1
        key = record.client_id.decode()
        if record.sequence < self.epochs.get(key, 0):
            return
        cursor = decode_cursor(record.payload)
        if not cursor.positions and not cursor.done:
            self.drop(key)
            self._dropped.add(key)
            return
        self.epochs[key] = record.sequence
        positions = self.positions.setdefault(key, [0] * self._state.config.partitions)
        done = self.done.setdefault(key, {})
        for partition, offset in cursor.positions:
            offset = max(offset, positions[partition])
            positions[partition] = offset
            if partition in done:
                done[partition] = {each for each in done[partition] if each >= offset}
                if not done[partition]:
                    del done[partition]
        room = DONE_MAX - sum(map(len, done.values()))
        for partition, offset in cursor.done[: max(0, room)]:
            if offset >= positions[partition]:
                done.setdefault(partition, set()).add(offset)
        if len(cursor.done) >= room:
            self._full.add(key)
        else:
            self._full.discard(key)
        self.place(key)

    def is_finished(self, key: str, partition: int, offset: int) -> bool:
        positions = self.positions.get(key)
        if positions is None:
            return False
        if offset < positions[partition]:
            return True
        return offset in self.done.get(key, {}).get(partition, ())

    def is_full(self, key: str) -> bool:
        """Nothing more is remembered as finished."""
        return key in self._full

    def take_dropped(self) -> set[str]:
        """Groups that have ended since the last call."""
        dropped = self._dropped
        self._dropped = set()
        return dropped

    def is_owned_at(self, key: str, node: str) -> bool:
        """Has the node a session that keeps QoS 2 records of the group under packet ids? What it
        says of them counts until it is closed."""
        group = self._state.groups.get(key)
        return group is not None and any(
            session.owner == node and subscription.qos == 2 and _outlives_connection(session)
            for session, subscription in group.members.items()
        )

    def kept_by_members(self, key: str) -> set[tuple[int, int]]:
        """Places of QoS 2 records that sessions have from the group under a packet id: nobody else
        may get them. [MQTT-4.8.2-4] [MQTT-4.8.2-5]"""
        group = self._state.groups.get(key)
        if group is None:
            return set()
        found: set[tuple[int, int]] = set()
        for session in group.members:
            for entry in session.inflight.values():
                if entry.qos == 2 and entry.group_tag == group.tag:
                    found.add((entry.partition, entry.offset))
        return found

    def starts(self, key: str) -> list[list[int]]:
        """Where members began that the log knows."""
        group = self._state.groups.get(key)
        if group is None:
            return []
        return [each.start for each in group.members.values() if each.start is not None]

    def is_durable(self, key: str) -> bool:
        group = self._state.groups.get(key)
        return group is not None and any(map(_outlives_connection, group.members))

    def place(self, key: str) -> None:
        """So that retention keeps what it has not finished with."""
        group = self._state.groups.get(key)
        positions = self.positions.get(key)
        if group is not None and positions is not None:
            group.tailing = False
            group.positions = list(positions)

    def fields(self, key: str) -> dict[str, object]:
        """Of a SNAPSHOT_GROUP entry."""
        done = self.done.get(key, {})
        return {
            "key": key,
            "positions": self.positions[key],
            "done": [[partition, sorted(offsets)] for partition, offsets in done.items()],
            "epoch": self.epochs.get(key, 0),
        }

    def restore(self, fields: dict[str, object]) -> None:
        """The positions are there. Raises KeyError, ValueError, TypeError or AssertionError."""
        key = str(fields["key"])
        done = fields.get("done", [])
        assert isinstance(done, list)
        self.done[key] = {int(partition): set(offsets) for partition, offsets in done}
        self.epochs[key] = int(str(fields.get("epoch", 0)))
        self.place(key)

    def drop(self, key: str) -> None:
        self.positions.pop(key, None)
        self.done.pop(key, None)
        self.epochs.pop(key, None)
        self._full.discard(key)
        group = self._state.groups.get(key)
        if group is not None:
            group.tailing = True
            group.positions = None


def _outlives_connection(session: Session) -> bool:
    return session.expiry_s > 0
