"""A data directory made from a lake has the messages of the lake and the saved state."""

import logging
import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest

pytest.importorskip("pyspark")

from holdfast.cli.log.records import time_text
from holdfast.cli.main import main
from holdfast.client.admin_connection import AdminError
from holdfast.client.log.lake.commits import Commit, CommitLog, LogRestore
from holdfast.client.log.lake.objects import location
from holdfast.client.log.lake.states import (
    EVERY_S,
    STATES,
    SavedState,
    remove_old,
    save_state,
    saved_states,
    usable,
)
from holdfast.client.log.reading.offsets import generation_in
from holdfast.io.conversion.adoption import adopt
from holdfast.io.conversion.carried import CarriedState
from holdfast.log.files.data_directory import open_to_read
from holdfast.log.files.layout import Manifest
from holdfast.testing import Broker
from holdfast_lake.lake.lake import Lake
from tests.e2e import wire as packets
from tests.e2e.wire import Message, Wire
from tests.support.journal_files import Journal, serving
from tests.support.small_s3 import BUCKET, small_s3
from tests.support.spark_free_lake import no_spark
from tests.unit.io.conversion.test_adoption import messages, reading, state_by_log, state_of, unpack

Capture = pytest.CaptureFixture[str]
FOR_EVER = 0xFFFF_FFFF


def run_of(lake: Path, data: Path) -> None:
    """A run of the pipeline with a copy of a data directory, which a broker serves."""
    copy = Path(shutil.copytree(data, lake.with_name(f"served-{lake.name}")))
    with Broker(data=copy, admin=True) as broker:
        run(lake, servers=f"{broker.host}:{broker.admin_port}")
    shutil.rmtree(copy)


def run(lake: Path, **source: str) -> None:
    report = Lake(lake, spark=no_spark()).run(["records"], source=source or None)
    assert report.errors == {}


def restore(lake: Path, directory: Path, *options: str) -> int:
    return main(["restore", "--from-lake", str(lake), str(directory), *options])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broker's directory with everything that a broker keeps, and a lake that has all of it."""
    site = tmp_path_factory.mktemp("site")
    unpack("killed", site / "data")
    adopt(site / "data", "n1", 4)
    run_of(site / "lake", site / "data")
    return site


@pytest.fixture
def lake(site: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(site / "lake", tmp_path / "lake"))


def kinds(found: CarriedState) -> Counter[int]:
    return Counter(kind for kind, _ in found.entries)


def without_packet_ids(found: CarriedState) -> CarriedState:
    """The lake does not say under which packet id a message of QoS 2 was sent. A client that has
    used the id again would have its message acknowledged and not stored."""
    assert any(session.inbound for session in found.sessions)
    for session in found.sessions:
        session.inbound = {}
    return found


def test_everything_comes_back(site: Path, lake: Path, tmp_path: Path, capsys: Capture) -> None:
    made = tmp_path / "made"
    assert restore(lake, made) == 0
    told = capsys.readouterr().out
    assert "3 sessions, 1 queue and retained messages as of 20" in told
    before, after = without_packet_ids(state_of(site / "data")), state_of(made)
    assert after.lasting()[:3] == before.lasting()[:3]
    assert kinds(after) == kinds(before)
    assert len(kinds(after)) == 4  # retained and delayed messages, producers, bans
    by_log = state_by_log(made, tmp_path / "copy", reading(made).now_us)
    assert by_log.lasting() == after.lasting()
    old = {place: each[:5] for place, each in messages(site / "data").items()}
    assert old == {place: each[:5] for place, each in messages(made).items()}


def manifest(directory: Path) -> Manifest:
    return open_to_read(directory).manifest


