"""The publish queue over a client whose every answer the test gives."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.client.client import Client
from holdfast.client.errors import ClientError, NotConnected, QueueFull, TimedOut
from holdfast.client.pubqueue.format import PaperFormat
from holdfast.client.pubqueue.messages import (
    MessageExpired,
    MessagesLeft,
    ProducerFenced,
    QueueClosed,
    QueueEntry,
    StoreError,
    StoreFull,
)
from holdfast.client.pubqueue.queue import PublishQueue
from holdfast.client.pubqueue.sender import RETRY_MAX_S, QueueCore
from holdfast.client.pubqueue.sqlite import SqliteStore
from holdfast.client.pubqueue.store import MemoryStore, QueueChange
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Properties
from tests.support.fake_client import FakeClient, settle

TIMEOUT_S = 60


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def queue_on(client: FakeClient, store: Any = None, **options: Any) -> PublishQueue:
    return PublishQueue(cast(Client, client), store, **options)


def payloads(client: FakeClient) -> list[bytes]:
    return [sent.payload for sent in client.sent]


@pytest.fixture(params=["memory", "sqlite"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    if request.param == "memory":
        return MemoryStore
    return lambda: SqliteStore(tmp_path / "queue.db")


def test_one_after_the_other(new_store: Callable[[], Any]) -> None:
    """The paper's scheme: the next message leaves when the one before it is confirmed."""

    async def test() -> None:
        client = FakeClient()
        told: list[tuple[bytes, int]] = []
        queue = queue_on(
            client, new_store(), on_delivered=lambda e, r: told.append((e.payload, r.reason))
        )
        async with queue:
            for number in range(3):
                assert await queue.put("t", str(number)) == number + 1
            assert (queue.length, queue.counts.put) == (3, 3)
            assert queue.age_s >= 0
            for number in range(3):
                await client.until_sent(number + 1)
                await settle()
                assert len(client.sent) == number + 1
                client.sent[number].confirm()
            await queue.flush()
            assert (queue.length, queue.size_bytes, queue.age_s) == (0, 0, 0.0)
        assert told == [(b"0", 0), (b"1", 0), (b"2", 0)]
        assert payloads(client) == [b"0", b"1", b"2"]
        assert queue.counts.delivered == 3

    run(test)


def test_window_and_identity(new_store: Callable[[], Any]) -> None:
    async def test() -> None:
        client = FakeClient()
        async with queue_on(client, new_store(), window=3) as queue:
            properties: Properties = {pr.CONTENT_TYPE: "x", pr.USER_PROPERTY: [("a", "b")]}
            await asyncio.gather(
                *(queue.put("t", str(n), retain=n == 1, properties=properties) for n in range(5))
            )
            await client.until_sent(3)
            await settle()
            assert len(client.sent) == 3
            assert [sent.retain for sent in client.sent] == [False, True, False]
            for sent in list(client.sent):
                sent.confirm()
            await client.until_sent(5)
            identities = [sent.identity for sent in client.sent]
            assert [one and one.sequence for one in identities] == [1, 2, 3, 4, 5]
            assert len({one and one.epoch for one in identities}) == 1
            assert {one and one.producer for one in identities} == {queue.producer}
            assert client.sent[0].properties[pr.CONTENT_TYPE] == "x"
            pairs = client.sent[0].properties[pr.USER_PROPERTY]
            assert isinstance(pairs, list)
            assert pairs[0] == ("a", "b")
            client.confirms = True
            for sent in client.open:
                sent.confirm()
        assert payloads(client) == [b"0", b"1", b"2", b"3", b"4"]

    run(test)


