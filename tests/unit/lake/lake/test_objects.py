"""The lake's protocol in an object store: no rename, no lock, a store that fails and drivers that
die at any request."""

import io
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("obstore")

from holdfast.client.log.lake import objects
from holdfast.client.log.lake.commits import ROWS, Commit, CommitLog
from holdfast.client.log.lake.errors import (
    CredentialsError,
    LakeError,
    ObjectStoreError,
    RaceError,
)
from holdfast.client.log.lake.files import note_failure, noted_failures
from holdfast.client.log.lake.objects import (
    PART_BYTES,
    ObjectPath,
    check_object_store,
    location,
    remove_objects,
)
from holdfast.client.log.lake.parquet import PartitionedWriter, WriteSpec, write_files
from holdfast_lake.lake.engine import Engine, Step, do_nothing
from holdfast_lake.lake.settings import LakeSettings, read_settings, write_settings
from holdfast_lake.lake.stores.store import ParquetStore
from tests.support.faulty_proxy import faulty_proxy
from tests.support.ports import free_port
from tests.support.small_s3 import BUCKET, Refusal, SmallS3, small_s3

LAKE = f"s3://{BUCKET}/here/is"
TABLE = "records"
DEAD = Refusal(400, "Dead")
DEAD_AFTER = Refusal(400, "Dead", after=True)
REQUESTS_MAX = 40


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallS3]:
    monkeypatch.setattr(objects, "RETRIES_MAX", 2)
    with small_s3(monkeypatch) as server:
        yield server


class Driver:
    """A driver with its own view of the table. Each step appends one row with a number."""

    def __init__(self) -> None:
        self.lake = location(LAKE)
        assert isinstance(self.lake, ObjectPath)
        self.log = CommitLog(self.lake, TABLE)
        self.store = ParquetStore(self.lake)

    def recover(self) -> None:
        from holdfast_lake.lake.engine import finish

        finish(self.lake, self.store, self.log)

    def stage(self, number: int) -> Commit:
        last = self.log.last()
        version = self.log.next_version()
        folder = f"_work/{TABLE}/{version:08}-{number:08x}"
        writer = PartitionedWriter(WriteSpec(str(self.lake / folder), ("d",)), "0")
        writer.write(pa.RecordBatch.from_pydict({"n": [number], "d": ["a/b"]}))
        files = [
            msgspec.structs.replace(
                file,
                path=self.store.final_path(ROWS, TABLE, version, at, file, replaced=False),
                staged=f"{folder}/{file.staged}",
                version=version,
            )
            for at, file in enumerate(writer.close())
        ]
        before = last.rows_total if last is not None else 0
        return Commit(
            table=TABLE, lineage="one", version=version, revision=1, columns=[], partition_by=[],
            committed_at_us=number, took_s=0, rows=1, quarantined=0, rows_total=before + 1,
            quarantined_total=0, files=files,
        )  # fmt: skip

    def commit(self, commit: Commit) -> None:
        before = self.log.read(commit.version - 1) if commit.version > 1 else None
        self.log.record(commit)
        self.store.apply(commit, before)

    def step(self, number: int) -> None:
        self.recover()
        self.commit(self.stage(number))


def listed(s3: SmallS3) -> list[int]:
    """The rows that a program sees which lists the directory of the table."""
    names = [name for name in s3.objects if name.startswith(f"here/is/{TABLE}/d=")]
    tables = [pq.read_table(pa.BufferReader(s3.objects[name])) for name in names]
    return sorted(n for table in tables for n in table["n"].to_pylist())


def committed(s3: SmallS3) -> list[int]:
    log = CommitLog(location(LAKE), TABLE)
    last = log.last()
    files = log.live(last.version) if last is not None else []
    found = [pq.read_table(pa.BufferReader(s3.objects[f"here/is/{f.path}"])) for f in files]
    return sorted(n for table in found for n in table["n"].to_pylist())


