"""What must hold in every run, whatever goes wrong.

The committed log of each partition is what any node's high watermark has ever covered; everything
else is compared with that: replicas, images, what clients were promised, and what they received.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn
from zlib import crc32

from msgspec.structs import asdict

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.record import Record
from holdfast.node.effects import Note
from holdfast.node.metadata.model import DATA, GATEWAY, VOTERS_MAX, NodePhase
from holdfast.node.placement.shares import zone_limit
from holdfast.node.session.message import Message as StoredMessage
from holdfast.node.session.state import decode_cursor
from holdfast.protocol.topics.names import is_shared
from tests.sim.invariants import check_invariants
from tests.sim.schedule import Violation
from tests.sim.story import SessionStory

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.whispers import Whisper
    from tests.sim.world import World

EARLY_US = 2_500_000
"""How much two right clocks may differ, and the cluster's from the true time."""
IMPOSSIBLE = frozenset(
    {"replica_diverged", "record_not_understood", "invariant_broken", "offsets_voided"}
)
"""Notes of a node that tell of damage."""


class Message:
    """One that a client has published. `text` is its payload."""

    def __init__(self, text: str, publisher: str, topic: str, number: int, qos: int) -> None:
        self.text = text
        self.publisher = publisher
        self.topic = topic
        self.number = number
        self.qos = qos
        # At most once in the log, however often it is sent.
        self.once = qos == 2
        # Seconds, for one that is published to `$delayed`; 0: it is not.
        self.delay_s = 0
        # Never behind a later one of its publisher.
        self.is_ordered = True
        # -1: never.
        self.expiry_s = -1
        # Again after each reconnect.
        self.times_sent = 0
        # For the first time.
        self.sent_at = 0.0
        self.is_acknowledged = False
        self.is_refused = False