def test_refused_for_now(new_store: Callable[[], Any]) -> None:
    """Sending stops, waits for what is in flight, and begins again at the lowest, alone."""

    async def test() -> None:
        client = FakeClient()
        async with queue_on(client, new_store(), window=3) as queue:
            for number in range(5):
                await queue.put("t", str(number))
            await client.until_sent(3)
            client.sent[0].confirm()
            await settle()
            # Three are in flight again, or two are and the window waits for the rest.
            for sent in client.open:
                sent.refuse(reasons.QUOTA_EXCEEDED)
            count = len(client.sent)
            await client.until_sent(count + 1)
            await settle()
            assert len(client.sent) == count + 1
            again = client.sent[-1]
            assert again.payload == b"1"
            assert again.identity == client.sent[1].identity
            client.confirms = True
            again.confirm()
        first = list(dict.fromkeys(payloads(client)))
        assert first == [b"0", b"1", b"2", b"3", b"4"]
        assert queue.counts.delivered == 5
        assert queue.counts.resent == len(client.sent) - 5

    run(test)


def test_refused_for_good(new_store: Callable[[], Any]) -> None:
    async def test() -> None:
        client = FakeClient()
        failures: list[tuple[bytes, int]] = []

        def on_failed(entry: QueueEntry, error: ClientError) -> None:
            failures.append((entry.payload, error.reason))

        async with queue_on(client, new_store(), window=2, on_failed=on_failed) as queue:
            await queue.put("t", "bad")
            await queue.put("t", "good", properties={pr.CONTENT_TYPE: "x"})
            await client.until_sent(2)
            client.sent[0].refuse(reasons.TOPIC_NAME_INVALID, "no")
            client.sent[1].confirm()
            await queue.flush()
            assert failures == [(b"bad", reasons.TOPIC_NAME_INVALID)]
            assert queue.counts.refused == 1
            (failed,) = await queue.failed()
            assert (failed.entry.payload, failed.reason) == (b"bad", reasons.TOPIC_NAME_INVALID)
            assert await queue.forget_failed() == 1
            assert await queue.failed() == []

    run(test)


def test_refused_message_that_then_fails_frees_the_others(new_store: Callable[[], Any]) -> None:
    """The broker holds back what follows a refused message; a new epoch begins anew."""

    async def test() -> None:
        client = FakeClient()
        async with queue_on(client, new_store(), window=1) as queue:
            await queue.put("t", "1")
            await queue.put("t", "2")
            await client.until_sent(1)
            client.sent[0].refuse(reasons.QUOTA_EXCEEDED)
            await client.until_sent(2)
            client.sent[1].refuse(reasons.TOPIC_NAME_INVALID)
            await client.until_sent(3)
            before, after = client.sent[0].identity, client.sent[2].identity
            assert before is not None
            assert after is not None
            assert (after.epoch, after.sequence) == (before.epoch + 1, 2)
            client.sent[2].confirm()

    run(test)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_message_that_fails_after_a_later_refused_one_frees_the_others(
    order: tuple[int, int],
) -> None:
    """The broker waits for the lowest number that it refused, whichever came last."""
    core = QueueCore(2, lambda: 0.0)
    for sequence in (1, 2):
        core.add(QueueEntry(sequence, 1, "t", b"", None, False, 0.0, 0.0, 100))
    core.checkpoint()
    assert [each.sequence for each in (core.next(0.0), core.next(0.0)) if each] == [1, 2]
    for sequence in order:
        core.retry(sequence, 0.0, refused=True)
    first = core.next(RETRY_MAX_S)
    assert first is not None
    assert first.sequence == 1
    core.failed(1)
    assert core.needs_renewal()


def test_a_queue_that_may_not_publish_waits(new_store: Callable[[], Any]) -> None:
    """A broker that was started with wrong rules must not empty a durable queue."""

    async def test() -> None:
        client = FakeClient()
        async with queue_on(client, new_store(), window=1) as queue:
            await queue.put("t", "1")
            await queue.put("t", "2")
            await client.until_sent(1)
            for attempt in range(1, 4):
                client.sent[-1].refuse(reasons.NOT_AUTHORIZED)
                await client.until_sent(attempt + 1)
                assert client.sent[-1].payload == b"1"
                assert queue.refusal is not None
                assert queue.refusal.reason == reasons.NOT_AUTHORIZED
            client.sent[-1].confirm()
            await client.until_sent(5)
            assert queue.refusal is None
            client.sent[-1].confirm()
            await queue.flush()
            assert queue.counts.refused == 0
            assert await queue.failed() == []

    run(test)


