"""The Python client of the log: cursors, positions, gaps, the seam to live, the offset table."""

import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.client.log import (
    AdminError,
    LogClient,
    LogCursor,
    LogGap,
    LogGapError,
    LogMessage,
    LogOptionError,
    LogTruncatedError,
    OffsetConflict,
    OffsetTable,
    Position,
)
from holdfast.client.log.reading import reader_http, scan
from holdfast.log.record import FLAG_PRODUCER, SESSION
from holdfast.protocol.mqtt.properties import CONTENT_TYPE, encode_block
from tests.support.journal_files import TIME_US, Journal, Server, record, serving

TOPICS = [f"plant/{number}" for number in range(7)]


def filled(directory: Path, count: int = 300, **options: int) -> Journal:
    """Messages numbered from 0, with records of other kinds between them."""
    journal = Journal(directory, **options)
    rng = random.Random(7)
    number = 0
    while number < count:
        items = []
        partition = rng.randrange(journal.partitions)
        for _ in range(rng.randrange(1, 9)):
            if rng.random() < 0.2:
                items.append(record("", b"{}", kind=SESSION))
            else:
                items.append(
                    record(TOPICS[number % 7], b"%d" % number, timestamp_us=TIME_US + number)
                )
                number += 1
        journal.append(partition, items)
    return journal


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    with serving(filled(tmp_path / "data")) as server:
        yield server


def client(*servers: Server) -> LogClient:
    return LogClient([f"127.0.0.1:{each.port}" for each in servers], wait_s=0)


def payloads(messages: list[LogMessage]) -> list[int]:
    return sorted(int(each.payload) for each in messages)


def total(journal: Journal) -> list[int]:
    return sorted(int(each.payload) for each in journal.records() if each.kind == 1)


def places(messages: list[LogMessage]) -> list[tuple[int, int]]:
    return [(each.partition, each.offset) for each in messages]


@pytest.mark.parametrize("vectorised", [True, False])
def test_every_message_once_wherever_a_read_is_cut(
    served: Server, monkeypatch: pytest.MonkeyPatch, vectorised: bool
) -> None:
    if not vectorised:
        monkeypatch.setattr(scan, "scan_stretch", None)
    monkeypatch.setattr(reader_http, "FETCH_BYTES", 2000)
    expected = [
        (each.partition, each.offset) for each in served.journal.records() if each.kind == 1
    ]
    for log in (client(served),):
        rng = random.Random(3)
        found: list[LogMessage] = []
        position = Position()
        while len(found) < len(expected):
            with log.read(start=position) as cursor:
                if rng.random() < 0.5:
                    for _ in range(rng.randrange(1, 40)):
                        found += [each for each in [next(cursor, None)] if each is not None]
                else:
                    found += next(cursor.batches(rng.randrange(1, 40)))
                position = Position.parse(str(cursor.position))
        assert sorted(places(found)) == sorted(expected)
        for partition in range(served.journal.partitions):
            own = [each.offset for each in found if each.partition == partition]
            assert own == sorted(own)
        # The same as Arrow, cut between any two batches.
        rows = []
        position = Position()
        while True:
            with log.read(start=position) as cursor:
                batch = next(cursor.arrow("partition,offset"), None)
                position = cursor.position
            if batch is None:
                break
            rows += [(each["partition"], each["offset"]) for each in batch.to_pylist()]
        assert sorted(rows) == sorted(expected)


def test_a_message_has_what_was_published(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "data")
    block = encode_block({CONTENT_TYPE: "text/plain"})
    journal.append(
        2,
        [
            record(
                "a/é", b"\x00\xff", flags=2 | 4 | FLAG_PRODUCER, client_id="ç", producer="p",
                producer_epoch=3, sequence=9, properties=block, audience=b"whoever",
                timestamp_us=TIME_US + 5,
            )
        ],
    )  # fmt: skip
    [message] = LogClient(journal.address).read()
    assert message == LogMessage(
        "a/é", b"\x00\xff", 2, 0, TIME_US + 5, 2, True, "ç", block, ("p", 3, 9)
    )
    assert message.properties == {CONTENT_TYPE: "text/plain"}
    assert message.time == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=TIME_US + 5)


