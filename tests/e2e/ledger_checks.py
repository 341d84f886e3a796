"""Whether the promise was kept, from a `Ledger`; in O(n log n) of what was sent and delivered.

Per durable subscriber, or shared group of them, and message that its filters match:
- a message whose PUBACK or PUBREC the publisher holds, or a will whose connection was lost, is
  delivered (else `lost`; `missed after SUBACK` when it is the first that was owed);
- published and subscribed with QoS 2, it is delivered once, and with QoS 1 once more only where
  its publisher sent it again, a connection was lost, or a fault was there (else `duplicate`), to
  one member of a group, and to another one only for such a reason;
- first deliveries of one publisher's messages on one topic come in sending order (`reordered`);
- every subscriber sees the messages of a topic, whoever sent them, in one order (`disagreement`);
- nothing is delivered that nobody sent (`invented`), no will of a client that said goodbye
  (`will not due`).
Per client: a connection is given nothing that was sent after the client's next connection was
accepted (`two owners`). Per topic: what is retained is what was acknowledged last (`retained`).
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise
from math import inf
from typing import Final

from tests.e2e.ledger import Delivery, Key, Ledger, Sent, Subscription, Violation

GOODBYE_S: Final = 2.0


def check(ledger: Ledger) -> list[Violation]:
    """Every broken promise; empty when all were kept."""
    found = list(ledger.accusations)
    found += _check_missing(ledger)
    faults = FaultTimes(ledger)
    for name, subscription in ledger.subscriptions.items():
        found += _check_known(ledger, faults, name, subscription)
        found += (text for _, text in _duplicates(ledger, faults, name, subscription) if text)
        if not subscription.is_group:
            found += _check_order(ledger, name, subscription)
    found += _check_agreement(ledger)
    found += _check_owners(ledger)
    found += _check_retained(ledger)
    return found


def legal_duplicates(ledger: Ledger) -> Counter[str]:
    """How many QoS 1 messages came once more, by what explains it."""
    faults = FaultTimes(ledger)
    return Counter(
        reason
        for name, subscription in ledger.subscriptions.items()
        for reason, violation in _duplicates(ledger, faults, name, subscription)
        if violation is None
    )


class FaultTimes:
    """Whether something was broken at any moment of an interval."""

    def __init__(self, ledger: Ledger) -> None:
        ordered = sorted(ledger.faults, key=lambda fault: fault.from_s)
        self._from_s = [fault.from_s for fault in ordered]
        self._newest_end_s: list[float] = []
        for fault in ordered:
            before = self._newest_end_s[-1] if self._newest_end_s else fault.to_s
            self._newest_end_s.append(max(before, fault.to_s))

    def touch(self, from_s: float, to_s: float) -> bool:
        begun = bisect_right(self._from_s, to_s)
        return begun > 0 and self._newest_end_s[begun - 1] >= from_s


def _check_missing(ledger: Ledger) -> Iterator[Violation]:
    first_seen: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for name, subscription in ledger.subscriptions.items():
        for delivery in subscription.history:
            publisher, topic, sequence = delivery.key
            seen = first_seen[name].get((publisher, topic), sequence)
            first_seen[name][publisher, topic] = min(seen, sequence)
    for name, key in ledger.missing():
        publisher, topic, sequence = key
        first = first_seen[name].get((publisher, topic))
        kind = "lost" if first is None or first < sequence else "missed after SUBACK"
        yield Violation(kind, name, f"{key} was acknowledged", key)


def _is_excused(ledger: Ledger, faults: FaultTimes, key: Key) -> bool:
    """Nothing acknowledges a goodbye: a node that ends right after it may not have kept it."""
    at_s = ledger.withdrawn[key]
    return faults.touch(at_s, at_s + GOODBYE_S)


def _check_known(
    ledger: Ledger, faults: FaultTimes, name: str, subscription: Subscription
) -> Iterator[Violation]:
    for key in dict.fromkeys(delivery.key for delivery in subscription.history):
        if key not in ledger.sent:
            yield Violation("invented", name, f"{key} was never sent", key)
        elif key in ledger.withdrawn and not _is_excused(ledger, faults, key):
            yield Violation("will not due", name, f"{key}: its client said goodbye", key)


def _duplicates(
    ledger: Ledger, faults: FaultTimes, name: str, subscription: Subscription
) -> Iterator[tuple[str, Violation | None]]:
    """For each delivery after the first: what explains it, or what it breaks."""
    newest: dict[Key, Delivery] = {}
    repeated: dict[Key, list[Delivery]] = {}
    for delivery in subscription.history:
        key = delivery.key
        before = newest.get(key)
        newest[key] = delivery
        sent = ledger.sent.get(key)
        if before is None or sent is None:
            continue
        known = repeated.setdefault(key, [before])
        known.append(delivery)
        if min(sent.qos, subscription.granted_qos(key[1]) or 0) == 2:
            yield "", Violation("duplicate", name, f"{key} at QoS 2", key)
        elif reason := _explanation(ledger, faults, sent, known):
            yield reason, None
        else:
            text = f"{key}, will: {sent.is_will}, to {known[-2].member}, then {delivery.member}"
            yield "", Violation("duplicate", name, text, key)


def _explanation(ledger: Ledger, faults: FaultTimes, sent: Sent, known: list[Delivery]) -> str:
    """Why the last of these deliveries of one message may be, below QoS 2; "" for no reason."""
    *earlier, delivery = known
    place = (delivery.member, delivery.connection)
    before = earlier[-1]
    # What is sent again at QoS 2 is recognised.
    copies = sent.sends if sent.qos == 1 else 1
    if (before.member, before.connection) != place and (
        before.member == delivery.member or _was_given_up(ledger, faults, before, delivery)
    ):
        return "resent with DUP" if delivery.dup else "sent to another connection"
    if sent.is_will:
        return ""
    there = sum((one.member, one.connection) == place for one in known)
    if max(there, len(known) if before.member != delivery.member else 0) <= copies:
        return "sent again by its publisher"
    if faults.touch(sent.at_s, ledger.acknowledged.get(delivery.key, inf)):
        return "on its way during a fault"
    return ""


def _was_given_up(ledger: Ledger, faults: FaultTimes, before: Delivery, delivery: Delivery) -> bool:
    """Whether a group's member lost its connection, or what it had from there on could be lost,
    before the message was given to another member."""
    end_s = ledger.ends.get((before.member, before.connection), inf)
    return end_s <= delivery.at_s or faults.touch(before.at_s, delivery.at_s)


def _first_deliveries(ledger: Ledger, subscription: Subscription) -> Iterator[Key]:
    """In their order, of messages that were sent after the SUBACK. Of one that was sent before, a
    first copy may lie before the subscription, and a second one, of a QoS 1 message whose outcome
    its publisher did not know, in it: so others may have had it earlier."""
    for key in dict.fromkeys(delivery.key for delivery in subscription.history):
        if key in ledger.sent and ledger.sent[key].at_s > subscription.since_s:
            yield key


def _check_order(ledger: Ledger, name: str, subscription: Subscription) -> Iterator[Violation]:
    """Of first deliveries. A group's members share them, so it is not asked of a group; nor of
    wills, which come when a server finds out."""
    newest: dict[tuple[str, str], int] = {}
    for publisher, topic, sequence in _first_deliveries(ledger, subscription):
        if publisher in ledger.unordered or ledger.sent[publisher, topic, sequence].is_will:
            continue
        before = newest.get((publisher, topic), -1)
        if sequence < before:
            key = (publisher, topic, sequence)
            yield Violation("reordered", name, f"{key} came after {before}", key)
        newest[publisher, topic] = max(before, sequence)


def _check_agreement(ledger: Ledger) -> Iterator[Violation]:
    orders: dict[str, dict[str, list[Key]]] = defaultdict(dict)
    for name, subscription in ledger.subscriptions.items():
        if not subscription.is_group:
            for key in _first_deliveries(ledger, subscription):
                orders[key[1]].setdefault(name, []).append(key)
    for topic, histories in orders.items():
        if not _have_one_order(list(histories.values())):
            yield from _disagreements(topic, histories)


def _have_one_order(histories: list[list[Key]]) -> bool:
    """Whether there is one order of which every history is a part."""
    longest = max(histories, key=len)
    position = {key: at for at, key in enumerate(longest)}
    if all(key in position for history in histories for key in history):
        return all(
            position[earlier] < position[later]
            for history in histories
            for earlier, later in pairwise(history)
        )
    return _has_no_circle(histories)


def _has_no_circle(histories: list[list[Key]]) -> bool:
    """The graph of what came before what."""
    after: dict[Key, list[Key]] = defaultdict(list)
    waiting_for: Counter[Key] = Counter()
    for history in histories:
        for earlier, later in pairwise(history):
            after[earlier].append(later)
            waiting_for[later] += 1
    keys = {key for history in histories for key in history}
    free = [key for key in keys if not waiting_for[key]]
    placed = 0
    while free:
        placed += 1
        for later in after[free.pop()]:
            waiting_for[later] -= 1
            if not waiting_for[later]:
                free.append(later)
    return placed == len(keys)


def _disagreements(topic: str, histories: dict[str, list[Key]]) -> Iterator[Violation]:
    """Only asked where there is one: compares every two."""
    found = False
    for (one, first), (other, second) in combinations(histories.items(), 2):
        common = set(first) & set(second)
        left = [key for key in first if key in common]
        right = [key for key in second if key in common]
        for mine, theirs in zip(left, right, strict=True):
            if mine != theirs:
                found = True
                text = f"{topic}: {mine} here, {theirs} at {other}"
                yield Violation("disagreement", one, text)
                break
    if not found:
        who = ", ".join(histories)
        yield Violation("disagreement", who, f"{topic}: no order is that of all")


def _check_owners(ledger: Ledger) -> Iterator[Violation]:
    for client, connection, key in ledger.former:
        accepted = ledger.connections[client]
        sent = ledger.sent.get(key)
        if connection < len(accepted) and sent is not None and sent.at_s > accepted[connection]:
            text = f"connection {connection} was given {key}, sent under its successor"
            yield Violation("two owners", client, text, key)


def _check_retained(ledger: Ledger) -> Iterator[Violation]:
    """One publisher a topic: else nobody outside knows which acknowledged message was the last."""
    newest: dict[str, int] = {}
    for publisher, topic, sequence in ledger.acknowledged:
        if ledger.sent[publisher, topic, sequence].retain:
            newest[topic] = max(newest.get(topic, -1), sequence)
    for topic, reader, key in ledger.retained:
        if key is not None and (key not in ledger.sent or not ledger.sent[key].retain):
            yield Violation("retained", reader, f"{topic}: {key} was not to be retained")
        elif (-1 if key is None else key[2]) < newest.get(topic, -1):
            text = f"{topic}: {key}, but {newest[topic]} was acknowledged"
            yield Violation("retained", reader, text)
