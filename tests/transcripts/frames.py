"""Frames between nodes as lines. Of records they show what is worth following: offsets, not times
and tickets."""

import json
from collections.abc import Callable
from typing import Any, Final

from holdfast.log import record as r
from holdfast.log.batch import Batch
from holdfast.log.kinds import KIND_NAMES
from holdfast.log.record import Record
from holdfast.node import frame_kinds as kinds
from holdfast.node.groups import codec as groups
from holdfast.node.groups import control_frames as control
from holdfast.node.metadata.model import ClusterMetadata, PartitionInfo
from holdfast.node.metadata.state_machine import decode_request
from holdfast.node.publish.forward_frames import decode_forward, decode_result
from holdfast.node.raft import messages as raft
from holdfast.node.raft.codec import decode_message
from holdfast.node.raft.log import EntryKind, LogEntry
from holdfast.node.reads.fetch_frames import decode_fetched
from holdfast.node.reads.read_barrier import decode_barrier
from holdfast.node.replicate import codec
from holdfast.node.session.state import decode_cursor
from tests.transcripts.packets import message_words, reason_text

NAMES: Final = {
    value: name for name, value in vars(kinds).items() if name.isupper() and isinstance(value, int)
}
ACTIONS: Final = {
    codec.GO_ON: "go on at", codec.CUT: "cut at", codec.RESET: "begin at", codec.NEWER: "newer",
    codec.ASK: "ask again",
}  # fmt: skip
ENTRIES_TOLD_MAX: Final = 5
LEFT_OUT: Final = frozenset({"request", "username", "users", "asking", "number", "epochs"})


