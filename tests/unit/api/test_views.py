"""Views of the admin port: pages, cursors, slices, and the questions between nodes."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, json

from holdfast.api.views.pages import BadCursor, BestRows, Place, decode_place
from holdfast.api.views.payloads import content_of
from holdfast.api.views.records import decode_positions, encode_positions
from holdfast.api.views.slices import SLICE_S, Slices
from holdfast.io.peers.questions import (
    ANSWERING_MAX,
    FEATURE,
    NoPeerAnswer,
    PeerAnswer,
    PeerQuestions,
)
from holdfast.node.frame_kinds import ANSWER, QUESTION, BadFrame


@given(
    st.lists(st.tuples(st.integers(0, 5), st.text("abc", max_size=3)), unique=True),
    st.integers(1, 4),
    st.booleans(),
)
def test_pages_are_a_sorted_list(rows: list[Place], limit: int, descending: bool) -> None:
    found: list[Place] = []
    after: Place | None = None
    while True:
        best: BestRows[Place] = BestRows(limit, after, descending=descending)
        for row in rows:
            best.add(row, row)
        assert best.matched == len(rows)
        found += best.page()
        following = best.following()
        if not following:
            break
        after = decode_place(following)
    assert found == sorted(rows, reverse=descending)


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda data: data.decode("latin-1")))
def test_a_cursor_is_read_or_refused(text: str) -> None:
    for decode in (decode_place, lambda each: decode_positions(each, 3, 0)):
        with contextlib.suppress(BadCursor):
            decode(text)


def test_positions_of_another_log_are_refused() -> None:
    for generation in (0, 7):
        assert decode_positions(encode_positions([1, 2], generation), 2, generation) == [1, 2]
        assert decode_positions(encode_positions([1, 2], generation), 2, 8) is None
    for wrong in (encode_positions([1], 0), encode_positions([1, -1], 0)):
        with pytest.raises(BadCursor, match="2 offsets"):
            decode_positions(wrong, 2, 0)


@given(st.binary(max_size=60), st.integers(0, 60))
def test_a_payload_is_text_or_base64(payload: bytes, most: int) -> None:
    content = content_of(payload, b"", most)
    assert content.bytes == len(payload)
    assert content.is_cut == (len(payload) > most)
    assert not (content.text and content.base64)
    if not content.is_cut and content.text:
        assert content.text.encode() == payload


def test_a_slice_ends_in_time_and_slices_take_turns() -> None:
    async def main() -> None:
        slices, order = Slices(), []

        def work(name: str) -> Iterator[None]:
            loop = asyncio.get_running_loop()
            for _ in range(3):
                until = loop.time() + SLICE_S
                while loop.time() < until:
                    pass
                order.append(name)
                yield

        await asyncio.gather(slices.run(work("a")), slices.run(work("b")))
        assert order == ["a", "b"] * 3

    asyncio.run(main())


Send = Callable[[str, int, bytes], bool]


class Link:
    """Two nodes whose frames arrive in the next turn."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.sent: list[tuple[int, bytes]] = []
        self.is_up = True
        self.asking = PeerQuestions(loop, self._to("b"))
        self.asked = PeerQuestions(loop, self._to("a"))
        self.asking.connected("b", f"x,{FEATURE}")

    def _to(self, name: str) -> Send:
        def send(node: str, kind: int, payload: bytes) -> bool:
            assert node == name
            self.sent.append((kind, payload))
            target = self.asked if name == "b" else self.asking
            other = "a" if name == "b" else "b"
            if self.is_up:
                asyncio.get_running_loop().call_soon(target.handle_frame, other, kind, payload)
            return True

        return send


def test_a_question_is_answered_refused_or_in_time() -> None:
    async def main() -> None:
        link = Link()
        with pytest.raises(NoPeerAnswer, match="no link"):
            await link.asking.ask("c", "x", b"{}")
        with pytest.raises(NoPeerAnswer, match="admin port is off"):
            await link.asking.ask("b", "x", b"{}")

        async def answer(name: str, parameters: Raw) -> bytes:
            if name == "broken":
                raise ZeroDivisionError
            if name == "refused":
                raise NoPeerAnswer("not now")
            return json.encode([name, json.decode(parameters)])

        link.asked.answer = answer
        assert json.decode(await link.asking.ask("b", "n", b'{"k":1}')) == ["n", {"k": 1}]
        with pytest.raises(NoPeerAnswer, match="not now"):
            await link.asking.ask("b", "refused", b"{}")
        with pytest.raises(NoPeerAnswer, match="internal error"):
            await link.asking.ask("b", "broken", b"{}")
        with pytest.raises(NoPeerAnswer, match="more than"):
            await link.asking.ask("b", "x", b'"' + b"x" * 300_000 + b'"')

        link.is_up = False
        with pytest.raises(NoPeerAnswer, match=r"within 0.01 s"):
            await link.asking.ask("b", "n", b"{}", 0.01)
        waiting = asyncio.create_task(link.asking.ask("b", "n", b"{}"))
        await asyncio.sleep(0)
        # An answer of another node, or of a question that has ended, changes nothing.
        link.asking.handle_frame("c", ANSWER, json.encode(PeerAnswer(99)))
        link.asking.disconnected("b")
        with pytest.raises(NoPeerAnswer, match="lost"):
            await waiting

    asyncio.run(main())


def test_too_many_questions_are_refused() -> None:
    async def main() -> None:
        link = Link()
        release = asyncio.Event()

        async def answer(name: str, parameters: Raw) -> bytes:
            await release.wait()
            return b"1"

        link.asked.answer = answer
        asked = [
            asyncio.create_task(link.asking.ask("b", "n", b"{}")) for _ in range(ANSWERING_MAX + 1)
        ]
        with pytest.raises(NoPeerAnswer, match="already"):
            await asked[-1]
        release.set()
        assert [bytes(each) for each in await asyncio.gather(*asked[:-1])] == [b"1"] * ANSWERING_MAX

    asyncio.run(main())


def test_a_malformed_frame_closes_the_link() -> None:
    async def main() -> None:
        link = Link()
        garbage = random.Random(5)
        for number in range(300):
            data = (
                garbage.randbytes(number % 40) if number % 2 else b'{"id":' + garbage.randbytes(9)
            )
            for kind in (QUESTION, ANSWER):
                with pytest.raises(BadFrame):
                    link.asked.handle_frame("a", kind, data)
        assert link.sent == []

    asyncio.run(main())
