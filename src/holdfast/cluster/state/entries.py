"""The part of the images that belongs to some partitions, as entries for another node.

A session belongs to its home partition, with its subscriptions, cursor and will; a retained message
to the partition of its record; of a producer each place, and of a client's QoS 2 packet ids each
one, to the partition that it is in; a shared group's positions to the home of its key. Entries set
keys to values, as those of a snapshot do: the images may move on while they are made.

Wills that were published are told in the partitions of their topics, and known by client alone: all
of them go along. To know of one earlier than its record comes does no harm.
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
from holdfast.broker.recovery.recovery import (
    SNAPSHOT_GROUP,
    SNAPSHOT_PRODUCER,
    SNAPSHOT_RETAINED,
    SNAPSHOT_SESSION,
    retained_entry,
)
from holdfast.broker.session.message import Message
from holdfast.cluster.state.replicated import NOBODY, ReplicatedState
from holdfast.storage.partition import partition_of

INBOUND: Final = 5
"""JSON: a client's packet ids that are stored and not released, each with its session epoch."""
FIRED: Final = 6
"""JSON: clients with the session epoch of their newest will that was published; NOBODY with the
newest epoch of all sessions."""
ENDED: Final = 7
"""JSON: clients with the epoch of their newest session that has ended."""

LOOKED_AT: Final = 64
"""So many things are looked at between two turns to stop."""
EPOCHS_MAX: Final = 500
"""In one entry."""

Entry = tuple[int, int, bytes]
"""(partition, kind, data)"""


def entries(images: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    """Everything that belongs to the partitions; None now and then, where the caller may stop for
    a while."""
    yield 0, FIRED, _dump([(NOBODY, images.newest_epoch)])
    yield from _epochs(images, partitions, FIRED, images.fired)
    yield from _sessions(images, partitions)
    yield from _inbound(images, partitions)
    yield from _groups(images, partitions)
    yield from _producers(images, partitions)
    yield from _retained(images, partitions)
    yield from _epochs(images, partitions, ENDED, images.ended)


def _home(images: ReplicatedState, key: str) -> int:
    return partition_of(key.encode(), images.state.config.partitions)


def _sessions(images: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    sessions = images.state.sessions
    for number, session in enumerate(list(sessions.values())):
        if number % LOOKED_AT == 0:
            yield None
        home = _home(images, session.client_id)
        if home in partitions and sessions.get(session.client_id) is session:
            yield home, SNAPSHOT_SESSION, _dump(images.fields(session))


def _inbound(images: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    for number, client_id in enumerate(list(images.inbound)):
        if number % LOOKED_AT == 0:
            yield None
        found: dict[int, list[tuple[int, int]]] = {}
        for (partition, packet_id), epoch in images.inbound.get(client_id, {}).items():
            if partition in partitions:
                found.setdefault(partition, []).append((packet_id, epoch))
        for partition, ids in found.items():
            yield partition, INBOUND, _dump({"client": client_id, "ids": ids})


def _groups(images: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    for number, key in enumerate(list(images.group_positions)):
        if number % LOOKED_AT == 0:
            yield None
        home = _home(images, key)
        if home in partitions and key in images.group_positions:
            yield home, SNAPSHOT_GROUP, _dump(images.groups.fields(key))


def _producers(images: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    table = images.state.producers
    for number, (producer_id, producer) in enumerate(list(table.by_id.items())):
        if number % LOOKED_AT == 0:
            yield None
        for place in producer.places():
            if place.partition in partitions:
                alone = Producer(place)
                alone.owner = producer.owner
                data = encode_producer(producer_id, alone)
                yield place.partition, SNAPSHOT_PRODUCER, data


def _retained(images: ReplicatedState, partitions: Container[int]) -> Iterator[Entry | None]:
    retained = images.state.retained
    scan = retained.scan_all()
    while not scan.done:
        yield None
        for topic, message in scan.next(LOOKED_AT):
            assert isinstance(message, Message)
            if message.partition in partitions and retained.get(topic) is message:
                yield message.partition, SNAPSHOT_RETAINED, retained_entry(message)


def _epochs(
    images: ReplicatedState, partitions: Container[int], kind: int, epochs: OrderedDict[str, int]
) -> Iterator[Entry | None]:
    """`ended` belongs to the clients' homes; of `fired` all is told, under any partition."""
    found: dict[int, list[tuple[str, int]]] = {}
    for number, (client_id, epoch) in enumerate(list(epochs.items())):
        if number % LOOKED_AT == 0:
            yield None
        home = _home(images, client_id) if kind == ENDED else 0
        if kind == FIRED or home in partitions:
            of_home = found.setdefault(home, [])
            of_home.append((client_id, epoch))
            if len(of_home) == EPOCHS_MAX:
                yield home, kind, _dump(found.pop(home))
    for home, rest in found.items():
        yield home, kind, _dump(rest)


def drop(images: ReplicatedState, partitions: Container[int]) -> Iterator[None]:
    """Forget everything that belongs to the partitions, with pauses as in `entries`."""
    state = images.state
    for number, session in enumerate(list(state.sessions.values())):
        if number % LOOKED_AT == 0:
            yield
        if _home(images, session.client_id) in partitions:
            images.drop(session)
    for client_id, ids in list(images.inbound.items()):
        for key in [key for key in ids if key[0] in partitions]:
            del ids[key]
        if not ids:
            images.inbound.pop(client_id, None)
    yield
    for name in list(images.group_positions):
        if _home(images, name) in partitions:
            images.groups.drop(name)
    for number, (producer_id, producer) in enumerate(list(state.producers.by_id.items())):
        if number % LOOKED_AT == 0:
            yield
        for place in producer.places():
            if place.partition in partitions:
                state.producers.remove(producer_id, place.partition)
    scan = state.retained.scan_all()
    while not scan.done:
        yield
        for topic, message in scan.next(LOOKED_AT):
            assert isinstance(message, Message)
            if message.partition in partitions:
                state.retained.remove(topic)
    for client_id in list(images.ended):
        if _home(images, client_id) in partitions:
            del images.ended[client_id]


def take(images: ReplicatedState, partition: int, kind: int, data: bytes) -> None:
    """An entry of another node. Raises ValueError, KeyError, TypeError, AssertionError,
    struct.error or CorruptBatch for one that is none."""
    if kind == SNAPSHOT_SESSION:
        images.restore(json.loads(data))
    elif kind == SNAPSHOT_PRODUCER:
        producer_id, producer = decode_producer(data)
        _take_place(images, producer_id, producer.owner, producer.first)
    elif kind in (SNAPSHOT_RETAINED, SNAPSHOT_GROUP):
        images.apply_snapshot_entry(kind, data)
    elif kind == INBOUND:
        fields = json.loads(data)
        ids = images.inbound.setdefault(str(fields["client"]), {})
        for packet_id, epoch in fields["ids"]:
            ids[(partition, int(packet_id))] = int(epoch)
    elif kind == FIRED:
        for client_id, epoch in json.loads(data):
            images.note_fired(str(client_id), int(epoch))
    elif kind == ENDED:
        for client_id, epoch in json.loads(data):
            images.note_ended(str(client_id), int(epoch))
    else:
        raise ValueError(f"an entry of kind {kind}")


def _take_place(
    images: ReplicatedState, producer_id: bytes, owner: str, place: ProducerPosition
) -> None:
    table = images.state.producers
    table.store(producer_id, place.partition, place.epoch, place.sequence, place.stored_us)
    if owner:
        table.bind(producer_id, place.partition, owner, place.stored_us)


def _dump(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
