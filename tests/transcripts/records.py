"""Records of the log as lines.

Normalised, because the two forms must differ in it:

- The epochs of a session and of a group become e1, e2, ... in their order. They come from
  reservations.
- A position in a partition becomes the number of messages below it, and a message has its number.
  State records are in other places, and a cursor that passes them has not moved. So a CURSOR record
  shows only positions that have changed, and one that has nothing else to say is left out.
- Times become seconds since the first command, in tenths. The time of an fsync is in them.
- Left out: tickets, the numbers of requests, the owners of sessions, the epochs of batches, and
  `reserve` records.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Final

from holdfast.log import record as r
from holdfast.log.kinds import KIND_NAMES
from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.session.session import SENT
from holdfast.node.session.state import decode_cursor
from tests.transcripts.packets import message_words, payload_text

LEFT_OUT: Final = frozenset({"op", "client", "request", "owner"})
POSITIONS: Final = frozenset({"start", "positions", "seam"})


class RecordLines:
    """The lines of the records of one log."""

    def __init__(self, begin_us: int, log: list[list[Record]]) -> None:
        """`log`: the records of each partition."""
        self._begin_us = begin_us
        self._log = log
        found: dict[str, set[int]] = {}
        for records in log:
            for record in records:
                for key, epoch in _epochs(record):
                    found.setdefault(key, set()).add(epoch)
        self._epochs: dict[str, list[int]] = {key: sorted(each) for key, each in found.items()}
        # Per partition the offsets of the messages.
        self._messages = [[each.offset for each in one if _has_number(each)] for one in log]
        # Per session or group and partition, the position that its last line has.
        self._known: dict[str, dict[int, int]] = {}

    def lines(self, partition: int) -> list[str]:
        found = []
        for record in self._log[partition]:
            line = self.line(record)
            if line:
                found.append(line)
        return found

    def line(self, record: Record) -> str:
        """ "" for a record that is left out."""
        words = [KIND_NAMES[record.kind].upper()]
        if _has_number(record):
            words.insert(0, f"{self._number(record.partition, record.offset)}")
        if record.kind in (r.MESSAGE, r.RETAINED):
            words += self._message(record)
        else:
            state = self._state(record)
            if not state:
                return ""
            words += [record.client_id.decode() or "-", *state]
        return " ".join(words)

    def _number(self, partition: int, offset: int) -> int:
        """The number of the message at the offset, or of the next one."""
        return bisect_left(self._messages[partition], offset)

    def _place(self, partition: int, offset: int) -> str:
        return f"{partition}:{self._number(partition, offset)}"

    def _numbers(self, offsets: list[int]) -> list[int]:
        return [self._number(partition, offset) for partition, offset in enumerate(offsets)]

    def _epoch(self, key: str, epoch: int) -> str:
        known = self._epochs.get(key, [])
        return f"e{known.index(epoch) + 1}" if epoch in known else f"e?{epoch}"

    def _seconds(self, time_us: int) -> str:
        # A timer fires up to a millisecond before or after the full second.
        return f"t+{(time_us - self._begin_us + 1000) // 100_000 / 10}"

    def _message(self, record: Record) -> list[str]:
        words = message_words(
            record.topic,
            record.payload,
            record.flags & r.FLAG_QOS_MASK,
            record.flags & r.FLAG_RETAIN != 0,
            record.properties,
        )
        client = record.client_id.decode()
        words += [f"from {client or '-'}", self._seconds(record.timestamp_us)]
        if record.flags & r.FLAG_PACKET_ID:
            words.append(
                f"packet-id {record.sequence} {self._epoch(client, record.producer_epoch)}"
            )
            if record.producer:
                words.append(f"life {self._epoch(client, int(record.producer))}")
        if record.flags & r.FLAG_PRODUCER:
            producer = record.producer.decode()
            words.append(f"producer {producer} {record.producer_epoch} {record.sequence}")
        if record.flags & r.FLAG_WILL:
            words.append(f"will {self._epoch(client, record.sequence)}")
        if record.flags & r.FLAG_DELAYED:
            is_due = not record.topic.startswith(b"$delayed/")
            number = self._number(record.partition, record.sequence)
            words.append(f"due, of {number}" if is_due else "waits")
        if record.flags & r.FLAG_AUDIENCE:
            words.append(f"audience {record.audience!r}")
        return words

    def _state(self, record: Record) -> list[str]:
        key = record.client_id.decode()
        if record.kind == r.CURSOR:
            words = self._cursor(key, record.payload)
            return [self._epoch(key, record.sequence), *words] if words else []
        if record.kind == r.SESSION:
            return self._session(record, key)
        if record.kind == r.RELEASE:
            return [f"packet-id {record.sequence}"]
        if record.kind == r.WILL:
            return [self._epoch(key, record.sequence)]
        if record.kind == r.BAN:
            fields = json.loads(record.payload or b"{}")
            for name in ("until_us", "since_us"):
                if fields.get(name):
                    fields[name] = self._seconds(fields[name])
            return [_fields_text(fields)] if fields else ["lifted"]
        if record.kind == r.DELAYED:
            return [f"{self._place(record.partition, record.sequence)} is over"]
        text = payload_text(record.payload) if record.payload else ""
        return [*[record.producer.decode()] * bool(record.producer), *[text] * bool(text)]

    def _session(self, record: Record, key: str) -> list[str]:
        fields = json.loads(record.payload)
        op = fields["op"]
        if op in ("reserve", "members"):
            return []
        if op not in ("member", "queue"):
            fields["epoch"] = self._epoch(key, fields.get("epoch", record.sequence))
        if op == "end" or fields.get("clean"):
            self._known.pop(key, None)
        for replay in (fields.get("replays") or {}).values():
            self._replay(replay)
        self._replay(fields)
        shown = {name: value for name, value in fields.items() if name not in LEFT_OUT}
        return [op, _fields_text(shown)]

    def _replay(self, fields: dict[str, Any]) -> None:
        for name in POSITIONS.intersection(fields):
            fields[name] = self._numbers(fields[name])
        if "floors" in fields:
            fields["floors"] = {
                topic: self._number(partition_of(topic.encode(), len(self._log)), floor)
                for topic, floor in fields["floors"].items()
            }
        if "again" in fields:
            fields["again"] = [self._place(*each) for each in fields["again"]]

    def _cursor(self, key: str, payload: bytes) -> list[str]:
        cursor = decode_cursor(payload)
        words = []
        if cursor.is_move:
            words.append("moved")
        known = self._known.setdefault(key, {})
        moved = []
        for partition, offset in cursor.positions:
            number = self._number(partition, offset)
            if known.get(partition) != number:
                known[partition] = number
                moved.append(f"{partition}:{number}")
        if moved:
            words.append("at " + " ".join(moved))
        for packet_id, entry in cursor.inflight:
            if entry is None:
                words.append(f"id {packet_id} is free")
                continue
            state = "sent" if entry.state == SENT else "received"
            place = self._place(entry.partition, entry.offset)
            words.append(f"id {packet_id} q{entry.qos} {state} {place}")
            words += ["retained"] * entry.is_retained
            words += [f"group {entry.group_tag}"] * (entry.group_tag > 0)
        if cursor.done:
            words.append("done " + " ".join(self._place(*each) for each in cursor.done))
        return words


def _has_number(record: Record) -> bool:
    return record.kind == r.MESSAGE


def _epochs(record: Record) -> Iterable[tuple[str, int]]:
    client = record.client_id.decode()
    if record.kind == r.SESSION:
        fields = json.loads(record.payload)
        if fields["op"] in ("member", "queue", "reserve"):
            return
        yield client, fields.get("epoch", record.sequence)
    elif record.kind in (r.CURSOR, r.WILL) or record.flags & r.FLAG_WILL:
        yield client, record.sequence
    elif record.flags & r.FLAG_PACKET_ID:
        yield client, record.producer_epoch
        if record.producer:
            yield client, int(record.producer)


def _fields_text(fields: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={json.dumps(value, separators=(',', ':'))}"
        if not isinstance(value, str)
        else f"{name}={value}"
        for name, value in fields.items()
        if value not in (None, False, "")
    )
