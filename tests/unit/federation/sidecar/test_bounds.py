"""What a member keeps in memory for others, in all: while its disk is full, and while many members
are cut off at once."""

from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import Dropped, Message
from holdfast_federation.core.frames import Announcement, Announcements, encode
from holdfast_federation.core.identity import Identity
from holdfast_federation.core.member import FederationMember
from holdfast_federation.sidecar.store import store as store_module
from holdfast_federation.sidecar.store.file import MemberStoreChange, MemberStoreFull, StoreFile
from tests.support.scripted_edge import ScriptedEdge, Site, until
from tests.support.sim_federation_member import node_id

MIB = 1 << 20


@pytest.mark.parametrize("when_full", ["drop-oldest", "wait"])
def test_while_the_disk_is_full_the_broker_keeps_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_full: str
) -> None:
    monkeypatch.setattr(store_module, "FULL_RETRY_S", 0.05)
    monkeypatch.setattr(store_module, "FULL_BYTES_MAX", 3 * MIB)
    apply = StoreFile.apply
    disks_full: set[str] = set()

    def full(file: StoreFile, change: MemberStoreChange) -> None:
        if file.path.parent.name in disks_full and change.added:
            raise MemberStoreFull(f"{file.path}: the disk is full")
        apply(file, change)

    monkeypatch.setattr(StoreFile, "apply", full)

    async def test() -> None:
        async with Site(tmp_path) as site:
            origin, here = ScriptedEdge(), ScriptedEdge(["a/#"])
            await site.start("here", here)
            sender = await site.start("origin", origin, ["here"], when_full=when_full)
            await until(lambda: origin.wanted == {"a/#"}, "interest")
            disks_full.add("origin")
            first = origin.publish("first", "a/1", 1)
            await until(lambda: sender.store.is_full, "a full disk")
            done = [origin.publish("x" * MIB, "a/1", 1) for _ in range(40)]
            assert sender.member.custody.bytes <= 5 * MIB
            assert sender._publications.waiting_count >= 36
            assert not any(event.is_set() for event in [first, *done])
            disks_full.clear()
            await until(lambda: len(here.delivered) == 41, "all")
            assert all(event.is_set() for event in [first, *done])
            assert not sender.counters.dropped

    uvloop.run(test())


def test_queues_of_all_members_together_are_bounded() -> None:
    """Ten members are cut off, each with a topic of its own; the busiest queue gives way."""
    config = replace(FederationConfig(), custody_bytes_max=10 * MIB)
    own = node_id(1)
    member = FederationMember(Identity(own, 1), "", config, 0.0)
    for number in range(2, 12):
        node = node_id(number)
        member.link_up(node, 0.0)
        news = Announcement(node, 1, 1, 0, [own], "", False, [f"t/{number}"], [])
        member.frame(node, encode(Announcements([news])), 0.1)
        member.link_down(node, 0.2)
    for _ in range(3):
        for number in range(3, 12):
            assert member.local_publish(Message(f"t/{number}", bytes(MIB // 10), 1), 1.0)
    for _ in range(200):
        assert member.local_publish(Message("t/2", bytes(MIB // 10), 1), 1.0)
        assert member.custody.bytes <= 10 * MIB
    dropped = [each for each in member.take_effects() if isinstance(each, Dropped)]
    assert {(each.reason, each.destination) for each in dropped} == {("custody full", node_id(2))}
    assert all(member.custody.queued(node_id(number)) == 3 for number in range(3, 12))
    member.custody.abandon(node_id(2), "test")
    assert member.custody.bytes == 27 * len(bytes(MIB // 10)) + sum(
        3 * len(f"t/{number}") for number in range(3, 12)
    )
