"""What clients want, said by everybody who may publish: true, false and hostile words."""

import json
import random

import pytest

from holdfast_federation.sidecar.edge_mqtt import interest_sources
from holdfast_federation.sidecar.edge_mqtt.interest_sources import (
    INTEREST_TOPIC,
    LOG_NOTICE,
    LOG_SUBSCRIBE,
    LOG_UNSUBSCRIBE,
    BadWord,
    InterestSources,
    SourceSettings,
)


def sources(*static: str, allowed: tuple[str, ...] = ("#",)) -> InterestSources:
    return InterestSources(SourceSettings(beacon_ttl_s=6.0), static, allowed)


def word(*filters: str, ttl: float = 60.0, client: str = "") -> bytes:
    return json.dumps({"filters": filters, "ttl": ttl, "client": client}).encode()


def wanted(interest: InterestSources, known: set[str]) -> set[str]:
    added, removed = interest.take_changes()
    assert not known & set(added)
    assert set(removed) <= known
    return (known | set(added)) - set(removed)


def test_static_ones_stay() -> None:
    interest = sources("a/#", "b")
    assert interest.take_changes() == (["a/#", "b"], [])
    interest.expire(1e9)
    assert interest.take_changes() == ([], [])


def test_a_beacon_holds_for_its_time() -> None:
    interest = sources()
    interest.handle("federator/beacon/a/b", b"whatever", 10.0)
    assert interest.take_changes() == (["a/b"], [])
    interest.handle("federator/beacon/a/b", b"", 15.0)
    interest.expire(20.9)
    assert interest.take_changes() == ([], [])
    interest.expire(21.0)
    assert interest.take_changes() == ([], ["a/b"])


def test_several_who_want_the_same() -> None:
    interest = sources("a/+")
    known = wanted(interest, set())
    interest.handle(INTEREST_TOPIC, word("a/+", "c", client="x"), 0.0)
    interest.handle(INTEREST_TOPIC, word("c", ttl=120, client="y"), 0.0)
    known = wanted(interest, known)
    assert known == {"a/+", "c"}
    interest.handle(INTEREST_TOPIC, word("a/+", "c", ttl=0, client="x"), 1.0)
    assert wanted(interest, known) == known
    interest.expire(120.0)
    assert wanted(interest, known) == {"a/+"}


def test_what_may_not_come_in_is_not_wanted() -> None:
    interest = sources("#", allowed=("in/#", "both/+"))
    interest.handle(INTEREST_TOPIC, word("+/x", "out/#", "$share/g/in/y"), 0.0)
    assert wanted(interest, set()) == {"in/#", "both/+", "in/x", "both/x", "$share/g/in/y"}


def test_own_topics_and_those_of_the_broker_are_nobodys() -> None:
    interest = sources()
    interest.own_clients = frozenset({"me"})
    interest.handle(LOG_SUBSCRIBE, b"1795346351: me 2 wanted/by/others", 0.0)
    interest.handle(LOG_SUBSCRIBE, b"1795346351: other 0 $SYS/#", 0.0)
    interest.handle(LOG_SUBSCRIBE, b"1795346351: other 0 federator/interest", 0.0)
    interest.handle("federator/beacon/$SYS/x", b"", 0.0)
    assert interest.take_changes() == ([], [])


def test_the_log_of_mosquitto() -> None:
    """Lines as Mosquitto 2.0.11 writes them."""
    interest = sources()
    interest.handle(
        LOG_NOTICE, b"1: New client connected from 127.0.0.1:5 as c l (p2, c1, k60).", 0.0
    )
    interest.handle(LOG_NOTICE, b"1: New client connected from ::1:5 as kept (p2, c0, k60).", 0.0)
    interest.handle(LOG_NOTICE, b"1: New client connected from ::1:5 as five (p5, c1, k60).", 0.0)
    for client in ("c l", "kept", "five"):
        interest.handle(LOG_SUBSCRIBE, f"1: {client} 1 {client[0]}/x y/+".encode(), 0.0)
    interest.handle(LOG_SUBSCRIBE, b"1: kept 2 $share/g/shared/#", 0.0)
    known = wanted(interest, set())
    assert known == {"c/x y/+", "k/x y/+", "f/x y/+", "$share/g/shared/#"}
    interest.handle(LOG_UNSUBSCRIBE, b"1: kept k/x y/+", 0.0)
    for client in ("c l", "kept", "five"):
        interest.handle(LOG_NOTICE, f"1: Client {client} disconnected.".encode(), 0.0)
    assert wanted(interest, known) == {"f/x y/+", "$share/g/shared/#"}


