"""Batches that are made of a lake's records: every offset of a range is in them, once."""

import random

from holdfast.api.nodes.whole_log import ABSENT, batches_of
from holdfast.api.views.records import read_window, read_window_back
from holdfast.log.batch import Batch
from holdfast.log.record import MESSAGE, Record

HOUR_US = 3_600_000_000


def test_every_offset_is_there() -> None:
    """With gaps at both ends, times that go back or far on, and large payloads."""
    rng = random.Random(4)
    for _ in range(200):
        start = rng.randrange(50)
        end = start + rng.randrange(1, 40)
        wanted: dict[int, tuple[bytes, int]] = {}
        records = []
        for offset in range(start, end):
            if rng.random() < 0.5:
                payload = bytes(rng.choice((1, 9, 600_000)))
                time_us = 10 * HOUR_US + rng.choice((0, offset, -HOUR_US, 3 * HOUR_US))
                wanted[offset] = payload, time_us
                records.append(
                    Record(
                        3, MESSAGE, timestamp_us=time_us, topic=b"t", payload=payload,
                        offset=offset,
                    )
                )  # fmt: skip
        found = batches_of(3, start, end, records)
        at = start
        for data in found:
            batch = Batch(data)
            assert (batch.partition, batch.base_offset) == (3, at)
            at = batch.end_offset
            for record in batch.records():
                if record.kind == ABSENT:
                    assert record.offset not in wanted
                else:
                    expected = wanted.pop(record.offset)
                    assert (record.payload, record.timestamp_us) == expected
        assert at == end
        assert not wanted


class Lake:
    """A lake of three messages in 90 offsets."""

    def first_offset(self, partition: int) -> int:
        return 0

    def read_batches(self, partition: int, start: int, end: int, bytes_max: int) -> list[bytes]:
        records = [
            Record(0, MESSAGE, timestamp_us=9, topic=b"t", payload=b"%d" % offset, offset=offset)
            for offset in (10, 40, 70)
            if start <= offset < end
        ]
        return batches_of(0, start, end, records)


def test_windows_pass_what_is_absent() -> None:
    window = read_window(Lake(), 0, 5, 90, 50)
    assert [each.offset for each in window.records] == [10, 40]
    assert window.position == 55
    window = read_window_back(Lake(), 0, 90, 0, 30)
    assert [each.offset for each in window.records] == [70]
    assert window.position == 60
