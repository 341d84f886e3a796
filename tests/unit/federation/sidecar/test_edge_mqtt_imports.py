"""What goes to a broker: in order, once, through cuts and refusals."""

import random
from collections.abc import Callable

import pytest

from holdfast_federation.core.effects import Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.edge_mqtt import imports as edge_imports
from holdfast_federation.sidecar.edge_mqtt.imports import Import, Imports


def id_of(number: int) -> MessageId:
    return MessageId(b"N" * 16, 1, number)


def give(imports: Imports, number: int, done: Callable[[], None], qos: int = 1) -> None:
    now_done = imports.deliver(id_of(number), Message("t", b"", qos), number, done, 0.0)
    if now_done is not None:
        now_done()


def test_in_order_and_done_once() -> None:
    imports = Imports()
    dones: list[int] = []
    for number in (1, 2, 3):
        give(imports, number, lambda n=number: dones.append(n))  # type: ignore[misc]
    sent = [entry for _ in range(3) if (entry := imports.next())]
    assert [entry.place for entry in sent] == [1, 2, 3]
    assert imports.next() is None
    for entry in sent:
        done = imports.finished(entry, "delivered")
        assert done is not None
        done()
    assert dones == [1, 2, 3]
    assert len(imports) == 0


def test_what_is_on_its_way_is_not_sent_again() -> None:
    """It was sent, the connection is lost, the host gives it again: the client repeats it."""
    imports = Imports()
    dones: list[str] = []
    for number in (1, 2, 3):
        give(imports, number, lambda: dones.append("stale"))
    first, second = imports.next(), imports.next()
    assert first is not None
    assert second is not None
    imports.down()
    # The acknowledgement of the first comes before the host gives anything.
    assert imports.finished(first, "delivered") is None
    for number in (1, 2, 3):
        give(imports, number, lambda n=number: dones.append(str(n)))  # type: ignore[misc]
    assert dones == ["1"]
    done = imports.finished(second, "delivered")
    assert done is not None
    done()
    third = imports.next()
    assert third is not None
    assert third.place == 3
    assert dones == ["1", "2"]


def test_unacknowledged_ones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_imports, "WAITING_MAX", 2)
    imports = Imports()
    dones: list[int] = []
    for number in (1, 2, 3):
        give(imports, number, lambda n=number: dones.append(n), 0)  # type: ignore[misc]
    assert dones == [3]
    assert imports.counts == {"no room": 1}


def test_random_cuts() -> None:
    """A host that gives in order from the first that is not done, a client that keeps what was sent
    while the session lives: every message gets to the broker once, in order."""
    choose = random.Random(5)
    for _ in range(300):
        imports = Imports()
        undone = list(range(1, 31))
        broker: list[int] = []
        on_the_way: list[Import] = []
        given = 0

        def done(number: int) -> None:
            undone.remove(number)  # noqa: B023

        def give_next(number: int) -> None:
            give(imports, number, lambda: done(number))  # noqa: B023

        steps = 0
        while undone:
            steps += 1
            assert steps < 2000
            what = choose.random()
            if what < 0.4 and given < len(undone):
                give_next(undone[given])
                given += 1
            elif what < 0.65:
                entry = imports.next()
                if entry is not None:
                    on_the_way.append(entry)
                    broker.append(entry.place)
            elif what < 0.9 and on_the_way:
                before = len(undone)
                finished = imports.finished(on_the_way.pop(0), "delivered")
                if finished is not None:
                    finished()
                given -= before - len(undone)
            elif what > 0.95:
                imports.down()
                given = 0
                if choose.random() < 0.5 and on_the_way:
                    assert imports.finished(on_the_way.pop(0), "delivered") is None
                for number in list(undone):
                    before = len(undone)
                    give_next(number)
                    given += 1 - (before - len(undone))
        assert broker == list(range(1, 31))
