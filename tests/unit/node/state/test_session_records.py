"""The JSON of sessions in the log, in snapshots and between nodes, as earlier versions write it.

tests/data/session_records.txt has what their encoder made. It is read, and written again without a
difference.
"""

from pathlib import Path

import msgspec
import pytest

from holdfast.node import frames
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.frames import (
    OWNED_DECODER,
    CloseFrame,
    OpenedFrame,
    OpenFrame,
    OwnedSessions,
    decode_frame,
    encode_frame,
)
from holdfast.node.state.session_records import (
    CloseRecord,
    EndRecord,
    OpenRecord,
    SubscribeRecord,
    UnknownRecord,
    UnsubscribeRecord,
    decode_entry,
    decode_record,
    encode_session,
    will_entry,
)

FILE = Path(__file__).parents[3] / "data" / "session_records.txt"
BYTES = dict(line.split(b"\t") for line in FILE.read_bytes().strip().split(b"\n"))
RECORDS = {name.decode(): data for name, data in BYTES.items() if data.startswith(b'{"op"')}
ENTRIES = {name.decode(): data for name, data in BYTES.items() if name.startswith(b"entry")}
FRAMES = {name.decode(): data for name, data in BYTES.items() if name.startswith(b"SESSION")}
DECODERS = {
    "SESSION_OPEN": frames.OPEN, "SESSION_OPENED": frames.OPENED, "SESSION_CLOSE": frames.CLOSE,
    "SESSION_OWNED": OWNED_DECODER,
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_an_older_version_is_read_and_written(name: str) -> None:
    record = decode_record(RECORDS[name])
    assert record.client == 'k\u00fcche"\\\n\x01/'
    assert encode_session(record) == RECORDS[name]


def test_the_fields_of_a_record_have_their_values() -> None:
    record = decode_record(RECORDS["open, all"])
    assert isinstance(record, OpenRecord)
    assert (record.epoch, record.expiry_s, record.clean, record.proved) == (7, 3600, True, True)
    assert (record.username, record.owner, record.request) == ("\u00fc\u2028", "n2", 41)
    assert record.will is not None
    will = record.will.will()
    assert (will.topic, will.payload) == ("w/\u00fc".encode(), b"\x00\xffgone")
    assert (will.qos, will.retain, will.properties) == (1, True, b"\x01\x02")
    assert (will.expiry_s, will.delay_s) == (30, 5)
    assert will_entry(will) == record.will
    plain = decode_record(RECORDS["open, plain"])
    assert isinstance(plain, OpenRecord)
    assert (plain.proved, plain.owner, plain.request, plain.will) == (False, "", 0, None)
    close = decode_record(RECORDS["close, will, maybe sent"])
    assert isinstance(close, CloseRecord)
    assert close.will
    assert close.maybe_sent
    assert isinstance(decode_record(RECORDS["end"]), EndRecord)
    subscribe = decode_record(RECORDS["subscribe"])
    assert isinstance(subscribe, SubscribeRecord)
    assert subscribe.subscriptions[0] == ("a/+/\u00fc", 1, True, False, 2, 268_435_455)
    assert subscribe.start == [3, 4]
    unsubscribe = decode_record(RECORDS["unsubscribe"])
    assert isinstance(unsubscribe, UnsubscribeRecord)
    assert unsubscribe.filters == ["a/+/\u00fc", "b"]


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_of_an_older_version_is_read_and_written(name: str) -> None:
    assert encode_session(decode_entry(ENTRIES[name])) == ENTRIES[name]


def test_an_entry_without_later_fields_is_read() -> None:
    """Version ad60d4e has no `proved`, a single node none of the last three."""
    fields = msgspec.json.decode(ENTRIES["entry, little"])
    del fields["proved"]
    entry = decode_entry(msgspec.json.encode(fields))
    assert not entry.proved
    assert entry.may_be_sent
    assert entry.born is entry.requests is entry.will is msgspec.UNSET


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_of_an_older_version_is_read_and_written(name: str) -> None:
    frame = decode_frame(DECODERS[name.split(",")[0]], FRAMES[name])
    assert encode_frame(frame) == FRAMES[name]


def test_the_fields_of_a_frame_have_their_values() -> None:
    found = decode_frame(frames.OPEN, FRAMES["SESSION_OPEN, little"])
    assert found == OpenFrame(1, "c", True, 0, None)
    assert found.user is msgspec.UNSET
    assert decode_frame(frames.OPEN, FRAMES["SESSION_OPEN, no user"]).user is None
    whole = decode_frame(frames.OPEN, FRAMES["SESSION_OPEN, all"])
    assert (whole.user, whole.gone, whole.expiry_s) == ("u", True, 4_294_967_295)
    denied = decode_frame(frames.OPENED, FRAMES["SESSION_OPENED, denied"])
    assert denied == OpenedFrame(
        request=1, client="c", epoch=0, present=False, lost=True, denied=True, session=None
    )
    assert decode_frame(frames.CLOSE, FRAMES["SESSION_CLOSE"]) == CloseFrame("c", 3)
    report = decode_frame(OWNED_DECODER, FRAMES["SESSION_OWNED"])
    assert report == OwnedSessions(
        partitions=[0, 1], owned=[("c", 3)], asking=["d"], users={"c": "u"}
    )
    # An older version requests a report without epochs, and announces one without users.
    older = decode_frame(OWNED_DECODER, b'{"partitions":[0],"owned":[],"asking":[],"later":1}')
    assert older == OwnedSessions(partitions=[0], owned=[], asking=[])


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"{}", b"\xff", b'{"client":1,"epoch":1}', b'{"client":"c","epoch":"1"}'],
)
def test_a_malformed_frame_is_refused(payload: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_frame(frames.CLOSE, payload)


@pytest.mark.parametrize("payload", [b"", b"[]", b'{"op":"end","client":1}', b"\xff"])
def test_a_malformed_record_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        decode_record(payload)


def test_a_change_that_only_a_later_version_knows_is_ignored() -> None:
    record = decode_record(b'{"op":"move","client":"c","to":"d"}')
    assert isinstance(record, UnknownRecord)
    reserve = b'{"op":"reserve","client":"","epoch":9}'
    assert encode_session(decode_record(reserve)) == reserve
