"""A member whose directory was put back to an earlier copy: nothing that it acknowledges afterwards
is missing at other members."""

import asyncio
import shutil
from pathlib import Path

import pytest
import uvloop

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import DeliverLocally
from holdfast_federation.core.frames import Data
from holdfast_federation.core.identity import RESTORED_STARTS, Identity
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.messages.streams import FORMER_MAX
from holdfast_federation.sidecar.store.identity import skip_starts
from tests.support.scripted_edge import ScriptedEdge, Site, until
from tests.support.seeds import run_seeds
from tests.support.sim_put_back import put_back_world

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


def test_a_former_epoch_is_confirmed_as_far_as_it_was_stored() -> None:
    """The origin was put back: its start 4 has other messages than the one that this member has
    stored, and the member has seen start 5 of the lost ones."""
    config = FederationConfig()
    member = FederationMember(Identity(OWN, 1), "", config, 0.0, ["a"])

    def accept(epoch: int, place: int, now: float) -> str | None:
        return member.receiving.accept(data(epoch, place), place, 1, now)

    def finish(now: float) -> list[tuple[int, int]]:
        for effect in member.take_effects():
            if isinstance(effect, DeliverLocally):
                member.receiving.stored(effect.id, now)
        return [(ack.epoch, ack.place) for ack in member.receiving.acks(now + 1)]

    assert [accept(4, 1, 0.0), accept(4, 2, 0.0), accept(5, 1, 0.0)] == [None] * 3
    assert finish(0.0) == [(4, 2), (5, 1)]
    # A message on a longer way may have been dropped by its origin.
    assert [accept(4, 3, 1.0), accept(3, 1, 1.0)] == ["earlier epoch"] * 2
    assert finish(1.0) == []
    late = config.retry_max_s
    assert accept(4, 2, late) == "duplicate"
    assert finish(late) == [(4, 2)]
    assert [accept(4, 3, late), accept(3, 1, late)] == [None, None]
    unstored = member.receiving.acks(late + 1)
    assert [(ack.epoch, ack.place) for ack in unstored] == [(3, 0), (4, 2)]
    assert finish(late) == [(3, 1), (4, 3)]
    member.check()


def test_former_epochs_survive_and_are_bounded() -> None:
    former = {(ORIGIN, epoch): epoch for epoch in range(1, 2 * FORMER_MAX)}
    member = FederationMember(
        Identity(OWN, 1),
        "",
        FederationConfig(),
        0.0,
        ["a"],
        positions={ORIGIN: (100, 2)},
        former=former,
    )
    receiving = member.receiving
    newest = 2 * FORMER_MAX - 1
    assert receiving.accept(data(newest, newest - 1), newest - 1, 1, 0.0) == "duplicate"
    assert receiving.accept(data(newest, newest), newest, 1, 0.0) is None
    assert receiving.accept(data(5, 77), 77, 1, 0.0) == "old epoch"
    member.check()


@pytest.mark.timeout(3600)
def test_nothing_accepted_afterwards_is_missing() -> None:
    run_seeds(range(40), put_back_world)