def test_a_message_that_may_not_be_published_fails_on_request() -> None:
    async def test() -> None:
        client = FakeClient()
        async with queue_on(client, when_not_authorized="fail") as queue:
            await queue.put("t", "1")
            await client.until_sent(1)
            client.sent[0].refuse(reasons.NOT_AUTHORIZED)
            await queue.flush()
            assert queue.counts.refused == 1
        with pytest.raises(ValueError, match=r"when_not_authorized 'drop'"):
            queue_on(client, when_not_authorized="drop")

    run(test)


def test_fenced_without_a_word(new_store: Callable[[], Any]) -> None:
    """A broker leaves the text out where the answer would be larger than the client takes."""

    async def test() -> None:
        client = FakeClient()
        queue = queue_on(client, new_store())
        await queue.open()
        await queue.put("t", "1")
        await client.until_sent(1)
        client.sent[0].refuse(0x83)
        with pytest.raises(ProducerFenced):
            await queue.flush()
        assert queue.length == 1
        with contextlib.suppress(MessagesLeft):
            await queue.close()

    run(test)


def test_fenced(new_store: Callable[[], Any]) -> None:
    """The queue stops, says why, and keeps the messages."""

    async def test() -> None:
        client = FakeClient()
        queue = queue_on(client, new_store(), window=2, messages_max=2)
        await queue.open()
        await queue.put("t", "1")
        await queue.put("t", "2")
        waiting = asyncio.create_task(queue.put("t", "3"))
        await client.until_sent(2)
        await settle()
        client.sent[0].refuse(0x83, "producer epoch is fenced: 1 is below 2")
        client.sent[1].refuse(0x83, "producer epoch is fenced: 1 is below 2")
        for call in (waiting, queue.put("t", "4"), queue.flush()):
            with pytest.raises(ProducerFenced, match="fenced"):
                await cast(Awaitable[Any], call)
        assert queue.length == 2
        if isinstance(queue._store, MemoryStore):
            with pytest.raises(MessagesLeft):
                await queue.close()
        else:
            assert await queue.close() == 2
        assert len(client.sent) == 2

    run(test)


def test_another_0x83_is_that_messages_failure() -> None:
    async def test() -> None:
        client = FakeClient()
        async with queue_on(client) as queue:
            await queue.put("t", "1")
            await client.until_sent(1)
            client.sent[0].refuse(0x83, "a plugin says no")
            await queue.flush()
            assert queue.error is None
            assert queue.counts.refused == 1

    run(test)


def test_a_client_without_reconnect_is_waited_for() -> None:
    async def test() -> None:
        client = FakeClient()
        client.is_connected = False
        async with queue_on(client, window=2) as queue:
            for number in range(3):
                await queue.put("t", str(number))
            await settle()
            assert client.sent == []
            client.is_connected = True
            await client.until_sent(1)
            client.disconnect()
            await settle()
            client.is_connected = True
            client.confirms = True
            await queue.flush()
        assert payloads(client)[-3:] == [b"0", b"1", b"2"]

    run(test)


def test_congestion_keeps_the_order() -> None:
    """While one message waits for the socket, acknowledgements send nothing past it."""

    async def test() -> None:
        client = FakeClient()
        async with queue_on(client, window=3) as queue:
            for number in range(2):
                await queue.put("t", str(number))
            await client.until_sent(2)
            client.is_congested = True
            for number in range(2, 6):
                await queue.put("t", str(number))
            await settle()
            client.sent[0].confirm()
            client.sent[1].confirm()
            await settle()
            client.free()
            client.confirms = True
            await queue.flush()
        assert payloads(client) == [b"0", b"1", b"2", b"3", b"4", b"5"]

    run(test)


def test_full_queue_refuses() -> None:
    async def test() -> None:
        client = FakeClient()
        async with queue_on(client, when_full="refuse", messages_max=2) as queue:
            await queue.put("t")
            await queue.put("t")
            assert queue.length == 2
            with pytest.raises(QueueFull, match="2 of 2 messages"):
                await queue.put("t")
            await client.until_sent(1)
            client.confirms = True
            client.sent[0].confirm()
            await queue.flush()
            await queue.put("t")
        assert queue.counts.put == 3

    run(test)


