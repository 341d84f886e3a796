"""Transfers replicated state for partitions whose local log begins after deleted records.

The state that those records defined (sessions, retained messages, positions of producers) is not in
the log any more. So the node requests the replicated state of the partition from its leader. The
leader sends it as of some applied offset, and this node continues with the log from that offset.

- For a partition in `missing` this node has no state, or a part of it. It neither follows nor leads
  the partition (Replication.suspend), so no node counts it as a replica that has the data.
- The partition is followed again when the received state is in a snapshot on the disk. Until then
  it is `unsaved`. Counter-example: it is followed at once, and the node restarts. It would find the
  log without the state.
- A restart needs no mark: the log of such a partition begins after the newest snapshot. So does a
  log that is copied, if its leader has removed records. It is `unsaved` for the same reason.
- Any node that has the state may send it, because only committed records define it. Leaders are
  chosen because they always have it.

One node receives requests at a time, for all partitions that it leads. It replies in pieces that
this node requests one by one; each is the work of one turn there. The previous state of the
partitions is dropped first. If the link is lost the transfer starts again.
"""

import json
import struct
from collections.abc import Container, Iterator
from typing import Final

from holdfast.log.batch import CorruptBatch
from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.node import frames
from holdfast.node.context import ClusterContext
from holdfast.node.features import GROUP_MEMBERS, WILL_OFFSETS
from holdfast.node.frame_kinds import IMAGE, IMAGE_REQUEST, BadFrame
from holdfast.node.frames import ImageRequest, decode_frame
from holdfast.node.node_state import NodeState
from holdfast.node.publish.apply import Applier
from holdfast.node.publish.producers import decode_producer, encode_producer
from holdfast.node.state.ban_records import ban_entry, ban_key, present_bans
from holdfast.node.state.client_epochs import ClientEpochs
from holdfast.node.state.fields import CLIENT_EPOCHS, PACKET_IDS
from holdfast.node.state.member_values import member_home
from holdfast.node.state.replicated import (
    ANY_PARTITION,
    ENDED_MAX,
    EPOCHS_ENTRY_MAX,
    NOBODY,
    SNAPSHOT_MEMBERS,
    SNAPSHOT_WILLS,
    ReplicatedState,
)
from holdfast.node.state.session_records import decode_entry, decode_json, encode_session
from holdfast.node.state.snapshot_entries import (
    SNAPSHOT_BAN,
    SNAPSHOT_DELAYED,
    SNAPSHOT_GROUP,
    SNAPSHOT_MEMBER,
    SNAPSHOT_PRODUCER,
    SNAPSHOT_RETAINED,
    SNAPSHOT_SESSION,
    delayed_entry,
)
from holdfast.node.state.state_records import retained_entry

INBOUND: Final = 5
"""The kind of a JSON entry with a client's unreleased QoS 2 packet ids, each with its session
epoch."""
FIRED: Final = 6
"""The kind of a JSON entry with clients and the session epoch of their newest published will. The
client id NOBODY has the newest epoch of all sessions, for older versions."""
ENDED: Final = 7
"""The kind of a JSON entry with clients and the epoch of their newest ended session. The client id
NOBODY has the newest epoch of all sessions with this home partition."""

LOOKED_AT: Final = 64
"""The number of items visited between two points at which the caller may pause."""

APPLIED_ALIKE: Final = (
    SNAPSHOT_RETAINED,
    SNAPSHOT_GROUP,
    SNAPSHOT_BAN,
    SNAPSHOT_DELAYED,
    SNAPSHOT_MEMBER,
)
"""The kinds of entries that a snapshot has in the same form."""

Entry = tuple[int, int, bytes]
"""One entry: (partition, kind, data)."""


