"""The ledger must find what is planted in a history, and nothing in a right one."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.e2e.ledger import Delivery, Interest, Key, Ledger
from tests.e2e.ledger_checks import check, legal_duplicates

TOPICS = ("load/a", "load/b")
STATE = ("p1", "state/x")
WILL = ("w1", "load/wills", 1)
GOODBYE = ("w2", "load/wills", 1)


def right_history() -> Ledger:
    """Two publishers with 20 messages each on two topics, QoS 1 and 2; three subscribers, a group
    of two, and a late one; retained messages, a will, and one that was withdrawn."""
    ledger = Ledger()
    for client, interests, group in (
        ("one", [Interest("load/#", 1)], ""),
        ("two", [Interest("load/+", 2)], ""),
        ("exact", [Interest("load/a", 2)], ""),
        ("m1", [Interest("load/a", 2)], "group"),
        ("m2", [Interest("load/a", 2)], "group"),
    ):
        ledger.subscribe(client, interests, group)
        ledger.subscribed(client, 1.0)
        ledger.connected(client, 0.5)
    for sequence in range(20):
        if sequence == 10:
            ledger.subscribe("late", [Interest("load/#", 2)])
            ledger.subscribed("late", 11.5)
        for publisher, qos in (("p1", 1), ("p2", 2)):
            for topic in TOPICS:
                publish(ledger, (publisher, topic, sequence), qos, 2.0 + sequence)
    for sequence in range(3):
        key = (*STATE, sequence)
        ledger.send(key, 1, 30.0 + sequence, retain=True)
        ledger.acknowledge(key, 30.5 + sequence)
    for reader in ("n1", "n2"):
        ledger.find_retained("state/x", reader, (*STATE, 2))
    ledger.send(WILL, 2, 40.0, is_will=True)
    ledger.acknowledge(WILL, 41.0)
    deliver(ledger, WILL, 41.5)
    ledger.send(GOODBYE, 2, 40.0, is_will=True)
    ledger.withdraw(GOODBYE, 42.5)
    return ledger


def publish(ledger: Ledger, key: Key, qos: int, at_s: float) -> None:
    ledger.send(key, qos, at_s)
    ledger.acknowledge(key, at_s + 0.2)
    deliver(ledger, key, at_s + 0.3)


def deliver(ledger: Ledger, key: Key, at_s: float) -> None:
    """To everybody whose filters match; to one of the group."""
    for name, subscription in ledger.subscriptions.items():
        if subscription.granted_qos(key[1]):
            client = ("m1", "m2")[key[2] % 2] if subscription.is_group else name
            ledger.deliver(client, key, at_s)


def kinds(ledger: Ledger) -> set[tuple[str, str]]:
    return {(violation.kind, violation.who) for violation in check(ledger)}


def history(ledger: Ledger, name: str) -> list[Delivery]:
    return ledger.subscriptions[name].history


def remove(ledger: Ledger, name: str, *keys: Key) -> None:
    kept = [delivery for delivery in history(ledger, name) if delivery.key not in keys]
    assert len(kept) == len(history(ledger, name)) - len(keys)
    ledger.subscriptions[name].history = kept


def swap(ledger: Ledger, name: str, first: Key, second: Key) -> None:
    deliveries = history(ledger, name)
    keys = [delivery.key for delivery in deliveries]
    a, b = keys.index(first), keys.index(second)
    deliveries[a], deliveries[b] = deliveries[b], deliveries[a]


def test_right_history() -> None:
    ledger = right_history()
    assert check(ledger) == []
    assert legal_duplicates(ledger) == {}
    counts = {name: len(history(ledger, name)) for name in ledger.subscriptions}
    assert counts == {"one": 81, "two": 81, "exact": 40, "group": 40, "late": 41}


def test_allowed_deviations() -> None:
    ledger = right_history()
    # Again at QoS 1, on a later connection; published with QoS 1.
    ledger.deliver("one", ("p2", "load/a", 3), 50.0, connection=2, dup=True)
    ledger.deliver("one", ("p2", "load/a", 4), 50.0, connection=2)
    ledger.deliver("two", ("p1", "load/a", 3), 50.0, connection=2, dup=True)
    # The publisher did not know the outcome and sent it again.
    ledger.send(("p1", "load/a", 5), 1, 50.0)
    ledger.deliver("one", ("p1", "load/a", 5), 50.0)
    # Never acknowledged: delivered to nobody, or to one only.
    ledger.send(("p1", "load/a", 20), 1, 50.0)
    ledger.send(("p1", "load/b", 20), 1, 50.0)
    ledger.deliver("one", ("p1", "load/b", 20), 50.1)
    # On its way when a node was killed: the one that took it in may have handed it on twice.
    ledger.fault("kill -9", 3.1, 4.0)
    ledger.deliver("one", ("p1", "load/a", 1), 50.2)
    # A QoS 1 message that one member did not acknowledge goes to another, when it is gone.
    ledger.disconnected("m2", 50.2)
    ledger.deliver("m1", ("p1", "load/a", 1), 50.3, dup=True)
    # Retained and not acknowledged; sent to the former connection before the next was accepted.
    ledger.send((*STATE, 3), 1, 50.0, retain=True)
    ledger.find_retained("state/x", "n3", (*STATE, 3))
    ledger.connected("one", 49.0)
    ledger.deliver_former("one", 1, ("p1", "load/a", 19))
    assert check(ledger) == []
    assert legal_duplicates(ledger) == {
        "resent with DUP": 3,
        "sent to another connection": 1,
        "sent again by its publisher": 1,
        "on its way during a fault": 1,
    }


def test_what_was_sent_before_the_suback_is_not_owed() -> None:
    ledger = right_history()
    ledger.subscribe("unanswered", [Interest("#", 2)])
    assert check(ledger) == []
    ledger.subscribed("unanswered", 100.0)
    assert check(ledger) == []
    ledger.send(("p1", "load/a", 20), 1, 100.1)
    ledger.acknowledge(("p1", "load/a", 20), 100.2)
    assert ("missed after SUBACK", "unanswered") not in kinds(ledger)
    assert ("lost", "unanswered") in kinds(ledger)


def lose(ledger: Ledger) -> None:
    remove(ledger, "one", ("p1", "load/b", 7))


def lose_last(ledger: Ledger) -> None:
    remove(ledger, "exact", ("p2", "load/a", 19))


def lose_everything(ledger: Ledger) -> None:
    history(ledger, "two").clear()


def lose_in_group(ledger: Ledger) -> None:
    remove(ledger, "group", ("p1", "load/a", 8))


def lose_after_suback(ledger: Ledger) -> None:
    remove(ledger, "late", ("p1", "load/a", 10))


def lose_will(ledger: Ledger) -> None:
    remove(ledger, "two", WILL)


def duplicate(ledger: Ledger) -> None:
    ledger.deliver("two", ("p2", "load/a", 3), 50.0, connection=2, dup=True)


def duplicate_in_group(ledger: Ledger) -> None:
    ledger.deliver("m1", ("p2", "load/a", 3), 50.0)


def duplicate_at_another_member(ledger: Ledger) -> None:
    ledger.disconnected("m1", 50.0)
    ledger.deliver("m1", ("p1", "load/a", 3), 50.3)


def duplicate_unexplained(ledger: Ledger) -> None:
    ledger.deliver("one", ("p1", "load/a", 3), 50.0)


def duplicate_once_too_often(ledger: Ledger) -> None:
    ledger.send(("p1", "load/a", 3), 1, 49.0)
    for _ in range(2):
        ledger.deliver("one", ("p1", "load/a", 3), 50.0)


def duplicate_outside_a_fault(ledger: Ledger) -> None:
    ledger.fault("kill -9", 0.0, 4.9)
    ledger.fault("SIGSTOP", 5.3, 9.0)
    ledger.deliver("one", ("p1", "load/a", 3), 50.0)


def duplicate_will(ledger: Ledger) -> None:
    ledger.fault("kill -9", 40.5, 42.0)
    ledger.deliver("one", WILL, 50.0)


def reorder(ledger: Ledger) -> None:
    swap(ledger, "two", ("p2", "load/b", 4), ("p2", "load/b", 5))


def disagree(ledger: Ledger) -> None:
    swap(ledger, "exact", ("p1", "load/a", 4), ("p2", "load/a", 4))


def disagree_in_a_circle(ledger: Ledger) -> None:
    """Every two agree on what both have."""
    keys: list[Key] = [(name, "round/x", 1) for name in "abc"]
    for client, order in (("x", (0, 1)), ("y", (1, 2)), ("z", (2, 0))):
        ledger.subscribe(client, [Interest("round/#", 1)])
        ledger.subscribed(client, 55.0)
        for at in order:
            ledger.send(keys[at], 1, 60.0)
            ledger.deliver(client, keys[at], 61.0)


def invent(ledger: Ledger) -> None:
    ledger.deliver("one", ("p3", "load/a", 1), 50.0)


def will_after_goodbye(ledger: Ledger) -> None:
    ledger.deliver("one", GOODBYE, 50.0)


def test_a_will_of_which_its_client_knows_nothing_may_come_late() -> None:
    ledger = right_history()
    for number in (3, 2):
        key = ("w1", "load/wills", number)
        ledger.send(key, 2, 45.0, is_will=True)
        deliver(ledger, key, 46.0)
    assert check(ledger) == []


def test_a_goodbye_just_before_a_fault_may_be_forgotten() -> None:
    ledger = right_history()
    will_after_goodbye(ledger)
    ledger.fault("kill -9", 43.0, 44.0)
    assert check(ledger) == []


def deliver_to_two_owners(ledger: Ledger) -> None:
    ledger.connected("one", 10.0)
    ledger.deliver_former("one", 1, ("p1", "load/a", 9))


def retain_older(ledger: Ledger) -> None:
    ledger.find_retained("state/x", "n3", (*STATE, 1))


def retain_nothing(ledger: Ledger) -> None:
    ledger.find_retained("state/x", "n3", None)


def retain_another(ledger: Ledger) -> None:
    ledger.find_retained("state/x", "n3", ("p1", "load/a", 19))


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (lose, {("lost", "one")}),
        (lose_last, {("lost", "exact")}),
        (lose_everything, {("lost", "two")}),
        (lose_in_group, {("lost", "group")}),
        (lose_after_suback, {("missed after SUBACK", "late")}),
        (lose_will, {("lost", "two")}),
        (duplicate, {("duplicate", "two")}),
        (duplicate_in_group, {("duplicate", "group")}),
        (duplicate_at_another_member, {("duplicate", "group")}),
        (duplicate_unexplained, {("duplicate", "one")}),
        (duplicate_once_too_often, {("duplicate", "one")}),
        (duplicate_outside_a_fault, {("duplicate", "one")}),
        (duplicate_will, {("duplicate", "one")}),
        (reorder, {("reordered", "two"), ("disagreement", "one")}),
        (disagree, {("disagreement", "one"), ("disagreement", "two")}),
        (disagree_in_a_circle, {("disagreement", "x, y, z")}),
        (invent, {("invented", "one")}),
        (will_after_goodbye, {("will not due", "one")}),
        (deliver_to_two_owners, {("two owners", "one")}),
        (retain_older, {("retained", "n3")}),
        (retain_nothing, {("retained", "n3")}),
        (retain_another, {("retained", "n3")}),
    ],
)
def test_planted(plant: Callable[[Ledger], None], expected: set[tuple[str, str]]) -> None:
    ledger = right_history()
    plant(ledger)
    assert kinds(ledger) == expected


@pytest.mark.parametrize("seed", range(20))
def test_any_lost_delivery_and_any_swap_is_found(seed: int) -> None:
    rng = random.Random(seed)
    ledger = right_history()
    name = rng.choice(["one", "two", "exact", "late"])
    owed = [one.key for one in history(ledger, name) if one.key[2] >= 10]
    remove(ledger, name, rng.choice(owed))
    assert {kind for kind, who in kinds(ledger)} <= {"lost", "missed after SUBACK"}
    assert {who for _, who in kinds(ledger)} == {name}
    ledger = right_history()
    topic = rng.choice([topic for topic in TOPICS if name != "exact" or topic == "load/a"])
    keys = [one.key for one in history(ledger, name) if one.key[1] == topic]
    swap(ledger, name, *rng.sample(keys, 2))
    assert "disagreement" in {kind for kind, _ in kinds(ledger)}


def test_refused_is_no_promise() -> None:
    ledger = right_history()
    key = ("p1", "load/a", 20)
    ledger.send(key, 1, 50.0)
    ledger.refuse(key)
    assert check(ledger) == []


def test_a_library_that_overtakes_itself() -> None:
    """Only the order of one publisher's messages is then not asked for: all must still agree."""
    ledger = right_history()
    ledger.may_reorder("p1")
    for name in ("one", "two", "late"):
        swap(ledger, name, ("p1", "load/b", 14), ("p1", "load/b", 15))
    assert check(ledger) == []
    swap(ledger, "one", ("p1", "load/b", 16), ("p1", "load/b", 17))
    assert {kind for kind, _ in kinds(ledger)} == {"disagreement"}