def test_full_queue_blocks_first_come_first_served(new_store: Callable[[], Any]) -> None:
    async def test() -> None:
        client = FakeClient()
        async with queue_on(client, new_store(), messages_max=2) as queue:
            await queue.put("t", "0")
            await queue.put("t", "1")
            puts = [asyncio.create_task(queue.put("t", str(number))) for number in range(2, 6)]
            await settle()
            assert not any(put.done() for put in puts)
            puts[1].cancel()
            await settle()
            await client.until_sent(1)
            client.sent[0].confirm()
            assert await puts[0] == 3
            await settle()
            assert not puts[2].done()
            assert queue.length == 2
            client.confirms = True
            for sent in client.open:
                sent.confirm()
            await asyncio.gather(*puts[2:])
        assert payloads(client) == [b"0", b"1", b"2", b"4", b"5"]

    run(test)


def test_bytes_limit() -> None:
    async def test() -> None:
        client = FakeClient()
        async with queue_on(client, bytes_max=300) as queue:
            with pytest.raises(QueueFull, match="of 300 bytes"):
                await queue.put("t", bytes(300))
            await queue.put("t", bytes(100))
            blocked = asyncio.create_task(queue.put("t", bytes(100)))
            small = asyncio.create_task(queue.put("t", b""))
            await settle()
            # The small one fits, but does not push in front.
            assert not blocked.done()
            assert not small.done()
            client.confirms = True
            client.sent[0].confirm()
            await asyncio.gather(blocked, small)
        assert [len(payload) for payload in payloads(client)] == [100, 100, 0]

    run(test)


def test_put_cancelled_before_it_is_stored(tmp_path: Path) -> None:
    async def test() -> None:
        client = FakeClient()
        client.confirms = True
        async with queue_on(client, SqliteStore(tmp_path / "queue.db")) as queue:
            kept = asyncio.create_task(queue.put("t", "kept"))
            gone = asyncio.create_task(queue.put("t", "gone"))
            await asyncio.sleep(0)
            gone.cancel()
            await kept
            await asyncio.wait([gone])
            await queue.flush()
            assert queue.length == 0
        assert payloads(client) == [b"kept"]

    run(test)


