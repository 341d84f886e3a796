"""Order and repetitions on the subscriber's side; ids as they travel."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from holdfast.client.client import Client
from holdfast.client.errors import ConnectionLost
from holdfast.client.identity import ProducerIdentity, identity_of, parse_identity
from holdfast.client.protocol.effects import Message
from holdfast.client.pubqueue.format import PaperFormat, SequenceFormat, parse_paper
from holdfast.client.pubqueue.ordered import (
    DUPLICATE,
    LATE,
    NEW,
    Deduplicate,
    identify,
    ordered_messages,
)
from holdfast.protocol.mqtt import properties as pr


def of(sequence: int, epoch: int = 1, producer: str = "p") -> ProducerIdentity:
    return ProducerIdentity(producer, epoch, sequence)


def test_identities() -> None:
    for text in ("a:0:1", "A-b_c.9:4294967295:9223372036854775807"):
        assert str(parse_identity(text)) == text
    for text in (
        "",
        "a:1",
        "a:1:1:1",
        ":1:1",
        "a:1:0",
        "a:01:1",
        "a:1:+1",
        "a:1:1 ",
        "a:-1:1",
        "a:4294967296:1",
        "a:1:9223372036854775808",
        "a:1:٣",
        "é:1:1",
        "a" * 65 + ":1:1",
        "a:1:1\n",
    ):
        with pytest.raises(ValueError):
            parse_identity(text)
    assert identity_of({}) is None
    assert identity_of({pr.USER_PROPERTY: [("x", "y")]}) is None
    assert identity_of({pr.USER_PROPERTY: [("x", "y"), ("hf-seq", "a:1:2")]}) == of(2, 1, "a")
    with pytest.raises(ValueError, match="2 properties"):
        identity_of({pr.USER_PROPERTY: [("hf-seq", "a:1:2"), ("hf-seq", "a:1:2")]})


def test_paper_form() -> None:
    form = PaperFormat("user2")
    assert form.encode("안녕".encode(), 17) == '{"id":17,"msg":"안녕","sender":"user2"}'.encode()
    assert parse_paper(form.encode(b'"quoted"', 17)) == (17, '"quoted"', "user2")
    assert form.next_sequence(0, 12.3456) == 12345
    assert form.next_sequence(12345, 12.3456) == 12346
    assert form.next_sequence(99999, 12.3456) == 100000
    assert SequenceFormat().next_sequence(4, 12.0) == 5
    for payload in (
        b"",
        b"7",
        b"[]",
        b'{"id":1}',
        b'{"id":true,"msg":"","sender":""}',
        b'{"id":-1,"msg":"","sender":""}',
        b'{"id":1.5,"msg":"","sender":""}',
        b'{"id":1,"msg":2,"sender":""}',
        b"[" * 100_000,
        b"\xff",
    ):
        with pytest.raises(ValueError):
            parse_paper(payload)


def test_deduplicate() -> None:
    filter = Deduplicate(producers_max=2, remembered_max=4)
    assert [filter.judge(of(n)) for n in (5, 7, 7, 5, 6, 6, 8)] == [
        *[NEW, NEW, DUPLICATE, DUPLICATE, LATE, DUPLICATE, NEW],
    ]
    # A new epoch may count from the beginning; what is left of the old one is late.
    assert [filter.judge(of(1, 2)), filter.judge(of(9, 1)), filter.judge(of(2, 2))] == [
        *[NEW, LATE, NEW],
    ]
    # Older than everything remembered: a repetition, most likely.
    assert filter.judge(of(5)) == DUPLICATE
    # A third producer makes the longest silent one forgotten.
    assert filter.judge(of(1, producer="q")) == NEW
    assert filter.judge(of(2, 2)) == DUPLICATE
    assert filter.judge(of(1, producer="r")) == NEW
    assert filter.judge(of(1, producer="q")) == NEW
    assert filter.counts.late == 2


def test_deduplicate_against_a_set() -> None:
    """With enough memory: each id passes once at most, ascending; each is late once at most."""
    for seed in range(200):
        choose = random.Random(seed)
        filter = Deduplicate()
        passed: list[tuple[int, int]] = []
        seen: set[tuple[int, int]] = set()
        for _ in range(100):
            identity = of(choose.randint(1, 30), choose.randint(1, 2))
            key = (identity.epoch, identity.sequence)
            verdict = filter.judge(identity)
            assert (verdict == DUPLICATE) == (key in seen)
            seen.add(key)
            if verdict == NEW:
                passed.append(key)
        assert passed == sorted(set(passed))


class Receiving:
    """A client that has received these messages, and then fails if there is an error."""

    def __init__(self, *messages: Message, error: Exception | None = None) -> None:
        self._messages = messages
        self._error = error

    async def messages(self) -> AsyncIterator[Message]:
        for message in self._messages:
            yield message
        if self._error is not None:
            raise self._error


def message(text: str, sequence: int | None) -> Message:
    pairs = [("hf-seq", f"p:1:{sequence}")] if sequence is not None else [("hf-seq", "nonsense")]
    return Message("t", text.encode(), 1, False, False, 1, {pr.USER_PROPERTY: pairs})


async def collect(client: Receiving, **options: Any) -> list[bytes]:
    return [one.payload async for one in ordered_messages(cast(Client, client), **options)]


def test_ordered_messages() -> None:
    received = [message("1", 1), message("3", 3), message("?", None), message("2", 2)]
    late: list[Message] = []

    async def test() -> None:
        assert await collect(Receiving(*received), on_late=late.append) == [b"1", b"3", b"?"]
        assert [one.payload for one in late] == [b"2"]
        client = Receiving(received[0], received[1], received[0], error=ConnectionLost("lost"))
        ordered = ordered_messages(cast(Client, client))
        assert [(await anext(ordered)).payload for _ in range(2)] == [b"1", b"3"]
        with pytest.raises(ConnectionLost):
            await anext(ordered)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_identify() -> None:
    paper = Message("t", b'{"id":5,"msg":"m","sender":"user1"}', 1, False, False, 1, {})
    assert identify(paper) == ProducerIdentity("user1", 0, 5)
    assert identify(message("x", 7)) == of(7)
    assert identify(message("x", None)) is None
    assert identify(Message("t", b"plain", 0, False, False, 0, {})) is None