def test_reads_by_topic_time_and_partition(served: Server) -> None:
    whole = total(served.journal)
    middle = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=TIME_US + 150)
    for log in (client(served),):
        assert payloads(list(log.read("plant/+"))) == whole
        chosen = [*log.read(["+/1", "plant/4/#"])]
        assert {each.topic for each in chosen} == {"plant/1", "plant/4"}
        late = payloads(list(log.read(start=middle)))
        early = payloads(list(log.read(end=str(middle))))
        assert sorted(early + late) == whole
        assert min(late) >= 140
        apart = [message for p in range(4) for message in log.read(partitions=[p])]
        assert payloads(apart) == whole
        assert [*log.read(start="latest")] == []
        assert [*log.read(start="-1s", end="latest")] == []


def test_refuses_what_cannot_be_read(served: Server) -> None:
    log = client(served)
    for wrong in (
        {"topics": "a/#/b"},
        {"topics": "$share/g/a"},
        {"topics": []},
        {"start": "yesterday"},
        {"start": Position({99: 0})},
        {"partitions": [99]},
        {"follow": True, "end": "latest"},
        {"idle_s": 1},
        {"follow": True, "idle_s": 0},
    ):
        with pytest.raises(LogOptionError):
            client(served).read(**wrong)  # type: ignore[arg-type]
    for options in ({"follow": True}, {"group": "g"}):
        with pytest.raises(LogOptionError, match="admin port"):
            LogClient.offline(lake="lake").read(**options)  # type: ignore[arg-type]
    with pytest.raises(LogOptionError, match="columns is 'tpoic'"):
        log.read().to_arrow("tpoic")
    with pytest.raises(LogOptionError, match="messages"):
        _mixed(log.read())
    with pytest.raises(LogTruncatedError, match="another log"):
        list(log.read(start=Position({0: 10**6})))
    with pytest.raises(LogTruncatedError, match="another log"):
        log.read(end=Position({0: 10**6}))
    for text in ("latest", '{"0": -1}', "[]"):
        with pytest.raises(LogOptionError):
            Position.parse(text)
    with pytest.raises(LogOptionError, match="nowhere"):
        LogClient("nowhere")
    with pytest.raises(LogOptionError, match="https"):
        LogClient("https://a:1,b:2")


def _mixed(cursor: LogCursor) -> None:
    next(cursor)
    next(cursor.arrow())


def test_gaps_are_told_before_the_messages_behind_them(tmp_path: Path) -> None:
    journal = filled(tmp_path / "data", 400, segment_bytes=4000)
    journal.remove_first_segment()
    journal.remove_first_segment()
    expected = total(journal)
    start = Position(dict.fromkeys(range(4), 0))
    with serving(journal) as server:
        for log in (client(server),):
            with pytest.raises(LogGapError) as error:
                list(log.read(start=start))
            assert error.value.gap.start == 0
            seen: list[object] = []
            cursor = log.read(start=start, on_gap=seen.append)
            for message in cursor:
                seen.append(message)
            gaps = [each for each in seen if isinstance(each, LogGap)]
            assert {g.partition: g.end for g in gaps} == dict(enumerate(journal.first_offset))
            assert payloads([each for each in seen if isinstance(each, LogMessage)]) == expected
            assert seen[: len(gaps)] == gaps


def test_a_damaged_batch_is_a_gap(tmp_path: Path) -> None:
    journal = filled(tmp_path / "data")
    whole = [(each.partition, each.offset) for each in journal.records() if each.kind == 1]
    data = bytearray(journal.batches[1])
    data[60] ^= 1
    journal.batches[1] = bytes(data)
    log = LogClient(journal.address)
    cursor = log.read()
    for _ in range(2):
        with pytest.raises(LogGapError):
            list(cursor)
    gaps: list[LogGap] = []
    found = places(list(log.read(on_gap=gaps.append)))
    [gap] = gaps
    lost = {(gap.partition, offset) for offset in range(gap.start, gap.end)}
    assert sorted(found) == sorted(set(whole) - lost)


