"""Bounds on connections whose CONNECT is not answered: bytes and places are always given back."""

import random

import pytest

from holdfast.node.connections.pending_connects import (
    PendingConnects,
    PendingHandshake,
    address_of,
)
from holdfast.node.session.connection import (
    AUTHENTICATING,
    CLOSED,
    EXCHANGING,
    NEW,
    Connection,
)
from holdfast.node.session.listener_rules import ListenerRules


def connection(number: int) -> Connection:
    return Connection(1000, f"10.0.0.{number % 3}:{number}", ListenerRules("l"))


def test_any_order_of_events_leaves_nothing_behind() -> None:
    chance = random.Random(7)
    pending = PendingConnects(1 << 30, 10)
    there: list[Connection] = []
    for number in range(2000):
        kind = chance.random()
        if kind < 0.3 or not there:
            one = connection(number)
            pending.enter(one)
            there.append(one)
            continue
        one = chance.choice(there)
        if kind < 0.6:
            pending.buffer(one, chance.choice([0, 10, 500]))
        elif kind < 0.75:
            one.state = AUTHENTICATING
            pending.receive_connect(one, 100)
        else:
            pending.leave(one)
            pending.leave(one)
            there.remove(one)
        assert len(pending) == len(there)
    for one in there:
        pending.leave(one)
    assert (len(pending), pending.bytes) == (0, 0)
    assert not pending.is_crowded("10.0.0.1:1")
    pending.buffer(there[0], 10)
    assert pending.bytes == 0


def test_the_oldest_makes_room_however_slowly_it_sends() -> None:
    pending = PendingConnects(100, 0)
    first, second = connection(1), connection(2)
    for one in (first, second):
        pending.enter(one)
        pending.buffer(one, 10)
    pending.buffer(first, 11)
    assert pending.oldest_holder() is first
    assert pending.oldest() is first
    first.state = CLOSED
    assert pending.oldest_holder() is second
    pending.receive_connect(second, 50)
    assert pending.bytes == 11 + 60


@pytest.mark.parametrize("state", [NEW, EXCHANGING, AUTHENTICATING])
def test_who_has_proved_nothing_makes_room_in_every_state(state: int) -> None:
    pending = PendingConnects(100, 0)
    handshake = PendingHandshake(lambda: None)
    first, later = connection(1), connection(2)
    pending.enter(first)
    pending.begin_handshake(handshake)
    pending.enter(later)
    assert pending.unproved == 2
    if state != NEW:
        pending.receive_connect(first, 50)
        first.state = state
        assert pending.oldest_holder() is first
    assert pending.oldest() is first
    pending.note_proof(first)
    assert pending.oldest() is handshake
    assert pending.oldest_holder() is None
    assert pending.unproved == 1
    pending.end_handshake(handshake)
    pending.end_handshake(handshake)
    assert pending.oldest() is later
    pending.leave(later)
    pending.leave(first)
    assert (pending.oldest(), pending.unproved, pending.bytes) == (None, 0, 0)


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("10.0.0.1:1883", "10.0.0.1"),
        ("2001:db8::1:1883", "2001:db8::/64"),
        ("2001:db8::ffff:1:1883", "2001:db8::/64"),
        ("2001:db8:0:1::1:1883", "2001:db8:0:1::/64"),
        ("fe80::1%eth0:1883", "fe80::/64"),
        ("::1:1883", "::/64"),
        ("::ffff:10.0.0.1:1883", "10.0.0.1"),
        ("?", ""),
        ("a:b:c:1", "a:b:c"),
    ],
)
def test_address_of(remote: str, address: str) -> None:
    assert address_of(remote) == address


def test_address_limit() -> None:
    pending = PendingConnects(100, 2)
    ones = [connection(1), connection(4)]
    for one in ones:
        pending.enter(one)
    assert pending.is_crowded("10.0.0.1:9")
    assert not pending.is_crowded("10.0.0.2:9")
    pending.leave(ones[0])
    assert not pending.is_crowded("10.0.0.1:9")
