"""The ledger must find what is planted in a history, and nothing in a right one."""

from collections.abc import Callable

import pytest

from tests.e2e.ledger import Interest, Key, Ledger

TOPICS = ("load/a", "load/b")


def right_history() -> Ledger:
    """Two publishers with 20 messages each on two topics, QoS 1 and 2, three subscribers."""
    ledger = Ledger()
    ledger.subscribe("one", [Interest("load/#", 1)])
    ledger.subscribe("two", [Interest("load/+", 2)])
    ledger.subscribe("exact", [Interest("load/a", 2)])
    for sequence in range(20):
        for publisher, qos in (("p1", 1), ("p2", 2)):
            for topic in TOPICS:
                key = (publisher, topic, sequence)
                ledger.send(key, qos)
                ledger.acknowledge(key)
                for subscriber in ("one", "two", "exact"):
                    if ledger.granted_qos(subscriber, topic):
                        ledger.deliver(subscriber, key)
    return ledger


def kinds(ledger: Ledger) -> set[tuple[str, str]]:
    return {(violation.kind, violation.who) for violation in ledger.check()}


def test_right_history() -> None:
    ledger = right_history()
    assert ledger.check() == []
    assert len(ledger.deliveries["one"]) == 80
    assert len(ledger.deliveries["exact"]) == 40


def test_allowed_deviations() -> None:
    ledger = right_history()
    ledger.deliver("one", ("p2", "load/a", 3))  # again, at QoS 1
    ledger.deliver("two", ("p1", "load/a", 3))  # published with QoS 1
    ledger.send(("p1", "load/a", 20), 1)  # never acknowledged, never delivered
    ledger.send(("p1", "load/b", 20), 1)  # never acknowledged, delivered to one only
    ledger.deliver("one", ("p1", "load/b", 20))
    assert ledger.check() == []


def swap(ledger: Ledger, subscriber: str, first: Key, second: Key) -> None:
    history = ledger.deliveries[subscriber]
    a, b = history.index(first), history.index(second)
    history[a], history[b] = history[b], history[a]


def lose(ledger: Ledger) -> None:
    ledger.deliveries["one"].remove(("p1", "load/b", 7))


def lose_last(ledger: Ledger) -> None:
    ledger.deliveries["exact"].remove(("p2", "load/a", 19))


def lose_everything(ledger: Ledger) -> None:
    ledger.deliveries["two"].clear()


def duplicate(ledger: Ledger) -> None:
    ledger.deliver("two", ("p2", "load/a", 3))


def reorder(ledger: Ledger) -> None:
    swap(ledger, "two", ("p2", "load/b", 4), ("p2", "load/b", 5))


def disagree(ledger: Ledger) -> None:
    swap(ledger, "exact", ("p1", "load/a", 4), ("p2", "load/a", 4))


def invent(ledger: Ledger) -> None:
    ledger.deliver("one", ("p3", "load/a", 1))


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (lose, {("lost", "one")}),
        (lose_last, {("lost", "exact")}),
        (lose_everything, {("lost", "two")}),
        (duplicate, {("duplicate", "two")}),
        (reorder, {("reordered", "two"), ("disagreement", "one")}),
        (disagree, {("disagreement", "one"), ("disagreement", "two")}),
        (invent, {("invented", "one")}),
    ],
)
def test_planted(plant: Callable[[Ledger], None], expected: set[tuple[str, str]]) -> None:
    ledger = right_history()
    plant(ledger)
    assert kinds(ledger) == expected


def test_refused_is_no_promise() -> None:
    ledger = right_history()
    key = ("p1", "load/a", 20)
    ledger.send(key, 1)
    ledger.refuse(key)
    assert ledger.check() == []


def test_accusations_are_kept() -> None:
    ledger = right_history()
    ledger.accuse("session lost", "two", "CONNACK said no session")
    assert kinds(ledger) == {("session lost", "two")}


@pytest.mark.parametrize(
    ("filter_", "topic", "expected"),
    [
        ("load/a", "load/a", True),
        ("load/a", "load/b", False),
        ("load/+", "load/b", True),
        ("load/+", "load/b/c", False),
        ("load/#", "load/b/c", True),
        ("load/#", "load", True),
        ("load/#", "other/b", False),
        ("+/+/x", "load/1/x", True),
        ("#", "a/b", True),
    ],
)
def test_interest(filter_: str, topic: str, expected: bool) -> None:
    assert Interest(filter_, 1).matches(topic) is expected