def test_a_second_copy_within_a_subscription_whose_first_lies_before_it() -> None:
    ledger = Ledger()
    for name, since_s in (("old", 0.0), ("new", 2.0)):
        ledger.subscribe(name, [Interest("#", 1)])
        ledger.subscribed(name, since_s)
    keys: list[Key] = [("p", "t", number) for number in range(3)]
    ledger.send(keys[0], 1, 1.0)
    ledger.send(keys[1], 1, 1.9)
    ledger.send(keys[0], 1, 3.0)
    ledger.send(keys[1], 1, 3.0)
    ledger.send(keys[2], 1, 3.0)
    for at in (0, 1, 0, 1, 2):
        ledger.deliver("old", keys[at], 4.0)
    for at in (1, 0, 1, 2):
        ledger.deliver("new", keys[at], 4.0)
    assert check(ledger) == []


def test_a_delivery_before_the_suback_counts() -> None:
    ledger = Ledger()
    ledger.subscribe("s", [Interest("#", 1)])
    ledger.send(("p", "t", 0), 1, 1.0)
    ledger.deliver("s", ("p", "t", 0), 1.1)
    ledger.subscribed("s", 1.2)
    assert check(ledger) == []
    ledger.subscriptions["s"].history[0] = replace(history(ledger, "s")[0], key=("p", "t", 1))
    assert kinds(ledger) == {("invented", "s")}


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
