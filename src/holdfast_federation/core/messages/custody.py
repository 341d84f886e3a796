"""Messages of QoS 1 and 2 at their origin, until every destination has confirmed them.

Each destination has a queue, the *stream*. Its messages have dense places, and a confirmation of a
place confirms all before it. Up to a window of them is in flight. The member retransmits all of
them after a timeout (`retransmit_timer`), and sooner after the path was lost, along the current
paths. Messages from before a restart keep their epoch and places and go first. Messages of this
epoch follow when those are confirmed.

A message goes to all its destinations at once, so a link that their paths share carries it once. If
one stream's window is full and the message goes to others, it goes along, up to a wider window.
Otherwise a near destination would run ahead of a far one whenever messages queue up here, and each
message would be sent twice. No stream waits for another.

A message that `is_repeatable` may be sent before it is stored, which promises nothing. Stores
become durable in the order of their effects. So after a crash the messages that were sent and not
stored are the last ones of their epoch, and the driver hands all of them over again in order. A
destination that has some of them recognises each by its number at the origin's broker. None that it
lacks follows a later one. Two kinds cannot be recognised and are stored first. A shared group's
message may be granted to another member the second time. A retained version gets another stamp.
"""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import Delete, Dropped, Message, Store
from holdfast_federation.core.frames import Data, decode, encode
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.custody_entry import (
    CustodyEntry,
    Grants,
    Place,
    Stream,
    frame_of,
    message_of,
)
from holdfast_federation.core.messages.retransmit_timer import RetransmitTimer

PROBING: Final = 8
"""The messages in flight to a destination after a loss; each confirmation doubles the number. A
second loss costs little, and a link that breaks under a whole window lets these through."""


class PathChanges(NamedTuple):
    """The changes of this member's paths since the last query."""

    moved: frozenset[bytes]
    """The destinations whose path is a different one."""
    broken: frozenset[bytes]
    """The destinations whose path lost a link."""


class BadEntry(ValueError):
    """A stored entry that is not a message in custody."""


