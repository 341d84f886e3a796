"""Delayed messages: `$delayed/SECONDS/TOPIC`, published to TOPIC that many seconds later.

The log has a delayed message as a record of its own, with FLAG_DELAYED, in the partition of TOPIC.
Its topic is what the client wrote. The record that publishes it later has FLAG_DELAYED and TOPIC,
and `sequence` is the offset of the first one. So one record both publishes the message and says
that it is over, in the same partition: after a crash exactly one of the two is true.

Invariant: the table has exactly the messages whose first record is applied, and whose second record
or DELAYED record is not. It has whole copies, so retention may remove the first record.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.admission.shares import Shares

DELAYED_PREFIX: Final = b"$delayed/"
DELAY_S_MAX: Final = 4_294_967
"""The longest delay in seconds that a topic can name, 49 days, as in other brokers."""
OVERHEAD_BYTES: Final = 1000
"""The memory in bytes of a delayed message beside its content, approximately."""
_USER_PROPERTY: Final = b"\x26"
_PUBLISHER: Final = b"hf-publisher"
ACTS_FOR: Final = "\0"
"""Between the user and the client id whose rights a message has that the admin port publishes. No
name of MQTT contains it. [MQTT-1.5.4-2]"""

Place = tuple[int, int]
"""Partition and offset of the first record."""


class InvalidDelay(ValueError):
    """The error of a topic that begins with `$delayed/` and is none of a delayed message."""


def split_delayed(raw: bytes, longest_s: int = DELAY_S_MAX) -> tuple[int, bytes]:
    """The delay in seconds and the topic of `$delayed/SECONDS/TOPIC`. Raises `InvalidDelay`."""
    digits, separator, topic = raw[len(DELAYED_PREFIX) :].partition(b"/")
    if not raw.startswith(DELAYED_PREFIX) or not separator or not topic:
        raise InvalidDelay("a delayed message has the topic '$delayed/SECONDS/TOPIC'")
    is_number = digits.isdigit() and len(digits) <= 10
    if not is_number or not 1 <= int(digits) <= longest_s:
        found = digits[:20].decode("utf-8", "replace")
        raise InvalidDelay(f"a delay has from 1 to {longest_s} seconds, found {found!r}")
    return int(digits), topic


def mounted(mount: bytes, topic: bytes) -> bytes:
    """The topic with a prefix in front, that of a delayed message behind its delay."""
    if not topic.startswith(DELAYED_PREFIX):
        return mount + topic
    delay, separator, rest = topic[len(DELAYED_PREFIX) :].partition(b"/")
    return DELAYED_PREFIX + delay + separator + mount + rest if rest else topic


def is_due(record: Record) -> bool:
    """Whether the record publishes a delayed message."""
    return (
        record.flags & log_record.FLAG_DELAYED != 0
        and record.kind == log_record.MESSAGE
        and not record.topic.startswith(DELAYED_PREFIX)
    )


def is_waiting(record: Record) -> bool:
    """Whether the record is the first one of a delayed message."""
    return (
        record.flags & log_record.FLAG_DELAYED != 0
        and record.kind == log_record.MESSAGE
        and record.topic.startswith(DELAYED_PREFIX)
    )


def with_publisher(properties: bytes, username: str | None, is_given: bool) -> bytes:
    """The properties with the user that published the message in front, for the check of rights
    when it is due. `is_given`: its rules came with the client's proof of identity, or are those of
    its listener. Raises `InvalidDelay` for a name that no property has room for."""
    name = (("g" if is_given else "u") + (username or "")).encode()
    if len(name) > 65535:
        raise InvalidDelay("the user name is too long for delayed messages")
    pair = (_PUBLISHER, name)
    return b"".join(
        (_USER_PROPERTY, *(len(each).to_bytes(2, "big") + each for each in pair), properties)
    )


def split_publisher(properties: bytes) -> tuple[str | None, bool, bytes]:
    """The arguments of `with_publisher`: user, `is_given`, the client's own properties."""
    head = _USER_PROPERTY + len(_PUBLISHER).to_bytes(2, "big") + _PUBLISHER
    if not properties.startswith(head):
        return None, False, properties
    at = len(head) + 2
    end = at + int.from_bytes(properties[at - 2 : at], "big")
    name = properties[at:end].decode("utf-8", "replace")
    return name[1:] or None, name.startswith("g"), properties[end:]


def owner_of(record: Record) -> str:
    """The user whose share of the table the first record of a message needs; "": anonymous."""
    return (split_publisher(record.properties)[0] or "").partition(ACTS_FOR)[0]


