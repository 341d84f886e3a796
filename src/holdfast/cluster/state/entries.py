"""The replicated state of some partitions as entries that another node can load.

Each part of the state belongs to one partition:
- a session with its subscriptions, cursor and will, to its home partition;
- a retained or delayed message, to the partition of its record;
- the position of a producer, and a QoS 2 packet id of a client, to the partition it counts in;
- the positions and the member records of a shared group, to the home of its key;
- a ban, to the home of its scope and name.

Entries set keys to values, as those of a snapshot do. The state may therefore change while they are
made.

The records of published wills are in the partitions of their topics, but the state has them by
client id alone. So all of them are sent. It does no harm if a node knows of a published will before
its record is applied: `fired` only prevents a second one.
"""

import json
from collections import OrderedDict
from collections.abc import Container, Iterator
from typing import Final

from holdfast.broker.publish.producers import (
    Producer,
    ProducerPosition,
    decode_producer,
    encode_producer,
)
from holdfast.broker.recovery.ban_records import ban_entry, ban_key, present_bans
from holdfast.broker.recovery.session_records import decode_entry, decode_json, encode_session
from holdfast.broker.recovery.snapshot_entries import (
    SNAPSHOT_BAN,
    SNAPSHOT_DELAYED,
    SNAPSHOT_GROUP,
    SNAPSHOT_PRODUCER,
    SNAPSHOT_RETAINED,
    SNAPSHOT_SESSION,
    delayed_entry,
)
from holdfast.broker.recovery.state_records import retained_entry
from holdfast.cluster.state.fields import CLIENT_EPOCHS, PACKET_IDS
from holdfast.cluster.state.replicated import NOBODY, SNAPSHOT_MEMBERS, ReplicatedState
from holdfast.storage.partition import partition_of

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
EPOCHS_MAX: Final = 500
"""The most epochs in one entry."""


Entry = tuple[int, int, bytes]
"""One entry: (partition, kind, data)."""


def entries(
    replicated: ReplicatedState, partitions: Container[int], *, with_members: bool = True
) -> Iterator[Entry | None]:
    """Yields everything that belongs to the partitions, and None at points where the caller may
    pause. `with_members`: False for a node of an older version, which does not accept those
    entries."""
    yield 0, FIRED, _dump([(NOBODY, max(replicated.newest_epochs))])
    for home, epoch in enumerate(replicated.newest_epochs):
        if epoch and home in partitions:
            yield home, ENDED, _dump([(NOBODY, epoch)])
    yield from _epochs(replicated, partitions, FIRED, replicated.fired)
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
    yield from _epochs(replicated, partitions, ENDED, replicated.ended)


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
    sessions = replicated.state.sessions
    for number, session in enumerate(list(sessions.values())):
        if number % LOOKED_AT == 0:
            yield None
        home = replicated.home(session.client_id)
        if home in partitions and sessions.get(session.client_id) is session:
            yield home, SNAPSHOT_SESSION, encode_session(replicated.entry(session))


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
                alone = Producer(place)
                alone.owner = producer.owner
                data = encode_producer(producer_id, alone)
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


def _epochs(
    replicated: ReplicatedState,
    partitions: Container[int],
    kind: int,
    epochs: OrderedDict[str, int],
) -> Iterator[Entry | None]:
    """Yields entries of `ended` for the clients with these homes, or all of `fired`, as partition
    0."""
    found: dict[int, list[tuple[str, int]]] = {}
    for number, (client_id, epoch) in enumerate(list(epochs.items())):
        if number % LOOKED_AT == 0:
            yield None
        home = replicated.home(client_id) if kind == ENDED else 0
        if kind == FIRED or home in partitions:
            of_home = found.setdefault(home, [])
            of_home.append((client_id, epoch))
            if len(of_home) == EPOCHS_MAX:
                yield home, kind, _dump(found.pop(home))
    for home, rest in found.items():
        yield home, kind, _dump(rest)


def drop(replicated: ReplicatedState, partitions: Container[int]) -> Iterator[None]:
    """Removes everything that belongs to the partitions, with pauses as in `entries`."""
    state = replicated.state
    for number, session in enumerate(list(state.sessions.values())):
        if number % LOOKED_AT == 0:
            yield
        if replicated.home(session.client_id) in partitions:
            replicated.drop(session)
    for client_id, ids in list(replicated.inbound.items()):
        for key in [key for key in ids if key[0] in partitions]:
            del ids[key]
        if not ids:
            replicated.inbound.pop(client_id, None)
    yield
    for name in list(replicated.group_positions):
        if replicated.home(name) in partitions:
            replicated.groups.drop(name)
    for home in range(state.config.partitions):
        if home in partitions:
            replicated.group_members.drop(home)
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
    for partition in range(state.config.partitions):
        if partition in partitions:
            state.delayed.drop_partition(partition)
    for client_id in list(replicated.ended):
        if replicated.home(client_id) in partitions:
            del replicated.ended[client_id]


def take(replicated: ReplicatedState, partition: int, kind: int, data: bytes) -> None:
    """Loads an entry of another node.

    Raises ValueError, struct.error or CorruptBatch when it is malformed.
    """
    if kind == SNAPSHOT_SESSION:
        replicated.restore(decode_entry(data))
    elif kind == SNAPSHOT_PRODUCER:
        producer_id, producer = decode_producer(data)
        _take_place(replicated, producer_id, producer.owner, producer.first)
    elif kind in (SNAPSHOT_RETAINED, SNAPSHOT_GROUP, SNAPSHOT_BAN, SNAPSHOT_DELAYED):
        replicated.apply_snapshot_entry(kind, data)
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


def _take_place(
    replicated: ReplicatedState, producer_id: bytes, owner: str, place: ProducerPosition
) -> None:
    table = replicated.state.producers
    table.store(producer_id, place.partition, place.epoch, place.sequence, place.stored_us)
    if owner:
        table.bind(producer_id, place.partition, owner, place.stored_us)


def _dump(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
