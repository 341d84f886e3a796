"""Retained messages of the whole federation, with brokers that can tell and take them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from holdfast_federation.core.effects import DeleteRetained, Message, RetainLocally, StoreRetained
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.member import FederationMember
from holdfast_federation.sidecar import retained_sync as retention_module
from holdfast_federation.sidecar.retained_sync import TOLD_MAX, RetainedSync
from holdfast_federation.sidecar.store.file import MemberStoreError, StoreFile
from holdfast_federation.sidecar.store.member_files import StoreFileThread
from holdfast_federation.sidecar.store.store import MemberStore
from tests.support.scripted_edge import RetainingScriptedEdge, ScriptedEdge, Site, until

NODE = b"n" * 16


def run(tmp_path: Path, test: Callable[[Site], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with Site(tmp_path) as site:
            site.config = replace(site.config, retained_check_s=0.5)
            await asyncio.wait_for(test(site), 100)

    uvloop.run(limited())


def test_who_comes_later_gets_what_is_retained(tmp_path: Path) -> None:
    """Of what was published while nobody wanted it, and of what was there before everything."""

    async def test(site: Site) -> None:
        origin, here = RetainingScriptedEdge(), RetainingScriptedEdge()
        origin.retained = {"a/0": Message("a/0", b"old", 1, True)}
        await site.start("origin", origin)
        await site.start("here", here, ["origin"])
        for number in range(3):
            done = origin.publish_retained(f"{number}")
            await asyncio.wait_for(done.wait(), 60)
        assert here.delivered == []
        here.host.change_interest(["a/#"], [])
        await until(lambda: here.texts() == {"a/0": "old", "a/1": "2"}, "what is retained")
        assert here.delivered == [], "a replay is no publication"
        origin.publish_retained("3")
        await until(lambda: here.texts()["a/1"] == "3", "the newest")
        assert here.payloads() == ["3"]
        origin.publish_retained("")
        await until(lambda: here.texts() == {"a/0": "old"}, "its removal")

    run(tmp_path, test)


def test_what_was_removed_while_a_member_was_away_stays_removed(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        origin, here = RetainingScriptedEdge(), RetainingScriptedEdge(["a/#"])
        await site.start("origin", origin)
        receiver = await site.start("here", here, ["origin"])
        await until(lambda: origin.wanted == {"a/#"}, "interest")
        await asyncio.wait_for(origin.publish_retained("1").wait(), 60)
        await asyncio.wait_for(origin.publish_retained("1", "a/2").wait(), 60)
        await until(lambda: here.texts() == {"a/1": "1", "a/2": "1"}, "both")
        await site.stop(receiver)
        await asyncio.wait_for(origin.publish_retained("").wait(), 60)
        await asyncio.wait_for(origin.publish_retained("2", "a/2").wait(), 60)
        receiver = await site.start("here", here, ["origin"])
        await until(lambda: here.texts() == {"a/2": "2"}, "what is now")
        # Its broker has lost everything; the federation has not.
        here.host.edge_down("test")
        here.retained.clear()
        here.host.edge_up()
        await until(lambda: here.texts() == {"a/2": "2"}, "what is now")
        assert origin.texts() == {"a/2": "2"}

    run(tmp_path, test)


def test_versions_survive(tmp_path: Path) -> None:
    """`done` means that the version is durable, even where nobody wants the message."""

    async def test(site: Site) -> None:
        origin = RetainingScriptedEdge()
        sender = await site.start("origin", origin)
        await asyncio.wait_for(origin.publish_retained("1").wait(), 60)
        await site.stop(sender)
        file = StoreFile(tmp_path / "origin" / "federation.db", sender.node)
        assert list(file.open().retained) == ["a/1"]
        file.close()
        sender = await site.start("origin", origin)
        assert sender.member.retained.store.get("a/1") is not None
        assert origin.given == []

    run(tmp_path, test)


def test_a_broker_that_cannot_tell_takes_no_part(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        origin, here = RetainingScriptedEdge(), ScriptedEdge(["a/#"])
        await site.start("origin", origin)
        await site.start("here", here, ["origin"])
        await until(lambda: origin.wanted == {"a/#"}, "interest")
        origin.publish_retained("1")
        await until(lambda: here.delivered, "it")
        assert here.delivered[0][1].is_retained

    run(tmp_path, test)


class Edge(RetainingScriptedEdge):
    """Takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Message, Callable[[], None]]] = []

    def retain(self, id: MessageId, message: Message, done: Callable[[], None]) -> None:
        self.waiting.append((message, done))


class Bench:
    def __init__(self, directory: Path) -> None:
        self.edge = Edge()
        self.told: list[Message] = []
        self.file = StoreFile(directory / "s.db", NODE)
        self.thread = StoreFileThread(self.file)
        self.store = MemberStore(self.thread, self)
        self.retention = RetainedSync(self.edge, self.store, ["kept"], self.call)

    def on_stored(self, ids: list[MessageId]) -> None:
        """Nothing is in custody here."""

    def on_broken(self, error: MemberStoreError) -> None:
        raise error

    def call(self, input: Callable[[FederationMember, float], None]) -> None:
        input(self, 0.0)  # type: ignore[arg-type]

    def broker_has_retained(self, message: Message, now: float) -> None:
        self.told.append(message)

    def wants(self, payload: bytes, topic: str = "t", may_wait: bool = False) -> None:
        message = Message(topic, payload, 1, True)
        self.retention.carry_out(RetainLocally(MessageId(NODE, 1, 1), message, may_wait))
        self.retention.carry_out(StoreRetained(topic, payload))

    async def stored(self) -> dict[str, bytes]:
        written = asyncio.Event()
        self.store.when_written(written.set)
        await asyncio.wait_for(written.wait(), 60)
        connection = self.file._connection
        assert connection is not None
        return await asyncio.get_running_loop().run_in_executor(
            self.thread._executor,
            lambda: dict(connection.execute("SELECT topic, data FROM retained").fetchall()),
        )


