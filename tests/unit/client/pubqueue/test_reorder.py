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
from holdfast.client.pubqueue.format import (
    PaperFormat,
    SequenceFormat,
    parse_paper,
)
from holdfast.client.pubqueue.ordered import identify, ordered_messages
from holdfast.client.pubqueue.reorder import (
    DUPLICATE,
    LATE,
    NEW,
    Deduplicate,
    Gap,
    Late,
    Ordered,
    Output,
    Reorder,
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
    filter = Deduplicate(sources_max=2, remembered_max=4)
    assert [filter.judge(of(n), "t") for n in (5, 7, 7, 5, 6, 6, 8)] == [
        *[NEW, NEW, DUPLICATE, DUPLICATE, LATE, DUPLICATE, NEW],
    ]
    # A new epoch may count from the beginning; what is left of the old one is late.
    assert [
        filter.judge(of(1, 2), "t"),
        filter.judge(of(9, 1), "t"),
        filter.judge(of(2, 2), "t"),
    ] == [
        *[NEW, LATE, NEW],
    ]
    # Older than everything remembered: a repetition, most likely.
    assert filter.judge(of(5), "t") == DUPLICATE
    # A third producer makes the longest silent one forgotten.
    assert filter.judge(of(1, producer="q"), "t") == NEW
    assert filter.judge(of(2, 2), "t") == DUPLICATE
    assert filter.judge(of(1, producer="r"), "t") == NEW
    assert filter.judge(of(1, producer="q"), "t") == NEW
    assert filter.counts.late == 2


def test_a_message_of_another_topic_is_not_late() -> None:
    filter = Deduplicate()
    sent = [(1, "a"), (3, "a"), (2, "b"), (2, "a"), (2, "b"), (4, "b")]
    assert [filter.judge(of(number), topic) for number, topic in sent] == [
        *[NEW, NEW, NEW, LATE, DUPLICATE, NEW],
    ]


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
            verdict = filter.judge(identity, "t")
            assert (verdict == DUPLICATE) == (key in seen)
            seen.add(key)
            if verdict == NEW:
                passed.append(key)
        assert passed == sorted(set(passed))


def items(output: list[Output[int]]) -> list[Any]:
    return [one.item if isinstance(one, Ordered) else one for one in output]


def feed(reorder: Reorder[int], *numbers: int, now: float = 0.0, epoch: int = 1) -> list[Any]:
    output: list[Any] = []
    for number in numbers:
        output += items(reorder.feed(of(number, epoch), number, now))
    return output


def test_reorder_closes_gaps() -> None:
    reorder: Reorder[int] = Reorder(5.0)
    assert feed(reorder, 3, 5, 6, 6, 3) == [3]
    assert reorder.timer() == 5.0
    assert feed(reorder, 4, now=1.0) == [4, 5, 6]
    assert reorder.timer() is None
    assert (reorder.counts.duplicates, reorder.counts.gaps) == (2, 0)


def test_reorder_gives_up_a_gap() -> None:
    reorder: Reorder[int] = Reorder(5.0)
    assert feed(reorder, 1, 4, now=0.0) == [1]
    assert feed(reorder, 5, 9, now=2.0) == []
    assert items(reorder.handle_timer(4.9)) == []
    assert items(reorder.handle_timer(5.0)) == [Gap("p", 2, 3), 4, 5]
    assert reorder.timer() == 7.0
    assert feed(reorder, 3, 3, 2, 1, now=6.0) == [Late(3), Late(2)]
    assert items(reorder.handle_timer(7.0)) == [Gap("p", 6, 8), 9]
    assert feed(reorder, 12, now=8.0) == []
    assert items(reorder.drain()) == [Gap("p", 10, 11), 12]
    assert reorder.timer() is None


def test_reorder_is_bounded() -> None:
    reorder: Reorder[int] = Reorder(5.0, producers_max=2, buffered_max=3)
    assert feed(reorder, 1, 3, 4) == [1]
    assert feed(reorder, 6) == [Gap("p", 2, 2), 3, 4]
    reorder.feed(of(1, producer="q"), 1, 0.0)
    assert items(reorder.feed(of(1, producer="r"), 1, 0.0)) == [Gap("p", 5, 5), 6, 1]


def test_reorder_over_epochs() -> None:
    reorder: Reorder[int] = Reorder(5.0)
    assert feed(reorder, 1, 2) == [1, 2]
    assert feed(reorder, 3, epoch=2) == [3]
    # A renewed epoch: the message that was overtaken closes its gap.
    assert feed(reorder, 5, epoch=2) == []
    assert feed(reorder, 4, epoch=3) == [4, 5]
    # A producer that has lost count begins anew.
    assert feed(reorder, 7, epoch=3) == []
    assert feed(reorder, 1, epoch=4) == [Gap("p", 6, 6), 7, 1]
    assert feed(reorder, 2, epoch=4) == [2]


def test_reorder_puts_any_shuffle_right() -> None:
    for seed in range(200):
        choose = random.Random(seed)
        numbers = list(range(2, 60))
        for index in range(len(numbers) - 5):
            other = index + choose.randint(0, 5)
            numbers[index], numbers[other] = numbers[other], numbers[index]
        numbers = [n for n in numbers for _ in range(choose.choice([1, 1, 2]))]
        reorder: Reorder[int] = Reorder()
        assert feed(reorder, 1, *numbers) == list(range(1, 60))


class Receiving:
    """A client that has received these messages; None is the pause in which a gap times out."""

    def __init__(self, *messages: Message | None, error: Exception | None = None) -> None:
        self._messages = list(messages)
        self._error = error

    async def receive(self) -> Message | None:
        if not self._messages:
            if self._error is not None:
                raise self._error
            return None
        message = self._messages.pop(0)
        if message is None:
            await asyncio.sleep(30)
        return message

    async def messages(self) -> AsyncIterator[Message]:
        while (message := await self.receive()) is not None:
            yield message


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
        got = await collect(Receiving(*received, received[0]), complete=True)
        assert got == [b"1", b"?", b"2", b"3"]
        gaps: list[Gap] = []
        client = Receiving(received[0], received[1], None, received[3])
        got = await collect(
            client, complete=True, gap_timeout_s=0.01, on_gap=gaps.append, on_late=late.append
        )
        assert got == [b"1", b"3"]
        assert gaps == [Gap("p", 2, 2)]
        assert len(late) == 2
        client = Receiving(received[0], received[1], error=ConnectionLost("lost"))
        ordered = ordered_messages(cast(Client, client), complete=True)
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