@pytest.mark.parametrize("death", [DEAD, DEAD_AFTER])
def test_a_driver_may_die_at_any_request(s3: SmallS3, death: Refusal) -> None:
    for at in range(1, REQUESTS_MAX):
        s3.objects.clear()
        first = Driver()
        first.step(1)
        left = [at]

        def refuse(_: str, __: str, left: list[int] = left) -> Refusal | None:
            left[0] -= 1
            if left[0] > 0:
                return None
            # The first request of its death may still have its effect.
            return death if left[0] == 0 else DEAD

        s3.refuse = refuse
        died = True
        with suppress(ObjectStoreError):
            first.step(2)
            died = False
        s3.refuse = lambda *_: None
        Driver().step(3)
        rows = committed(s3)
        assert rows == listed(s3), at
        assert rows in ([1, 3], [1, 2, 3]), at
        assert died or rows == [1, 2, 3]
        if not died:
            return
    raise AssertionError("a step has more requests than were tried")


def test_of_two_drivers_one_makes_a_version_and_the_other_yields(s3: SmallS3) -> None:
    one, two = Driver(), Driver()
    mine, theirs = one.stage(1), two.stage(2)
    two.commit(theirs)
    with pytest.raises(RaceError, match="another driver has made version 1"):
        one.commit(mine)
    one.step(1)
    assert committed(s3) == listed(s3) == [1, 2]


def test_a_lost_response_is_no_lost_race(s3: SmallS3) -> None:
    lost = [Refusal(500, after=True), Refusal(503, "SlowDown")]
    s3.refuse = lambda method, key: lost.pop() if "_commits" in key and lost else None
    Driver().step(1)
    assert not lost
    assert committed(s3) == listed(s3) == [1]


def test_a_commit_whose_outcome_is_unknown_keeps_its_files(s3: SmallS3) -> None:
    """The request arrives after its driver has given up."""
    driver = Driver()
    commit = driver.stage(1)
    path = driver.lake / f"{TABLE}/_commits/00000001.json"
    s3.refuse = lambda method, key: Refusal(503) if method == "PUT" else None
    with pytest.raises(ObjectStoreError, match="503"):
        driver.log.record(commit)
    s3.refuse = lambda *_: None
    Driver().recover()
    assert isinstance(path, ObjectPath)
    path.create(msgspec.json.encode(commit))
    Driver().step(2)
    assert committed(s3) == listed(s3) == [1, 2]


def test_another_driver_s_late_apply_changes_nothing(s3: SmallS3) -> None:
    """It stopped before it applied version 1, and went on when version 2 had replaced its files."""
    one, two = Driver(), Driver()
    first = one.stage(1)
    one.log.record(first)
    two.recover()
    second = msgspec.structs.replace(two.stage(2), removed=[file.path for file in first.files])
    two.commit(second)
    one.store.apply(first, None)
    assert committed(s3) == listed(s3) == [2]


def test_a_step_applies_the_version_of_a_driver_that_died(s3: SmallS3) -> None:
    """The other driver was running all the time, so it recovers nothing at a start."""

    def step(store: ParquetStore, number: int, reached: Callable[[str], None]) -> None:
        step = Step(Engine(None, store.lake, store, reached), TABLE)  # type: ignore[arg-type]
        spec = WriteSpec(step.stage_directory(ROWS), ("d",))
        batch = pa.RecordBatch.from_pydict({"n": [number], "d": ["x"]})
        (found,) = write_files([batch], spec, "0")
        step.staged(ROWS, found.column(0).to_pylist(), replaced=False)
        step.commit(revision=1, columns=[], partition_by=[], rows_total=step.version)

    def die(point: str) -> None:
        if point == f"{TABLE} recorded":
            raise ObjectStoreError("dead")

    one, two = ParquetStore(location(LAKE)), ParquetStore(location(LAKE))
    step(one, 1, do_nothing)
    step(two, 2, do_nothing)
    with pytest.raises(ObjectStoreError):
        step(one, 3, die)
    step(two, 4, do_nothing)
    assert committed(s3) == listed(s3) == [1, 2, 3, 4]