def test_the_broker_has_it_before_the_store(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        bench = Bench(tmp_path)
        await bench.store.open()
        bench.retention.up()
        bench.wants(b"1")
        bench.wants(b"2")
        bench.wants(b"3")
        assert [message.payload for message, _ in bench.edge.waiting] == [b"1"]
        assert await bench.stored() == {}
        bench.edge.waiting.pop()[1]()
        [(message, late)] = bench.edge.waiting
        assert message.payload == b"3", "what is in between need not be told"
        assert await bench.stored() == {}
        bench.retention.down()
        late()
        bench.edge.waiting.clear()
        bench.retention.up()
        [(message, done)] = bench.edge.waiting
        assert message.payload == b"3"
        late()
        assert await bench.stored() == {}
        done()
        assert await bench.stored() == {"t": b"3"}
        assert bench.retention.waiting == 0
        bench.retention.carry_out(DeleteRetained("t"))
        await bench.store.close()
        file = StoreFile(tmp_path / "s.db", NODE)
        assert file.open().retained == {}
        file.close()

    run(tmp_path, test)


def test_what_may_wait_gives_way_to_what_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "MAY_WAIT_S", 0.05)

    async def test(site: Site) -> None:
        bench = Bench(tmp_path)
        await bench.store.open()
        bench.retention.up()
        for topic in ("replaced", "delivered", "alone"):
            bench.wants(b"1", topic, may_wait=True)
        assert bench.edge.waiting == []
        bench.wants(b"2", "replaced")
        bench.retention.delivered("delivered")
        await until(lambda: len(bench.edge.waiting) == 2, "what nothing has replaced")
        assert [(message.topic, message.payload) for message, _ in bench.edge.waiting] == [
            ("replaced", b"2"),
            ("alone", b"1"),
        ]
        for _, done in bench.edge.waiting:
            done()
        assert await bench.stored() == {"delivered": b"1", "replaced": b"2", "alone": b"1"}
        assert bench.retention.waiting == 0
        await bench.store.close()

    run(tmp_path, test)


def test_what_a_reading_did_not_find_is_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker does not reply in time, and then it has more than a reading takes. Otherwise the
    member would have the broker replace what it has."""
    monkeypatch.setattr(retention_module, "READ_AGAIN_S", 0.02)

    async def test(site: Site) -> None:
        bench = Bench(tmp_path)
        await bench.store.open()
        edge, retention = bench.edge, bench.retention
        edge.retained = {topic: Message(topic, b"x", 1, True) for topic in ("a", "kept")}
        edge.fails, edge.found_max = True, 1
        retention.up()
        retention.set_wanted_filters(frozenset(["a"]))
        await until(lambda: len(edge.reads) >= 6, "it is read again and again")
        assert bench.told == []
        edge.fails = False
        await until(lambda: len(bench.told) == 2, "both readings")
        assert [message.topic for message in bench.told] == ["a", "a"]
        # The readings of a connection end with it.
        edge.fails = True
        retention.set_wanted_filters(frozenset(["b"]))
        retention.down()
        edge.fails, edge.found_max = False, 2
        bench.told.clear()
        retention.up()
        await until(lambda: len(bench.told) == 2, "all")
        assert edge.reads[-1] == {"#"}
        assert [message.topic for message in bench.told] == ["a", "kept"]
        await bench.store.close()

    run(tmp_path, test)


def test_all_that_a_broker_has_is_told(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        bench = Bench(tmp_path)
        await bench.store.open()
        count = 2 * TOLD_MAX + 10
        for number in range(count):
            topic = f"a/{number}"
            bench.edge.retained[topic] = Message(topic, b"x", 1, True)
        bench.retention.up()
        await until(lambda: len(bench.told) == count + 1, "all")
        assert [message.topic for message in bench.told] == [f"a/{n}" for n in range(count)] + [
            "kept"
        ]
        assert bench.told[-1].payload == b""
        bench.told.clear()
        bench.retention.set_wanted_filters(frozenset(["a/1", "a/2"]))
        await until(lambda: len(bench.told) == 2, "what is wanted now")
        bench.retention.set_wanted_filters(frozenset(["a/1"]))
        bench.retention.set_wanted_filters(frozenset(["a/1", "a/3"]))
        await until(lambda: len(bench.told) == 3, "what is new")
        assert bench.edge.reads[1:] == [frozenset(["a/1", "a/2"]), frozenset(["a/3"])]
        # What is read for a broker that has gone meanwhile counts for nothing.
        bench.told.clear()
        bench.retention.set_wanted_filters(frozenset(["#"]))
        bench.retention.down()
        await asyncio.sleep(0.05)
        assert bench.told == []
        await bench.store.close()

    run(tmp_path, test)