@pytest.mark.parametrize(
    ("topic", "payload"),
    [
        (INTEREST_TOPIC, b""),
        (INTEREST_TOPIC, b"\xff"),
        (INTEREST_TOPIC, b"null"),
        (INTEREST_TOPIC, b"[" * 60_000),
        (INTEREST_TOPIC, b'{"filters": ["a"]}'),
        (INTEREST_TOPIC, b'{"filters": ["a"], "ttl": 60, "x": 1}'),
        (INTEREST_TOPIC, b'{"filters": [1], "ttl": 60}'),
        (INTEREST_TOPIC, b'{"filters": ["a/#/b"], "ttl": 60}'),
        (INTEREST_TOPIC, b'{"filters": [""], "ttl": 60}'),
        (INTEREST_TOPIC, b'{"filters": ["$share/g"], "ttl": 60}'),
        (INTEREST_TOPIC, b'{"filters": ["a"], "ttl": -1}'),
        (INTEREST_TOPIC, b'{"filters": ["a"], "ttl": 1e999}'),
        (INTEREST_TOPIC, word(*["a"] * 1001)),
        (INTEREST_TOPIC, b" " * 65_537),
        ("federator/beacon/", b""),
        (LOG_SUBSCRIBE, b"nonsense"),
        (LOG_SUBSCRIBE, b"1: c 1 a/#/b"),
        (LOG_UNSUBSCRIBE, b"\xff\xff"),
    ],
)
def test_refused_and_counted(topic: str, payload: bytes) -> None:
    interest = sources()
    with pytest.raises(BadWord):
        interest.handle(topic, payload, 0.0)
    assert sum(interest.refused.values()) == 1
    assert interest.take_changes() == ([], [])


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interest_sources, "HELD_MAX", 10)
    interest = sources("static")
    for number in range(9):
        interest.handle(f"federator/beacon/{number}", b"", 0.0)
    with pytest.raises(BadWord, match="10 filters"):
        interest.handle("federator/beacon/one-more", b"", 0.0)
    # What is wanted already may be said again, and what has expired makes room.
    interest.handle("federator/beacon/1", b"", 5.0)
    interest.expire(6.0)
    interest.handle("federator/beacon/one-more", b"", 6.0)
    assert len(interest) == 3


def test_survives_a_restart_with_the_time_that_is_left() -> None:
    interest = sources("static")
    interest.handle("federator/beacon/a", b"", 10.0)
    interest.handle(INTEREST_TOPIC, word("b/#", ttl=100, client="x"), 10.0)
    kept = interest.snapshot(14.0)
    assert len(kept) == 2
    after = sources("static")
    after.restore(kept, 1000.0)
    known = wanted(after, set())
    assert known == {"static", "a", "b/#"}
    after.expire(1002.0)
    known = wanted(after, known)
    assert known == {"static", "b/#"}
    after.expire(1096.0)
    assert wanted(after, known) == {"static"}


def test_a_statement_that_is_valid_for_longer_is_to_be_saved() -> None:
    """A start would otherwise restore the shorter validity. A renewal need not be saved."""
    interest = sources()
    for ttl, is_longer in ((10, True), (10, False), (100, True), (50, False)):
        interest.handle(INTEREST_TOPIC, word("a/#", ttl=ttl, client="x"), 1.0)
        assert interest.is_longer == is_longer
        interest.snapshot(1.0)
        assert not interest.is_longer
    interest.handle(INTEREST_TOPIC, word("a/#", ttl=0, client="x"), 2.0)
    interest.handle(INTEREST_TOPIC, word("a/#", ttl=10, client="x"), 2.0)
    assert interest.is_longer


def test_any_bytes_at_all() -> None:
    choose = random.Random(3)
    interest = sources()
    topics = [INTEREST_TOPIC, LOG_SUBSCRIBE, LOG_UNSUBSCRIBE, LOG_NOTICE, "federator/beacon/x"]
    good = word("a/#", "b")
    refused = 0
    for _ in range(3000):
        payload = bytearray(choose.choice([good, b"1: client 1 a/b", b"", b"\0"]))
        for _ in range(choose.randint(0, 4)):
            payload.insert(choose.randint(0, len(payload)), choose.randrange(256))
        try:
            interest.handle(choose.choice(topics), bytes(payload), 0.0)
        except BadWord:
            refused += 1
    interest.take_changes()
    assert 0 < refused == sum(interest.refused.values())
