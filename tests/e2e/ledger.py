"""What clients saw of a broker or a cluster; `ledger_checks` says whether the promise was kept.

The ledger is told by the clients themselves: what they sent, what was acknowledged to them and
what was delivered to them, in the order in which it happened. It knows nothing of the broker.
Times are monotonic seconds of one machine, the same for all of its processes. With a log it
writes everything it is told there, too, as events of an experiment: from them others can judge.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from holdfast_lab.log import ExperimentLog

Key = tuple[str, str, int]
"""Publisher, topic, sequence number of the publisher on that topic."""


@dataclass(frozen=True)
class Violation:
    kind: str
    who: str
    text: str
    key: Key | None = None
    """The message it is about."""


@dataclass(frozen=True)
class Interest:
    """One filter of a subscriber. A subscriber's filters must not overlap."""

    filter: str
    qos: int

    def matches(self, topic: str) -> bool:
        wanted, levels = self.filter.split("/"), topic.split("/")
        if wanted[-1] == "#":
            wanted, levels = wanted[:-1], levels[: len(wanted) - 1]
        return len(wanted) == len(levels) and all(
            want in ("+", level) for want, level in zip(wanted, levels, strict=True)
        )


@dataclass(slots=True)
class Sent:
    qos: int
    at_s: float
    """When it was sent for the first time."""
    sends: int = 1
    """How often it left the publisher: above 1, the outcome of the one before was unknown."""
    retain: bool = False
    is_will: bool = False


@dataclass(frozen=True, slots=True)
class Delivery:
    key: Key
    at_s: float
    member: str
    """The client: of a shared group one of its members, else the subscriber itself."""
    connection: int
    """The client's connections are counted from 1."""
    dup: bool


@dataclass
class Subscription:
    """Of one durable client, or of a shared group of them."""

    interests: list[Interest]
    since_s: float = inf
    """SUBACK: what is sent from then on is owed."""
    is_group: bool = False
    history: list[Delivery] = field(default_factory=list)
    _granted: dict[str, int | None] = field(default_factory=dict)

    def granted_qos(self, topic: str) -> int | None:
        """None when none of its filters matches."""
        if topic not in self._granted:
            found = [one.qos for one in self.interests if one.matches(topic)]
            self._granted[topic] = max(found) if found else None
        return self._granted[topic]


@dataclass(frozen=True)
class Fault:
    """Something was broken, and the cluster not yet whole again."""

    kind: str
    from_s: float
    to_s: float


