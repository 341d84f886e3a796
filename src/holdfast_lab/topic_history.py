"""Assembles the history of one topic's messages in one run from events.

Promises hold per topic, so one topic is judged at a time, in memory. Its events come with those
that concern all topics: subscriptions, connections and faults.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from holdfast.protocol.topics.names import matches

OF_MESSAGES: Final = (
    "published", "confirmed", "withdrawn", "delivered", "delivered_former", "retained_found",
)  # fmt: skip
"""The events of one topic."""
OF_ALL: Final = (
    "client", "connected", "disconnected", "subscribing", "subscribed", "fault_injected",
    "fault_healed",
)  # fmt: skip
"""The events that concern every topic."""
END_US: Final = inf
"""The end of a fault that was never healed."""

Key = tuple[str, int]
"""A message of the topic: its publisher and sequence."""


class Row(NamedTuple):
    """An event, reduced to the fields that the checks use. The names are those of `events`."""

    event: str
    n: int
    writer: str
    host: str
    time_us: int
    error_us: int
    publisher: str | None = None
    sequence: int | None = None
    client: str | None = None
    group: str | None = None
    qos: int | None = None
    dup: bool | None = None
    retain: bool | None = None
    will: bool | None = None
    connection: int | None = None
    filters: list[dict[str, object]] | None = None
    fault: int | None = None
    unordered: bool | None = None


class Moment(NamedTuple):
    """A time on the clock of a host."""

    time_us: int
    host: str
    error_us: int

    def is_after(self, other: "Moment") -> bool:
        """Returns whether this moment is certainly after another one.

        On the clocks of two hosts it must be later by more than both errors. A smaller distance
        proves no order.
        """
        doubt_us = 0 if self.host == other.host else self.error_us + other.error_us
        return self.time_us > other.time_us + doubt_us


@dataclass(slots=True)
class JudgedMessage:
    """A published message, as its first PUBLISH had it."""

    sent: Moment
    qos: int
    is_will: bool
    retain: bool
    sends: int = 1


@dataclass(slots=True)
class Receipt:
    """A delivery to a subscription. For a group it is a delivery to one of its members."""

    key: Key
    client: str
    connection: int
    dup: bool
    time_us: int


@dataclass
class JudgedSubscription:
    """The subscription of a client or group to the topic, with its deliveries.

    `granted_qos` is None if no filter matches the topic. `since` is the SUBACK, for a group the
    first one.
    """

    name: str
    is_group: bool = False
    granted_qos: int | None = None
    since: Moment | None = None
    receipts: list[Receipt] = field(default_factory=list)
    writers: set[str] = field(default_factory=set)
    """The writers of the deliveries."""

    def is_due(self, message: JudgedMessage) -> bool:
        """Returns whether the message was published after the SUBACK."""
        return self.since is not None and message.sent.is_after(self.since)


class History:
    """The messages, subscriptions and faults of one topic in one run."""

    def __init__(self, topic: str, rows: Iterable[Row]) -> None:
        """Assembles the history from events in any order."""
        self.topic = topic
        self.messages: dict[Key, JudgedMessage] = {}
        self.confirmed_us: dict[Key, int] = {}
        self.withdrawn_us: dict[Key, int] = {}
        self.subscriptions: dict[str, JudgedSubscription] = {}
        self.former: list[tuple[str, int, Key]] = []
        """Deliveries on former connections: the client, the connection and the message."""
        self.retained: list[tuple[str, Key | None]] = []
        """The retained message that each client found."""
        self.unordered: set[str] = set()
        self.accepted_us: dict[str, list[int]] = {}
        """The times at which each client's connections were accepted."""
        self.ends_us: dict[tuple[str, int], int] = {}
        self._fault_from_us: dict[int, int] = {}
        self._fault_to_us: dict[int, int] = {}
        self._group_of: dict[str, str | None] = {}
        ordered = sorted(rows, key=lambda row: (row.n, row.writer))
        # Subscriptions come first, because deliveries are assigned to them.
        for row in ordered:
            if row.event in OF_ALL:
                self._take_common(row)
        for row in ordered:
            if row.event in OF_MESSAGES:
                self._take(row)
        self._order_groups()

    def was_broken(self, from_us: float, to_us: float) -> bool:
        """Returns whether there was a fault at any moment between two times."""
        return any(
            begin <= to_us and self._fault_to_us.get(fault, END_US) >= from_us
            for fault, begin in self._fault_from_us.items()
        )

    def _take_common(self, row: Row) -> None:
        """Notes an event that concerns all topics."""
        client = row.client or ""
        if row.event == "connected":
            self.accepted_us.setdefault(client, []).append(row.time_us)
        elif row.event == "disconnected":
            self.ends_us.setdefault((client, row.connection or 0), row.time_us)
        elif row.event == "subscribing":
            self._subscribe(client, row)
        elif row.event == "subscribed" and client in self._group_of:
            subscription = self._subscription_of(client)
            moment = Moment(row.time_us, row.host, row.error_us)
            if subscription.since is None or moment.time_us < subscription.since.time_us:
                subscription.since = moment
        elif row.event == "client" and row.unordered:
            self.unordered.add(client)
        elif row.event == "fault_injected":
            self._fault_from_us.setdefault(row.fault or 0, row.time_us)
        elif row.event == "fault_healed":
            self._fault_to_us[row.fault or 0] = row.time_us

    def _subscribe(self, client: str, row: Row) -> None:
        self._group_of[client] = row.group
        name = row.group or client
        if name in self.subscriptions:
            return
        found = [
            int(str(one["qos"]))
            for one in row.filters or ()
            if None not in one.values() and matches(str(one["filter"]), self.topic)
        ]
        granted_qos = max(found) if found else None
        self.subscriptions[name] = JudgedSubscription(name, row.group is not None, granted_qos)

    def _subscription_of(self, client: str) -> JudgedSubscription:
        """Returns the subscription of a client. A client that never subscribed gets one that is
        owed nothing."""
        name = self._group_of.get(client) or client
        return self.subscriptions.setdefault(name, JudgedSubscription(name))

    def _take(self, row: Row) -> None:
        """Notes an event of the topic."""
        key = (row.publisher or "", row.sequence or 0)
        if row.event == "published":
            known = self.messages.get(key)
            if known is not None:
                known.sends += 1
                return
            sent = Moment(row.time_us, row.host, row.error_us)
            self.messages[key] = JudgedMessage(sent, row.qos or 0, bool(row.will), bool(row.retain))
        elif row.event == "confirmed":
            self.confirmed_us.setdefault(key, row.time_us)
        elif row.event == "withdrawn":
            self.withdrawn_us[key] = row.time_us
        elif row.event == "delivered":
            client = row.client or ""
            receipt = Receipt(key, client, row.connection or 0, bool(row.dup), row.time_us)
            subscription = self._subscription_of(client)
            subscription.receipts.append(receipt)
            subscription.writers.add(row.writer)
        elif row.event == "delivered_former":
            self.former.append((row.client or "", row.connection or 0, key))
        elif row.event == "retained_found":
            self.retained.append((row.client or "", key if row.publisher is not None else None))

    def _order_groups(self) -> None:
        """Sorts deliveries to groups by time if their members have several writers.

        The numbers of several writers have no common order.
        """
        for subscription in self.subscriptions.values():
            if len(subscription.writers) > 1:
                subscription.receipts.sort(key=lambda receipt: receipt.time_us)
