"""Packs the replicated state of some partitions as entries that another node can load.

Each part of the state belongs to one partition:
- a session with its subscriptions, cursor and will, to its home partition;
- a retained or delayed message, to the partition of its record;
- the position of a producer, and a QoS 2 packet id of a client, to the partition it counts in;
- the positions and the member records of a shared group, to the home of its key;
- a ban, to the home of its scope and name;
- a value of the federation's member, to the home of the federation's session.

Entries set keys to values, as those of a snapshot do. The state may therefore change while they are
made.

A node of an older version knows published wills by client id alone, so it gets all of them. It does
no harm if a node knows of a published will before its record is applied: `fired` only prevents a
second one.
"""

import json
from collections.abc import Container, Iterator
from typing import Final

from holdfast.log.partition import partition_of
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
    accept entries of group members, or of the offsets of published wills."""
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
    if member_home(state.config.partitions) in partitions:
        state.member.clear()
    for partition in range(state.config.partitions):
        if partition in partitions:
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