class Frames:
    """The lines of one story. Epochs of sessions are numbered in the order of their appearance."""

    def __init__(self) -> None:
        self._epochs: dict[str, list[int]] = {}
        # Partition and offset of each record that was told.
        self._told: set[tuple[int, int]] = set()
        # By leader and follower: the end of Raft's log that was sent, and that is confirmed.
        self._sent: dict[tuple[str, str], int] = {}
        self._confirmed: dict[tuple[str, str], int] = {}
        self._lines: dict[int, Callable[[bytes], str]] = {
            kinds.PROPOSAL: lambda data: command_text(decode_request(data)[1]),
            kinds.REPLICATE: self._replicate,
            kinds.REPLICATE_ACK: lambda data: _offsets(codec.decode_ack(data)[1]),
            kinds.FOLLOW: _follow,
            kinds.FOLLOW_FROM: _follow_from,
            kinds.COMMIT: lambda data: _offsets(codec.decode_offsets("COMMIT", data)),
            kinds.FORWARD: self._forward,
            kinds.FORWARD_RESULT: _forward_result,
            kinds.BARRIER: lambda data: "",
            kinds.BARRIER_RESULT: lambda data: _offsets(decode_barrier(data)[1]),
            kinds.QOS0: lambda data: self._batch(Batch(data), has_offsets=False),
            kinds.GROUP: _group,
            kinds.FETCHED: _fetched,
        }

    def line(self, sender: str, receiver: str, kind: int, data: bytes) -> str | None:
        """None: nothing that a story tells."""
        if kind in (kinds.HEARTBEAT, kinds.POSITION, kinds.PROPOSAL_RESULT, kinds.INTEREST_ACK):
            return None
        if kind == kinds.RAFT:
            return self._raft(sender, receiver, decode_message(data)[2])
        found = self._lines.get(kind, self._json)(data)
        return f"{NAMES[kind]} {found}".rstrip()

    def epoch(self, client: str, epoch: int) -> str:
        known = self._epochs.setdefault(client, [])
        if epoch not in known:
            known.append(epoch)
        return f"e{known.index(epoch) + 1}"

    def record(self, record: Record, *, has_offset: bool = True) -> str:
        words = []
        if has_offset:
            # What it is is told once.
            place = (record.partition, record.offset)
            if place in self._told:
                return f"{record.partition}:{record.offset}"
            self._told.add(place)
            words.append(f"{record.partition}:{record.offset}")
        words.append(KIND_NAMES[record.kind].upper())
        client = record.client_id.decode()
        if record.kind in (r.MESSAGE, r.RETAINED):
            qos, retain = record.flags & r.FLAG_QOS_MASK, record.flags & r.FLAG_RETAIN != 0
            words += message_words(record.topic, record.payload, qos, retain, b"")
            words += [f"will of {client}"] * (record.flags & r.FLAG_WILL != 0)
            words += [f"packet-id {record.sequence}"] * (record.flags & r.FLAG_PACKET_ID != 0)
        elif record.kind == r.SESSION:
            words += [client or "-", *self._session(client, json.loads(record.payload))]
        elif record.kind == r.CURSOR:
            words += [client, _cursor(record.payload)]
        else:
            words += [client, *[f"packet-id {record.sequence}"] * (record.kind == r.RELEASE)]
        return " ".join(words).rstrip()

    def _session(self, client: str, fields: dict[str, Any]) -> list[str]:
        words = [fields["op"]]
        if fields["op"] == "open":
            words.append(self.epoch(client, fields["epoch"]))
        words += [f"owner {fields.get('owner')}"] * bool(fields.get("owner"))
        words += ["clean"] * bool(fields.get("clean"))
        words += [" ".join(each[0] for each in fields.get("subscriptions", ()))]
        words += [" ".join(fields.get("filters", ()))]
        words += [fields.get("member", ""), *["left"] * bool(fields.get("left"))]
        words += ["with a will"] * bool(fields.get("will"))
        return [word for word in words if word]

    def records(self, records: list[Record]) -> str:
        return "; ".join(self.record(each) for each in records)

    def _batch(self, batch: Batch, *, has_offsets: bool = True) -> str:
        return "; ".join(self.record(each, has_offset=has_offsets) for each in batch.records())

    def _replicate(self, data: bytes) -> str:
        return "; ".join(self._batch(batch) for _, batch in codec.decode_replicate(data))

    def _forward(self, data: bytes) -> str:
        return "; ".join(
            f"partition {batch.partition}: {self._batch(batch, has_offsets=False)}"
            for _, _, batch in decode_forward(data)
        )

    def _json(self, data: bytes) -> str:
        fields = json.loads(data)
        client = fields.get("client", "")
        words = [client]
        for name, value in fields.items():
            if name == "epoch" and value:
                words.append(self.epoch(client, value))
            elif name == "session" and value:
                words.append("with its state")
            elif name == "will" and value:
                words.append("with a will")
            elif name == "owned":
                owned = " ".join(f"{key} {self.epoch(key, epoch)}" for key, epoch in value)
                words.append(f"owned: {owned or '-'}")
            elif name == "added" or (name == "removed" and value):
                words.append(f"{name}: {' '.join(value) or '-'}")
            elif name not in LEFT_OUT | {"client"} and value not in (None, False, [], {}):
                words.append(name if value is True else f"{name} {json.dumps(value)}")
        return " ".join(word for word in words if word)

    def _raft(self, sender: str, receiver: str, message: raft.Message) -> str | None:
        if isinstance(message, raft.VoteRequest):
            kind = "PreVote" if message.is_trial else "RequestVote"
            return f"RAFT {kind} term {message.term}, log ends at {message.last_index}"
        if isinstance(message, raft.VoteReply):
            kind = "PreVote" if message.is_trial else "RequestVote"
            return f"RAFT {kind} {'granted' if message.is_granted else 'refused'}"
        if isinstance(message, raft.Append) and message.entries:
            self._sent[sender, receiver] = message.prev_index + len(message.entries)
            count = len(message.entries)
            text = "; ".join(map(entry_text, message.entries))
            text = text if count <= ENTRIES_TOLD_MAX else f"{count} entries"
            return f"RAFT AppendEntries after {message.prev_index}: {text}"
        if isinstance(message, raft.AppendReply):
            known = self._confirmed.get((receiver, sender), 0)
            self._confirmed[receiver, sender] = max(known, message.index)
            sent = self._sent.get((receiver, sender), 0)
            if message.is_accepted and known < message.index <= sent:
                return f"RAFT AppendEntries accepted up to {message.index}"
            return None
        if isinstance(message, raft.TimeoutNow):
            return "RAFT TimeoutNow"
        return "RAFT InstallSnapshot" if isinstance(message, raft.Install) else None


