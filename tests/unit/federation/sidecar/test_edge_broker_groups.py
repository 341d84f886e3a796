"""The edge inside a broker: who of its clients gets what comes in. A test plays the federation."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.main import main
from holdfast.client.client import Client
from holdfast.node.groups.groups import Groups
from holdfast.node.session.audience import Audience
from holdfast.protocol.topics.names import matches
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.routing.interest import plain_of
from holdfast_federation.sidecar.edge_broker.interest import importable
from holdfast_federation.sidecar.edge_broker.messages import audience_of
from holdfast_federation.sidecar.edge_broker.origin_offset import LogPlace, with_offset
from tests.support.broker_in_process import LoopBroker, loop_broker
from tests.support.edge_site import OTHER, Site, run
from tests.support.peer_mesh import until

G, H = "$share/g/t/#", "$share/h/t/#"
DAY_S = 86_400


async def receive(client: Client, count: int) -> list[bytes]:
    """Exactly so many."""
    found = []
    for _ in range(count):
        message = await client.receive()
        assert message is not None
        found.append(message.payload)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await client.receive()
    return found


def test_a_group_that_was_not_granted_a_message_never_gets_it(tmp_path: Path) -> None:
    """Neither live, nor later, nor from another start of the broker."""
    filters = {"plain": "t/#", "g": G, "h": H}

    async def main() -> None:
        broker = LoopBroker(tmp_path)
        await broker.start()
        site = await Site(broker).start()
        for name, filter in filters.items():
            async with site.client(name, session_expiry_s=DAY_S) as client:
                await client.subscribe((filter, 2))
        for qos in (1, 2):
            begin = 10 * qos
            site.deliver("t/1", b"plain", qos, begin)
            site.deliver("t/1", b"g", qos, begin + 1, is_plain=False, granted=(G,))
            site.deliver("t/1", b"not h", qos, begin + 2, granted=(G,))
            site.deliver("t/1", b"all", qos, begin + 3, granted=None)
            site.deliver("t/1", b"groups", qos, begin + 4, is_plain=False, granted=None)
        await until(lambda: len(site.done) == 10)
        await broker.crash()
        async with loop_broker(tmp_path) as again:
            site = await Site(again).start()
            clients = {}
            for name in filters:
                clients[name] = site.client(name, clean_start=False, session_expiry_s=DAY_S)
                await clients[name].connect()
            site.deliver("t/1", b"0 plain", 0, 0)
            site.deliver("t/1", b"0 h", 0, 0, is_plain=False, granted=(H,))
            await until(lambda: len(site.done) == 2)
            for name, mine in {
                "plain": [b"plain", b"not h", b"all"],
                "g": [b"g", b"not h", b"all", b"groups"],
                "h": [b"all", b"groups"],
            }.items():
                last = {"plain": [b"0 plain"], "h": [b"0 h"]}.get(name, [])
                found = await receive(clients[name], 2 * len(mine) + len(last))
                assert sorted(found) == sorted(mine + mine + last), name
                await clients[name].disconnect()
            await site.edge.stop()

    asyncio.run(main())


def test_a_share_that_another_member_was_to_have_is_stored_once_behind_newer_ones(
    tmp_path: Path,
) -> None:
    """The message has come for plain subscribers, and later ones of its origin's log; both times
    under its place there."""

    def marked(offset: int) -> bytes:
        return with_offset(b"", LogPlace(OTHER, "l", 3, offset))

    async def scenario(site: Site) -> None:
        await site.start()
        async with site.client("plain") as plain, site.client("g") as member:
            await plain.subscribe(("t/1", 2))
            await member.subscribe((G, 2))
            site.deliver("t/1", b"first", 2, 1, properties=marked(7))
            site.deliver("t/1", b"second", 2, 2, properties=marked(8), granted=(G,))
            for _ in range(2):
                site.deliver(
                    *("t/1", b"first", 2, 3),
                    properties=marked(7),
                    is_plain=False,
                    granted=(G,),
                    is_regranted=True,
                )
            await until(lambda: len(site.done) == 4)
            message = await member.receive()
            again = await member.receive()
            assert message is not None
            assert again is not None
            assert (message.payload, again.payload) == (b"second", b"first")
            assert again.properties == {}
            assert await receive(member, 0) == []
            assert await receive(plain, 2) == [b"first", b"second"]
        assert site.loop_broker.broker.node.state.stats.producer_duplicates == 1

    run(tmp_path, scenario)


def test_a_group_that_begins_while_a_message_waits_for_room_does_not_get_it(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.start()
        state = site.loop_broker.broker.node.state
        state.disk_full = True
        site.deliver("t/1", b"before", 1, 1)
        async with site.client("g") as member:
            await member.subscribe((G, 1))
            state.disk_full = False
            site.deliver("t/1", b"after", 1, 2, granted=(G,))
            assert await receive(member, 1) == [b"after"]

    run(tmp_path, scenario)


def test_a_group_of_which_a_part_may_come_in_is_known_by_that_part(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.start(imports=["t/#"])
        async with site.client("all") as every, site.client("part") as part:
            await every.subscribe(("$share/g/#", 1))
            await part.subscribe((G, 1))
            await until(lambda: len(site.host.interest) == 2)
            (of_every,) = importable("$share/g/#", ["t/#"])
            assert set(site.host.interest) == {of_every, G}
            site.deliver("t/1", b"1", 1, 1, is_plain=False, granted=(of_every,))
            site.deliver("t/1", b"2", 1, 2, is_plain=False, granted=(G,))
            assert await receive(every, 1) == [b"1"]
            assert await receive(part, 1) == [b"2"]

    run(tmp_path, scenario)


def test_a_message_that_a_group_here_began_too_late_for_goes_out_so(tmp_path: Path) -> None:
    """It waits in the log while there is no federator; a group that begins meanwhile has only what
    comes later, so another member's clients of the group may have it."""

    async def main() -> None:
        async with loop_broker(tmp_path) as broker:
            site = await Site(broker).start()
            await site.want("#")
            await site.edge.stop()
            async with site.client("p") as client:
                await client.publish("t/1", b"before", qos=1)
                await client.subscribe((G, 1), ("$share/g/other", 1))
                await client.publish("t/1", b"after", qos=2)
                again = await Site(broker).start()
                await until(lambda: len(again.host.published) == 2)
                told = {each.payload: each.missed_by for each in again.host.published}
                assert told == {b"before": (G,), b"after": ()}
            await again.edge.stop()

    asyncio.run(main())