def test_the_result_is_another_generation_of_the_log(
    site: Path, lake: Path, tmp_path: Path, capsys: Capture
) -> None:
    last = CommitLog(lake, "records").last()
    assert last is not None
    assert restore(lake, tmp_path / "made", "--node-id", "again") == 0
    found = manifest(tmp_path / "made")
    assert found.node_id == "again"
    assert found.incarnation != manifest(site / "data").incarnation
    assert generation_in(last.log) == (f"cluster {found.cluster_id}", found.generation)
    assert found.log_generation != found.generation
    assert found.former == ((found.generation, tuple(last.offsets[str(p)] for p in range(4))),)
    # The lake has nothing that the log has lost.
    run_of(lake, tmp_path / "made")
    assert restore(lake, tmp_path / "made") == 1
    assert "is not empty" in capsys.readouterr().err


def test_states_that_cannot_be_used(lake: Path, tmp_path: Path, capsys: Capture) -> None:
    (state,) = saved_states(lake)
    described = lake / STATES / f"{state.taken_us:020}.json"
    text, data = described.read_bytes(), state.snapshot(lake).read_bytes()  # type: ignore[union-attr]

    def refused(line: str) -> None:
        assert restore(lake, tmp_path / "made") == 1
        told = capsys.readouterr().err
        assert told.startswith("holdfast: ")
        assert told.count("\n") == 1
        assert line in told
        assert not (tmp_path / "made").exists()

    state.snapshot(lake).write_bytes(data[:-10])  # type: ignore[union-attr]
    refused("is damaged: the footer at")
    state.snapshot(lake).unlink()  # type: ignore[union-attr]
    refused("is damaged: its file is missing")
    state.snapshot(lake).write_bytes(data)  # type: ignore[union-attr]
    described.write_bytes(text.replace(b'"format":1', b'"format":2'))
    refused("has format 2, this version reads 1")
    described.write_bytes(text[:-5])
    refused("is damaged: ")
    described.write_bytes(text.replace(b'"cluster ', b'"cluster 0'))
    refused("are later, or of another log")
    described.unlink()
    refused("has no state of the broker for these messages")
    assert restore(lake, tmp_path / "made", "--messages-only") == 0
    assert "no sessions, queues and bans" in capsys.readouterr().out
    assert not state_of(tmp_path / "made").sessions
    assert len(messages(tmp_path / "made")) == len(messages(lake.parent / "made")) == 42


def test_words_that_do_not_fit(tmp_path: Path, capsys: Capture) -> None:
    assert main(["restore", str(tmp_path)]) == 2
    assert main(["restore", "--from-lake", "a", "b", "c"]) == 2
    assert capsys.readouterr().err.count("give a BACKUP, or --from-lake LAKE") == 2
    assert restore(tmp_path, tmp_path / "made") == 1
    assert "is no lake with records" in capsys.readouterr().err


class Life:
    """A broker that serves its clients and a lake, and is lost with its disk."""

    def __init__(self, root: Path) -> None:
        self.lake = root / "lake"
        self.root = root

    def broker(self, name: str) -> Broker:
        settings = {"log.partitions": 4}
        return Broker(data=self.root / name, admin=True, settings=settings)

    def run(self, broker: Broker) -> None:
        run(self.lake, servers=f"127.0.0.1:{broker.admin_port}")


def received(broker: Broker, client_id: str, count: int) -> list[bytes]:
    with Wire(broker.port) as client:
        assert client.connect(client_id, clean=False, expiry_s=FOR_EVER).session_present
        found: list[Message] = [client.message() for _ in range(count)]
        client.disconnect()
    return sorted(each.payload for each in found)


def publish_busy(broker: Broker, payload: bytes, *, dup: bool) -> None:
    """A client with one packet id publishes at QoS 2, and is away before its PUBREL."""
    with Wire(broker.port) as busy:
        busy.connect("busy", clean=False, expiry_s=FOR_EVER)
        busy.send(packets.publish("kept/busy", payload, 2, 1, retain=True, dup=dup))
        assert busy.expect(packets.PUBREC).reason in (0, 0x10)


def retained(broker: Broker) -> dict[str, bytes]:
    with Wire(broker.port) as client:
        client.connect("reader")
        client.subscribe(("kept/#", 0), ("end", 0))
        client.publish("end", b"", 1)
        found: dict[str, bytes] = {}
        while (message := client.message()).topic != "end":
            found[message.topic] = message.payload
    return found