def test_follows_over_two_servers_and_is_closed(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = served.journal
    count = len(total(journal))
    with serving(journal) as second:
        cursor = client(served, second).read(follow=True, start="earliest")
        found: list[LogMessage] = []
        ended = threading.Event()

        def read() -> None:
            found.extend(cursor)
            ended.set()

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for number in range(count, count + 60):
                if number % 20 == 0:
                    served.fail_next = second.fail_next = 2
                journal.publish("plant/1", b"%d" % number)
                until(lambda number=number: found and int(found[-1].payload) == number)
            # At the end of the log the reader waits in one request.
            before = served.requests + second.requests
            time.sleep(0.3)
            assert served.requests + second.requests <= before + 2
        finally:
            cursor.close()
            assert ended.wait(5)
            thread.join()
        assert payloads(found) == list(range(count + 60))


def until(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_idle_lists_and_the_loss_of_the_end(served: Server) -> None:
    journal = served.journal
    cursor = client(served).read(start="latest", follow=True, idle_s=0.05)
    lists = cursor.batches()
    assert next(lists) == []
    journal.publish("plant/1", b"new")
    assert [each.payload for each in next(lists)] == [b"new"]
    assert next(lists) == []
    position = cursor.position
    cursor.close()
    journal.next_offset[:] = [0] * 4
    journal.batches.clear()
    with pytest.raises(LogTruncatedError):
        next(client(served).read(start=position))
    with pytest.raises(AdminError, match="404"):
        client(served).read(group="g")


def test_reads_without_numpy_and_pyarrow(served: Server) -> None:
    """As in an installation without extras."""
    script = (
        "import sys\n"
        "sys.modules['numpy'] = sys.modules['pyarrow'] = sys.modules['zlib_ng'] = None\n"
        "from holdfast.client.log import LogClient\n"
        f"print(sum(1 for _ in LogClient('127.0.0.1:{served.port}').read()))\n"
        "print('asyncio' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    count = len(total(served.journal))
    assert run.stdout.split() == [str(count), "False"]


def test_a_sink_and_its_offsets_are_one_transaction(served: Server, tmp_path: Path) -> None:
    """Whatever is rolled back, and however many run it: every message is stored once."""
    log = client(served)
    path = tmp_path / "sink.db"
    rng = random.Random(5)
    runs = conflicts = 0
    expected = total(served.journal)
    with sqlite3.connect(path) as database:
        database.execute("create table results (number integer)")
    while True:
        runs += 1
        assert runs < 500
        database, other = sqlite3.connect(path), sqlite3.connect(path)
        offsets, rival = OffsetTable(database, "sums"), OffsetTable(other, "sums")
        with log.read(start=offsets.load() or "earliest") as cursor:
            rival_start = rival.load() or "earliest"
            for messages in cursor.batches(rng.randrange(1, 50)):
                rows = [(int(each.payload),) for each in messages]
                database.executemany("insert into results values (?)", rows)
                offsets.store(cursor.position)
                if rng.random() < 0.3:
                    break  # it dies before the commit
                database.commit()
        database.close()
        # A second process that began at the same place.
        with log.read(start=rival_start) as cursor:
            for messages in cursor.batches(5):
                rows = [(int(each.payload),) for each in messages]
                other.executemany("insert into results values (?)", rows)
                try:
                    rival.store(cursor.position)
                    other.commit()
                except (OffsetConflict, sqlite3.IntegrityError):
                    conflicts += 1
                    other.rollback()
                break
        other.close()
        with sqlite3.connect(path) as database:
            done = sorted(row[0] for row in database.execute("select number from results"))
        assert len(set(done)) == len(done)
        if done == expected:
            break
    assert runs > 2
    assert conflicts


def test_an_offset_table_is_refused_clearly() -> None:
    with pytest.raises(LogOptionError, match="table is"):
        OffsetTable(sqlite3.connect(":memory:"), "s", table="a; drop table b")
    with pytest.raises(LogOptionError, match="placeholder"):
        OffsetTable(object(), "s")  # type: ignore[arg-type]