def test_a_group_whose_members_come_back_began_before_they_went(tmp_path: Path) -> None:
    """Its members are away while the message is stored, and back when it goes out."""

    async def scenario(site: Site) -> None:
        await site.start()
        await site.want("#")
        async with site.client("g", session_expiry_s=DAY_S) as member:
            await member.subscribe((G, 1))
        await site.edge.stop()
        async with site.client("p") as client:
            await client.publish("t/1", b"1", qos=1)
        member = site.client("g", clean_start=False, session_expiry_s=DAY_S)
        await member.connect()
        assert await receive(member, 1) == [b"1"]
        again = await Site(site.loop_broker).start()
        await until(lambda: again.host.published)
        assert again.host.published[0].missed_by == ()
        await again.edge.stop()
        await member.disconnect()

    run(tmp_path, scenario)


def test_a_group_that_is_away_gets_what_comes_right_after_a_start(tmp_path: Path) -> None:
    """Its home is not open yet when the broker is ready, so the group is in no route."""

    async def main() -> None:
        async with (
            loop_broker(tmp_path) as broker,
            Site(broker).client("g", session_expiry_s=DAY_S) as member,
        ):
            await member.subscribe((G, 1))
        async with loop_broker(tmp_path) as broker:
            groups = broker.broker.node.state.cluster.groups
            assert isinstance(groups, Groups)
            assert groups.coordinator.homes.opening
            site = Site(broker)
            await site.edge.start(site.host)
            site.deliver("t/1", b"1", 1, 1, is_plain=False, granted=(G,))
            await until(lambda: site.done)
            member = site.client("g", clean_start=False, session_expiry_s=DAY_S)
            await member.connect()
            assert await receive(member, 1) == [b"1"]
            await member.disconnect()
            await site.edge.stop()

    asyncio.run(main())


def test_the_log_command_says_for_whom_a_message_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(site: Site) -> None:
        await site.start()
        async with site.client("g") as member:
            await member.subscribe((G, 1))
            site.deliver("t/1", b"1", 1, 1)
            site.deliver("t/1", b"2", 1, 2, is_plain=False, granted=(G,))
            site.deliver("t/1", b"3", 1, 3, is_plain=False)
            site.deliver("t/1", b"4", 1, 4, granted=None)
            await until(lambda: len(site.done) == 4)

    run(tmp_path, scenario)
    arguments = ["log", "dump", str(tmp_path), "--kind", "message"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [[part for part in line.split() if part.startswith("for=")] for line in lines]
    assert shown == [["for=plain"], [f"for={G}"], ["for=nobody"], []]
    assert main([*arguments, "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each.get("audience") for each in objects] == [
        {"plain": True, "groups": []},
        {"plain": False, "groups": [G]},
        {"plain": False, "groups": []},
        None,
    ]


KEYS = st.sampled_from(
    [f"$share/{name}/{filter}" for name in "gh" for filter in ("#", "a/#", "a/+", "+/b", "b")]
)
IMPORTS = st.sampled_from([["#"], ["a/#"], ["a/+", "+/b"], ["+/b", "b", "a/#"]])
TOPICS = st.sampled_from(["a", "b", "a/b", "a/c", "b/b"])


@given(
    IMPORTS, st.lists(st.sets(KEYS), min_size=1, max_size=4), TOPICS, st.booleans(), st.randoms()
)
def test_whoever_is_granted_what_each_group_gets_it_at_one_member(
    imports: list[str],
    members: list[set[str]],
    topic: str,
    is_plain: bool,
    chance: random.Random,
) -> None:
    """Members that let the same in announce their groups; the origin gives each announced one to
    one of those that have it."""
    announced = [{one for key in keys for one in importable(key, imports)} for keys in members]
    granted: list[set[str]] = [set() for _ in members]
    for share in sorted(set().union(*announced)):
        if matches(plain_of(share), topic):
            having = [number for number, shares in enumerate(announced) if share in shares]
            granted[chance.choice(having)].add(share)
    found: list[str] = []
    for keys, shares in zip(members, granted, strict=True):
        delivery = DeliverLocally(
            MessageId(OTHER, 1, 1), Message(topic, b"", 1), 1, 1, is_plain, tuple(shares)
        )
        here = [key for key in keys if matches(plain_of(key), topic)]
        audience = audience_of(delivery, here, imports)
        assert audience == Audience(is_plain, set(here) & set(audience.groups if audience else ()))
        found += audience.groups
    may_come_in = any(matches(one, topic) for one in imports)
    wanting = {key for keys in members for key in keys if matches(plain_of(key), topic)}
    assert sorted(found) == (sorted(wanting) if may_come_in else [])
