"""Streams from other members: each place delivered once, in order, and confirmed when stored.

A *position* is the epoch of an origin and the next place to deliver. The driver stores it together
with the delivered message and returns it after a restart. Without it the stream continues at the
lowest place for which its origin has no confirmation, so messages may be delivered twice.

An origin begins an epoch when all places of the one before are confirmed or dropped. So places of a
former epoch are repetitions, unless the directory of the origin was put back to an earlier copy:
then its custody may have a start that is earlier than those which this member has seen.
Smallest counter-example against confirming such a place unread: the origin starts as 4, 5 and 6,
and its messages of 6 arrive. It is put back to start 3, starts as 4 again, and accepts a message.
So a place of a former epoch is confirmed only if it was stored, and delivered otherwise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.frames import MEMBERS_MAX, Data, Skip, StreamAck
from holdfast_federation.core.identity import EPOCH_COUNTED_MAX, MessageId
from holdfast_federation.core.messages.local_delivery import LocalDelivery

Position = tuple[int, int]
FormerPositions = dict[tuple[bytes, int], int]
"""By origin and epoch the next place, for epochs before those of the positions."""
FORMER_MAX: Final = 16
"""The most former epochs of an origin that are tracked. Places of earlier ones are confirmed
unread."""


@dataclass(slots=True)
class StreamSource:
    """The stream from one origin. Every place below `next_place` is delivered or passed over."""

    epoch: int
    next_place: int
    out_of_order: dict[int, Data | Skip] = field(default_factory=dict)
    """Messages that arrived ahead of their turn, by place."""
    out_of_order_bytes: int = 0
    unstored: dict[MessageId, int] = field(default_factory=dict)
    """Delivered messages that are not stored, in order of places."""
    confirmed: int = 0
    ack_at: float | None = None
    began_at: float = float("-inf")
    """The time at which the first message of the epoch came."""
    former: "dict[int, StreamSource]" = field(default_factory=dict)
    """The streams of epochs before this one, the newest FORMER_MAX."""

    def stored_up_to(self) -> int:
        return next(iter(self.unstored.values()), self.next_place) - 1


class IncomingStreams:
    """The streams from all origins, and the confirmations owed to them.

    A confirmation never covers a place that is not stored: its origin deletes what is confirmed.
    """

    def __init__(
        self,
        context: MemberContext,
        delivering: LocalDelivery,
        positions: dict[bytes, Position],
        is_member: Callable[[bytes], bool] = lambda node: True,
        former: FormerPositions | None = None,
    ) -> None:
        self._own = context.node
        self._config = context.config
        self._delivering = delivering
        self._is_member = is_member
        # An epoch above EPOCH_COUNTED_MAX was forged. It would reject its origin for good, because
        # the origin's true epochs are lower.
        self._sources = {
            node: StreamSource(epoch, next_place)
            for node, (epoch, next_place) in positions.items()
            if epoch <= EPOCH_COUNTED_MAX
        }
        for (node, epoch), next_place in sorted((former or {}).items()):
            if node in self._sources and epoch < self._sources[node].epoch:
                _add_former(self._sources[node], StreamSource(epoch, next_place))
        # The origins and epochs with places to confirm.
        self._unconfirmed: set[tuple[bytes, int]] = set()
        # Confirmations of old epochs, for origins that retransmit messages confirmed before.
        self._acknowledgements: list[StreamAck] = []

    def positions(self) -> dict[bytes, Position]:
        """Returns the positions by delivery. The driver tracks the positions that are stored."""
        return {node: (source.epoch, source.next_place) for node, source in self._sources.items()}

    def accept(self, data: Data | Skip, place: int, base: int, now: float) -> str | None:
        """Accepts a message and delivers it in its turn. Returns why it is refused, or None."""
        source = self._sources.get(data.node)
        if source is None and len(self._sources) >= MEMBERS_MAX:
            self._forget_strangers()
            if len(self._sources) >= MEMBERS_MAX:
                return "too many origins"
        if source is None or data.epoch > source.epoch:
            source = self._succeeded(source, data.epoch, base, now)
            self._sources[data.node] = source
        elif data.epoch < source.epoch:
            former = source.former.get(data.epoch)
            if former is None and _is_forgotten(source, data.epoch):
                self._acknowledgements.append(StreamAck(data.node, data.epoch, self._own, place, 0))
                return "old epoch"
            if former is None or place >= former.next_place:
                if now < source.began_at + self._config.retry_max_s:
                    # It may be a message that the origin dropped, on a longer way than later ones.
                    # One in custody is sent again.
                    return "earlier epoch"
                if former is None:
                    former = _add_former(source, StreamSource(data.epoch, base))
            source = former
        self._skip(source, base, now)
        early = source.out_of_order.get(place)
        if early is not None and not self._delivering.accepts(early):
            # A group ended here since it came. This copy may have another grant.
            source.out_of_order_bytes -= _size(source.out_of_order.pop(place))
            early = None
        if place < source.next_place or early is not None:
            self._acknowledge(data.node, source, now)
            return "duplicate"
        if place - source.next_place >= self._config.shared_window_messages:
            return "beyond the window"
        if place > source.next_place and not self._has_room(source, data):
            return "beyond the window"
        if not self._delivering.accepts(data):
            return "group not here"
        source.out_of_order[place] = data
        source.out_of_order_bytes += _size(data)
        self._deliver_in_order(source, now)
        self._acknowledge(data.node, source, now)
        return None

    def _succeeded(
        self, before: StreamSource | None, epoch: int, base: int, now: float
    ) -> StreamSource:
        """Returns the stream of a later epoch, with those before it."""
        source = StreamSource(epoch, base, began_at=now)
        if before is not None:
            source.former, before.former = before.former, {}
            before.out_of_order.clear()
            before.out_of_order_bytes = 0
            _add_former(source, before)
        return source

    def _find(self, node: bytes, epoch: int) -> StreamSource | None:
        source = self._sources.get(node)
        if source is None or source.epoch == epoch:
            return source
        return source.former.get(epoch)

    def stored(self, id: MessageId, now: float) -> None:
        source = self._find(id.node, id.epoch)
        if source is not None and source.unstored.pop(id, None) is not None:
            self._acknowledge(id.node, source, now)

    def acks(self, now: float) -> list[StreamAck]:
        """Returns the confirmations that are due."""
        if not self._acknowledgements and not self._unconfirmed:
            return []
        found, self._acknowledgements = self._acknowledgements, []
        for node, epoch in sorted(self._unconfirmed):
            source = self._find(node, epoch)
            if source is None:
                self._unconfirmed.discard((node, epoch))
            elif source.ack_at is not None and source.ack_at <= now:
                assert source.stored_up_to() >= source.confirmed, "a confirmation falls"
                source.confirmed = source.stored_up_to()
                source.ack_at = None
                self._unconfirmed.discard((node, epoch))
                found.append(StreamAck(node, epoch, self._own, source.confirmed, 0))
        return found

    def timer(self) -> float:
        found = (self._find(*each) for each in self._unconfirmed)
        times = (source.ack_at for source in found if source is not None)
        return min((at for at in times if at is not None), default=float("inf"))

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two inputs."""
        for source in self._all_sources():
            early = source.out_of_order
            assert source.out_of_order_bytes == sum(map(_size, early.values())), "bytes ahead"
            assert all(place >= source.next_place for place in early), "a delivered place waits"
            places = list(source.unstored.values())
            assert places == sorted(places), "unstored places out of order"
            assert not places or places[-1] < source.next_place, "an undelivered place is unstored"
            assert source.confirmed <= source.stored_up_to(), "confirmed before it is stored"
            assert all(epoch < source.epoch for epoch in source.former), "a later epoch is former"
            assert len(source.former) <= FORMER_MAX, "too many former epochs"
        origins = {node for node, _ in self._unconfirmed}
        assert origins <= self._sources.keys(), "a confirmation for a stranger"

    def _all_sources(self) -> Iterator[StreamSource]:
        for source in self._sources.values():
            yield source
            yield from source.former.values()

    def _forget_strangers(self) -> None:
        """Forgets origins that have left the federation, to make room for members."""
        for node, source in list(self._sources.items()):
            if not self._is_member(node) and not source.unstored:
                del self._sources[node]
                self._unconfirmed = {each for each in self._unconfirmed if each[0] != node}

    def _skip(self, source: StreamSource, base: int, now: float) -> None:
        """Passes over places below `base`: this member confirmed them before it lost its position,
        or the origin dropped them."""
        if base <= source.next_place:
            return
        for place in [place for place in source.out_of_order if place < base]:
            source.out_of_order_bytes -= _size(source.out_of_order.pop(place))
        source.next_place = base
        self._deliver_in_order(source, now)

    def _has_room(self, source: StreamSource, data: Data | Skip) -> bool:
        """Returns whether a message ahead of its turn fits. An origin has no more in flight, unless
        it is a single message."""
        size = source.out_of_order_bytes + _size(data)
        return not source.out_of_order or size <= self._config.shared_window_bytes

    def _deliver_in_order(self, source: StreamSource, now: float) -> None:
        while source.next_place in source.out_of_order:
            data = source.out_of_order.pop(source.next_place)
            source.out_of_order_bytes -= _size(data)
            if not self._delivering.accepts(data):
                # The group ended here since the message came. Its origin sends it again with
                # another grant.
                return
            self._deliver(source, data, now)
            source.next_place += 1

    def _deliver(self, source: StreamSource, data: Data | Skip, now: float) -> None:
        if self._delivering.deliver(data, source.next_place, now):
            # An origin that uses an id twice gets the first place confirmed when it is stored.
            source.unstored.setdefault(data.id, source.next_place)

    def _acknowledge(self, node: bytes, source: StreamSource, now: float) -> None:
        self._unconfirmed.add((node, source.epoch))
        at = now + self._config.ack_delay_s
        if source.stored_up_to() - source.confirmed >= self._config.ack_messages:
            at = now
        source.ack_at = at if source.ack_at is None else min(source.ack_at, at)


def _add_former(source: StreamSource, former: StreamSource) -> StreamSource:
    source.former[former.epoch] = former
    if len(source.former) > FORMER_MAX:
        del source.former[min(source.former)]
    return former


def _is_forgotten(source: StreamSource, epoch: int) -> bool:
    """Returns whether the epoch is before those that are tracked."""
    return len(source.former) >= FORMER_MAX and epoch < min(source.former)


def _size(data: Data | Skip) -> int:
    if isinstance(data, Skip):
        return 0
    return len(data.topic) + len(data.payload) + len(data.properties)
