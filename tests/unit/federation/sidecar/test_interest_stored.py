"""The interest of other members that a crash leaves: no less than the messages went by."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from holdfast_federation.core.effects import Message
from holdfast_federation.core.identity import Identity, MessageId
from holdfast_federation.core.messages.streams import Position
from holdfast_federation.core.routing.interest import RemoteInterest
from holdfast_federation.sidecar import federator
from holdfast_federation.sidecar.federator import Federator
from holdfast_federation.sidecar.store.file import (
    MemberStoreChange,
    MemberStoreError,
    StoredMember,
)
from tests.support.scripted_edge import ScriptedEdge, Site, until

OWN = bytes(15) + b"\7"


class Disk:
    """The durable state of one member over its starts. `is_open`: cleared, a write waits."""

    disputed = 0
    may_move = False

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._has_crashed = False
        self._epoch = 0
        self._custody: dict[MessageId, bytes] = {}
        self._positions: dict[bytes, Position] = {}
        self._retained: dict[str, bytes] = {}
        self._memory: list[bytes] = []

    def crash(self) -> None:
        """Ends the start: what it writes from now on is lost."""
        self._has_crashed = True
        self.is_open.set()

    async def begin(self, id: str) -> Identity:
        self._has_crashed = False
        self._epoch += 1
        return Identity(OWN, self._epoch)

    async def load(self) -> StoredMember:
        custody = [(data, 0.0) for data in self._custody.values()]
        return StoredMember(custody, self._positions, self._retained, self._memory)

    async def apply(self, change: MemberStoreChange) -> None:
        await self.is_open.wait()
        if self._has_crashed:
            raise MemberStoreError("crashed")
        for id in change.removed:
            self._custody.pop(id, None)
        self._custody |= change.added
        self._positions |= change.positions
        self._memory = self._memory if change.memory is None else change.memory

    async def dispute(self, epoch: int) -> None:
        pass

    async def read_assignment(self) -> bytes:
        return b""

    async def write_assignment(self, data: bytes) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _memory_is_not_written_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash may come before any delay has passed, as it may under load."""
    monkeypatch.setattr(federator, "MEMORY_DELAY_S", 1000.0)


def run(tmp_path: Path, test: Callable[[Site, Disk], Awaitable[None]]) -> None:
    async def limited() -> None:
        disk = Disk()
        async with Site(tmp_path) as site:
            try:
                await asyncio.wait_for(test(site, disk), 100)
            finally:
                disk.crash()

    uvloop.run(limited())


async def knows(origin: Federator, *others: Federator) -> None:
    """Waits until the origin knows that the others want `a/1`, and has a path to each."""
    nodes, member = {other.node for other in others}, origin.member
    await until(lambda: set(member.interested("a/1")) == nodes, "the interest")
    await until(lambda: member.routes.reached() == nodes, "the paths")


async def two_of_one_filter(
    site: Site, disk: Disk
) -> tuple[Federator, ScriptedEdge, list[Federator], list[ScriptedEdge]]:
    """An origin whose edge has subscribed for the first of two members, and knows both."""
    edge, edges = ScriptedEdge(), [ScriptedEdge(["a/#"]), ScriptedEdge(["a/#"])]
    origin = await site.start("origin", edge, state=disk)
    others = [await site.start("one", edges[0], ["origin"])]
    await until(lambda: edge.wanted == {"a/#"}, "the first")
    await until(lambda: not origin.store.waiting(), "the store is idle")
    others.append(await site.start("two", edges[1], ["origin"]))
    await knows(origin, *others)
    return origin, edge, others, edges


async def crash(site: Site, disk: Disk, *members: Federator) -> None:
    """Ends the member of the disk without another write, and then the others."""
    disk.crash()
    for member in members:
        await site.stop(member)


