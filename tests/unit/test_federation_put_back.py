"""A member whose directory was put back to an earlier copy: nothing that it acknowledges afterwards
is missing at other members."""

import asyncio
import shutil
from pathlib import Path

import pytest
import uvloop

from holdfast.federation.core.config import FederationConfig
from holdfast.federation.core.frames import Data
from holdfast.federation.core.identity import RESTORED_STARTS, Identity
from holdfast.federation.core.member import FederationMember
from holdfast.federation.sidecar.store.identity import skip_starts
from tests.support.scripted_edge import ScriptedEdge, Site, until

COUNT = 60
OWN, ORIGIN = b"o" * 16, b"x" * 16


async def publish(edge: ScriptedEdge, name: str) -> list[str]:
    """Publish until all are done, and return them."""
    texts = [f"{name} {number}" for number in range(COUNT)]
    done = [edge.publish(text) for text in texts]
    await until(lambda: all(each.is_set() for each in done), f"{name} is done")
    return texts


@pytest.mark.parametrize("is_alone_first", [False, True])
@pytest.mark.parametrize("is_restored", [True, False])
def test_what_is_done_arrives(tmp_path: Path, is_restored: bool, is_alone_first: bool) -> None:
    """The member goes on from a copy, by `holdfast restore` or as a snapshot of a machine puts it
    back. What it acknowledges before it meets others is in custody under an epoch that it has used
    for other messages."""

    async def scenario() -> None:
        async with Site(tmp_path) as site:
            here = ScriptedEdge(["a/#"])
            other = await site.start("here", here)
            edge = ScriptedEdge()
            origin = await site.start("origin", edge, ["here"])
            await until(lambda: edge.wanted == frozenset(["a/#"]), "interest")
            sent = await publish(edge, "before")
            await until(lambda: not len(origin.member.custody), "confirmed")
            await site.stop(origin)
            shutil.copytree(tmp_path / "origin", tmp_path / "copy")
            for number in range(3):
                edge = ScriptedEdge()
                origin = await site.start("origin", edge, ["here"])
                await until(lambda edge=edge: edge.wanted, "interest")  # type: ignore[misc]
                sent += await publish(edge, f"lost {number}")
                await until(
                    lambda: set(sent) <= set(here.payloads()),  # noqa: B023
                    "delivered",
                )
                await site.stop(origin)
            shutil.rmtree(tmp_path / "origin")
            (tmp_path / "copy").rename(tmp_path / "origin")
            if is_restored:
                skip_starts(tmp_path / "origin", RESTORED_STARTS)
            if is_alone_first:
                await site.stop(other)
                edge = ScriptedEdge()
                origin = await site.start("origin", edge)
                sent += await publish(edge, "alone")
                await site.stop(origin)
                await site.start("here", here)
            for attempt in range(2):
                edge = ScriptedEdge()
                origin = await site.start("origin", edge, ["here"])
                failed = asyncio.ensure_future(origin.failed())
                texts = [f"after {attempt} {number}" for number in range(COUNT)]
                done = [edge.publish(text) for text in texts]
                await until(
                    lambda: failed.done() or all(each.is_set() for each in done),  # noqa: B023
                    "done, or it has found out",
                )
                # It may find out after all are done.
                await until(
                    lambda: failed.done() or not len(origin.member.custody),  # noqa: B023
                    "confirmed, or it has found out",
                )
                failed.cancel()
                sent += [text for text, each in zip(texts, done, strict=True) if each.is_set()]
                await site.stop(origin)
            await until(lambda: set(sent) <= set(here.payloads()), "all are delivered")
            assert sent[-1] == f"after 1 {COUNT - 1}"

    uvloop.run(asyncio.wait_for(scenario(), 100))


def data(epoch: int, place: int) -> Data:
    return Data(ORIGIN, epoch, place, 0, 4, 1, False, "a", b"", b"", None, [(OWN, place, 1)], 0)


def test_an_epoch_that_was_used_again_is_not_confirmed() -> None:
    """The origin was put back: its start 4 has other messages than the one that this member has
    stored, and the member has seen start 5 of the lost ones."""
    member = FederationMember(Identity(OWN, 1), "", FederationConfig(), 0.0, ["a"])
    for place in (1, 2):
        assert member.receiving.accept(data(4, place), place, 1, 0.0) is None
    assert member.receiving.accept(data(5, 1), 1, 1, 0.0) is None
    assert member.receiving.accept(data(4, 2), 2, 1, 0.0) == "old epoch"
    assert member.receiving.accept(data(4, 3), 3, 1, 0.0) == "epoch used again"
    confirmed = [(ack.epoch, ack.place) for ack in member.receiving.acks(1e9)]
    assert (4, 2) in confirmed
    assert (4, 3) not in confirmed
