"""Frames between members: what comes back, what is refused, what is ignored."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.frames import (
    VERSION,
    Announcement,
    AnnouncementRequest,
    Announcements,
    Data,
    Frame,
    Goodbye,
    Hello,
    InvalidFrame,
    StreamAck,
    decode,
    encode,
)
from holdfast_federation.core.identity import BadIdentity, Identity, decode_identity
from holdfast_federation.core.messages.custody import BadEntry, Custody

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


def announcement(**changes: object) -> Announcement:
    whole = Announcement(A, 1, 2, 0, [B], "mqtt://a", False, ["a/+", "b/#"], [])
    return msgspec.structs.replace(whole, **changes)


def message(**changes: object) -> Data:
    whole = Data(A, 1, 7, 1, 4, 1, True, "a/b", b"x", b"\x01\x00", 2.5, [(B, 3, 1), (C, 9, 9)])
    return msgspec.structs.replace(whole, **changes)


@pytest.mark.parametrize(
    "frame",
    [
        Hello(3, b"12345678", True),
        Announcements([announcement(), announcement(base=1, removed=["c"])]),
        AnnouncementRequest([(A, 1, 5), (B, 2, 1)]),
        message(),
        message(qos=0, destinations=[(B, 0, 0)], expiry_s=None),
        StreamAck(A, 1, B, 12, 3),
        Goodbye("leaving"),
    ],
)
def test_what_is_said_is_heard(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (message(topic="a/#"), "wildcards"),
        (message(topic=""), "at least one character"),
        (message(qos=3), "qos|<= 2|\\$\\[5\\]"),
        (message(node=b"short"), "length"),
        (message(hops=17), "<= 16"),
        (message(destinations=[]), "length"),
        (message(destinations=[(B, 1, 1), (B, 2, 1)]), "twice"),
        (message(destinations=[(A, 1, 1)]), "own origin"),
        (message(destinations=[(B, 1, 2)]), "place 1"),
        (message(destinations=[(B, 0, 0)]), "place 0"),
        (message(expiry_s=-1.0), ">= 0"),
        (Announcements([announcement(added=["a#"])]), "level of its own"),
        (Announcements([announcement(added=["$share/g"])]), "shared subscription"),
        (Announcements([announcement(base=2)]), "version 2"),
        (Announcements([announcement(removed=["a"])]), "removes"),
        (Announcements([announcement(chunk=1)]), "chunk 1 of 1"),
        (Announcements([announcement(epoch=0)]), ">= 1"),
    ],
)
def test_what_is_wrong_is_refused(frame: Frame, reason: str) -> None:
    with pytest.raises(InvalidFrame, match=reason):
        decode(encode(frame))


def test_an_unknown_kind_is_ignored_and_another_version_is_not() -> None:
    assert decode(bytes((VERSION, 99)) + b"whatever") is None
    with pytest.raises(InvalidFrame, match="protocol 9"):
        decode(bytes((9, 1)) + b"whatever")
    with pytest.raises(InvalidFrame, match="least is 2"):
        decode(b"\x02")


@given(st.integers(1, 8), st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_happens(kind: int, noise: bytes) -> None:
    try:
        decode(bytes((VERSION, kind)) + noise)
    except InvalidFrame:
        pass


@given(st.data())
def test_a_damaged_frame_is_a_frame_or_refused(data: st.DataObject) -> None:
    frame = bytearray(encode(message()))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(frame))
    except InvalidFrame:
        pass


def test_an_identity_survives_and_grows() -> None:
    identity = Identity(A, 4)
    assert decode_identity(identity.encode()) == identity
    assert identity.restarted() == Identity(A, 5)
    for data in (b"", b"xyz 1\n", b"00 1\n", A.hex().encode() + b" -1\n", b"\xff"):
        with pytest.raises(BadIdentity):
            decode_identity(data)


def test_a_store_with_something_else_in_it_is_refused() -> None:
    custody = Custody(MemberContext(Identity(A, 1), FederationConfig()))
    with pytest.raises(BadEntry):
        custody.load([encode(Goodbye("x"))], 0.0)