def test_a_forgotten_table_begins_again_under_other_names(s3: SmallS3) -> None:
    driver, slow = Driver(), Driver()
    driver.step(1)
    late = slow.stage(7)
    driver.store.forget(TABLE)
    assert driver.log.last() is None
    assert listed(s3) == []
    with pytest.raises(RaceError):
        slow.commit(late)
    Driver().step(3)
    assert committed(s3) == listed(s3) == [3]
    driver.store.apply(driver.log.read(2), driver.log.read(1))  # late
    assert committed(s3) == listed(s3) == [3]


def test_leftovers_are_removed_when_their_version_is_recorded(s3: SmallS3) -> None:
    dead = Driver()
    dead.stage(9)
    Driver().recover()
    assert any("_work/" in name for name in s3.objects), "it may still be recorded"
    Driver().step(1)
    Driver().recover()
    assert not any("_work/" in name for name in s3.objects)


def test_the_probe_refuses_a_store_that_forgets(s3: SmallS3) -> None:
    lake = location(LAKE)
    assert isinstance(lake, ObjectPath)
    check_object_store(lake)
    assert not s3.objects
    s3.is_conditional = False
    with pytest.raises(LakeError, match="let 8 of 8 writers create the same object"):
        check_object_store(lake)
    s3.is_conditional, s3.check_s = True, 0.05
    with pytest.raises(LakeError, match="writers create the same object"):
        check_object_store(lake)
    s3.check_s = 0.0
    s3.forgets = lambda key: "_probe" in key
    with pytest.raises(LakeError, match="forgotten"):
        check_object_store(lake)
    s3.forgets = lambda key: False
    s3.refuse = lambda method, key: Refusal(501, "NotImplemented") if method == "PUT" else None
    with pytest.raises(LakeError, match="refuses If-None-Match"):
        check_object_store(lake)


def test_an_expired_token_is_one_clear_line(s3: SmallS3) -> None:
    driver = Driver()
    driver.step(1)
    s3.refuse = lambda *_: Refusal(400, "ExpiredToken")
    with pytest.raises(CredentialsError, match=r"\(ExpiredToken\). Renew them") as error:
        driver.step(2)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)
    s3.refuse = lambda *_: None
    driver.step(2)
    assert committed(s3) == listed(s3) == [1, 2]


def test_two_runs_do_not_make_two_lakes_in_one_place(s3: SmallS3) -> None:
    lake = location(LAKE)
    assert read_settings(lake) is None
    write_settings(lake, LakeSettings(1, "delta"), is_new=True)
    with pytest.raises(LakeError, match="another run has just made the lake"):
        write_settings(lake, LakeSettings(1, "parquet"), is_new=True)
    with pytest.raises(LakeError, match=f"is inside the lake {LAKE}"):
        read_settings(location(f"{LAKE}/readings"))
    with pytest.raises(LakeError, match="is no lake: it has files"):
        read_settings(location(f"s3://{BUCKET}/here"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("hdfs://a/b", "in no object store"),
        ("s3://bucket", "names no place"),
        ("s3://bucket//", "names no place"),
        ("s3://bucket/a//b", "names no place"),
    ],
)
def test_urls_that_are_no_lake(url: str, why: str) -> None:
    with pytest.raises(LakeError, match=why):
        location(url)


def test_paths_go_to_tasks_as_texts() -> None:
    path: Any = location("abfss://box@account.dfs.core.windows.net/a/b/")
    assert str(path) == "abfss://box@account.dfs.core.windows.net/a/b"
    assert location(str(path / "c")) == path / "c"
    assert (path / "c").parent == path


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
@pytest.mark.parametrize("value", ["", "localhost:9000", "http://", "ftp://here", "http://a b"])
def test_an_endpoint_that_is_no_url(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """obstore would panic, which no `except Exception` catches."""
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "client", objects.client.__wrapped__)
    with pytest.raises(LakeError, match=f"the variable {name}={value} is no URL such as https://"):
        location("s3://somewhere/lake").is_dir()


