"""A record of state keeps what its payload says in memory. The fold takes that, so both must say
the same when the record is folded, whatever has changed since it was appended."""

import logging
from collections import Counter

import pytest

from holdfast.log.record import Record
from holdfast.node.session.session import Inflight
from holdfast.node.session.state import CursorState, decode_cursor
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.session_records import SessionRecord, decode_record
from tests.transcripts.scenes import play
from tests.transcripts.seeds import scene_of
from tests.transcripts.stage import ONE, THREE

SEEDS = 8


def view(cursor: CursorState) -> object:
    def entry(each: Inflight | None) -> object:
        if each is None:
            return None
        assert each.group is each.message is None
        place = each.partition, each.offset, each.qos, each.is_retained
        return *place, each.state, each.logged, each.is_ahead, each.group_tag, each.topic

    inflight = [(packet_id, entry(each)) for packet_id, each in cursor.inflight]
    return cursor.positions, inflight, cursor.done, cursor.is_move


def test_the_content_of_a_record_is_that_of_its_payload(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1, "holdfast")
    found: Counter[str] = Counter()
    apply = Recovery.apply

    def compare(recovery: Recovery, record: Record) -> None:
        content = record.content
        if isinstance(content, CursorState):
            assert view(content) == view(decode_cursor(record.payload))
        elif content is not None:
            assert isinstance(content, SessionRecord)
            assert content == decode_record(record.payload)
        found[type(content).__name__] += 1
        apply(recovery, record)

    monkeypatch.setattr(Recovery, "apply", compare)
    for seed in range(SEEDS):
        for form in (ONE, THREE):
            play(scene_of(seed), form)
    read = "CursorState OpenRecord CloseRecord EndRecord SubscribeRecord UnsubscribeRecord"
    assert set(read.split()) | {"MemberRecord", "NoneType"} == set(found)