class Custody:
    """All messages of QoS 1 and 2 of this origin that a destination has not confirmed."""

    def __init__(self, context: MemberContext) -> None:
        self._config = context.config
        self._identity = context.identity
        self._effects = context.effects
        self._entries: dict[MessageId, CustodyEntry] = {}
        self._streams: dict[bytes, Stream] = {}
        # Destinations to which something may be sent now, and those with something in flight.
        self._ready: set[bytes] = set()
        self._flying: set[bytes] = set()
        # The entries that wait for an unstored entry with their reclaimed grants, by its id. One
        # whose grants go to several members waits for each.
        self._followers: dict[MessageId, CustodyEntry] = {}
        # Entries with a group's share; the values are the same.
        self._granted: dict[MessageId, CustodyEntry] = {}

        # The sizes of all entries, each once.
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def queued(self, node: bytes) -> int:
        stream = self._streams.get(node)
        return len(stream.entries) if stream is not None else 0

    def queued_bytes(self, node: bytes) -> int:
        stream = self._streams.get(node)
        return stream.bytes if stream is not None else 0

    def load(self, stored: Iterable[bytes], now: float, disputed: int = 0) -> int:
        """Restores custody after a start, before any other call, from the stored entries in any
        order. Raises BadEntry when one of them is no message.

        Entries of epochs up to `disputed` get new ids and places, of this epoch. Returns the number
        of ids used for them. Counter-example: the directory is put back to epoch 3, and the lost
        starts were 4 to 6. The next start is 4 again. A destination has stored other messages of 4
        and confirms those of this one unread.
        """
        entries = []
        for data in stored:
            frame = decode(data)
            if not isinstance(frame, Data):
                raise BadEntry("the federation's store holds what is not a message: delete it")
            places = {node: place for node, place, _ in frame.destinations}
            grants = {node: (plain, tuple(shares)) for node, plain, shares in frame.grants}
            entries.append(
                CustodyEntry(
                    frame.id,
                    message_of(frame),
                    now,
                    places,
                    grants,
                    is_regranted=frame.is_regranted,
                )
            )
        entries.sort(key=lambda entry: (entry.id.epoch, entry.id.sequence))
        moved = [entry for entry in entries if entry.id.epoch <= disputed]
        for entry in entries[len(moved) :]:
            self._entries[entry.id] = entry
            self.bytes += entry.size
            self._note_grants(entry)
            for node in entry.places:
                self._queue(node, entry)
        for number, old in enumerate(moved, 1):
            id = MessageId(self._identity.node, self._identity.epoch, number)
            new = CustodyEntry(
                id, old.message, now, {}, old.grants, frozenset((id,)), old.is_regranted
            )
            self._add_entry(new, sorted(old.places), now)
            # Behind the store of the new one, so that a crash leaves one of them.
            self._effects.append(Delete(old.id))
        return len(moved)

    def accept(
        self,
        id: MessageId,
        message: Message,
        nodes: Iterable[bytes],
        now: float,
        grants: Grants | None = None,
    ) -> None:
        may_go = message.is_repeatable and not message.is_retained and not grants
        waits_for = frozenset(() if may_go else (id,))
        self._add_entry(CustodyEntry(id, message, now, {}, grants or {}, waits_for), nodes, now)

    def regrant(self, entry: CustodyEntry, id: MessageId, grants: Grants, now: float) -> None:
        """Puts reclaimed grants into a new entry, under another id and with the same age.

        The rest of the old entry is sent only after the new one is stored. Otherwise the member
        that had the grants could pass the place, and a crash would lose the group's share.
        """
        unstored = frozenset((id,))
        entry.waits_for |= unstored
        self._followers[id] = entry
        again = CustodyEntry(id, entry.message, entry.accepted_at, {}, grants, unstored, True)
        self._add_entry(again, sorted(grants), now)

    def grant_only(
        self, entry: CustodyEntry, node: bytes, shares: tuple[str, ...], now: float
    ) -> None:
        """Reduces a destination's grant to these shares; its place stays.

        The entry may have been dropped for the room of the one with the rest of its grants.
        """
        if node not in entry.grants:
            return
        is_plain, _ = entry.grants[node]
        entry.grants[node] = (is_plain, shares)
        self._note_grants(entry)
        self._store(entry, now)
        if node in self._flying:
            self._streams[node].retry_at = now

    def granted(self) -> list[CustodyEntry]:
        """Returns the entries with a group's share that is not confirmed."""
        return list(self._granted.values())

    def _add_entry(self, entry: CustodyEntry, nodes: Iterable[bytes], now: float) -> None:
        for node in nodes:
            stream = self._stream(node)
            entry.places[node] = stream.next_place
            stream.next_place += 1
        self._entries[entry.id] = entry
        self.bytes += entry.size
        self._note_grants(entry)
        self._store(entry, now, entry.may_send and entry.message.done_may_wait)
        for node in list(entry.places):
            self._queue(node, entry)
            self._bound(node)
        while self.bytes > self._config.custody_bytes_max and len(self._entries) > 1:
            # Who waits for most pays: a queue that is cut off costs no other destination.
            longest = max(self._streams, key=lambda node: self._streams[node].bytes)
            self._drop(longest, self._streams[longest], "custody full")

    def _store(self, entry: CustodyEntry, now: float, may_wait: bool = False) -> None:
        destinations = [(node, place, place) for node, place in entry.places.items()]
        data = encode(frame_of(entry, destinations, 1, now))
        self._effects.append(Store(entry.id, data, may_wait))

    def _note_grants(self, entry: CustodyEntry) -> None:
        if any(shares for _, shares in entry.grants.values()):
            self._granted[entry.id] = entry
        else:
            self._granted.pop(entry.id, None)

    def stored(self, id: MessageId) -> None:
        self._release(self._entries.get(id), id)
        self._release(self._followers.pop(id, None), id)

    def _release(self, entry: CustodyEntry | None, id: MessageId) -> None:
        """Lets an entry wait no longer for `id`, which is stored, or not needed any more."""
        if entry is not None and id in entry.waits_for:
            entry.waits_for -= {id}
            if entry.may_send:
                self._ready.update(entry.places)

    def confirmed(self, node: bytes, epoch: int, place: int, now: float) -> None:
        """Removes the messages that a destination has confirmed.

        A confirmation counts up to the last place sent since the start. Otherwise one forged place
        of 2^40 would empty the queue. A destination that stored more before this start confirms it
        again.
        """
        stream = self._streams.get(node)
        if stream is None:
            return
        if (epoch, place) > stream.launched:
            epoch, place = stream.launched if epoch == stream.launched[0] else (0, 0)
        before = len(stream.entries)
        while stream.entries:
            head = stream.entries[0]
            if head.id.epoch != epoch or head.places[node] > place:
                break
            self._pop(node, stream)
        if len(stream.entries) < before:
            stream.patience.confirmed(epoch, place, now)
            stream.probing *= 2
            if stream.probing >= self._config.window_messages:
                stream.probing = 0
            if node in self._flying and not stream.patience.uses_short_timeout:
                stream.retry_at = now + stream.patience.wait_s
            self._ready.add(node)

    def rerouted(self, changes: PathChanges, now: float) -> None:
        """Retransmits sooner after a change of the graph: messages may be lost with a link."""
        for node in changes.moved:
            self._stream(node).patience.moved(now)
        for node in self._flying:
            stream = self._streams[node]
            if node in changes.broken:
                last = stream.entries[stream.sent - 1]
                wait_s = stream.patience.after_a_loss(last.id.epoch, last.places[node])
            else:
                wait_s = stream.patience.after_a_change()
            due = now + wait_s
            stream.retry_at = due if stream.retry_at is None else min(stream.retry_at, due)
        self.wake()

    def wake(self) -> None:
        """Marks every stream with messages as ready, because it may be reachable now.

        A changed graph and a new link both call it. A changed graph alone is not enough: a link
        that is lost and back before its loss is announced changes no graph. A message from in
        between would wait for the next one.
        """
        self._ready.update(node for node, stream in self._streams.items() if stream.entries)

    def abandon(self, node: bytes, reason: str) -> None:
        """Drops all messages to a destination that has left the federation."""
        stream = self._streams.get(node)
        while stream is not None and stream.entries:
            self._drop(node, stream, reason)

    def collect(self, can_reach: Callable[[bytes], bool], now: float) -> list[Data]:
        """Returns the messages to send now, in order, each once for all its destinations."""
        if not self._ready:
            return []
        due: dict[MessageId, tuple[CustodyEntry, list[Place]]] = {}
        for node in sorted(self._ready):
            if can_reach(node):
                for entry, place in self._fill(node, self._streams[node], now):
                    due.setdefault(entry.id, (entry, []))[1].append(place)
        self._ready.clear()
        found = []
        for id in sorted(due):
            entry, places = due[id]
            self._send_along(entry, places, can_reach, now)
            found.append(frame_of(entry, places, 1, now))
        return found

    def handle_timers(self, now: float) -> None:
        for node in sorted(self._flying):
            stream = self._streams[node]
            if stream.retry_at is None or stream.retry_at > now:
                continue
            # Without a path it is sent later: a change of the graph makes the stream ready.
            stream.sent = 0
            stream.sent_bytes = 0
            self._flying.discard(node)
            stream.retry_at = None
            stream.patience.expired()
            stream.probing = PROBING
            self._ready.add(node)

    def tidy(self, now: float) -> None:
        """Drops expired and overdue messages at the heads of streams.

        An expired message behind others is still sent, and its destination drops it. A stream has
        no holes, because a confirmation covers all places before it.
        """
        for node, stream in self._streams.items():
            while stream.entries:
                head = stream.entries[0]
                if head.remaining_s(now) == 0.0:
                    self._drop(node, stream, "expired")
                elif now - head.accepted_at >= self._config.queue_age_max_s:
                    self._drop(node, stream, "too old")
                else:
                    break

    def timer(self) -> float:
        times = [self._streams[node].retry_at for node in self._flying]
        return min((at for at in times if at is not None), default=float("inf"))

    def _fill(self, node: bytes, stream: Stream, now: float) -> list[tuple[CustodyEntry, Place]]:
        """Puts as many messages into flight as the window has room for."""
        found: list[tuple[CustodyEntry, Place]] = []
        config = self._config
        while True:
            messages_max = stream.probing or config.window_messages
            entry = stream.next(messages_max, config.window_bytes)
            if entry is None:
                return found
            found.append((entry, self._launch(node, stream, now)))

    def _send_along(
        self,
        entry: CustodyEntry,
        places: list[Place],
        can_reach: Callable[[bytes], bool],
        now: float,
    ) -> None:
        """Adds the destinations at which this message is the next one, within a wider window."""
        if len(places) == len(entry.places):
            return
        config = self._config
        going = {node for node, _, _ in places}
        for node in entry.places:
            if node in going:
                continue
            stream = self._streams[node]
            messages_max = stream.probing or config.shared_window_messages
            next = stream.next(messages_max, config.shared_window_bytes)
            if next is entry and can_reach(node):
                places.append(self._launch(node, stream, now))

    def _launch(self, node: bytes, stream: Stream, now: float) -> Place:
        """Puts the next message of the stream into flight."""
        entry = stream.entries[stream.sent]
        stream.sent += 1
        stream.sent_bytes += entry.size
        patience = stream.patience
        if node not in self._flying:
            self._flying.add(node)
            patience.start(now)
            stream.retry_at = now + patience.wait_s
        place = entry.places[node]
        stream.launched = max(stream.launched, (entry.id.epoch, place))
        patience.launched(entry.id.epoch, place, now)
        return (node, place, stream.entries[0].places[node])

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two inputs."""
        assert self.bytes == sum(entry.size for entry in self._entries.values())
        queued = 0
        for node, stream in self._streams.items():
            stream.check([entry.places[node] for entry in stream.entries])
            queued += len(stream.entries)
            assert (node in self._flying) == (stream.sent > 0), "the streams in flight"
            for entry in stream.entries:
                assert self._entries.get(entry.id) is entry, "a queued message is not in custody"
        assert queued == sum(len(entry.places) for entry in self._entries.values())
        for id, entry in self._entries.items():
            assert entry.id == id, "a message under another id"
            assert entry.places, "a message without a destination"
            assert entry.grants.keys() <= entry.places.keys(), "a grant without a place"
            has_shares = any(shares for _, shares in entry.grants.values())
            assert has_shares == (id in self._granted), "the entries with a group's share"
        for id, entry in self._followers.items():
            assert id in entry.waits_for, "a follower of another entry"

    def _stream(self, node: bytes) -> Stream:
        stream = self._streams.get(node)
        if stream is None:
            stream = Stream(RetransmitTimer(self._config))
            self._streams[node] = stream
        return stream

    def _queue(self, node: bytes, entry: CustodyEntry) -> None:
        stream = self._stream(node)
        stream.entries.append(entry)
        stream.bytes += entry.size
        if entry.may_send:
            self._ready.add(node)

    def _bound(self, node: bytes) -> None:
        stream = self._streams[node]
        config = self._config
        while len(stream.entries) > 1 and (
            len(stream.entries) > config.queue_messages_max or stream.bytes > config.queue_bytes_max
        ):
            self._drop(node, stream, "queue full")

    def _drop(self, node: bytes, stream: Stream, reason: str) -> None:
        self._effects.append(Dropped(reason, stream.entries[0].id, node))
        self._pop(node, stream)
        if stream.entries:
            self._ready.add(node)

    def _pop(self, node: bytes, stream: Stream) -> None:
        entry = stream.entries.popleft()
        stream.bytes -= entry.size
        if stream.sent:
            stream.sent -= 1
            stream.sent_bytes -= entry.size
        assert stream.bytes >= stream.sent_bytes >= 0, "fewer bytes are queued than are in flight"
        if not stream.sent:
            self._flying.discard(node)
            stream.retry_at = None
        del entry.places[node]
        if entry.grants.pop(node, None) is not None:
            self._note_grants(entry)
        if not entry.places:
            del self._entries[entry.id]
            self.bytes -= entry.size
            assert self.bytes >= 0, "fewer bytes are in custody than none"
            self._release(self._followers.pop(entry.id, None), entry.id)
            self._effects.append(Delete(entry.id))