def entries(
    replicated: ReplicatedState,
    partitions: Container[int],
    *,
    with_members: bool = True,
    with_offsets: bool = True,
) -> Iterator[Entry | None]:
    """Yields everything that belongs to the partitions, and None at points where the caller may
    pause. `with_members`, `with_offsets`: False for a node of an older version, which does not
    accept entries of group members, or of the offsets of published wills.

    Each part of the state belongs to one partition:
    - a session with its subscriptions, cursor and will, to its home partition;
    - a retained or delayed message, to the partition of its record;
    - the position of a producer, and a QoS 2 packet id of a client, to the partition it counts in;
    - the positions and the member records of a shared group, to the home of its key;
    - a ban, to the home of its scope and name;
    - a value of the federation's member, to the home of the federation's session.

    Entries set keys to values, as those of a snapshot do. The state may therefore change while they
    are made.

    A node of an older version knows published wills by client id alone, so it gets all of them. It
    does no harm if a node knows of a published will before its record is applied: `fired` only
    prevents a second one.
    """
    if with_offsets:
        for partition, data in replicated.wills():
            yield None
            # The wills of older versions are of any partition.
            if partition in partitions or partition == ANY_PARTITION:
                yield max(0, partition), SNAPSHOT_WILLS, data
    else:
        yield 0, FIRED, _dump([(NOBODY, max(replicated.newest_epochs))])
        for fired in list(replicated.fired.values()):
            yield from _epochs(0, FIRED, fired)
    for home, epoch in enumerate(replicated.newest_epochs):
        if epoch and home in partitions:
            yield home, ENDED, _dump([(NOBODY, epoch)])
    yield from _sessions(replicated, partitions)
    yield from _inbound(replicated, partitions)
    yield from _groups(replicated, partitions)
    if with_members:
        for home, data in replicated.group_members.entries():
            if home in partitions:
                yield home, SNAPSHOT_MEMBERS, data
    yield from _producers(replicated, partitions)
    yield from _retained(replicated, partitions)
    yield from _bans(replicated, partitions)
    yield from _delayed(replicated, partitions)
    yield from _member(replicated, partitions)
    for home, ended in enumerate(replicated.ended):
        if home in partitions:
            yield from _epochs(home, ENDED, ended)


def _home_of_ban(replicated: ReplicatedState, scope: str, name: str) -> int:
    return partition_of(ban_key(scope, name), replicated.state.config.partitions)


