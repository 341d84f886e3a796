"""What stands between a federator and its broker.

An edge turns a broker's clients into a member's: it says what they want, hands over what they
publish, and publishes for them what the federation brings. Every call is made in the event loop.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, runtime_checkable

from holdfast.federation.core.effects import DeliverLocally, Message
from holdfast.federation.core.identity import MessageId


class EdgeHost(Protocol):
    """The federator, as its edge sees it."""

    def publish(self, message: Message, done: Callable[[], None]) -> None:
        """A client's message. `done` is called once it is in custody, durably, or is nobody's;
        only then may the edge acknowledge it to the broker. Never called for what the edge
        published itself. While custody has no room, `done` waits: the edge's window closes.
        """

    def change_interest(self, added: Iterable[str], removed: Iterable[str]) -> None:
        """Filters of clients that began and ended, each once for each of them."""

    def retained_removed(self, removals: Mapping[str, int]) -> None:
        """By clients: topics, and when, in microseconds of the wall clock."""

    def edge_up(self) -> None:
        """The broker can be published to."""

    def edge_down(self, reason: str) -> None:
        """What was delivered and not done is to be delivered again, from the first on."""


class Edge(Protocol):
    async def start(self, host: EdgeHost) -> None:
        """Returns at once; the edge connects by itself, again and again. `edge_up` tells."""

    def want(self, filters: frozenset[str]) -> None:
        """What other members want of this broker's messages, in place of what was wanted."""

    def deliver(self, delivery: DeliverLocally, done: Callable[[], None]) -> None:
        """To the broker's clients, in order; its expiry counts from now. `done` when the broker has
        it durably, for QoS 0 when it is sent. `place` grows within (id.node, id.epoch): a broker
        that deduplicates by producer sequence uses it. Only between `edge_up` and `edge_down`.
        """

    async def stop(self) -> None: ...


@runtime_checkable
class RetainingEdge(Edge, Protocol):
    """One whose broker's retained messages are the federation's, too."""

    def read_retained(self, filters: frozenset[str], done: Callable[[list[Message]], None]) -> None:
        """What the broker has retained under the filters; `came_from` is set on what the
        federation brought. `done` gets an empty list if it cannot be read."""

    def retain(self, id: MessageId, message: Message, done: Callable[[], None]) -> None:
        """The broker retains this under its topic, with an empty payload nothing. It is no
        publication; a broker that can be told it in no other way takes it for one. `done` when
        the broker has it durably. Only between `edge_up` and `edge_down`."""
