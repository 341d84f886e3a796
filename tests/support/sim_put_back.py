"""A member of a federation whose directory is put back to an earlier copy, in virtual time.

The copy may be restored with `holdfast restore`, which counts starts on, or as a snapshot of a
machine puts it back. What the member had accepted after the copy may be lost with it, and older
messages may arrive twice. What it accepts after it goes on is missing nowhere. The broker goes back
together with the member, as one directory has both.
"""

import copy
import random
from functools import partial
from typing import Any

from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import EPOCH_RANDOM_STEP, RESTORED_STARTS, MessageId
from tests.support.sim_federation import Weather, World, Wrong, random_weather
from tests.support.sim_federation_member import WALL_S, SimMember

BEGINS_AGAIN_S = 1.0
ORIGIN = 0


class PutBackWorld(World):
    """Messages are known by their payloads: the member may use an id twice before it finds out
    that its directory is an old copy."""

    def __init__(self, count: int, edges: list[tuple[int, int]], seed: int, weather: Weather):
        self.accepted: set[bytes] = set()
        """The payloads that the member will have delivered, except for those that were lost."""
        self.texts: dict[MessageId, bytes] = {}
        self.found: dict[int, set[bytes]] = {number: set() for number in range(count)}
        self.copied: tuple[Any, ...] = ()
        self.before: set[bytes] = set()
        self.numbers = 0
        others = range(1, count)
        super().__init__(
            count, edges, seed, weather, subscriptions={each: ["#"] for each in others}
        )

    def step_epochs(self) -> None:
        self.epoch_step = self.rng.randint(1, EPOCH_RANDOM_STEP)

    def offer(self) -> None:
        """A client of the member publishes."""
        self.numbers += 1
        member = self.members[ORIGIN]
        if member.core is not None:
            member.publish(Message("a", b"%d" % self.numbers, self.rng.choice((1, 2))))

    def handed_over(
        self, id: MessageId, first: MessageId, number: int, wanting: tuple[bytes, ...]
    ) -> None:
        super().handed_over(id, first, number, wanting)
        self.texts[id] = self.members[ORIGIN].handing.payload

    def promise(self, id: MessageId) -> None:
        # Messages of disputed starts have new ids, and were accepted before.
        if id in self.texts:
            self.accepted.add(self.texts[id])

    def copy_directory(self) -> None:
        member = self.members[ORIGIN]
        member.disk.remembered = member.member.memory(self.now, WALL_S + self.now)
        self.copied = copy.deepcopy((member.disk, member.session, member.numbered))
        self.before = set(self.accepted)

    def put_back(self, skipped: int) -> None:
        """Put the member back to its copy. Messages accepted since count only if they arrived."""
        member = self.members[ORIGIN]
        assert member.core is None
        member.disk, member.session, member.numbered = copy.deepcopy(self.copied)
        member.disk.epoch += skipped
        self.accepted = set(self.before)
        self.unstored.clear()

    def conflicted(self, member: SimMember, epoch: int) -> None:
        """The driver stores it, ends the member and starts it again."""
        super().conflicted(member, epoch)
        member.disk.disputed = max(epoch, member.disk.epoch)
        member.disk.epoch = max(epoch, member.disk.epoch)
        member.has_failed = True
        self.at(self.now, partial(self.crash, member.number))
        self.at(self.now + BEGINS_AGAIN_S, partial(self.restart, member.number))

    # The checks of ids

    def check_delivery(self, member: SimMember, effect: DeliverLocally) -> None:
        pass

    def check_known(self, member: SimMember, effect: DeliverLocally) -> None:
        if effect.message.payload not in self.found[member.number]:
            raise Wrong(f"{effect.message.payload!r} taken for known at {member.number}")

    def arrived(self, member: SimMember, effect: DeliverLocally, groups: list[str]) -> None:
        self.found[member.number].add(effect.message.payload)

    def lacking(self) -> list[tuple[int, bytes]]:
        return [
            (number, text)
            for number, found in self.found.items()
            if number != ORIGIN
            for text in sorted(self.accepted.difference(found))
        ]


def put_back_world(seed: int, settle_s: float = 200.0) -> PutBackWorld:
    """`settle_s`: a link that was lost often counts again after `link_delay_max_s`."""
    rng = random.Random(seed)
    count = rng.choice((2, 3, 4))
    edges = [(number, number + 1) for number in range(count - 1)]
    if count > 2 and rng.random() < 0.5:
        edges.append((0, count - 1))
    world = PutBackWorld(count, edges, seed, random_weather(rng))
    world.members[ORIGIN].tells_places = False
    world.run_until(world.is_stable, 60.0)

    def work(duration_s: float) -> None:
        end = world.now + duration_s
        while world.now < end:
            for _ in range(rng.choice((0, 0, 1, 4))):
                world.offer()
            world.run(rng.choice((0.002, 0.05, 0.2)))

    def begin_again(number: int) -> None:
        world.crash(number)
        world.run(rng.choice((0.1, 1.0)))
        world.restart(number)

    work(rng.choice((0.0, 2.0)))
    for _ in range(rng.randrange(3)):
        begin_again(ORIGIN)
        work(1.0)
    world.copy_directory()
    for _ in range(rng.randrange(4)):
        work(rng.choice((0.0, 0.5, 2.0)))
        begin_again(ORIGIN)
    work(rng.choice((0.0, 1.0)))
    for number in range(1, count):
        if rng.random() < 0.3:
            begin_again(number)
    world.crash(ORIGIN)
    world.run(rng.choice((0.1, 3.0)))
    world.put_back(RESTORED_STARTS if rng.random() < 0.3 else 0)
    if rng.random() < 0.4:
        # It accepts messages before it meets the others.
        world.partition({ORIGIN})
        world.restart(ORIGIN)
        work(1.0)
        if rng.random() < 0.5:
            begin_again(ORIGIN)
        world.heal()
    else:
        world.restart(ORIGIN)
    work(3.0)
    world.calm()
    end = world.now + settle_s
    while world.lacking() or any(len(member.member.custody) for member in world.members):
        if world.now > end:
            raise Wrong(f"missing after it was put back: {world.lacking()[:3]}")
        world.run(0.5)
        for member in world.members:
            world.restart(member.number)
    return world