def _bans(replicated: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    for number, ban in enumerate(present_bans(replicated.state)):
        if number % LOOKED_AT == 0:
            yield None
        if ban is not None:
            home = _home_of_ban(replicated, ban.scope, ban.name)
            if home in partitions:
                yield home, SNAPSHOT_BAN, ban_entry(ban)


def _sessions(replicated: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    homes = [each for each in range(replicated.state.config.partitions) if each in partitions]
    for number, session in enumerate(replicated.present_sessions(homes)):
        home = replicated.home(session.client_id)
        yield home, SNAPSHOT_SESSION, encode_session(replicated.entry(session))
        if number % LOOKED_AT == 0:
            yield None


def _inbound(replicated: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    for number, client_id in enumerate(list(replicated.inbound)):
        if number % LOOKED_AT == 0:
            yield None
        found: dict[int, list[tuple[int, int]]] = {}
        for (partition, packet_id), epoch in replicated.inbound.get(client_id, {}).items():
            if partition in partitions:
                found.setdefault(partition, []).append((packet_id, epoch))
        for partition, ids in found.items():
            yield partition, INBOUND, _dump({"client": client_id, "ids": ids})


def _groups(replicated: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    for number, key in enumerate(list(replicated.group_positions)):
        if number % LOOKED_AT == 0:
            yield None
        home = replicated.home(key)
        if home in partitions and key in replicated.group_positions:
            yield home, SNAPSHOT_GROUP, encode_session(replicated.groups.entry(key))


def _producers(replicated: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    table = replicated.state.producers
    for number, (producer_id, producer) in enumerate(list(table.by_id.items())):
        if number % LOOKED_AT == 0:
            yield None
        for place in producer.positions():
            if place.partition in partitions:
                data = encode_producer(producer_id, [place])
                yield place.partition, SNAPSHOT_PRODUCER, data


def _retained(replicated: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    retained = replicated.state.retained
    scan = retained.scan_all()
    while not scan.done:
        yield None
        for topic, message in scan.next(LOOKED_AT):
            if message.partition in partitions and retained.get(topic) is message:
                yield message.partition, SNAPSHOT_RETAINED, retained_entry(message)


def _delayed(replicated: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    waiting = replicated.state.delayed.by_place
    for number, message in enumerate(list(waiting.values())):
        if number % LOOKED_AT == 0:
            yield None
        partition = message.place[0]
        if partition in partitions and message.place in waiting:
            yield partition, SNAPSHOT_DELAYED, delayed_entry(message)


def _member(replicated: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    home = member_home(replicated.state.config.partitions)
    if home in partitions:
        for number, value in enumerate(replicated.state.member.entries()):
            if number % LOOKED_AT == 0:
                yield None
            if value is not None:
                yield home, SNAPSHOT_MEMBER, value


def _epochs(partition: int, kind: int, epochs: ClientEpochs) -> Iterator[Entry | None]:
    known = [(client_id, epoch) for client_id, epoch, _ in epochs.items()]
    for start in range(0, len(known), EPOCHS_ENTRY_MAX):
        yield None
        yield partition, kind, _dump(known[start : start + EPOCHS_ENTRY_MAX])


def drop(replicated: ReplicatedState, partitions: Container[int]) -> Iterator[None]:
    """Removes everything that belongs to the partitions, with pauses as in `entries`."""
    state = replicated.state
    homes = [each for each in range(state.config.partitions) if each in partitions]
    for number, session in enumerate(replicated.present_sessions(homes)):
        replicated.drop(session)
        if number % LOOKED_AT == 0:
            yield
    for number, (client_id, ids) in enumerate(list(replicated.inbound.items())):
        if number % LOOKED_AT == 0:
            yield
        for key in [key for key in ids if key[0] in partitions]:
            del ids[key]
        if not ids:
            replicated.inbound.pop(client_id, None)
    for number, name in enumerate(list(replicated.group_positions)):
        if number % LOOKED_AT == 0:
            yield
        if replicated.home(name) in partitions:
            replicated.groups.drop(name)
    for number, (producer_id, producer) in enumerate(list(state.producers.by_id.items())):
        if number % LOOKED_AT == 0:
            yield
        for place in producer.positions():
            if place.partition in partitions:
                state.producers.remove(producer_id, place.partition)
    scan = state.retained.scan_all()
    while not scan.done:
        yield
        for topic, message in scan.next(LOOKED_AT):
            if message.partition in partitions:
                state.retained.remove(topic)
    for number, (scope, name) in enumerate(state.bans.names()):
        if number % LOOKED_AT == 0:
            yield
        if _home_of_ban(replicated, scope, name) in partitions:
            state.bans.lift(scope, name)
    if member_home(state.config.partitions) in partitions:
        state.member.clear()
    for partition in homes:
        replicated.group_members.drop(partition)
        state.delayed.drop_partition(partition)
        replicated.fired.pop(partition, None)
        replicated.ended[partition] = ClientEpochs(ENDED_MAX)


def take(replicated: ReplicatedState, partition: int, kind: int, data: bytes) -> None:
    """Loads an entry of another node.

    Raises ValueError, struct.error or CorruptBatch when it is malformed.
    """
    if kind == SNAPSHOT_SESSION:
        replicated.restore(decode_entry(data))
    elif kind == SNAPSHOT_PRODUCER:
        if decode_producer(data)[1].first.partition != partition:
            raise ValueError("a producer in another partition")
        replicated.apply_snapshot_entry(kind, data)
    elif kind in APPLIED_ALIKE:
        replicated.apply_snapshot_entry(kind, data)
    elif kind == SNAPSHOT_WILLS:
        replicated.restore_wills(data)
    elif kind == SNAPSHOT_MEMBERS:
        replicated.group_members.restore(data)
    elif kind == INBOUND:
        entry = decode_json(PACKET_IDS, data, "packet ids")
        ids = replicated.inbound.setdefault(entry.client, {})
        for packet_id, epoch in entry.ids:
            ids[(partition, packet_id)] = epoch
    elif kind == FIRED:
        for client_id, epoch in decode_json(CLIENT_EPOCHS, data, "epochs of wills"):
            replicated.note_fired(client_id, epoch)
    elif kind == ENDED:
        for client_id, epoch in decode_json(CLIENT_EPOCHS, data, "epochs of ended sessions"):
            if client_id == NOBODY:
                replicated.note_epoch(partition, epoch)
            else:
                replicated.note_ended(client_id, epoch)
    else:
        raise ValueError(f"an entry of kind {kind}")


def _dump(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


PIECE_BYTES: Final = 32 << 10
"""The size in bytes at which an IMAGE frame is closed. A single larger entry has a frame of its
own."""
PIECE_PAUSES: Final = 4
"""The number of pauses per piece; 64 sessions, topics or producers are visited before each."""
DROP_PAUSES: Final = 4
"""The number of pauses per turn while the previous state is dropped."""
ASK_AGAIN_S: Final = 0.1
"""The delay in seconds after which a request is repeated to a leader that did not have the
state."""
ANSWER_S: Final = 5.0
"""The time in seconds after which a request without a reply is repeated."""

ANEW: Final = -1
"""In place of the offset at which a log begins again: its leader lacks records that are applied."""
_HEAD: Final = struct.Struct("<QI?H")
"""The head of a piece: request number, piece number, whether it is the last, number of
partitions."""
_GRANT: Final = struct.Struct("<HQ")
"""An entry of the first piece: a partition, and the offset up to which the state is applied."""
_ENTRY: Final = struct.Struct("<HBI")


class TransferRequest:
    """A transfer to this node."""

    def __init__(self, number: int, node: str, partitions: set[int], now: float) -> None:
        self.number = number
        self.node = node
        self.partitions = partitions
        # The number of the next piece; -1: the previous state is being dropped.
        self.piece = -1
        self.received_at = now
        self.offsets: dict[int, int] = {}
        # That of the log when it began.
        self.generation = 0
        self.dropping: Iterator[None] = iter(())


class OutgoingTransfer:
    """A transfer from this node to another."""

    def __init__(self, number: int, grants: dict[int, int], source: Iterator[Entry | None]) -> None:
        self.number = number
        self.piece = 0
        self.grants = grants
        self.source = source


def replay_offset(journal: Journal, partition: int, applied: int) -> int:
    """Returns the offset at which a restart begins to apply records to a state that has those below
    `applied`.

    Invariant: an offset within the log here is committed there. Counter-example: the log is copied,
    its end is not committed, and the next leader feeds other records with these offsets. This node
    saves its state, and crashes before it has cut the end. It would take the end for committed. A
    snapshot may contain the effects of the records that are applied again.
    """
    if applied <= journal.next_offset[partition]:
        return min(applied, journal.high_watermark[partition])
    return applied


class Transfer:
    """The state transfers of this node, in both directions.

    Invariant: a partition is in at most one of `missing` and `unsaved`, and is followed only if it
    is in neither.
    """

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        applier: Applier,
    ) -> None:
        self._state = state
        self._context = context
        self._replicated = replicated
        self._applier = applier
        # At a start ClusterNode adds the partitions whose logs begin after the snapshot.
        self.missing: set[int] = set()
        # Partitions whose log begins again at an offset, while clients leave that would miss the
        # records before it. PartEffects calls `restarted` then.
        self.expected: dict[int, int] = {}
        # Partition -> number of the transfer that its state came with, or of its copied log.
        self.unsaved: dict[int, int] = {}
        # Those of them, and of earlier ones, whose log is copied: the state was complete here.
        self.copies: set[int] = set()
        # Partitions that may be followed again; ClusterNode takes them.
        self.released: list[int] = []
        self._number = 0
        self._request: TransferRequest | None = None
        self._request_at = 0.0
        self._sending: dict[str, OutgoingTransfer] = {}
        # False if the log that the state here was made from is damaged.
        self.may_serve = True
        self.received = 0
        self.sent = 0
        # How often the state of a partition was given up, to be received again.
        self._drops = 0

    @property
    def is_whole(self) -> bool:
        """True if the state of all partitions is complete, and saved if it was received."""
        return not self.missing and not self.expected and self.unsaved.keys() <= self.copies

    def lacks(self, partition: int) -> bool:
        """True if the state of the partition is incomplete, or not in force yet."""
        return partition in self.missing or partition in self.expected or partition in self.released

    def begin_snapshot(self) -> tuple[list[int], Iterator[tuple[int, bytes]]]:
        """Returns the offsets and the entries of a snapshot that begins now. These raise
        `OSError` if state is dropped meanwhile. Counter-example: it is dropped because the
        leader's log begins above what was fed. This node restarts, and the next leader's log
        begins below. It feeds this node from there, without the rest of the state."""
        return self.offsets(), self._entries(self._drops)

    def _entries(self, drops: int) -> Iterator[tuple[int, bytes]]:
        for entry in self._replicated.snapshot():
            if drops != self._drops:
                break
            yield entry
        if drops != self._drops:
            raise OSError("the state of a partition was dropped, to be received again")

    def offsets(self) -> list[int]:
        """Returns the offsets from which records must be applied to a snapshot taken now: 0 for a
        partition whose state it lacks."""
        applied = self._state.delivered
        offsets = [
            replay_offset(self._context.journal, each, at) for each, at in enumerate(applied)
        ]
        for partition in (*self.missing, *self.expected):
            offsets[partition] = 0
        return offsets

    # At the node that lacks them

    def restarted(self, partition: int, offset: int) -> None:
        """Handles a log that now begins at `offset`, and requests the replicated state if the one
        here is older. ANEW: it has records that are given up, and nothing of it counts."""
        if self._request is not None:
            self._request.partitions.discard(partition)
        self.unsaved.pop(partition, None)
        is_anew = offset == ANEW
        if is_anew:
            self._applier.begin_again(partition)
            offset = 0
        applied = max(self._state.delivered[partition], self._applier.starts[partition])
        if is_anew or applied < offset:
            self._drops += partition not in self.missing
            self.missing.add(partition)
            for node, given in list(self._sending.items()):
                if partition in given.grants:
                    del self._sending[node]
        elif partition not in self.missing:
            self._received(partition)
        self._state.delivered[partition] = offset
        if not self._context.is_stored(partition):
            self._applier.note_fed(partition, offset)

    def abandon(self, partition: int) -> None:
        """Stops waiting for the state of the partition: no node has it."""
        if self._request is not None:
            self._request.partitions.discard(partition)
        self.missing.discard(partition)
        self.unsaved.pop(partition, None)

    def save(self, partition: int) -> None:
        """Lets the state of a partition be saved, because its log begins behind the snapshot."""
        self._number += 1
        self.unsaved[partition] = self._number
        self.copies.add(partition)

    def _received(self, partition: int) -> None:
        self._number += 1
        self.missing.discard(partition)
        self.copies.discard(partition)
        if not self._context.is_stored(partition):
            self.released.append(partition)
            return
        self.unsaved[partition] = self._number

    def step(self, now: float) -> None:
        """Begins a transfer, drops previous state or notices a timeout. It runs once per turn."""
        asked = self._request
        if asked is None:
            if self.missing and now >= self._request_at:
                self._begin(now)
            asked = self._request
            if asked is None:
                return
        if not asked.partitions or now > asked.received_at + ANSWER_S:
            self._request = None
        elif asked.piece < 0:
            asked.received_at = now
            for _ in range(DROP_PAUSES):
                if next(asked.dropping, True):
                    asked.piece = 0
                    self._send_request(asked)
                    return

    def _begin(self, now: float) -> None:
        led: dict[str, set[int]] = {}
        for partition in sorted(self.missing):
            leader = self._context.leader(partition)
            if leader in self._context.connected:
                led.setdefault(leader, set()).add(partition)
        if not led:
            self._request_at = now + ASK_AGAIN_S
            return
        node = max(led, key=lambda name: len(led[name]))
        self._number += 1
        asked = TransferRequest(self._number, node, led[node], now)
        asked.generation = self._context.generation
        asked.dropping = drop(self._replicated, frozenset(asked.partitions))
        self._request = asked

    def _send_request(self, asked: TransferRequest) -> None:
        wanted = None
        if not asked.piece:
            delivered = self._state.delivered
            wanted = [(partition, delivered[partition]) for partition in sorted(asked.partitions)]
        request = ImageRequest(asked.number, asked.piece, wanted)
        self._context.send_frame(asked.node, IMAGE_REQUEST, request)

    def handle_state(self, node: str, payload: bytes) -> None:
        """Takes a piece of state. Raises BadFrame when it is malformed."""
        try:
            number, piece, is_last, count = _HEAD.unpack_from(payload)
            at = _HEAD.size + count * _GRANT.size
            grants = dict(_GRANT.iter_unpack(payload[_HEAD.size : at]))
            asked = self._request
            if asked is None or asked.node != node or asked.number != number:
                return
            if piece != asked.piece:
                raise BadFrame(f"piece {piece} of images, {asked.piece} is due")
            if not piece:
                asked.offsets = grants
                asked.partitions.intersection_update(grants)
            self._load(asked, payload, at)
        except (struct.error, ValueError, CorruptBatch) as error:
            raise BadFrame(f"images: {error!r}") from None
        now = asked.received_at = self._state.now
        self.received += len(payload)
        if not is_last:
            asked.piece += 1
            self._send_request(asked)
            return
        self._request = None
        if asked.generation != self._context.generation:
            # The state may have records that are given up since.
            asked.partitions.clear()
        if not asked.partitions:
            self._request_at = now + ASK_AGAIN_S
        for partition in sorted(asked.partitions):
            self._applier.starts[partition] = asked.offsets[partition]
            self._received(partition)
        self._state.note(
            "info",
            "images_received",
            {"node": node, "partitions": len(asked.partitions), "missing": len(self.missing)},
        )

    def _load(self, asked: TransferRequest, payload: bytes, at: int) -> None:
        while at < len(payload):
            partition, kind, length = _ENTRY.unpack_from(payload, at)
            at += _ENTRY.size
            data = payload[at : at + length]
            if len(data) != length:
                raise BadFrame("images: an entry is cut off")
            at += length
            if partition in asked.partitions or kind == FIRED:
                take(self._replicated, partition, kind, data)

    def needs_save(self) -> bool:
        """True if a snapshot should be taken now: no transfer is under way, and no state is wrong,
        which the next start would load."""
        is_wrong = self._state.has_stopped_partition
        return bool(self.unsaved) and self._request is None and not is_wrong

    def saved(self, covered: dict[int, int]) -> None:
        """Releases the partitions of a durable snapshot. `covered`: `unsaved` when it began."""
        for partition, number in covered.items():
            if self.unsaved.get(partition) == number:
                del self.unsaved[partition]
                self.released.append(partition)

    def pop_released(self) -> list[int]:
        """Returns the partitions that may be followed again since the last call."""
        released = self.released
        self.released = []
        return released

    def disconnected(self, node: str) -> None:
        """Ends the transfers from and to a node whose link is lost."""
        self._sending.pop(node, None)
        if self._request is not None and self._request.node == node:
            self._request = None

    def timer(self) -> float | None:
        """Returns the time of the next step, or None."""
        if self._request is not None:
            return 0.0 if self._request.piece < 0 else self._request.received_at + ANSWER_S
        return self._request_at if self.missing else None

    # At the node that has them

    def handle_request(self, node: str, payload: bytes) -> None:
        """Sends the requested piece of state. Raises BadFrame when the request is malformed."""
        frame = decode_frame(frames.IMAGE_REQUEST, payload)
        number, piece = frame.request, frame.piece
        if not piece:
            self._sending[node] = self._send_state(node, number, frame.partitions)
        given = self._sending.get(node)
        if given is None:
            # This node has dropped the transfer; the other node requests it again.
            return
        if given.number != number or given.piece != piece:
            raise BadFrame(f"asks for piece {piece} of images {number}")
        self._send(node, given)

    def _send_state(
        self, node: str, number: int, wanted: list[tuple[int, int]] | None
    ) -> OutgoingTransfer:
        if wanted is None:
            raise BadFrame("asks for images without partitions")
        delivered = self._state.delivered
        grants: dict[int, int] = {}
        for partition, needed in wanted:
            if not 0 <= partition < len(delivered):
                raise BadFrame(f"asks for images of partition {partition}")
            applied = max(delivered[partition], self._applier.starts[partition])
            if self.may_serve and partition not in self.missing and applied >= needed:
                grants[partition] = applied
        source: Iterator[Entry | None] = iter(())
        if grants:
            source = entries(
                self._replicated,
                frozenset(grants),
                with_members=self._context.understands(node, GROUP_MEMBERS),
                with_offsets=self._context.understands(node, WILL_OFFSETS),
            )
        return OutgoingTransfer(number, grants, source)

    def _send(self, node: str, given: OutgoingTransfer) -> None:
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
        self._context.send(node, IMAGE, b"".join(head + parts))
        given.piece += 1
        if is_last:
            del self._sending[node]
