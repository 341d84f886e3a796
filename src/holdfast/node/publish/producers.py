"""Producers and their progress, which let QoS 1 take effect exactly once.

A producer numbers its messages, over all its topics, in the user property `hf-seq`: `<producer
id>:<epoch>:<sequence>`. For each producer and partition the table has a position (a `position`):
the last (epoch, sequence) stored there. So the broker recognises a repetition after any crash:
recovery builds the table from the records themselves (FLAG_PRODUCER) and from snapshots.

Invariants
- A position is that of the newest record of its producer in its partition; nothing else moves it.
  So replay in log order ends with the same positions, whatever a snapshot already contained.
- Partitions are independent: a crash may leave sequence 8 in one and take 7 from another.
- The table is a function of the records. Limits and clocks choose the positions to forget, and a
  FORGOTTEN record says so. In a cluster one node chooses. Counter-example without the records: each
  node forgets what its own order of partitions makes the oldest, and the next leader stores a
  repetition again.
- `positions_max` bounds the memory. Above it the holder with the most positions loses a producer. A
  holder is a user or, where users are not verified, the client that began the producer. So a client
  that keeps numbering new producers evicts its own. Without holders it would evict those of all
  clients, and with them their exactly once. Among equals the producer goes that stored nothing for
  longest.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final

from holdfast.log.record import FORGOTTEN, Record
from holdfast.protocol.mqtt.properties import user_property_at

PROPERTY_HEAD: Final = b"\x26\x00\x06hf-seq"
"""A user property of that name, up to the length of its value."""
PROPERTY_HEAD_BYTES: Final = len(PROPERTY_HEAD)
ID_BYTES_MAX: Final = 64
ID_CHARACTERS: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-"
EPOCH_MAX: Final = (1 << 32) - 1
SEQUENCE_MAX: Final = (1 << 63) - 1
EPOCH_DIGITS_MAX: Final = 10
SEQUENCE_DIGITS_MAX: Final = 19

CANDIDATES_MAX: Final = 32
"""The most producers examined to find the one to evict."""
CHOSEN_MAX: Final = 100
"""The most producers chosen at once to be forgotten, so that a lower limit takes effect in
steps."""
EXPIRED_MAX: Final = 2
"""The most expired ones of them. So they leave faster than new ones come, without a search."""
_HOLDER_BYTES: Final = 16

_ENTRY: Final = struct.Struct("<BHH")
_PLACE: Final = struct.Struct("<HIQq")
_STORED: Final = struct.Struct("<q")


class InvalidSequence(Exception):
    """An `hf-seq` value that is invalid. The text is for the publisher."""


class SequenceReader:
    """A parser of `hf-seq`, one for each connection. Its cache is the part before the sequence."""

    def __init__(self) -> None:
        self.producer_id = b""
        self.epoch = 0
        self.sequence = 0
        # `<producer id>:<epoch>` as it was last read.
        self._head = b""

    def read(self, properties: bytes, at: int) -> bool:
        """Parses the value into the fields. `properties` is a checked block, `at` is where
        PROPERTY_HEAD was first found in it. False: those bytes belong to other properties. An
        invalid value raises `InvalidSequence`."""
        if at:
            at = user_property_at(properties, PROPERTY_HEAD, 0)
            if at < 0:
                return False
        start = at + PROPERTY_HEAD_BYTES + 2
        end = start + (properties[start - 2] << 8 | properties[start - 1])
        if end < len(properties) and user_property_at(properties, PROPERTY_HEAD, end) >= 0:
            raise InvalidSequence("hf-seq stands more than once")
        head, _, digits = properties[start:end].rpartition(b":")
        if head != self._head or not head:
            self._read_head(head)
        if len(digits) <= SEQUENCE_DIGITS_MAX and digits.isdigit() and digits[0] != 0x30:
            self.sequence = int(digits)
            if self.sequence <= SEQUENCE_MAX:
                return True
        raise InvalidSequence(_number_text("sequence", 1, SEQUENCE_MAX))

    def _read_head(self, head: bytes) -> None:
        producer_id, colon, digits = head.partition(b":")
        if not colon:
            raise InvalidSequence("hf-seq is not <producer id>:<epoch>:<sequence>")
        if not 0 < len(producer_id) <= ID_BYTES_MAX or producer_id.translate(None, ID_CHARACTERS):
            raise InvalidSequence(
                f"hf-seq: the producer id must be 1 to {ID_BYTES_MAX} of A-Z a-z 0-9 _ . -"
            )
        is_number = len(digits) <= EPOCH_DIGITS_MAX and digits.isdigit()
        if not is_number or (digits[0] == 0x30 and len(digits) > 1) or int(digits) > EPOCH_MAX:
            raise InvalidSequence(_number_text("epoch", 0, EPOCH_MAX))
        self._head = head
        self.producer_id = producer_id
        self.epoch = int(digits)


def _number_text(name: str, low: int, high: int) -> str:
    return (
        f"hf-seq: the {name} must be a decimal number from {low} to {high}"
        " without sign or leading zeros"
    )


class ProducerPosition:
    """The last message of a producer in one partition. Sequence 0: none is stored there."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.epoch = 0
        self.sequence = 0
        # Wall clock of the newest record.
        self.stored_us = 0
        # The user that it is bound to, or "".
        self.owner = ""
        # A FORGOTTEN record of it is appended by this node, and not applied yet.
        self.is_leaving = False


