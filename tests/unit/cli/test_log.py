"""`holdfast log` on real directories: what it shows, and that it finds every kind of damage."""

import json
import time
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.cli.resources.command import time_us
from holdfast.log.batch import Batch
from holdfast.log.record import (
    CURSOR,
    FLAG_PACKET_ID,
    FLAG_PRODUCER,
    FLAG_RETAIN,
    FLAG_WILL,
    RELEASE,
    RETAINED,
    SESSION,
)
from holdfast.log.snapshot import SnapshotEncoder
from holdfast.node.session.session import Inflight
from holdfast.node.session.state import encode_cursor
from tests.support.journal_files import TIME_US, Journal, record

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Four segments; two partitions with 60 messages each."""
    made = Journal(tmp_path / "data", segment_bytes=4000)
    for number in range(60):
        made.append(0, [record("a/0", b"zero %d" % number, timestamp_us=TIME_US + number)])
        made.append(2, [record("b/2", b"two %d" % number, timestamp_us=TIME_US + number)])
    assert len(made.segments()) == 4
    return made


def run(*arguments: object) -> int:
    return main(["log", *map(str, arguments)])


def lines(capsys: Capture) -> list[str]:
    return capsys.readouterr().out.splitlines()


def problems(journal: Journal, capsys: Capture) -> list[str]:
    """What verify finds; its exit code says so too, and inspect does not crash on it."""
    assert run("inspect", journal.directory) == 0
    capsys.readouterr()
    code = run("verify", journal.directory, "--json")
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if found["problems"] else 0)
    assert found["ok"] == (not found["problems"])
    result: list[str] = found["problems"]
    return result


def batch_positions(segment: Path) -> list[int]:
    data = segment.read_bytes()
    positions = [0]
    while positions[-1] < len(data):
        positions.append(positions[-1] + Batch(data, positions[-1]).length)
    return positions[:-1]


def change(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip(path: Path, position: int) -> None:
    change(path, position, bytes([path.read_bytes()[position] ^ 0x40]))


# inspect


def test_inspect_shows_what_is_there(journal: Journal, capsys: Capture) -> None:
    assert run("inspect", journal.directory) == 0
    shown = lines(capsys)
    assert f"data directory  {journal.directory}" in shown
    size = sum(path.stat().st_size for path in journal.segments())
    assert f"journal         120 records in 4 segments, {size / 1000:.3g} kB" in shown
    assert "sequences       0 to 120" in shown
    assert "damage          none" in shown
    assert [line.split()[:5] for line in shown if line.startswith("          0 ")] == [
        ["0", "0", "60", "60", "0"]
    ]


def test_inspect_from_indexes_agrees_with_reading_everything(
    journal: Journal, capsys: Capture
) -> None:
    run("inspect", journal.directory, "--json")
    quick = json.loads(capsys.readouterr().out)
    for index in journal.folder.glob("*.idx"):
        index.unlink()
    run("inspect", journal.directory, "--json")
    scanned = json.loads(capsys.readouterr().out)
    for segment in scanned["segments"]:
        if segment["index"] == "missing":
            segment["index"] = ""
    assert quick["segments"] == scanned["segments"]
    assert (
        quick["partitions"]
        == scanned["partitions"]
        == {
            "0": {"start": 0, "end": 60, "records": 60},
            "2": {"start": 0, "end": 60, "records": 60},
        }
    )
    assert quick["segments"][0]["first_us"] == TIME_US
    assert quick["segments"][-1]["last_us"] == TIME_US + 59
    assert len(scanned["notes"]) == 3


def test_inspect_of_an_empty_journal(tmp_path: Path, capsys: Capture) -> None:
    journal = Journal(tmp_path / "data")
    assert run("inspect", journal.directory) == 0
    assert any(line.startswith("journal         0 records") for line in lines(capsys))
    assert problems(journal, capsys) == []
    assert run("dump", journal.directory) == 0
    assert run("tail", journal.directory) == 0
    assert lines(capsys) == []


@pytest.mark.parametrize("command", ["inspect", "verify", "dump", "tail"])
def test_no_data_directory(tmp_path: Path, capsys: Capture, command: str) -> None:
    for path in (tmp_path, tmp_path / "none", Path(__file__)):
        assert run(command, path) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"holdfast: {path} is no Holdfast data directory")
        assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["inspect", "verify", "dump", "tail"])
def test_a_file_that_cannot_be_read(journal: Journal, capsys: Capture, command: str) -> None:
    segment = journal.segments()[-1]
    segment.unlink()
    segment.mkdir()
    assert run(command, journal.directory) == 2
    error = capsys.readouterr().err
    assert error.startswith("holdfast: ")
    assert error.count("\n") == 1


# verify


def test_an_undamaged_directory_is_fine(journal: Journal, capsys: Capture) -> None:
    assert problems(journal, capsys) == []
    assert run("verify", journal.directory) == 0
    assert lines(capsys) == ["no damage in 120 records of 4 segments and 0 snapshots"]


def test_after_retention_it_is_still_fine(journal: Journal, capsys: Capture) -> None:
    write_snapshot(journal, 60)
    journal.remove_first_segment()
    assert problems(journal, capsys) == []


def test_every_flipped_byte_is_found(tmp_path: Path, capsys: Capture) -> None:
    """In a sealed segment and its index. Padding and reserved fields are under the checksum."""
    journal = Journal(tmp_path / "data", segment_bytes=300)
    for number in range(4):
        journal.append(1, [record("t", b"%d" % number), record("u", b"")])
    segment = journal.segments()[0]
    assert len(journal.segments()) == 2
    for path in (segment, segment.with_suffix(".idx")):
        for position in range(path.stat().st_size):
            flip(path, position)
            assert run("verify", journal.directory) == 1, f"{path.name} at {position}"
            flip(path, position)
    assert run("verify", journal.directory) == 0
    capsys.readouterr()


def test_damage_names_its_place_and_what_is_missing(journal: Journal, capsys: Capture) -> None:
    segment = journal.segments()[1]
    positions = batch_positions(segment)
    flip(segment, positions[2] + 60)
    found = problems(journal, capsys)
    length = positions[3] - positions[2]
    assert len(found) == 2
    assert found[0].startswith(f"{segment.name} at {positions[2]}: {length} bytes of damage: check")
    assert f"at {positions[4]}: offsets " in found[1]


@pytest.mark.parametrize("field", [0, 4, 13, 16, 28, 40])
def test_a_damaged_header_costs_one_batch(journal: Journal, capsys: Capture, field: int) -> None:
    segment = journal.segments()[-1]
    positions = batch_positions(segment)
    flip(segment, positions[1] + field)
    found = [line for line in problems(journal, capsys) if "bytes of damage" in line]
    assert len(found) == 1
    assert f"at {positions[1]}: {positions[2] - positions[1]} bytes" in found[0]


def test_a_published_batch_is_not_taken_for_one(tmp_path: Path, capsys: Capture) -> None:
    """A payload that is a valid batch, in a batch that is damaged before it."""
    journal = Journal(tmp_path / "data")
    inner = Journal(tmp_path / "inner").append(3, [record("forged", b"x")])
    for topic_length in range(8):  # at one of them the payload is aligned like a batch
        journal.append(0, [record("t" * topic_length or "u", inner)])
    journal.append(0, [record("t", b"last")])
    segment = journal.segments()[0]
    for position in batch_positions(segment)[:-1]:
        flip(segment, position + 50)
    assert run("dump", journal.directory) == 1
    captured = capsys.readouterr()
    assert "last" in captured.out
    assert "forged" not in captured.out


def test_batches_begin_at_multiples_of_eight(tmp_path: Path, capsys: Capture) -> None:
    journal = Journal(tmp_path / "data")
    inner = Journal(tmp_path / "inner").append(3, [record("forged", b"x")])
    # Header 48, head 40, topic and client id of one byte each: the payload begins at 90.
    journal.append(0, [record("t", inner)])
    journal.append(0, [record("t", b"last")])
    flip(journal.segments()[0], 0)
    assert run("dump", journal.directory) == 1
    captured = capsys.readouterr()
    assert "last" in captured.out
    assert "forged" not in captured.out


def test_a_torn_tail_is_no_damage(journal: Journal, capsys: Capture) -> None:
    segment = journal.segments()[-1]
    whole = segment.read_bytes()
    last = batch_positions(segment)[-1]
    for length in range(last + 1, len(whole)):
        segment.write_bytes(whole[:length])
        assert run("verify", journal.directory) == 0
        assert f"note    {segment.name} at {last}: the last {length - last} bytes" in (
            capsys.readouterr().out
        )


def test_space_allocated_in_advance_is_nothing(journal: Journal, capsys: Capture) -> None:
    with journal.segments()[-1].open("ab") as file:
        file.write(bytes(10_000))
    assert run("verify", journal.directory) == 0
    assert lines(capsys) == ["no damage in 120 records of 4 segments and 0 snapshots"]


def test_zeros_after_a_sealed_segment_are_nothing(journal: Journal, capsys: Capture) -> None:
    """A crash came before the space was given back."""
    with journal.segments()[0].open("ab") as file:
        file.write(bytes(1000))
    assert problems(journal, capsys) == []
    journal.segments()[0].with_suffix(".idx").unlink()
    assert problems(journal, capsys) == []


def test_a_torn_middle_segment_is_damage(journal: Journal, capsys: Capture) -> None:
    segment = journal.segments()[1]
    segment.write_bytes(segment.read_bytes()[:-5])
    segment.with_suffix(".idx").unlink()
    found = problems(journal, capsys)
    assert "bytes of damage" in found[0]
    assert f"{journal.segments()[2].name}: 1 records before it are missing" in found


def test_a_segment_cut_at_a_batch_is_found(journal: Journal, capsys: Capture) -> None:
    segment = journal.segments()[1]
    segment.write_bytes(segment.read_bytes()[: batch_positions(segment)[-1]])
    segment.with_suffix(".idx").unlink()
    assert f"{journal.segments()[2].name}: 1 records before it are missing" in (
        problems(journal, capsys)
    )


def test_a_missing_segment_is_found(journal: Journal, capsys: Capture) -> None:
    first, second, third, _ = journal.segments()
    records = int(third.stem) - int(second.stem)
    second.unlink()
    second.with_suffix(".idx").unlink()
    found = problems(journal, capsys)
    assert f"{third.name}: {records} records before it are missing" in found
    first.unlink()
    first.with_suffix(".idx").unlink()
    assert any("needs a snapshot" in line for line in problems(journal, capsys))


def test_records_twice_are_found(journal: Journal, capsys: Capture) -> None:
    segment = journal.segments()[-1]
    data = segment.read_bytes()
    segment.write_bytes(data + data[batch_positions(segment)[-1] :])
    assert any("again, after 60 was reached" in line for line in problems(journal, capsys))


def test_a_foreign_partition_is_found(journal: Journal, capsys: Capture) -> None:
    other = Journal(journal.directory.parent / "other", partitions=9)
    with journal.segments()[-1].open("ab") as file:
        file.write(other.append(8, [record()]))
    assert any("partition 8, the directory has 4" in line for line in problems(journal, capsys))


def test_an_index_of_another_segment_is_found(journal: Journal, capsys: Capture) -> None:
    first, second = (path.with_suffix(".idx") for path in journal.segments()[:2])
    second.write_bytes(first.read_bytes())
    assert any(line.startswith(f"{second.name}: ") for line in problems(journal, capsys))


def test_a_valid_index_that_is_wrong_is_found(journal: Journal, capsys: Capture) -> None:
    """Right checksums, right length, other messages."""
    other = Journal(journal.directory.parent / "other", segment_bytes=4000)
    for number in range(60):
        other.append(0, [record("a/1", b"zero %d" % number, timestamp_us=TIME_US + number)])
        other.append(2, [record("b/2", b"two %d" % number, timestamp_us=TIME_US + number)])
    segment, foreign = journal.segments()[0], other.segments()[0]
    assert segment.stat().st_size == foreign.stat().st_size
    segment.with_suffix(".idx").write_bytes(foreign.with_suffix(".idx").read_bytes())
    name = segment.with_suffix(".idx").name
    assert problems(journal, capsys) == [
        f"{name}: topic b'a/1', which no message of the segment has"
    ]


def write_snapshot(journal: Journal, sequence: int) -> Path:
    encoder = SnapshotEncoder(sequence, [0] * journal.partitions, TIME_US)
    pieces = encoder.add(1, b"session")
    path = journal.directory / "snapshots" / f"{sequence:020d}.snap"
    path.write_bytes(b"".join(pieces + encoder.finish()))
    return path


def test_snapshots_are_shown_and_checked(journal: Journal, capsys: Capture) -> None:
    path = write_snapshot(journal, 60)
    assert problems(journal, capsys) == []
    run("inspect", journal.directory)
    shown = lines(capsys)
    assert shown[shown.index("snapshots") + 2].split()[:2] == ["60", "1"]
    data = path.read_bytes()
    # In the header, an entry, the footer.
    for position in (5, data.index(b"session"), len(data) - 1):
        flip(path, position)
        assert [line[:24] for line in problems(journal, capsys)] == [path.name[:24]]
        path.write_bytes(data)
    path.write_bytes(data[:-1])
    assert [line[:24] for line in problems(journal, capsys)] == [path.name[:24]]


def test_a_snapshot_under_another_name_is_found(journal: Journal, capsys: Capture) -> None:
    path = write_snapshot(journal, 60)
    path.rename(path.with_name(f"{61:020d}.snap"))
    assert problems(journal, capsys) == [f"{61:020d}.snap: it says that it starts at sequence 60"]


def test_an_unfinished_snapshot_is_none(journal: Journal, capsys: Capture) -> None:
    (journal.directory / "snapshots" / f"{60:020d}.snap.tmp").write_bytes(b"HFLS")
    assert problems(journal, capsys) == []


def test_a_damaged_start_file_is_found(journal: Journal, capsys: Capture) -> None:
    write_snapshot(journal, 60)
    journal.remove_first_segment()
    (journal.folder / "start.json").write_text("{}")
    assert problems(journal, capsys) == ["journal/start.json: damaged; retention writes it again"]


# dump


def dumped(journal: Journal, capsys: Capture, *arguments: str) -> list[tuple[int, int]]:
    assert run("dump", journal.directory, "--json", *arguments) == 0
    records = [json.loads(line) for line in lines(capsys)]
    return [(record["partition"], record["offset"]) for record in records]


def test_dump_shows_everything_in_journal_order(journal: Journal, capsys: Capture) -> None:
    expected = [(partition, offset) for offset in range(60) for partition in (0, 2)]
    assert dumped(journal, capsys) == expected


def test_dump_selects(journal: Journal, capsys: Capture) -> None:
    assert dumped(journal, capsys, "--partition", "2", "--from", "58") == [(2, 58), (2, 59)]
    assert dumped(journal, capsys, "--topic", "a/+", "--to", "2") == [(0, 0), (0, 1)]
    assert len(dumped(journal, capsys, "--topic", "a/+", "--topic", "b/#")) == 120
    assert dumped(journal, capsys, "--topic", "c/#") == []
    assert dumped(journal, capsys, "--kind", "session") == []
    start = "2026-09-21T14:13:20.000058Z"
    assert dumped(journal, capsys, "--from", start) == [(0, 58), (2, 58), (0, 59), (2, 59)]
    assert dumped(journal, capsys, "--to", "2026-09-21T14:13:20.000001Z") == [(0, 0), (2, 0)]
    assert dumped(journal, capsys, "--from", "59", "--to", "3000-01-01") == [(0, 59), (2, 59)]


def test_dump_passes_damage_and_says_so(journal: Journal, capsys: Capture) -> None:
    segment = journal.segments()[0]
    flip(segment, batch_positions(segment)[1] + 60)
    assert run("dump", journal.directory) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 119
    assert captured.err.startswith(f"holdfast: {segment.name} at ")


def test_text_lines(tmp_path: Path, capsys: Capture) -> None:
    journal = Journal(tmp_path / "data")
    cursor = encode_cursor([(3, 17)], {5: Inflight(1, 9, 2, False), 6: None}, [])
    journal.append(
        1,
        [
            record("a/b", b"21.5", flags=1),
            record("a/b", b"\xff\x00", flags=2 | FLAG_RETAIN | FLAG_PACKET_ID, sequence=77),
            record("q", b"x", flags=1 | FLAG_PRODUCER, producer="p", producer_epoch=3, sequence=4),
            record("w", b"gone", flags=FLAG_WILL, sequence=2, properties=b"\x01\x01"),
            record("r", b"", kind=RETAINED, flags=FLAG_RETAIN, client_id=""),
            record("", b'{"op":"open"}', kind=SESSION, flags=0),
            record("", cursor, kind=CURSOR, flags=0),
            record("", b"", kind=RELEASE, flags=0, sequence=77),
            record("", b"later", kind=99, flags=0),
        ],
    )
    run("dump", journal.directory)
    time = "2026-09-21T14:13:20.000000Z"
    assert lines(capsys) == [
        f"{time} 1/0 message q1 a/b client=c 21.5",
        f"{time} 1/1 message q2r a/b client=c packet=77 hex:ff00",
        f"{time} 1/2 message q1 q client=c producer=p:3:4 x",
        f"{time} 1/3 message q0 w client=c will-epoch=2 properties=0101 gone",
        f"{time} 1/4 retained q0r r",
        f'{time} 1/5 session client=c {{"op":"open"}}',
        f"{time} 1/6 cursor client=c 3/17 packet=5:1/9 packet=6:free",
        f"{time} 1/7 release client=c packet=77",
        f"{time} 1/8 kind-99 client=c later",
    ]
    run("dump", journal.directory, "--json")
    shown = [json.loads(line) for line in lines(capsys)]
    assert shown[1]["payload_base64"] == "/wA="
    assert (shown[1]["qos"], shown[1]["retain"], shown[1]["sequence"]) == (2, True, 77)
    assert shown[2]["producer"] == "p"
    assert shown[3]["properties_base64"] == "AQE="
    assert shown[6]["cursor"] == "3/17 packet=5:1/9 packet=6:free"
    assert shown[8]["kind"] == 99
    assert (shown[0]["timestamp_us"], shown[0]["client"]) == (TIME_US, "c")


def test_text_never_drives_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    journal = Journal(tmp_path / "data")
    journal.append(0, [record("a\x1b[2J", "b\r\n\x1b]0;x\x07\u202e\\".encode(), client_id="c\n")])
    run("dump", journal.directory)
    (line,) = lines(capsys)
    assert line.isprintable()
    assert r"a\x1b[2J client=c\n b\r\n\x1b]0;x\x07\u202e" + "\\\\" in line


def test_long_payloads_are_shortened(tmp_path: Path, capsys: Capture) -> None:
    journal = Journal(tmp_path / "data")
    journal.append(0, [record("t", b"x" * 5000)])
    run("dump", journal.directory)
    assert lines(capsys)[0].endswith("x" * 200 + "... (5000 bytes)")
    run("dump", journal.directory, "--full")
    assert lines(capsys)[0].endswith(" " + "x" * 5000)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--topic", "a/#/b"], "'#' must be the last character"),
        (["--topic", "$share/g/a"], "without its group"),
        (["--from", "yesterday"], "neither an offset nor a time"),
        (["--partition", "-1"], "no number from 0 up"),
        (["--kind", "nonsense"], "invalid choice"),
    ],
)
def test_wrong_arguments(
    journal: Journal, capsys: Capture, arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as error:
        run("dump", journal.directory, *arguments)
    assert error.value.code == 2
    assert text in capsys.readouterr().err


# tail


def test_tail_shows_the_newest(journal: Journal, capsys: Capture) -> None:
    assert run("tail", journal.directory) == 0
    shown = lines(capsys)
    assert len(shown) == 10
    assert shown[0].endswith("zero 55")
    assert shown[-1].endswith("two 59")


def test_tail_looks_back_over_segments(journal: Journal, capsys: Capture) -> None:
    assert run("tail", journal.directory, "-n", "50", "--topic", "a/0") == 0
    shown = lines(capsys)
    assert [line.split()[-1] for line in shown] == [str(number) for number in range(10, 60)]
    assert run("tail", journal.directory, "-n", "1000") == 0
    assert len(lines(capsys)) == 120
    assert run("tail", journal.directory, "-n", "0") == 0
    assert lines(capsys) == []


def test_tail_keeps_the_order_inside_a_batch(journal: Journal, capsys: Capture) -> None:
    journal.append(1, [record("t", b"%d" % number) for number in range(5)])
    assert run("tail", journal.directory, "-n", "3") == 0
    assert [line[-1] for line in lines(capsys)] == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("text", "wanted_us"),
    [
        ("2026-01-31T12:00:00Z", 1_769_860_800_000_000),
        ("2026-01-31T13:00:00+01:00", 1_769_860_800_000_000),
        ("1969-12-31T23:59:59Z", -1),
        ("0001-01-01T00:00:00Z", -1),
        ("earliest", -1),
        ("-15", -1),
        ("1769860800", -1),
        ("", -1),
    ],
)
def test_the_time_of_a_command(text: str, wanted_us: int) -> None:
    if wanted_us < 0:
        with pytest.raises(ValueError, match="is no time like"):
            time_us(text)
    else:
        assert time_us(text) == wanted_us


def test_a_time_before_now() -> None:
    now_us = time.time_ns() // 1000
    assert 0 <= now_us - 900_000_000 - time_us("-15m") + 60_000_000 <= 120_000_000