class Ledger:
    def __init__(self, log: ExperimentLog | None = None) -> None:
        self._log = log
        self.sent: dict[Key, Sent] = {}
        self.acknowledged: dict[Key, float] = {}
        """When: at PUBACK or PUBREC; for a will, when the connection was lost."""
        self.refused: set[Key] = set()
        self.withdrawn: dict[Key, float] = {}
        self.subscriptions: dict[str, Subscription] = {}
        self.connections: dict[str, list[float]] = defaultdict(list)
        """Of each client: when each of its connections was accepted."""
        self.nodes: dict[str, list[str]] = defaultdict(list)
        """Of each client: by whom."""
        self.ends: dict[tuple[str, int], float] = {}
        """Of each client and connection: when the client lost it or let go of it."""
        self.delivered: set[Key] = set()
        """To anybody."""
        self.former: list[tuple[str, int, Key]] = []
        self.retained: list[tuple[str, str, Key | None]] = []
        self.faults: list[Fault] = []
        self.unordered: set[str] = set()
        """Publishers whose library may let a new message overtake one that it sends again."""
        self.accusations: list[Violation] = []
        self._group_of: dict[str, str] = {}

    def _write(
        self, event: str, key: Key | None = None, at_s: float | None = None, **fields: object
    ) -> None:
        if self._log is None:
            return
        if key is not None:
            fields["publisher"], fields["topic"], fields["sequence"] = key
        self._log.write(event, at_s, **fields)

    def may_reorder(self, publisher: str) -> None:
        """Its library may let a new message overtake one that it sends again."""
        self.unordered.add(publisher)
        self._write("client", client=publisher, unordered=True)

    def send(
        self, key: Key, qos: int, at_s: float, *, retain: bool = False, is_will: bool = False
    ) -> None:
        """Also each time it is sent again. A will is sent with CONNECT."""
        known = self.sent.get(key)
        if known is None:
            self.sent[key] = Sent(qos, at_s, retain=retain, is_will=is_will)
        else:
            known.sends += 1
        self._write("published", key, at_s, qos=qos, retain=retain, will=is_will)

    def acknowledge(self, key: Key, at_s: float) -> None:
        self.acknowledged.setdefault(key, at_s)
        self._write("confirmed", key, at_s)

    def refuse(self, key: Key) -> None:
        """The broker answered with an error: no promise was made."""
        self.refused.add(key)
        self._write("refused", key)

    def withdraw(self, key: Key, at_s: float) -> None:
        """A will whose client said goodbye, and whose server closed the connection upon it."""
        self.withdrawn[key] = at_s
        self._write("withdrawn", key, at_s)

    def connected(self, client: str, at_s: float, node: str = "") -> None:
        """A connection was accepted: its number is the count of these calls."""
        self.connections[client].append(at_s)
        self.nodes[client].append(node)
        self._write("connected", None, at_s, client=client, node=node)

    def disconnected(self, client: str, at_s: float) -> None:
        """The newest connection is over, as far as the client knows."""
        number = len(self.connections[client])
        self.ends.setdefault((client, number), at_s)
        self._write("disconnected", None, at_s, client=client, connection=number)

    def subscribe(self, client: str, interests: list[Interest], group: str = "") -> None:
        """With SUBSCRIBE. The members of a group must have no other filters, and all the same."""
        name = group or client
        self._group_of[client] = name
        self.subscriptions.setdefault(name, Subscription(interests, is_group=bool(group)))
        filters = [{"filter": one.filter, "qos": one.qos} for one in interests]
        named: dict[str, object] = {"group": group} if group else {}
        self._write("subscribing", None, None, client=client, filters=filters, **named)

    def subscribed(self, client: str, at_s: float) -> None:
        """With SUBACK; of a group, the first one counts."""
        subscription = self.subscriptions[self._group_of[client]]
        subscription.since_s = min(subscription.since_s, at_s)
        self._write("subscribed", None, at_s, client=client)

    def deliver(
        self, client: str, key: Key, at_s: float, connection: int = 1, dup: bool = False
    ) -> None:
        """To the application: a QoS 2 message counts once, however often it is retransmitted."""
        subscription = self.subscriptions[self._group_of[client]]
        subscription.history.append(Delivery(key, at_s, client, connection, dup))
        self.delivered.add(key)
        self._write("delivered", key, at_s, client=client, connection=connection, dup=dup)

    def deliver_former(self, client: str, connection: int, key: Key) -> None:
        """On a connection whose client has another one since, and that it answers no more."""
        self.former.append((client, connection, key))
        self._write("delivered_former", key, client=client, connection=connection)

    def find_retained(self, topic: str, reader: str, key: Key | None) -> None:
        """What a new subscriber was given as the retained message, when all was quiet."""
        self.retained.append((topic, reader, key))
        if key is None:
            self._write("retained_found", client=reader, topic=topic)
        else:
            self._write("retained_found", key, client=reader)

    def fault(self, kind: str, from_s: float, to_s: float, nodes: Iterable[str] = ()) -> None:
        self.faults.append(Fault(kind, from_s, to_s))
        number = len(self.faults)
        self._write("fault_injected", None, from_s, fault=number, kind=kind, nodes=sorted(nodes))
        self._write("fault_healed", None, to_s, fault=number)

    def accuse(self, kind: str, who: str, text: str) -> None:
        """What only the client can see: `session lost`, `packet id reused`."""
        self.accusations.append(Violation(kind, who, text))
        self._write("accused", client=who, kind=kind, text=text)

    def missing(self) -> Iterator[tuple[str, Key]]:
        """Acknowledged messages that a durable subscriber has not got (yet)."""
        for name, subscription in self.subscriptions.items():
            seen = {delivery.key for delivery in subscription.history}
            for key in self.acknowledged.keys() - seen:
                if (
                    subscription.granted_qos(key[1])
                    and key in self.sent
                    and self.sent[key].at_s > subscription.since_s
                ):
                    yield name, key