def test_a_broker_is_lost_with_its_disk(tmp_path: Path, capsys: Capture) -> None:
    life = Life(tmp_path)
    with life.broker("data") as broker, Wire(broker.port) as client:
        for name, filter in (("away", "plant/#"), ("worker", "$share/$queue/line/#")):
            with Wire(broker.port) as session:
                session.connect(name, clean=False, expiry_s=FOR_EVER)
                session.subscribe((filter, 1))
                session.disconnect()
        client.connect("publisher")
        for number in range(20):
            client.publish(f"plant/{number % 3}", b"%d" % number, 1)
            client.publish("line/1", b"job %d" % number, 1)
        client.publish("kept/stored", b"1", 1, retain=True)
        client.publish("kept/unstored", b"2", 0, retain=True)
        client.publish("kept/gone", b"3", 1, retain=True)
        client.publish("kept/gone", b"", 0, retain=True)
        assert received(broker, "away", 5)
        publish_busy(broker, b"5", dup=False)
        life.run(broker)
        (state,) = saved_states(life.lake)
        assert not state.is_due(state.taken_us + int(EVERY_S * 1e6) - 1)
        client.publish("plant/1", b"later", 1)
        client.publish("kept/stored", b"4", 1, retain=True)
        assert len(received(broker, "away", 16)) == 16  # The lake never learns of it.
        life.run(broker)
        assert saved_states(life.lake) == [state]
        client.publish("plant/1", b"lost", 1)
    shutil.rmtree(tmp_path / "data")
    assert restore(life.lake, tmp_path / "made") == 0
    assert "2 later messages: they come again" in capsys.readouterr().out
    made = reading(tmp_path / "made")
    by_log = state_by_log(tmp_path / "made", tmp_path / "copy", made.now_us)
    assert by_log.lasting() == made.carried().lasting()
    with life.broker("made") as broker:
        kept = {"kept/stored": b"4", "kept/unstored": b"2"}
        assert retained(broker) == {**kept, "kept/busy": b"5"}
        # Its message since has no acknowledgement of the lost broker.
        publish_busy(broker, b"6", dup=True)
        assert retained(broker) == {**kept, "kept/busy": b"6"}
        assert received(broker, "worker", 20) == sorted(b"job %d" % n for n in range(20))
        again = received(broker, "away", 16)
        assert b"later" in again
        with Wire(broker.port) as client:
            client.connect("publisher")
            client.publish("plant/1", b"new", 1)
        assert received(broker, "away", 1) == [b"new"]
        life.run(broker)
    last = CommitLog(life.lake, "records").last()
    assert last is not None
    assert generation_in(last.log)[1] == manifest(tmp_path / "made").log_generation


def test_a_restored_log_begins_at_a_time(site: Path, lake: Path, tmp_path: Path) -> None:
    """A restore keeps what a session, a queue or the saved state needs, however old it is."""
    assert restore(lake, tmp_path / "made", "--since", "2030-01-01T00:00:00Z") == 0
    before, after = reading(site / "data"), reading(tmp_path / "made")
    known = without_packet_ids(before.carried())
    assert after.carried().lasting()[:3] == known.lasting()[:3]
    assert kinds(after.carried()) == kinds(before.carried())
    starts, ends = after.journal.start_offsets, before.journal.next_offset
    assert any(starts)
    there = {at for at in messages(site / "data") if at[1] >= starts[at[0]]}
    assert {at for at in messages(tmp_path / "made") if at[1] < ends[at[0]]} == there


def test_a_part_of_the_messages(site: Path, lake: Path, tmp_path: Path, capsys: Capture) -> None:
    all_of_them = messages(site / "data")
    times = sorted(each[4] for each in all_of_them.values())
    since_us, until_us = times[10], times[30]
    times_given = ["--since", time_text(since_us), "--until", time_text(until_us)]
    assert restore(lake, tmp_path / "made", *times_given) == 1
    assert "those there are later, or of another log" in capsys.readouterr().err
    assert restore(lake, tmp_path / "made", *times_given, "--messages-only") == 0
    chosen = {at for at, each in all_of_them.items() if since_us <= each[4] < until_us}
    assert 0 < len(chosen) < len(all_of_them)
    assert set(messages(tmp_path / "made")) == chosen