def test_a_crash_leaves_the_interest_by_which_a_message_left(tmp_path: Path) -> None:
    """A second member wants a filter that the edge has subscribed to already. It has a message, and
    all crash. The origin comes back alone, and its broker hands over the next one."""

    async def test(site: Site, disk: Disk) -> None:
        origin, edge, others, edges = await two_of_one_filter(site, disk)
        edge.publish("before")
        await until(lambda: all(each.payloads() == ["before"] for each in edges), "both have it")
        await crash(site, disk, origin, *others)

        origin = await site.start("origin", edge, state=disk)
        await asyncio.wait_for(edge.publish("meanwhile").wait(), 60)
        assert all(origin.member.custody.queued(each.node) for each in others)
        for name, each in (("one", edges[0]), ("two", edges[1])):
            await site.start(name, each, ["origin"])
        await until(lambda: all(each.payloads()[-1] == "meanwhile" for each in edges), "both")

    run(tmp_path, test)


@pytest.mark.parametrize("is_repeatable", [False, True])
def test_nothing_leaves_by_interest_that_a_crash_would_take(
    tmp_path: Path, is_repeatable: bool
) -> None:
    """The disk stops before the second member's interest is on it. Nothing leaves until it goes on,
    also no message that may leave before it is stored. If the origin crashes, the second member has
    no message, rather than one without those behind it."""

    async def test(site: Site, disk: Disk) -> None:
        origin, edge, others, edges = await two_of_one_filter(site, disk)
        disk.is_open.clear()
        done = asyncio.Event()
        message = Message("a/1", b"x", 1, is_repeatable=is_repeatable)
        edge.host.publish(message, done.set)
        # A later message, which is not stored first, would overtake it.
        edge.publish("after", qos=0)
        await until(lambda: all("after" in each.payloads() for each in edges), "the later one")
        assert [each.payloads() for each in edges] == [["after"], ["after"]]
        assert not done.is_set()
        disk.is_open.set()
        await until(lambda: all("x" in each.payloads() for each in edges), "the message")
        await until(done.is_set, "it is confirmed")

        # The interest is on the disk now, so a repeatable one does not wait for the disk.
        disk.is_open.clear()
        if is_repeatable:
            edge.host.publish(Message("a/1", b"y", 1, is_repeatable=True), done.set)
            await until(lambda: all("y" in each.payloads() for each in edges), "the next one")
        await crash(site, disk, origin, *others)

    run(tmp_path, test)


def test_interest_is_young_until_it_is_remembered() -> None:
    interest = RemoteInterest()
    interest.change(b"B", ["a/#"], [])
    first = interest.version
    interest.change(b"C", ["$share/g/b/+"], [])
    assert [interest.is_young(topic) for topic in ("a/x", "b/x", "c")] == [True, True, False]
    interest.remembered(first)
    assert [interest.is_young(topic) for topic in ("a/x", "b/x")] == [False, True]
    # The same filter of another member, and one that comes after the memory was taken.
    second = interest.version
    interest.change(b"C", ["a/#"], [])
    interest.remembered(second)
    assert [interest.is_young(topic) for topic in ("a/x", "b/x")] == [True, False]
    interest.change(b"C", [], ["a/#"])
    interest.remembered(interest.version)
    assert not interest.is_young("a/x")
    assert interest.members("a/x") == (b"B",)


def test_the_edge_learns_the_filters_at_each_start(tmp_path: Path) -> None:
    """Also that there are none any more: its broker keeps messages for its subscriptions, which
    nobody else ends. A member that knows no other one, and has never, reports nothing: its store
    may be lost."""

    async def test(site: Site, disk: Disk) -> None:
        unset = frozenset({"unset"})
        edge, other = ScriptedEdge(), ScriptedEdge(["a/#"])
        edge.wanted = unset
        origin = await site.start("origin", edge, state=disk)
        interested = await site.start("other", other)
        assert edge.wanted == unset
        await site.stop(interested)
        interested = await site.start("other", other, ["origin"])
        await until(lambda: edge.wanted == {"a/#"}, "the filter")
        await crash(site, disk, origin)
        edge.wanted = unset
        await site.stop(interested)
        origin = await site.start("origin", edge, state=disk)
        await until(lambda: edge.wanted == {"a/#"}, "from memory, with no other member")
        interested = await site.start("other", other, ["origin"])
        other.host.change_interest([], ["a/#"])
        await until(lambda: not edge.wanted, "it is gone")
        await crash(site, disk, origin, interested)
        edge.wanted = unset
        await site.start("origin", edge, state=disk)
        await until(lambda: edge.wanted == frozenset(), "that there are none")

    run(tmp_path, test)
