"""What is retained anew where nobody elsewhere wants the topic any more is still the newest."""

import itertools
from pathlib import Path

from tests.e2e.federated import Member, line
from tests.e2e.pair import wait_until
from tests.interop.paho_client import Paho


def test_a_newer_message_is_not_replaced_by_an_older_one(tmp_path: Path) -> None:
    names = itertools.count()

    def found(member: Member) -> bytes:
        with Paho(member.port, f"looks-{next(names)}") as client:
            client.subscribe("kept/#", 1)
            payload: bytes = client.message().payload
            return payload

    with (
        line(tmp_path, "ab") as (a, b),
        Paho(a.port, "at-a") as at_a,
        Paho(b.port, "at-b") as at_b,
    ):
        at_a.publish("kept/x", b"old", 1, True)
        assert found(b) == b"old"
        wait_until(lambda: not a.sends("kept/#"), "nobody at b wants it")
        at_b.publish("kept/x", b"new", 1, True)
        with Paho(a.port, "wants") as wants:
            wants.subscribe("kept/#", 1)
            assert wants.message().payload == b"old"
            wait_until(lambda: found(a) == b"new", "a has the newest")
        assert found(b) == b"new"


def test_what_was_removed_does_not_come_back(tmp_path: Path) -> None:
    with line(tmp_path, "ab") as (a, b):
        with Paho(a.port, "at-a") as at_a, Paho(b.port, "at-b") as at_b:
            at_a.publish("kept/x", b"old", 1, True)
            at_b.subscribe("kept/#", 1)
            assert at_b.message().payload == b"old"
            at_b.unsubscribe("kept/#")
            wait_until(lambda: not a.sends("kept/#"), "nobody at b wants it")
            at_b.publish("kept/x", b"", 1, True)
        assert b.stop() == 0
        b.start()
        wait_until(lambda: a.is_linked(1) and b.is_linked(1), "b is linked again")
        with Paho(b.port, "looks") as looks:
            looks.subscribe("kept/#", 1)
            wait_until(lambda: a.sends("kept/#"), "a knows that b wants it")
            with Paho(a.port, "at-a-again") as at_a:
                at_a.publish("kept/y", b"another", 1)
            assert looks.message().payload == b"another"

        def nothing_at(member: Member) -> bool:
            with Paho(member.port, f"looks-at-{member.name}") as looks:
                looks.subscribe("kept/#", 1)
                looks.publish("kept/end", b"end", 1)
                payload: bytes = looks.message().payload
                return payload == b"end"

        wait_until(lambda: nothing_at(a), "it is gone where it came from, too")
        assert nothing_at(b)