def a_commit(log: str = "l", **more: Any) -> Commit:
    return Commit(
        table="records", lineage="r", version=1, revision=1, columns=[], partition_by=[],
        committed_at_us=0, took_s=0, rows=0, quarantined=0, rows_total=0, quarantined_total=0,
        log=log, **more,
    )  # fmt: skip


def test_states_of_former_generations() -> None:
    """A state fits where its generation has the messages that the table has."""
    former = [SavedState(log="cluster a", taken_us=n, ends={0: n}, bytes=1) for n in (5, 9)]
    other = SavedState(log="cluster b", taken_us=6, ends={0: 1}, bytes=1)
    now = SavedState(log="cluster a generation 7", taken_us=20, ends={0: 12}, bytes=1)
    states = [*former, other, now]
    commit = a_commit("cluster a generation 7")
    assert usable(states, commit, {0: 12}) == [*former, now]
    assert usable(states, commit, {0: 11}) == former
    restored = LogRestore(version=1, offsets={"0": 8})
    commit = a_commit("cluster a generation 7", restored=[restored])
    assert usable(states, commit, {0: 12}) == [former[0], now]


@pytest.mark.parametrize("where", ["directory", "objects"])
def test_states_beside_a_table(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        root = location(str(tmp_path))
        if where == "objects":
            stack.enter_context(small_s3(monkeypatch))
            root = location(f"s3://{BUCKET}/{tmp_path.name}")
        assert saved_states(root) == []

        def save(number: int, log: str = "l", *, fails: bool = False) -> SavedState:
            def write(file: IO[bytes]) -> None:
                file.write(b"state %d" % number)
                if fails:
                    raise AdminError("the server is away")

            def describe(size_bytes: int) -> SavedState:
                return SavedState(log=log, taken_us=number, ends={0: number}, bytes=size_bytes)

            return save_state(root, write, describe, number)

        hour_us = 3_600_000_000
        states = [save(number * hour_us) for number in range(1, 6)]
        with pytest.raises(AdminError):
            save(6 * hour_us, fails=True)
        assert saved_states(root) == states
        for state in states:
            assert state.snapshot(root).read_bytes() == b"state %d" % state.taken_us
        # An upload that was interrupted, and one that may be under way.
        (root / STATES / f"{3:020}.snapshot").write_bytes(b"half")
        (root / STATES / f"{7 * hour_us:020}.snapshot").write_bytes(b"half")
        save(hour_us // 2, "another log")
        remove_old(root, a_commit(offsets={"0": 4 * hour_us}))
        assert saved_states(root) == states[2:]
        names = {each.name for each in (root / STATES).iterdir() if each.name.endswith(".snapshot")}
        assert names == {f"{number * hour_us:020}.snapshot" for number in (3, 4, 5, 7)}


def test_a_state_that_could_not_be_fetched_delays_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server of an earlier version has none."""
    journal = Journal(tmp_path / "data")
    journal.publish("a", b"1")
    with serving(journal) as server:
        run(tmp_path / "one", servers=f"127.0.0.1:{server.port}")
    warned = [each for each in caplog.records if "state_not_saved" in each.message]
    assert [each.levelname for each in warned if each.levelno > logging.INFO] == ["WARNING"]
    assert saved_states(tmp_path / "one") == []
    last = CommitLog(tmp_path / "one", "records").last()
    assert last is not None
    assert last.rows == 1


def test_a_lake_keeps_no_state_of_another_log(lake: Path, tmp_path: Path) -> None:
    states = saved_states(lake)
    with Life(tmp_path).broker("other") as broker, Wire(broker.port) as client:
        client.connect("publisher")
        client.publish("a", b"1", 1)
        source = {"servers": f"127.0.0.1:{broker.admin_port}"}
        report = Lake(lake, spark=no_spark()).run(["records"], source=source)
    assert "was made from another log" in str(report.errors["records"])
    assert saved_states(lake) == states