class Checks:
    def __init__(self, world: "World", partitions: int) -> None:
        self._world = world
        self.impossible = IMPOSSIBLE
        # Per partition the committed batches, in order.
        self.committed: list[list[Batch]] = [[] for _ in range(partitions)]
        self.messages: dict[str, Message] = {}
        # Per payload how often it is in the committed log; topics by name.
        self.stored: dict[str, int] = {}
        # By text: partition and newest offset.
        self.places: dict[str, tuple[int, int]] = {}
        # By payload, the timestamp of the newest copy.
        self.stored_us: dict[str, int] = {}
        # The same, of the first copy.
        self.first_stored_us: dict[str, int] = {}
        # Of QoS 0, by payload; and those that were sent while all was quiet.
        self.whispers: dict[str, Whisper] = {}
        self.quiet_whispers: list[Whisper] = []
        self.wills: dict[str, int] = {}
        # Delayed messages that wait: by partition and offset, the text and when it is due.
        self.delayed: dict[tuple[int, int], tuple[str, int]] = {}
        # All of them so far.
        self.waited: set[str] = set()
        self.retained: dict[str, str] = {}
        self.records = 0
        self._turns = 0
        self._newest: dict[tuple[str, str], int] = {}
        # (partition, epoch, first offset) -> checksum and who wrote it first.
        self._written: dict[tuple[int, int, int], tuple[int, str]] = {}
        self._watermarks: dict[tuple[str, int], list[int]] = {}
        self._unstored: dict[tuple[str, int], set[int]] = {}
        self._owners: dict[tuple[str, int], str] = {}
        # The newest metadata that was looked at: its version and nodes. And until when each node
        # that it has said to be down, or no longer has, was so.
        self._version = 0
        self._known: set[str] = set()
        self._down_until: dict[str, float] = {}
        # Messages.
        self.acknowledged = 0
        # Per shared group: the newest epoch of a coordinator, and the positions in the log.
        self._group_positions: dict[str, tuple[int, dict[int, int]]] = {}
        # The first of them.
        self.group_begins: dict[str, dict[int, int]] = {}
        self.sessions = SessionStory(self.fail)

    def fail(self, text: str) -> NoReturn:
        raise Violation(text)

    # The log

    def batch_written(self, node: str, batch: Batch) -> None:
        """One leader per epoch: what it appends at an offset is the same everywhere."""
        key = (batch.partition, batch.epoch, batch.base_offset)
        checksum = crc32(batch.content())
        known = self._written.setdefault(key, (checksum, node))
        if known[0] != checksum:
            self.fail(
                f"partition {batch.partition}, epoch {batch.epoch}, offset {batch.base_offset}:"
                f" {node} has another batch than {known[1]}"
            )

    def was_down(self, node: str, since: float) -> bool:
        """Did the cluster take it for lost, or remove it, at that time or later?

        A node that is removed while it is cut off does not know it yet: its clients without a
        session of their own lose what they had there, as those of a lost one do.
        """
        return self._down_until.get(node, -1.0) >= since

    def _note_down(self, process: "Process") -> None:
        metadata = process.cluster_node.context.metadata
        if metadata is None or metadata.version <= self._version:
            return
        self._version = metadata.version
        for node in self._known - metadata.nodes.keys():
            self._down_until[node] = float("inf")
        self._known |= metadata.nodes.keys()
        for node, info in metadata.nodes.items():
            if info.state == NodePhase.DOWN:
                self._down_until[node] = float("inf")
            elif self._down_until.get(node) == float("inf"):
                self._down_until[node] = self._world.schedule.now

    def turn_ended(self, process: "Process") -> None:
        self._note_down(process)
        self._turns += 1
        check_invariants(process, self._turns)
        if process.cluster_node.meta.diverged:
            self.fail(f"{process.host.name}: {process.cluster_node.meta.diverged}")
        journal = process.journal
        mirror = process.host.mirror
        key = (process.host.name, process.number)
        before = self._watermarks.get(key)
        now = journal.high_watermark
        if before == now:
            if process.host.role == GATEWAY:
                process.feeds_watch.note_filters()
            # What was committed before it was written may be written now.
            if not process.host.mirror_behind:
                return
        elif before is not None:
            for partition, offset in enumerate(now):
                if offset < before[partition] and not self._is_unstored(process, partition):
                    self.fail(
                        f"{key[0]}: the high watermark of partition {partition} went back from"
                        f" {before[partition]} to {offset}"
                    )
        self._watermarks[key] = list(now)
        context = process.cluster_node.context
        self._unstored[key] = set(context.unstored)
        if process.host.role == GATEWAY:
            process.feeds_watch.look(self.committed)
            return
        behind = False
        mirror.begin(journal.start_offsets)
        for partition, offset in enumerate(now):
            is_fed = partition in context.unstored and partition not in context.copied
            # A log that the node leaves is still here, and may have got a higher watermark in the
            # turn in which the node began to leave it.
            if is_fed and partition not in context.leaving:
                self._check_mark(process, partition)
                continue
            batches = mirror.batches[partition]
            at = mirror.checked[partition]
            while at < len(batches) and batches[at].end_offset <= offset:
                self._compare(process.host.name, partition, batches[at])
                at += 1
            mirror.checked[partition] = at
            if mirror.end(partition) < offset:
                behind = True
        process.host.mirror_behind = behind

    def _check_mark(self, process: "Process", partition: int) -> None:
        mark, end = process.state.delivered[partition], self.ends()[partition]
        if mark > end:
            name = process.host.name
            self.fail(f"{name}: the mark of partition {partition} is {mark}, committed {end}")

    def _is_unstored(self, process: "Process", partition: int) -> bool:
        """True if the partition is not stored there, or was not a turn before."""
        before = self._unstored.get((process.host.name, process.number), set())
        return partition in before or partition in process.cluster_node.context.unstored

    def _compare(self, node: str, partition: int, batch: Batch) -> None:
        committed = self.committed[partition]
        at = bisect_left(committed, batch.base_offset, key=lambda each: each.base_offset)
        if at < len(committed):
            if committed[at].content() != batch.content():
                self.fail(
                    f"{node}: offset {batch.base_offset} of partition {partition} (epoch"
                    f" {batch.epoch}) is not what is committed there: offset"
                    f" {committed[at].base_offset} (epoch {committed[at].epoch})"
                )
            return
        end = committed[-1].end_offset if committed else 0
        if batch.base_offset != end:
            self.fail(f"{node}: offset {batch.base_offset} of partition {partition} after {end}")
        committed.append(batch)
        for record in batch.records():
            self._take(record)

    def _take_delayed(self, record: Record, topic: str, text: str) -> None:
        message = self.messages.get(text)
        if message is None or topic != f"$delayed/{message.delay_s}/{message.topic}":
            self.fail(f"nobody has published {text!r} to {topic}")
        due_us = record.timestamp_us + message.delay_s * 1_000_000
        self.delayed[record.partition, record.offset] = (text, due_us)
        if message.is_refused:
            self.fail(f"{text} is committed though it was refused")
        if message.once and text in self.waited:
            self.fail(f"{text} is in the log twice")
        self.waited.add(text)

    def _take_due(self, record: Record, text: str) -> None:
        place = (record.partition, record.sequence)
        waiting, due_us = self.delayed.pop(place, ("", 0))
        if waiting != text:
            self.fail(f"{text} is published for {place}, where {waiting!r} waits")
        early_s = (due_us - record.timestamp_us) / 1e6
        if early_s > 0:
            self.fail(f"{text} is published {early_s:.2f} s before its time")
        true_us = self._world.client_hosts[0].true_us()
        if due_us - true_us > self._world.skew_s * 1e6 + EARLY_US:
            self.fail(f"{text} is published {(due_us - true_us) / 1e6:.2f} s too early")

    def _take(self, record: Record) -> None:
        """A record is committed."""
        self.records += 1
        topic = record.topic.decode()
        text = record.payload.decode("utf-8", "replace")
        is_about_topic = record.kind in (log_record.MESSAGE, log_record.RETAINED)
        if record.flags & log_record.FLAG_DELAYED and is_about_topic:
            if topic.startswith("$delayed/"):
                self._take_delayed(record, topic, text)
                return
            self._take_due(record, text)
        if is_about_topic and record.flags & log_record.FLAG_RETAIN:
            self.retained[topic] = text
        self.sessions.take(record)
        if record.kind == log_record.CURSOR:
            self._take_group_positions(record)
        if record.kind != log_record.MESSAGE:
            return
        if record.flags & log_record.FLAG_WILL:
            self.wills[text] = self.wills.get(text, 0) + 1
            if self.wills[text] > 1:
                self.fail(f"the will {text} was published twice")
            return
        message = self.messages.get(text)
        if message is None or message.topic != topic:
            self.fail(f"nobody has published {text!r} to {topic}")
        count = self.stored.get(text, 0) + 1
        self.stored[text] = count
        self.places[text] = (record.partition, record.offset)
        self.first_stored_us.setdefault(text, record.timestamp_us)
        self.stored_us[text] = max(record.timestamp_us, self.stored_us.get(text, 0))
        if message.is_refused:
            self.fail(f"{text} is committed though it was refused")
        if count > 1:
            if message.once:
                self.fail(f"{text} is in the log twice")
            if count > message.times_sent:
                self.fail(f"{text} is in the log {count} times, and was sent less often")
            return
        if not message.is_ordered:
            return
        key = (message.publisher, topic)
        if self._newest.get(key, -1) >= message.number:
            self.fail(f"{text} is in the log behind number {self._newest[key]} of its publisher")
        self._newest[key] = message.number

    def _take_group_positions(self, record: Record) -> None:
        """A position says that everything before it is finished, so it never goes back. A
        coordinator that logs a lower one has claimed a finished record; the next coordinator would
        hand out everything from there on again."""
        key = record.client_id.decode()
        if not is_shared(key):
            return
        epoch, known = self._group_positions.get(key, (0, {}))
        if record.sequence < epoch:
            # A deposed coordinator's.
            return
        cursor = decode_cursor(record.payload)
        if not cursor.positions and not cursor.done:
            self._group_positions.pop(key, None)
            self.group_begins.pop(key, None)
            return
        self.group_begins.setdefault(key, dict(cursor.positions))
        for partition, offset in cursor.positions:
            if offset < known.get(partition, 0):
                self.fail(
                    f"{key} goes back from offset {known[partition]} of partition {partition} to"
                    f" {offset}"
                )
            known[partition] = offset
        self._group_positions[key] = (record.sequence, known)

    # Clients

    def published(self, message: Message) -> None:
        self.messages[message.text] = message

    def promised(self, message: Message, node: str) -> None:
        """The client has its PUBACK, or PUBREC."""
        if not self.stored.get(message.text) and message.text not in self.waited:
            self.fail(f"{node} has acknowledged {message.text}, which is not committed")
        if not message.is_acknowledged:
            self.acknowledged += 1
        message.is_acknowledged = True

    def refused(self, message: Message, node: str) -> None:
        if message.qos < 2 and message.times_sent > 1:
            # An earlier copy may have made it.
            return
        message.is_refused = True
        if self.stored.get(message.text):
            self.fail(f"{node} has refused {message.text}, which is committed")

    def opened(self, client: str, process: "Process", is_present: bool) -> None:
        """A client has its CONNACK from this node."""
        session = process.state.sessions.get(client)
        if session is None or not session.recorded:
            return
        key = (client, session.epoch)
        owner = self._owners.setdefault(key, process.host.name)
        if owner != process.host.name:
            self.fail(
                f"epoch {session.epoch} of {client} belongs to {owner} and to {process.host.name}"
            )
        if is_present and self.sessions.is_new(client, session.epoch):
            self.fail(f"{process.host.name} tells {client} of a session that has just begun")

    def overheard(self, client: str, node: str, text: str, superseded_at: float) -> None:
        """A connection of a client has been given a message, the client having been accepted
        elsewhere at that time."""
        message = self.messages.get(text)
        if message is not None and message.sent_at > superseded_at:
            self.fail(
                f"{node} has given {text} to {client}, sent {message.sent_at - superseded_at:.3f} s"
                " after a later connection of the client was accepted"
            )

    def noted(self, process: "Process", note: Note) -> None:
        if note.event in self.impossible:
            self.fail(f"{process.host.name}: {note.event} {note.fields}")

    def ends(self) -> list[int]:
        """Of the committed log."""
        return [batches[-1].end_offset if batches else 0 for batches in self.committed]

    # At the end

    def at_rest(self) -> str:
        """What still differs between the nodes, all of which run; "" if nothing does."""
        world = self._world
        ends = self.ends()
        for host in world.hosts.values():
            process = host.process
            if process is None:
                return f"{host.name} does not run"
            metadata = process.cluster_node.context.metadata
            if metadata is None:
                return f"{host.name} has no metadata"
            # An even number of voters tolerates no more failures.
            if len(metadata.voters) < min((world.settings.nodes - 1) // 2 * 2 + 1, VOTERS_MAX):
                return f"by {host.name} only {metadata.voters} vote"
            if host.is_witness:
                continue
            journal = process.journal
            if process.state.delivered != ends:
                return f"{host.name} has applied {process.state.delivered} of {ends}"
            if journal.durable_offset != ends or journal.next_offset != ends:
                return f"{host.name}'s log ends at {journal.next_offset}, committed are {ends}"
            for partition, info in enumerate(metadata.partitions):
                if not info.leader:
                    return f"partition {partition} has no leader"
                if len(info.in_sync) < min(metadata.replication_factor, len(world.data_hosts)):
                    return f"partition {partition}: in sync are only {info.in_sync}"
                if info.adding:
                    return f"partition {partition}: {info.adding} are being added"
                if crowded := self._crowded(info.replicas, metadata.replication_factor):
                    return f"partition {partition}: {info.replicas}, of them {crowded} in one zone"
                if any(world.hosts[node].role != DATA for node in info.members):
                    self.fail(f"partition {partition}: {info.members} have no data")
                is_stored = process.cluster_node.context.is_stored(partition)
                is_member = host.name in info.members
                if host.role == DATA and is_stored != is_member:
                    return f"{host.name} stores partition {partition}: {is_stored}"
        return ""

    def _crowded(self, replicas: Sequence[str], factor: int) -> list[str]:
        """More replicas in one zone than there must be, now that all zones live."""
        hosts = {host.name: host for host in self._world.data_hosts}
        zones = {name: host.zone or name for name, host in hosts.items()}
        limit = zone_limit(zones.values(), min(factor, len(hosts)))
        for zone in set(zones.values()):
            found = [node for node in replicas if zones[node] == zone]
            if len(found) > limit:
                return found
        return []

    def same_images(self) -> None:
        """Every node has the same sessions, retained messages and producers."""
        first: Mapping[str, object] | None = None
        name = ""
        for host in self._world.client_hosts:
            assert host.process is not None
            check_invariants(host.process)
            image = image_of(host.process)
            if first is None:
                first, name = image, host.name
                continue
            for key in sorted(first.keys() | image.keys()):
                if first.get(key) != image.get(key):
                    text = _difference(first.get(key), image.get(key))
                    self.fail(f"{key} differs: {name} and {host.name}, {text}")
        assert first is not None
        for topic, newest in self.retained.items():
            found = first.get(f"retained {topic}")
            if newest and found != newest:
                self.fail(f"retained on {topic} is {found}, the last one is {newest}")

    def same_sessions(self, *, without_short_ones: bool = False) -> None:
        """The log says of a session what the node believes that has its connection.
        `without_short_ones`: of a session that ends with its connection, and is in the log for its
        will, the subscriptions are not in the log."""
        for host in self._world.hosts.values():
            assert host.process is not None
            for session in host.process.state.sessions.values():
                if session.connection is None or not session.recorded:
                    continue
                if without_short_ones and not session.expiry_s:
                    continue
                image = host.process.images.state.sessions.get(session.client_id)
                believed = (host.name, session.epoch, sorted(session.subscriptions))
                told = None
                if image is not None:
                    told = (image.owner, image.epoch, sorted(image.subscriptions))
                if told != believed:
                    self.fail(f"{session.client_id}: the log says {told}, its node {believed}")


def _difference(first: object, second: object) -> str:
    if isinstance(first, dict) and isinstance(second, dict):
        keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
        return ", ".join(f"{key}: {first.get(key)} and {second.get(key)}" for key in keys)
    return f"{first} and {second}"


def image_of(process: "Process") -> dict[str, object]:
    images = process.images
    found: dict[str, object] = {}
    for client_id, session in images.state.sessions.items():
        fields = asdict(images.entry(session))
        found[f"session {client_id}"] = {
            key: sorted(value, key=repr) if isinstance(value, list) else value
            for key, value in fields.items()
        }
        found[f"inbound {client_id}"] = images.inbound_ids(client_id)
    for topic, message in images.state.retained.entries.items():
        assert isinstance(message, StoredMessage)
        found[f"retained {topic}"] = message.payload.decode()
    found["start of the member"] = images.state.member.start
    for name, value in images.state.member.values.items():
        found[f"member {name!r}"] = value
    for key in images.group_positions:
        found[f"group {key}"] = images.groups.entry(key)
    for fired in images.fired.values():
        for client_id in fired:
            found[f"fired {client_id}"] = images.fired_epoch(client_id)
    for ended in images.ended:
        for client_id, epoch, _ in ended.items():
            found[f"ended {client_id}"] = epoch
    return found