def test_expiry(new_store: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        client = FakeClient()
        client.is_connected = False
        failures: list[tuple[bytes, type]] = []
        async with queue_on(
            client,
            new_store(),
            expiry_s=0.01,
            on_failed=lambda entry, error: failures.append((entry.payload, type(error))),
        ) as queue:
            await queue.put("t", "sent once", expiry_s=0)
            await queue.put("t", "short")
            await queue.put("t", "long", expiry_s=1000)
            await asyncio.sleep(0.05)
            client.is_connected = True
            client.confirms = True
            await queue.flush()
            assert queue.counts.expired == 1
        assert failures == [(b"short", MessageExpired)]
        assert payloads(client)[-1] == b"long"

    run(test)


def test_callbacks_that_raise_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("boom")

    async def test() -> None:
        client = FakeClient()
        async with queue_on(client, on_delivered=explode, on_failed=explode) as queue:
            await queue.put("t", "1")
            await queue.put("t", "2")
            await client.until_sent(1)
            client.sent[0].confirm()
            await client.until_sent(2)
            client.sent[1].refuse(reasons.TOPIC_NAME_INVALID)
            await queue.flush()
            assert queue.error is None

    with caplog.at_level(logging.ERROR):
        run(test)
    assert [r.message.split()[0] for r in caplog.records] == ["on_delivered", "on_failed"]


def test_closing_with_messages_left(new_store: Callable[[], Any], tmp_path: Path) -> None:
    async def test() -> None:
        client = FakeClient()
        queue = queue_on(client, new_store(), close_timeout_s=0.01, messages_max=1)
        await queue.open()
        await queue.put("t", "1")
        blocked = asyncio.create_task(queue.put("t", "2"))
        await client.until_sent(1)
        with pytest.raises(TimedOut):
            await queue.flush(0.01)
        if isinstance(queue._store, MemoryStore):
            with pytest.raises(MessagesLeft) as caught:
                await queue.close()
            assert caught.value.count == 1
        else:
            assert await queue.close() == 1
        with pytest.raises(QueueClosed):
            await blocked
        with pytest.raises(QueueClosed):
            await queue.put("t")
        assert await queue.close() == 0
        # A confirmation after the end changes nothing.
        client.sent[0].confirm()
        await settle()
        assert queue.counts.delivered == 0

    run(test)


def test_an_error_in_the_body_is_not_hidden() -> None:
    async def test() -> None:
        async def body() -> None:
            async with queue_on(FakeClient()) as queue:
                await queue.put("t")
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            await body()

    run(test)


def test_messages_no_server_could_accept() -> None:
    async def test() -> None:
        async with queue_on(FakeClient()) as queue:
            for topic, properties in (
                ("", None),
                ("a/#", None),
                ("t", {pr.TOPIC_ALIAS: 1}),
                ("t", {pr.SUBSCRIPTION_IDENTIFIER: [1]}),
                ("t", {pr.SERVER_KEEP_ALIVE: 1}),
                ("t", {pr.USER_PROPERTY: [("hf-seq", "me:1:1")]}),
                ("t", {pr.PAYLOAD_FORMAT_INDICATOR: 7}),
            ):
                with pytest.raises(ValueError):
                    await queue.put(topic, b"", properties=cast(Any, properties))
            assert queue.length == 0

    run(test)


def test_settings_that_are_wrong() -> None:
    async def test() -> None:
        client = FakeClient()
        for options in (
            {"window": 0},
            {"when_full": "drop"},
            {"messages_max": 0},
            {"bytes_max": 0},
        ):
            with pytest.raises(ValueError):
                queue_on(client, **options)
        with pytest.raises(ValueError, match="MQTT 5"):
            queue_on(FakeClient(level=4))
        with pytest.raises(QueueClosed):
            await queue_on(client).put("t")

    run(test)


def test_paper_form_with_a_clock_that_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids grow strictly, over restarts, too; MQTT 3.1.1 will do."""
    clock = [1_700_000_000.5, 1_700_000_000.5, 1_600_000_000.0]

    async def test() -> None:
        client = FakeClient(level=4)
        client.confirms = True
        for now in clock:
            monkeypatch.setattr("time.time", lambda now=now: now)
            store = SqliteStore(tmp_path / "queue.db")
            async with queue_on(client, store, form=PaperFormat("user1")) as queue:
                await queue.put("topic1/group1/user1", "hello")
                with pytest.raises(ValueError):
                    await queue.put("t", b"\xff")
                with pytest.raises(ValueError, match="MQTT 5"):
                    await queue.put("t", "x", properties={pr.CONTENT_TYPE: "x"})
        messages = [json.loads(payload) for payload in payloads(client)]
        first = 1_700_000_000_500
        assert messages == [{"id": first + n, "msg": "hello", "sender": "user1"} for n in range(3)]
        assert all(not sent.properties for sent in client.sent)

    run(test)


class FullStore(MemoryStore):
    """A store on disk whose next transactions fail."""

    blocking = True

    def __init__(self) -> None:
        super().__init__()
        self.error: StoreError | None = None
        self.changes: list[QueueChange] = []

    def apply(self, change: QueueChange) -> None:
        if self.error is not None:
            raise self.error
        self.changes.append(change)


def test_full_disk_and_broken_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        client = FakeClient()
        store = FullStore()
        queue = queue_on(client, store)
        await queue.open()
        assert await queue.put("t", "1") == 1
        store.error = StoreFull("the disk is full")
        with pytest.raises(StoreFull):
            await queue.put("t", "lost, and known to be")
        assert queue.length == 1
        client.sent[0].confirm()
        await queue.flush()
        store.error = None
        # Nothing was stored, so its sequence is free.
        assert await queue.put("t", "2") == 2
        removed = [one for change in store.changes for one in change.removed]
        assert removed == [1]
        store.error = StoreError("input/output error")
        monkeypatch.setattr("holdfast.client.pubqueue.writer.ADDED_MAX", 1)
        puts = [asyncio.create_task(queue.put("t", "3")) for _ in range(3)]
        await asyncio.wait(puts)
        assert all("input/output" in str(put.exception()) for put in puts)
        await settle()
        assert isinstance(queue.error, StoreError)
        with pytest.raises(StoreError):
            await queue.flush()
        store.error = None
        assert await queue.close() == 1

    run(test)


def test_concurrent_puts_share_a_transaction() -> None:
    async def test() -> None:
        client = FakeClient()
        client.confirms = True
        store = FullStore()
        async with queue_on(client, store, window=64) as queue:
            sequences = await asyncio.gather(*(queue.put("t", str(n)) for n in range(500)))
            assert sequences == list(range(1, 501))
        assert payloads(client) == [str(n).encode() for n in range(500)]
        assert sum(bool(change.added) for change in store.changes) < 20

    run(test)


@pytest.mark.parametrize(("limit", "value"), [("LOADED_MAX", 10), ("LOADED_BYTES_MAX", 600)])
def test_more_than_is_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    """A backlog on disk is read in pieces, and messages put meanwhile come after it."""
    monkeypatch.setattr(f"holdfast.client.pubqueue.sender.{limit}", value)

    async def test() -> None:
        offline = FakeClient()
        offline.is_connected = False
        path = tmp_path / "queue.db"
        queue = queue_on(offline, SqliteStore(path), close_timeout_s=0)
        await queue.open()
        await asyncio.gather(*(queue.put("t", str(n)) for n in range(95)))
        assert len(queue._sender.core.pending) <= 10
        assert await queue.close() == 95

        client = FakeClient()
        async with queue_on(client, SqliteStore(path), window=4) as queue:
            assert queue.length == 95
            await client.until_sent(4)
            assert len(queue._sender.core.pending) <= 20
            client.confirms = True
            for sent in client.open:
                sent.confirm()
            for number in range(95, 150):
                await queue.put("t", str(number))
            await queue.flush()
            assert queue.size_bytes == 0
        assert payloads(client) == [str(n).encode() for n in range(150)]
        epochs = [sent.identity.epoch for sent in client.sent if sent.identity is not None]
        assert epochs == sorted(epochs)
        assert len(set(epochs)) == 2

    run(test)


def test_a_newer_epoch_waits_for_the_older_to_be_gone(tmp_path: Path) -> None:
    """Sent while an older one may still be sent again, it would have that one fenced."""

    async def test() -> None:
        path = tmp_path / "queue.db"
        offline = FakeClient()
        offline.is_connected = False
        queue = queue_on(offline, SqliteStore(path), close_timeout_s=0)
        await queue.open()
        await queue.put("t", "old")
        await queue.close()
        client = FakeClient()
        async with queue_on(client, SqliteStore(path), window=8) as queue:
            await queue.put("t", "new")
            await client.until_sent(1)
            await settle(50)
            assert payloads(client) == [b"old"]
            client.sent[0].confirm()
            await client.until_sent(2)
            # What is left in the file now does not have the old one.
            assert [e.payload for e in await queue._open_writer().read(0, 10, 1000)] == [b"new"]
            client.sent[1].confirm()

    run(test)


def test_lost_for_good_error_is_kept_from_the_application() -> None:
    """A message whose connection ended is sent again, not failed."""

    async def test() -> None:
        client = FakeClient()
        failures: list[QueueEntry] = []
        async with queue_on(client, on_failed=lambda e, _: failures.append(e)) as queue:
            await queue.put("t", "1")
            await client.until_sent(1)
            client.sent[0].fail(NotConnected("gave up"))
            await client.until_sent(2)
            assert client.sent[1].identity == client.sent[0].identity
            client.sent[1].confirm()
        assert failures == []
        assert queue.counts.resent == 1

    run(test)
