"""A node that was told that its disk is an older copy stands apart, and says so wherever it can."""

import asyncio
import random

import pytest

from holdfast.node.replicate.disk_position import Known
from holdfast.security.peer_handshake import OLDER_COPY, OLDER_COPY_WAITS
from holdfast.security.peer_identity import ANSWERS_APART, PeerIdentity, Refusal
from tests.support.peer_mesh import Mesh, PeerNode, run, until


def refuses(node: PeerNode) -> list[PeerIdentity]:
    """Those that it has refused since; each must stand apart before it may begin anew."""
    seen = []

    def judge(peer: PeerIdentity, known: Known) -> Refusal | None:
        seen.append(peer)
        return Refusal(OLDER_COPY if peer.stands_apart else OLDER_COPY_WAITS, "it lacks much")

    node.links.objection = judge
    return seen


@pytest.mark.parametrize(("one", "other"), [("n1", "n2"), ("n2", "n1")])
@pytest.mark.parametrize("dials", [True, False])
def test_who_stands_apart_is_heard_whoever_dials(one: str, other: str, dials: bool) -> None:
    """Its address may be another one than the others know, or theirs."""

    async def test() -> None:
        async with Mesh() as mesh:
            whole = await mesh.start(one, features=ANSWERS_APART)
            copy = await mesh.start(other, features=ANSWERS_APART)
            seen = refuses(whole)
            if dials:
                copy.links.set_peers({one: whole.address})
            else:
                whole.links.set_peers({other: copy.address})
            await until(lambda: ("begins anew", "") in copy.events)
            assert copy.events[0] == ("stands apart", "")
            assert [peer.stands_apart for peer in seen[:2]] == [False, True]
            assert not whole.linked()

    run(test)


def test_an_older_version_is_not_dialled_to_the_end() -> None:
    """It would take it for a link."""

    async def test() -> None:
        async with Mesh() as mesh:
            older, copy = await mesh.start("n1"), await mesh.start("n2", features=ANSWERS_APART)
            copy.links.isolate("its disk is an older copy")
            copy.links.set_peers({"n1": older.address})
            await until(lambda: copy.refusals("isolated") > 2)
            older.links.set_peers({"n2": copy.address})
            await until(lambda: older.refusals("refused_there") > 2)
            assert not older.events
            assert not copy.events

    run(test)


def test_nobody_takes_a_link_to_one_that_stands_apart() -> None:
    """Not even who has no objection: it does not remember, or is in no cluster yet."""

    async def test() -> None:
        async with Mesh() as mesh:
            nodes = [await mesh.start(name, features=ANSWERS_APART) for name in ("n1", "n2", "n3")]
            for node in nodes[1:]:
                node.links.isolate("its disk is an older copy")
            for node in nodes:
                node.links.set_peers({each.node_id: each.address for each in nodes})
            await until(lambda: nodes[0].refusals("apart") > 3)
            assert not any(node.events for node in nodes)

    run(test)


@pytest.mark.parametrize("seed", range(10))
def test_no_handshake_under_way_becomes_a_link(seed: int) -> None:
    async def test() -> None:
        chance = random.Random(seed)
        async with Mesh() as mesh:
            one = await mesh.start("n1", features=ANSWERS_APART)
            two = await mesh.start("n2", features=ANSWERS_APART)
            two.links.set_peers({"n1": one.address})
            one.links.set_peers({"n2": two.address})
            for _ in range(chance.randrange(20)):
                await asyncio.sleep(0)
            two.links.isolate("its disk is an older copy")
            events = list(two.events)
            await until(lambda: one.refusals("apart") > 1)
            assert not one.linked()
            assert not two.linked()
            assert [name for name, _ in two.events[len(events) :]] in ([], ["disconnected"])

    run(test)