def entry_text(entry: LogEntry) -> str:
    if entry.kind == EntryKind.NOTHING:
        return "no-op"
    if entry.kind == EntryKind.MEMBERS:
        return "members"
    return command_text(decode_request(entry.data)[1])


def command_text(data: bytes) -> str:
    """A command for the metadata, as JSON without versions."""
    name, *fields = json.loads(data)
    if name != "change":
        return f"{name} {json.dumps(fields[0])}"
    partitions, nodes, *_ = fields
    words = [f"{node[0]} is {node[6]}" for _, node in nodes]
    words += [f"partition {each[0]} {_assigned(each[2])}" for each in partitions]
    return "change: " + ", ".join(words) if words else "no change, for a read"


def _assigned(info: list[Any]) -> str:
    leader, epoch, in_sync = info[2], info[3], info[4]
    return f"leader {leader or '-'} epoch {epoch} in sync {' '.join(in_sync) or '-'}"


def partition_text(info: PartitionInfo) -> str:
    return f"leader {info.leader or '-'} epoch {info.epoch} in sync {' '.join(info.in_sync) or '-'}"


def metadata_changes(before: ClusterMetadata | None, now: ClusterMetadata) -> list[str]:
    found = []
    for name, node in now.nodes.items():
        old = None if before is None else before.nodes.get(name)
        if old is not None and old.state != node.state:
            found.append(f"{name} is {node.state}")
    for number, info in enumerate(now.partitions):
        if before is None or partition_text(before.partitions[number]) != partition_text(info):
            found.append(f"partition {number} {partition_text(info)}")
    return found


def _offsets(entries: list[tuple[int, int, int]]) -> str:
    return " ".join(f"{partition}:{offset}" for partition, _, offset in entries)


def _follow(data: bytes) -> str:
    return ", ".join(
        f"partition {entry[0]} from {entry[4]} of epoch {entry[3]}"
        for entry in codec.decode_follow(data)[1]
    )


def _fetched(data: bytes) -> str:
    head, records = decode_fetched(data)
    places = " ".join(f"{each.partition}/{each.offset}" for each in records)
    return f"{places or 'nothing'}{' and more' * head.more}"


def _follow_from(data: bytes) -> str:
    return ", ".join(
        f"partition {entry[0]} {ACTIONS[entry[3]]} {entry[5]}"
        for entry in codec.decode_follow_from(data)
    )


def _forward_result(data: bytes) -> str:
    return ", ".join(
        f"partition {each.partition}: {reason_text(each.reason)} {each.text}".rstrip()
        for each in decode_result(data)
    )


def _cursor(payload: bytes) -> str:
    cursor = decode_cursor(payload)
    words = [f"at {' '.join(f'{p}:{o}' for p, o in cursor.positions)}"] * bool(cursor.positions)
    for packet_id, entry in cursor.inflight:
        words.append(
            f"id {packet_id} is free"
            if entry is None
            else f"id {packet_id} has {entry.partition}:{entry.offset}"
        )
    return ", ".join(words)


def _places(places: list[tuple[int, int]]) -> str:
    return " ".join(f"{partition}:{offset}" for partition, offset in places)


def _group(data: bytes) -> str:
    operation = data[0]
    if operation == control.ASSIGN:
        assign = groups.decode_assign(data)
        return f"ASSIGN {assign.key} {_places([(m.partition, m.offset) for m in assign.messages])}"
    if operation == control.REPORT:
        report = groups.decode_report(data)
        words = [f"REPORT {report.key} members {report.members} limit {report.limit}"]
        words += [f"finished {_places(report.done)}"] * bool(report.done)
        words += [f"returned {_places(report.returned)}"] * bool(report.returned)
        return ", ".join(words)
    if operation == control.TELL:
        tell = control.decode_full_report(data)
        words = [
            f"{each.key} members {each.members} limit {each.limit} assigned"
            f" {_places(each.assigned) or '-'}"
            for each in tell.capacities
        ]
        return "TELL " + (", ".join(words) or "nothing")
    return "HEARD" if operation == control.HEARD else "ASK"
