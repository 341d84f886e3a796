"""The values of a broker's member: the fence of the log, snapshots, and the files of before."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.state.member_values import IDENTITY, MemberValues
from holdfast_federation.core.frames import Data, encode
from holdfast_federation.core.identity import BadIdentity, MessageId
from holdfast_federation.core.messages.streams import FORMER_MAX
from holdfast_federation.sidecar.edge_broker.member_log import MemberLog
from holdfast_federation.sidecar.store.file import (
    STORE,
    MemberStoreChange,
    MemberStoreError,
    MemberStoreFull,
    StoredMember,
    StoreFile,
)
from holdfast_federation.sidecar.store.identity import IdentityFile
from tests.support.broker_in_process import LoopBroker, loop_broker
from tests.unit.io.event_loop.test_failures import in_loop

NODE, ORIGIN = b"n" * 16, b"o" * 16
ASSIGNMENT = (
    b'{"url":"http://m","token":"secret","neighbours":{"%s":"b:1"}}' % ORIGIN.hex().encode()
)


def record(start: int, key: bytes, value: bytes) -> Record:
    return Record(0, log_record.FEDERATION, client_id=key, sequence=start, payload=value)


def test_records_of_an_earlier_start_change_nothing() -> None:
    values = MemberValues()
    values.apply(record(7, IDENTITY, b"seven"))
    values.apply(record(7, b"a", b"1"))
    values.apply(record(8, IDENTITY, b"eight"))
    values.apply(record(7, b"a", b""))
    values.apply(record(7, b"b", b"2"))
    values.apply(record(7, IDENTITY, b"again"))
    # Of two nodes that begin the same start, the first one in the log has it.
    values.apply(record(8, IDENTITY, b"other"))
    assert (values.start, values.values) == (8, {IDENTITY: b"eight", b"a": b"1"})
    values.apply(record(8, b"a", b""))
    assert values.values == {IDENTITY: b"eight"}


def test_a_snapshot_that_is_taken_meanwhile_leads_to_the_same_values() -> None:
    """Its entries are made while records are applied; those since its beginning are applied over
    it."""
    for seed in range(300):
        rng = random.Random(seed)
        records, start = [], 0
        for number in range(40):
            if not start or rng.random() < 0.15:
                start += 1
                records.append(record(start, IDENTITY, b"%d" % number))
            # Of the start before, too: a deposed federator.
            of = max(1, start - (rng.random() < 0.3))
            value = b"" if rng.random() < 0.3 else b"%d" % number
            records.append(record(of, rng.choice([b"a", b"b", b"c"]), value))
        live, loaded = MemberValues(), MemberValues()
        begin = rng.randrange(len(records))
        for one in records[:begin]:
            live.apply(one)
        at, entries = begin, live.entries()
        while True:
            for one in records[at : (at := min(len(records), at + rng.randrange(4)))]:
                live.apply(one)
            try:
                entry = next(entries)
            except StopIteration:
                break
            if entry is not None:
                loaded.restore(entry)
        for one in records[at:]:
            live.apply(one)
        for one in records[begin:]:
            loaded.apply(one)
        assert (loaded.start, loaded.values) == (live.start, live.values), seed


@pytest.mark.parametrize("data", [b"", b"x" * 12, bytes(12), MemberValues.__name__.encode() * 2])
def test_an_entry_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, Exception), match=r"requires|without a content"):
        MemberValues().restore(data)


def log_of(broker: LoopBroker, *, is_alone: bool = True) -> MemberLog:
    directory = broker.directory / "federation"
    return MemberLog(broker.broker, directory, "created", lambda: 0, is_alone)


def values_at(broker: LoopBroker) -> dict[bytes, bytes]:
    return broker.broker.node.state.recorded.member.values


def message(number: int) -> bytes:
    body = b"%d" % number
    to = [(ORIGIN, number, 1)]
    return encode(Data(NODE, 5, number, 0, 4, 1, False, "a", body, b"", None, to, 0))


CHANGE = MemberStoreChange(
    added={MessageId(NODE, 5, number): message(number) for number in (1, 2, 300)},
    positions={ORIGIN: (7, 20)},
    retained={"t": b"version", "gone": b"version"},
    memory=[b"one", b"", b"three"],
    former={(ORIGIN, 6): 9},
)


def content(stored: StoredMember) -> object:
    custody = [data for data, _ in stored.custody]
    return custody, stored.positions, stored.retained, stored.memory, stored.former


@in_loop
async def test_what_is_stored_is_there_after_a_crash(tmp_path: Path) -> None:
    broker = LoopBroker(tmp_path)
    await broker.start()
    first = log_of(broker)
    identity = await first.begin(NODE.hex())
    assert (identity.node, identity.epoch) == (NODE, 1)
    await first.apply(CHANGE)
    await first.apply(MemberStoreChange(removed={MessageId(NODE, 5, 2)}, retained={"gone": None}))
    await first.write_assignment(ASSIGNMENT)
    assert not any(b"secret" in each for each in values_at(broker).values())
    await broker.crash()
    async with loop_broker(tmp_path) as again:
        second = log_of(again)
        identity = await second.begin("")
        assert (identity.node, identity.epoch) == (NODE, 2)
        assert content(await second.load()) == (
            [message(1), message(300)],
            {ORIGIN: (7, 20)},
            {"t": b"version"},
            [b"one", b"", b"three"],
            {(ORIGIN, 6): 9},
        )
        assert json.loads(await second.read_assignment()) == json.loads(ASSIGNMENT)
        # Another node has the neighbours, and no token.
        (tmp_path / "federation/manager.json").unlink()
        assert b'"b:1"' in await second.read_assignment()
        await second.write_assignment(b"")
        assert await second.read_assignment() == b""
        with pytest.raises(BadIdentity, match="the log has the member"):
            await log_of(again).begin("f" * 32)


@in_loop
async def test_a_deposed_federator_stores_nothing(tmp_path: Path) -> None:
    async with loop_broker(tmp_path) as broker:
        first, second = log_of(broker), log_of(broker)
        await first.begin("")
        await second.begin("")
        with pytest.raises(MemberStoreError, match="another node has begun to run the member"):
            await first.apply(CHANGE)
        assert content(await second.load()) == ([], {}, {}, [], {})
        await second.apply(CHANGE)
        second.abandon()
        with pytest.raises(MemberStoreError, match="another node runs the member"):
            await second.apply(CHANGE)


@in_loop
async def test_a_full_disk_takes_only_what_frees_room(tmp_path: Path) -> None:
    async with loop_broker(tmp_path) as broker:
        log = log_of(broker)
        await log.begin("")
        await log.apply(CHANGE)
        broker.broker.node.state.disk_full = True
        with pytest.raises(MemberStoreFull):
            await log.apply(MemberStoreChange(added={MessageId(NODE, 5, 9): message(9)}))
        await log.apply(MemberStoreChange(removed=set(CHANGE.added)))
        broker.broker.node.state.disk_full = False
        assert (await log.load()).custody == []


@in_loop
async def test_former_positions_are_bounded(tmp_path: Path) -> None:
    async with loop_broker(tmp_path) as broker:
        log = log_of(broker)
        await log.begin("")
        for epoch in range(1, 2 * FORMER_MAX):
            await log.apply(MemberStoreChange(former={(ORIGIN, epoch): 1}))
        kept = {epoch for _, epoch in (await log.load()).former}
        assert kept == set(range(FORMER_MAX, 2 * FORMER_MAX))


@in_loop
async def test_a_dispute_and_a_restore_skip_starts(tmp_path: Path) -> None:
    async with loop_broker(tmp_path) as broker:
        log = log_of(broker)
        await log.begin("")
        await log.dispute(50)
        again = log_of(broker)
        assert (await again.begin("")).epoch == 51
        assert again.disputed == 50
        restored = MemberLog(broker.broker, tmp_path / "none", "created", lambda: 99, True)
        assert (await restored.begin("")).epoch > 51 + (1 << 20)
        unagreed = MemberLog(broker.broker, tmp_path / "none", "created", lambda: None, True)
        with pytest.raises(MemberStoreError, match="have not agreed on the generation"):
            await unagreed.begin("")


async def begin_and_load(log: MemberLog) -> None:
    await log.begin("")
    await log.load()


@in_loop
async def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    async with loop_broker(tmp_path) as broker:
        log = log_of(broker)
        await log.begin("")
        values = values_at(broker)
        for key, data, words in (
            (b"starts", b"no", "the starts of the log"),
            (b"position:" + ORIGIN, b"short", "records in the log"),
            (IDENTITY, b"no", "identity in the log"),
        ):
            before = values.get(key)
            values[key] = data
            with pytest.raises(MemberStoreError, match=words):
                await begin_and_load(log_of(broker))
            values.pop(key)
            if before is not None:
                values[key] = before
        directory = tmp_path / "federation"
        del values[IDENTITY]
        file = IdentityFile(directory)
        file.begin()
        (directory / "log-starts").write_bytes(b"no")
        with pytest.raises(BadIdentity, match="in use by another process"):
            await log_of(broker).begin("")
        file.release()
        with pytest.raises(MemberStoreError, match=r"log-starts.*remove it if it is damaged"):
            await log_of(broker).begin("")


@in_loop
async def test_files_of_before_are_adopted_whatever_fails(tmp_path: Path) -> None:
    """The process ends after each of its steps, and begins again."""
    for steps in range(12):
        root = tmp_path / str(steps)
        directory = root / "federation"
        broker = LoopBroker(root)
        await broker.start()
        file = IdentityFile(directory)
        identity = file.begin(NODE.hex())
        file.dispute(identity.epoch)
        file.release()
        store = StoreFile(directory / STORE, NODE)
        store.open()
        store.apply(CHANGE)
        store.close()
        (directory / "log-starts").write_bytes(b"[[1,[0,0,0,0]]]")
        (directory / "manager.json").write_bytes(ASSIGNMENT)
        log = log_of(broker)
        store_values, left = log._store, steps

        async def fail(values: list[tuple[bytes, bytes]], store_values=store_values) -> None:  # type: ignore[no-untyped-def]
            nonlocal left
            left -= 1
            if left < 0:
                raise MemberStoreError("the process ends")
            await store_values(values)

        log._store = fail  # type: ignore[method-assign]
        [failure] = await asyncio.gather(log.begin(""), return_exceptions=True)
        assert not isinstance(failure, BaseException) or "the process ends" in str(failure)
        await broker.crash()
        async with loop_broker(root) as again:
            log = log_of(again)
            adopted = await log.begin("")
            assert adopted.node == NODE
            assert adopted.epoch > identity.epoch
            found = await log.load()
            assert content(found) == content(
                StoredMember(
                    [(data, 0.0) for data in CHANGE.added.values()],
                    CHANGE.positions,
                    {topic: data for topic, data in CHANGE.retained.items() if data is not None},
                    CHANGE.memory or [],
                    CHANGE.former,
                )
            )
            assert log.disputed == identity.epoch
            assert log.starts[0] == (1, [0, 0, 0, 0])
            assert json.loads(await log.read_assignment()) == json.loads(ASSIGNMENT)
            assert [path.name for path in directory.iterdir()] == ["manager.json"]
        if not isinstance(failure, BaseException):
            assert steps > 4, "no step was interrupted"
            return
    raise AssertionError("it never succeeded")