def test_a_store_that_cannot_be_reached_is_named_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text is the same at each attempt, so that a log has it once."""
    monkeypatch.setattr(objects, "RETRIES_MAX", 0)
    place = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(objects, "REQUEST_S", 0.1)
    with small_s3(monkeypatch) as server, socket.create_server(("127.0.0.1", 0)) as silent:
        assert not server.requests
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for url, cause in ((place, "Connection refused"), (hanging, "Timeout")):
            monkeypatch.setenv("AWS_ENDPOINT_URL", url)
            objects.client.cache_clear()
            for call in (location(LAKE).read_bytes, lambda: list(location(LAKE).objects())):  # type: ignore[union-attr]
                with pytest.raises(ObjectStoreError) as caught:
                    call()
                text = f"the object store does not serve {LAKE}: {url}, {cause}"
                assert str(caught.value) == text


@pytest.mark.parametrize("request_number", [1, 2, 3, 4])
def test_a_response_that_ends_within_its_body(
    s3: SmallS3, monkeypatch: pytest.MonkeyPatch, request_number: int
) -> None:
    """Each kind of request has its effect and its result. Listings have several pages."""
    monkeypatch.setattr(objects, "PAGE", 2)
    place = location(LAKE)
    assert isinstance(place, ObjectPath)
    names = [f"{number}" for number in range(5)]
    for name in names:
        (place / name).write_bytes(name.encode())
    large = bytes(PART_BYTES + 1)
    sent = 0

    def fault() -> str:
        nonlocal sent
        sent += 1
        return "half after" if sent == request_number else ""

    def cut(call: Callable[[], Any]) -> Any:
        nonlocal sent
        sent = 0
        return call()

    with faulty_proxy(os.environ["AWS_ENDPOINT_URL"], 1.0, 1) as (proxy, endpoint):
        monkeypatch.setattr(proxy, "fault", fault)
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        objects.client.cache_clear()
        assert cut(lambda: [each.path.name for each in place.objects()]) == names
        assert cut(lambda: sorted(each.name for each in place.iterdir())) == names
        assert cut((place / "3").read_bytes) == b"3"
        assert not cut((place / "none").exists)
        with pytest.raises(FileExistsError):
            cut(lambda: (place / "3").create(b"other"))
        cut(lambda: (place / "3").copy_to(place / "copy"))
        cut(lambda: (place / "new").create(b"new"))
        cut(lambda: (place / "large").upload(io.BytesIO(large)))
        assert (place / "large").read_bytes() == large
        cut(lambda: remove_objects([place / "0", place / "1"]))
    there = [key.removeprefix(place.key + "/") for key in s3.objects]
    assert sorted(there) == ["2", "3", "4", "copy", "large", "new"]
    assert s3.objects[f"{place.key}/copy"] == b"3"


def test_a_bucket_that_is_not_there(s3: SmallS3) -> None:
    """Each kind of request reports it with what to do."""
    s3.refuse = lambda method, key: Refusal(404, "NoSuchBucket")
    place = location(LAKE)
    assert isinstance(place, ObjectPath)
    calls: list[Callable[[], Any]] = [
        place.read_bytes, place.exists, lambda: place.create(b"1"), lambda: list(place.objects()),
        lambda: list(place.iterdir()), lambda: place.copy_to(place / "copy"),
        lambda: check_object_store(place),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(LakeError, match=f"no bucket s3://{BUCKET}: make it first"):
            call()


def test_the_error_of_a_step_is_noted_in_the_store(s3: SmallS3) -> None:
    lake = location(LAKE)
    asked = s3.requests
    assert noted_failures(lake) == {}
    assert s3.requests - asked <= 2, "a status does not ask for each table"
    note_failure(lake, "latency", "out of range")
    note_failure(lake, "readings", "no such column")
    assert noted_failures(lake) == {"latency": "out of range", "readings": "no such column"}
    note_failure(lake, "latency", "")
    note_failure(lake, "gaps", "")  # none was there
    assert noted_failures(lake) == {"readings": "no such column"}
    s3.refuse = lambda method, key: Refusal(500)
    note_failure(lake, "readings", "the store is the cause, and the run goes on")