class Holder:
    """A user, or a client, with its producers, oldest first. Evictions choose among holders."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.position_count = 0
        self.producers: dict[bytes, None] = {}


class Producer:
    """The positions of one producer."""

    def __init__(self, first: ProducerPosition) -> None:
        self.holder: Holder | None = None
        self.first = first
        # None = None | Most producers write to one partition, so the first position needs no dict.
        self.others: dict[int, ProducerPosition] | None = None

    @property
    def owner(self) -> str:
        """The user that the producer is bound to, or "". If two users were first in two partitions,
        it is the one in the lower partition, on every node."""
        if self.others is None:
            return self.first.owner
        bound = [place for place in self.positions() if place.owner]
        return min(bound, key=_partition_of).owner if bound else ""

    def position(self, partition: int) -> ProducerPosition | None:
        """The position in a partition, or None."""
        if self.first.partition == partition:
            return self.first
        return None if self.others is None else self.others.get(partition)

    def positions(self) -> list[ProducerPosition]:
        return [self.first] if self.others is None else [self.first, *self.others.values()]

    def is_expired(self, since_us: int) -> bool:
        """Whether no position was stored at or after `since_us`."""
        if self.first.stored_us >= since_us:
            return False
        return all(place.stored_us < since_us for place in self.positions())


def _partition_of(place: ProducerPosition) -> int:
    return place.partition


class ProducerTable:
    """All producers of a broker. `wall_us` is the wall clock in microseconds, as in the records."""

    def __init__(self, positions_max: int, expiry_s: int) -> None:
        self.positions_max = positions_max
        self.expiry_us = expiry_s * 1_000_000
        # The one whose newest record is oldest comes first.
        self.by_id: OrderedDict[bytes, Producer] = OrderedDict()
        self.position_count = 0
        # Those that leave.
        self.leaving_count = 0
        self.holders: dict[bytes, Holder] = {}
        # Holders by their number of positions; and the largest such number, or a larger one.
        self._by_position_count: dict[int, dict[Holder, None]] = {}
        self._position_count_top = 0
        # True once a producer was bound to a user. From then on the log has the owner of each new
        # one.
        self.binds = False

    def __len__(self) -> int:
        return len(self.by_id)

    def find(self, producer_id: bytes, wall_us: int) -> Producer | None:
        """The producer, or None if it is unknown or has expired."""
        producer = self.by_id.get(producer_id)
        if producer is not None and producer.is_expired(wall_us - self.expiry_us):
            return None
        return producer

    def find_position(
        self, producer_id: bytes, partition: int, wall_us: int
    ) -> ProducerPosition | None:
        """The position of a producer in a partition, or None if it is unknown or has expired."""
        producer = self.by_id.get(producer_id)
        place = None if producer is None else producer.position(partition)
        if place is None or place.stored_us < wall_us - self.expiry_us:
            return None
        return place

    def advance(
        self, producer_id: bytes, place: ProducerPosition, epoch: int, sequence: int, stored_us: int
    ) -> None:
        """Moves a position to a record that was appended."""
        self.by_id.move_to_end(producer_id)
        place.epoch = epoch
        place.sequence = sequence
        place.stored_us = stored_us
        if place.is_leaving:
            self._set_leaving(place, False)

    def store(
        self,
        producer_id: bytes,
        partition: int,
        epoch: int,
        sequence: int,
        stored_us: int,
        client_id: bytes = b"",
    ) -> None:
        """Moves a position to a record of the client (b"": unknown) that was appended, or is
        replayed in log order."""
        producer = self.by_id.get(producer_id)
        place = None if producer is None else producer.position(partition)
        if place is None:
            place = self._new_position(producer_id, partition, stored_us, client_id)
        self.advance(producer_id, place, epoch, sequence, stored_us)

    def bind(self, producer_id: bytes, partition: int, owner: str, stored_us: int) -> None:
        """Binds a producer, new in this partition or not, to a user; "" releases it."""
        producer = self.by_id.get(producer_id)
        place = None if producer is None else producer.position(partition)
        if place is None:
            place = self._new_position(producer_id, partition, stored_us, b"")
        producer = self.by_id[producer_id]
        place.owner = owner
        key = b"u" + producer.owner.encode()
        if producer.holder is None or producer.holder.key != key:
            # Where users are verified, all producers without a user have one holder.
            self._assign_holder(producer_id, producer, key)
        if owner:
            self.binds = True

    def snapshot(self) -> Iterator[bytes]:
        """One entry per producer and user, for `restore`. The table may change between two
        entries."""
        for producer_id, producer in list(self.by_id.items()):
            of_owner: dict[str, list[ProducerPosition]] = {}
            for place in producer.positions():
                of_owner.setdefault(place.owner, []).append(place)
            for places in of_owner.values():
                yield encode_producer(producer_id, places)

    def restore(self, data: bytes) -> None:
        """Adds the positions of a snapshot's entry. Raises `struct.error` or `ValueError` for other
        bytes."""
        producer_id, entry = decode_producer(data)
        for place in entry.positions():
            self.store(producer_id, place.partition, place.epoch, place.sequence, place.stored_us)
            if place.owner:
                self.bind(producer_id, place.partition, place.owner, place.stored_us)

    def forget(self, record: Record) -> None:
        """Applies a FORGOTTEN record. It is void if the position has moved since it was chosen."""
        producer = self.by_id.get(record.producer)
        place = None if producer is None else producer.position(record.partition)
        if place is not None and forgets(record, place.epoch, place.sequence, place.stored_us):
            self.remove(record.producer, record.partition)

    def expired(self, wall_us: int) -> list[tuple[bytes, ProducerPosition]]:
        """Chooses some positions of producers that have expired."""
        found: list[tuple[bytes, ProducerPosition]] = []
        for _ in range(EXPIRED_MAX):
            oldest = next(iter(self.by_id), None)
            if oldest is None or not self.by_id[oldest].is_expired(wall_us - self.expiry_us):
                break
            found += self._choose(oldest)
        return found

    def excess(self) -> list[tuple[bytes, ProducerPosition]]:
        """Chooses some positions to forget, until the rest fits or one producer is left."""
        found: list[tuple[bytes, ProducerPosition]] = []
        for _ in range(min(CHOSEN_MAX, len(self.by_id) - 1)):
            if self.position_count - self.leaving_count <= self.positions_max:
                break
            found += self._choose(self._least())
        return found

    def _choose(self, producer_id: bytes) -> list[tuple[bytes, ProducerPosition]]:
        """Lets a producer leave. It goes behind the others, so that they are looked at first."""
        producer = self.by_id[producer_id]
        chosen = [place for place in producer.positions() if not place.is_leaving]
        for place in chosen:
            self._set_leaving(place, True)
        self.by_id.move_to_end(producer_id)
        holder = producer.holder
        assert holder is not None
        del holder.producers[producer_id]
        holder.producers[producer_id] = None
        return [(producer_id, place) for place in chosen]

    def _set_leaving(self, place: ProducerPosition, is_leaving: bool) -> None:
        if place.is_leaving != is_leaving:
            place.is_leaving = is_leaving
            self.leaving_count += 1 if is_leaving else -1

    def remove(self, producer_id: bytes, partition: int) -> None:
        """Forgets one position of a producer."""
        producer = self.by_id.get(producer_id)
        place = None if producer is None else producer.position(partition)
        if producer is None or place is None:
            return
        self._set_leaving(place, False)
        kept = [place for place in producer.positions() if place.partition != partition]
        if not kept:
            self._forget(producer_id)
            return
        producer.first = kept[0]
        producer.others = {place.partition: place for place in kept[1:]} or None
        self.position_count -= 1
        self._count(producer, -1)

    def _assign_holder(self, producer_id: bytes, producer: Producer, key: bytes) -> None:
        """Assigns the producer to the holder."""
        count = len(producer.positions())
        self._unassign_holder(producer_id, producer)
        holder = self.holders.get(key)
        if holder is None:
            holder = Holder(key)
            self.holders[key] = holder
        holder.producers[producer_id] = None
        producer.holder = holder
        self._count(producer, count)

    def _unassign_holder(self, producer_id: bytes, producer: Producer) -> None:
        holder = producer.holder
        if holder is None:
            return
        self._count(producer, -len(producer.positions()))
        del holder.producers[producer_id]
        producer.holder = None
        if not holder.producers:
            del self.holders[holder.key]

    def _count(self, producer: Producer, change: int) -> None:
        holder = producer.holder
        assert holder is not None
        if holder.position_count:
            equals = self._by_position_count[holder.position_count]
            del equals[holder]
            if not equals:
                del self._by_position_count[holder.position_count]
        holder.position_count += change
        if holder.position_count:
            self._by_position_count.setdefault(holder.position_count, {})[holder] = None
            self._position_count_top = max(self._position_count_top, holder.position_count)

    def _largest(self) -> Holder:
        """One of the holders with the most positions. Each step down of the loop was a step up
        before."""
        while self._position_count_top not in self._by_position_count:
            self._position_count_top -= 1
        return next(iter(self._by_position_count[self._position_count_top]))

    def _new_position(
        self, producer_id: bytes, partition: int, stored_us: int, client_id: bytes
    ) -> ProducerPosition:
        """A new position of a producer that is new or known."""
        place = ProducerPosition(partition)
        place.stored_us = stored_us
        producer = self.by_id.get(producer_id)
        if producer is None:
            producer = Producer(place)
            self.by_id[producer_id] = producer
            self._assign_holder(producer_id, producer, _holder_key(producer_id, "", client_id))
        else:
            if producer.others is None:
                producer.others = {}
            producer.others[partition] = place
            self._count(producer, 1)
        self.position_count += 1
        return place

    def _least(self) -> bytes:
        """The producer to evict. It is the first among those silent for longest whose holder has
        the most positions. If there is none, it is an old one of that holder."""
        largest = self._largest()
        for producer_id in islice(self.by_id, CANDIDATES_MAX):
            holder = self.by_id[producer_id].holder
            assert holder is not None
            if holder.position_count >= largest.position_count:
                return producer_id
        found = b""
        found_us = 0
        for producer_id in islice(largest.producers, CANDIDATES_MAX):
            producer = self.by_id[producer_id]
            stored_us = max(place.stored_us for place in producer.positions())
            if not found or stored_us < found_us:
                found = producer_id
                found_us = stored_us
        return found

    def _forget(self, producer_id: bytes) -> None:
        producer = self.by_id.pop(producer_id, None)
        if producer is not None:
            self._unassign_holder(producer_id, producer)
            self.position_count -= len(producer.positions())
            assert self.position_count >= 0, "fewer positions than none"

    def check(self) -> None:
        """Raises `AssertionError` unless the counts are the sums over the producers."""
        places = [place for each in self.by_id.values() for place in each.positions()]
        total = len(places)
        assert self.position_count == total, "the positions of all producers"
        assert self.leaving_count == sum(place.is_leaving for place in places), "those that leave"
        owned = 0
        for holder in self.holders.values():
            positions = [len(self.by_id[each].positions()) for each in holder.producers]
            assert holder.position_count == sum(positions), "the positions of a holder"
            assert holder in self._by_position_count[holder.position_count], "its rank"
            owned += len(positions)
        assert owned == len(self.by_id), "a producer without a holder"


def _holder_key(producer_id: bytes, owner: str, client_id: bytes) -> bytes:
    """The key of a holder. A digest stands for a client id, which may be long. A producer without
    user and client, from a snapshot, is its own holder."""
    if owner:
        return b"u" + owner.encode()
    if client_id:
        return b"c" + hashlib.blake2b(client_id, digest_size=_HOLDER_BYTES).digest()
    return b"p" + producer_id


def forgotten(producer_id: bytes, place: ProducerPosition, wall_us: int) -> Record:
    """The record that a position is forgotten. Its payload is the time of the position, i64 in
    microseconds: the producer may begin again with the same epoch and sequence."""
    return Record(
        place.partition,
        FORGOTTEN,
        timestamp_us=wall_us,
        producer=producer_id,
        producer_epoch=place.epoch,
        sequence=place.sequence,
        payload=_STORED.pack(place.stored_us),
    )


def forgets(record: Record, epoch: int, sequence: int, stored_us: int) -> bool:
    """Whether a FORGOTTEN record names this position. Replay gives a message of the federation the
    time of its publication, which is before that of its position."""
    named = record.producer_epoch, record.sequence
    return named == (epoch, sequence) and stored_us <= forgotten_us(record)


def forgotten_us(record: Record) -> int:
    """The time of the position that a FORGOTTEN record names. Raises `struct.error` for a record
    that is none."""
    stored_us: int = _STORED.unpack(record.payload)[0]
    return stored_us


def encode_producer(producer_id: bytes, places: list[ProducerPosition]) -> bytes:
    """The snapshot entry of positions with one owner: u8 id length, u16 owner length, u16
    positions; the id, the owner; per position u16 partition, u32 epoch, u64 sequence, i64
    stored_us. Little-endian."""
    owner = places[0].owner.encode()
    parts = [_ENTRY.pack(len(producer_id), len(owner), len(places)), producer_id, owner]
    for place in places:
        parts.append(_PLACE.pack(place.partition, place.epoch, place.sequence, place.stored_us))
    return b"".join(parts)


def decode_producer(data: bytes) -> tuple[bytes, Producer]:
    """The producer of a snapshot entry. Raises `struct.error` or `ValueError` for other bytes."""
    id_length, owner_length, count = _ENTRY.unpack_from(data)
    owner_start = _ENTRY.size + id_length
    at = owner_start + owner_length
    if count == 0 or len(data) != at + count * _PLACE.size:
        raise ValueError(f"a producer entry of {len(data)} bytes for {count} places")
    owner = data[owner_start:at].decode()
    places: list[ProducerPosition] = []
    for _ in range(count):
        partition, epoch, sequence, stored_us = _PLACE.unpack_from(data, at)
        place = ProducerPosition(partition)
        place.epoch = epoch
        place.sequence = sequence
        place.stored_us = stored_us
        place.owner = owner
        places.append(place)
        at += _PLACE.size
    producer = Producer(places[0])
    if count > 1:
        producer.others = {place.partition: place for place in places[1:]}
    return data[_ENTRY.size : owner_start], producer
