"""What clients saw of a broker, and whether the broker kept its promise.

The ledger is told by the clients themselves: what they sent, what was acknowledged to them and
what was delivered to them, in the order in which it happened. It knows nothing of the broker.

Promise, per durable subscriber and message that its filters match:
- a message whose PUBACK or PUBREC the publisher holds is delivered (else `lost`);
- published and subscribed with QoS 2, it is delivered once (else `duplicate`);
- first deliveries of one publisher's messages on one topic come in sending order (`reordered`);
- every subscriber sees the messages of a topic, whoever sent them, in one order (`disagreement`);
- nothing is delivered that nobody sent (`invented`).
Clients add what only they can see (`session lost`, `packet id reused`) with `accuse`.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

Key = tuple[str, str, int]
"""Publisher, topic, sequence number of the publisher on that topic."""


@dataclass(frozen=True)
class Violation:
    kind: str
    who: str
    text: str


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


class Ledger:
    def __init__(self) -> None:
        self.sent: dict[Key, int] = {}
        """QoS with which it was sent."""
        self.acknowledged: set[Key] = set()
        self.refused: set[Key] = set()
        self.interests: dict[str, list[Interest]] = {}
        self.deliveries: dict[str, list[Key]] = defaultdict(list)
        self._accusations: list[Violation] = []

    def send(self, key: Key, qos: int) -> None:
        self.sent[key] = qos

    def acknowledge(self, key: Key) -> None:
        self.acknowledged.add(key)

    def refuse(self, key: Key) -> None:
        """The broker answered with an error: no promise was made."""
        self.refused.add(key)

    def subscribe(self, subscriber: str, interests: list[Interest]) -> None:
        """Call it with the SUBACK, before any message is sent that the subscriber must get."""
        self.interests[subscriber] = interests

    def deliver(self, subscriber: str, key: Key) -> None:
        """To the application: a QoS 2 message counts once, however often it is retransmitted."""
        self.deliveries[subscriber].append(key)

    def accuse(self, kind: str, who: str, text: str) -> None:
        self._accusations.append(Violation(kind, who, text))

    def granted_qos(self, subscriber: str, topic: str) -> int | None:
        """None when none of its filters matches."""
        found = [one.qos for one in self.interests[subscriber] if one.matches(topic)]
        return max(found) if found else None

    def missing(self) -> Iterator[tuple[str, Key]]:
        """Acknowledged messages that a durable subscriber has not got (yet)."""
        for subscriber in self.interests:
            seen = set(self.deliveries[subscriber])
            for key in self.acknowledged - seen:
                if self.granted_qos(subscriber, key[1]):
                    yield subscriber, key

    def check(self) -> list[Violation]:
        """Every broken promise; empty when all were kept."""
        found = list(self._accusations)
        for subscriber, key in self.missing():
            found.append(Violation("lost", subscriber, f"{key} was acknowledged"))
        for subscriber, history in self.deliveries.items():
            found += self._check_history(subscriber, history)
        found += self._check_agreement()
        return found

    def _check_history(self, subscriber: str, history: list[Key]) -> Iterator[Violation]:
        seen: set[Key] = set()
        newest: dict[tuple[str, str], int] = {}
        for key in history:
            publisher, topic, sequence = key
            if key not in self.sent:
                yield Violation("invented", subscriber, f"{key} was never sent")
                continue
            if key in seen:
                if min(self.sent[key], self.granted_qos(subscriber, topic) or 0) == 2:
                    yield Violation("duplicate", subscriber, f"{key} at QoS 2")
                continue
            seen.add(key)
            before = newest.get((publisher, topic), -1)
            if sequence < before:
                yield Violation("reordered", subscriber, f"{key} came after {before}")
            newest[publisher, topic] = max(before, sequence)

    def _check_agreement(self) -> Iterator[Violation]:
        firsts: dict[str, dict[str, list[Key]]] = defaultdict(dict)
        for subscriber, history in self.deliveries.items():
            for key in dict.fromkeys(history):
                firsts[key[1]].setdefault(subscriber, []).append(key)
        for topic, orders in firsts.items():
            for (one, first), (other, second) in combinations(orders.items(), 2):
                common = set(first) & set(second)
                left = [key for key in first if key in common]
                right = [key for key in second if key in common]
                if left != right:
                    at = next(
                        i
                        for i, pair in enumerate(zip(left, right, strict=True))
                        if pair[0] != pair[1]
                    )
                    text = f"{topic}: {left[at]} here, {right[at]} at {other}"
                    yield Violation("disagreement", one, text)
