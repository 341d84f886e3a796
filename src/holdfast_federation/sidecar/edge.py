"""Interface between a federator and its broker.

An edge represents a broker's clients in the federation. It reports their interest, hands over their
messages, and publishes for them what the federation delivers. Every call is made in the event loop.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import MessageId


class RetainedFound(NamedTuple):
    """The retained messages that one reading of a broker found."""

    messages: list[Message]
    is_complete: bool = True
    """False: some are left out. A topic without a message here may have one."""


ReadingDone = Callable[[RetainedFound | None], None]
"""Receives what a reading found, or None if the broker cannot be read now."""


class EdgeHost(Protocol):
    """The federator, as its edge sees it."""

    def publish(self, message: Message, done: Callable[[], None]) -> None:
        """Accepts a client's message.

        `done` is called once the message is durably in custody or has no destination. Only then may
        the edge acknowledge it to the broker. While custody has no room, `done` waits, so the
        edge's window closes. The edge never calls this for messages that it published itself: they
        would circulate.
        """

    def change_interest(self, added: Iterable[str], removed: Iterable[str]) -> None:
        """Reports the filters that clients subscribed to and unsubscribed from, once per client."""

    def retained_removed(self, removals: Mapping[str, int]) -> None:
        """Reports topics whose retained message a client removed, with the time of removal.

        Times are microseconds of the wall clock.
        """

    def edge_up(self) -> None:
        """Reports that the broker accepts publishes."""

    def edge_down(self, reason: str) -> None:
        """Reports that the broker is gone. Deliveries without `done` will be repeated from the
        first."""


class Edge(Protocol):
    """The broker's side of a federator."""

    async def start(self, host: EdgeHost) -> None:
        """Begins to connect and returns at once.

        The edge reconnects automatically, and reports each success with `edge_up`.
        """

    def set_wanted_filters(self, filters: frozenset[str]) -> None:
        """Replaces the set of filters that other members want of this broker's messages."""

    def deliver(self, delivery: DeliverLocally, done: Callable[[], None]) -> None:
        """Publishes a message to the broker's clients, in the order of the calls.

        Its expiry counts from now. `done` is called when the broker has it durably, for QoS 0 when
        it is sent. `place` grows within (`id.node`, `id.epoch`), so a broker can use it as the
        producer sequence. The federator calls this only between `edge_up` and `edge_down`.
        """

    async def stop(self) -> None: ...


@runtime_checkable
class RetainingEdge(Edge, Protocol):
    """An edge whose broker shares its retained messages with the federation."""

    def read_retained(self, filters: frozenset[str], done: ReadingDone) -> None:
        """Reads the broker's retained messages under the filters, and calls `done` later.

        `delivered_id` is set on messages that the federation brought.
        """

    def retain(self, id: MessageId, message: Message, done: Callable[[], None]) -> None:
        """Stores the message as the retained one of its topic. An empty payload removes that one.

        It is no publication, but a broker with no other way treats it as one. `done` is called when
        the broker has it durably. The federator calls this only between `edge_up` and `edge_down`.
        """