class Delayed:
    """One message that waits for its time."""

    def __init__(self, record: Record) -> None:
        seconds, topic = split_delayed(record.topic)
        self.record = record
        self.topic = topic
        # By the cluster's wall clock.
        self.due_us = record.timestamp_us + seconds * 1_000_000
        content = len(record.topic) * 2 + len(record.properties) + len(record.payload)
        self.size_bytes = OVERHEAD_BYTES + content
        self.owner = owner_of(record)
        # This node has delivered it, at QoS 0, and its record is not applied yet.
        self.is_delivered = False

    @property
    def place(self) -> Place:
        return self.record.partition, self.record.offset


class DelayedTable:
    """The delayed messages that wait, by place, by client and by time.

    A message stays in the table while its second record is under way to the log, so the table is a
    function of the records. Smallest counter-example of a table that forgets it at the append: a
    leader appends the record, another node leads before it is committed, and the record is
    truncated. Later the first node leads again and does not know the message any more.
    """

    def __init__(self) -> None:
        self.by_place: dict[Place, Delayed] = {}
        self._counts: dict[bytes, int] = {}
        # Of the users: messages, and their bytes.
        self.messages = Shares()
        self.bytes = Shares()
        # Per partition, (due_us, offset), also of messages that are gone.
        self._due: dict[int, list[tuple[int, int]]] = {}
        # The time of the timer that is armed for the earliest message; 0.0: there is none.
        self.armed_at = 0.0

    def __len__(self) -> int:
        return len(self.by_place)

    def count_of(self, client_id: bytes) -> int:
        """The number of messages of a client."""
        return self._counts.get(client_id, 0)

    def apply(self, record: Record) -> None:
        """Applies a record with FLAG_DELAYED, or of kind DELAYED. Raises `InvalidDelay`."""
        if is_waiting(record):
            self.add(Delayed(record))
        else:
            self.remove((record.partition, record.sequence))

    def add(self, message: Delayed) -> None:
        """Adds a message, unless the table has it."""
        place = message.place
        if place in self.by_place:
            return
        self.by_place[place] = message
        client_id = message.record.client_id
        self._counts[client_id] = self._counts.get(client_id, 0) + 1
        self.messages.change(message.owner, 1)
        self.bytes.change(message.owner, message.size_bytes)
        self._push(message, message.due_us)

    def remove(self, place: Place) -> bool:
        """Removes a message that is over. False: there is none."""
        message = self.by_place.pop(place, None)
        if message is None:
            return False
        self.messages.change(message.owner, -1)
        self.bytes.change(message.owner, -message.size_bytes)
        client_id = message.record.client_id
        left = self._counts[client_id] - 1
        if left:
            self._counts[client_id] = left
        else:
            del self._counts[client_id]
        return True

    def check(self) -> None:
        """Raises `AssertionError` unless the counts and sizes are the sums over the messages."""
        sizes = [message.size_bytes for message in self.by_place.values()]
        assert self.bytes.total == sum(sizes), "the bytes of delayed messages"
        assert sum(self._counts.values()) == len(sizes), "the counts of the clients"
        assert self.messages.total == len(sizes), "the shares of the users"
        self.messages.check()
        self.bytes.check()

    def drop_partition(self, partition: int) -> None:
        """Removes all messages of a partition."""
        # Each message that waits has an entry: one that is tried has its next one.
        for _, offset in self._due.pop(partition, ()):
            self.remove((partition, offset))

    def _push(self, message: Delayed, due_us: int) -> None:
        partition, offset = message.place
        heapq.heappush(self._due.setdefault(partition, []), (due_us, offset))

    def earliest_us(self) -> int | None:
        """The time of the earliest message, or None."""
        found: int | None = None
        for partition, heap in self._due.items():
            while heap and (partition, heap[0][1]) not in self.by_place:
                heapq.heappop(heap)
            if heap and (found is None or heap[0][0] < found):
                found = heap[0][0]
        return found

    def take_due(
        self, wall_us: int, is_ours: Callable[[int], bool], count_max: int, again_us: int
    ) -> Iterator[Delayed]:
        """Some of the messages of these partitions whose time has come. They stay in the table
        until their record is applied. `again_us`: the microseconds after which one that is still
        there is due again."""
        for partition, heap in self._due.items():
            if not is_ours(partition):
                continue
            while heap and heap[0][0] <= wall_us and count_max > 0:
                message = self.by_place.get((partition, heapq.heappop(heap)[1]))
                if message is None:
                    continue
                count_max -= 1
                self._push(message, wall_us + again_us)
                yield message
