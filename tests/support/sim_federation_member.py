"""A member of a simulated federation, with its driver, its disk and its broker."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast.protocol.topics.names import is_shared, matches
from holdfast_federation.core.effects import (
    CloseLink,
    Delete,
    DeleteRetained,
    DeliverLocally,
    Dial,
    Effect,
    IdentityConflict,
    Message,
    RetainLocally,
    Send,
    Store,
    StoreRetained,
)
from holdfast_federation.core.frames import Data, decode
from holdfast_federation.core.identity import Identity, MessageId
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.routing.interest import plain_of

if TYPE_CHECKING:
    from tests.support.sim_federation import World

MAY_WAIT_S = 2.0
WALL_S = 1_750_000_000.0
"""What clocks on walls say at the beginning."""


CHECKED_EACH = 8
"""After so many calls the sums over the member's tables are compared."""


def node_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


@dataclass
class Disk:
    """What survives a power cut."""

    epoch: int = 0
    disputed: int = 0
    custody: dict[MessageId, bytes] = field(default_factory=dict)
    delivered: dict[MessageId, str] = field(default_factory=dict)
    """Topic, in the order of delivery."""
    positions: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    former: dict[tuple[bytes, int], int] = field(default_factory=dict)
    places: dict[bytes, int] = field(default_factory=dict)
    """The newest number, of each origin that tells them."""
    remembered: list[bytes] = field(default_factory=list)
    retained: dict[str, bytes] = field(default_factory=dict)


class SimMember:
    """A member and its driver."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.number = number
        self.node = node_id(number)
        self.disk = Disk()
        self.filters: list[str] = []
        self.desired: dict[bytes, str] = {}
        self.core: FederationMember | None = None
        self.life = 0
        # It takes no inputs until it starts again.
        self.has_failed = False
        self.newest: dict[tuple[bytes, str, bool], tuple[int, int]] = {}
        # What the broker has retained, which no crash of the member touches.
        self.broker: dict[str, bytes] = {}
        # Topics of which that came by the federation.
        self.brought: set[str] = set()
        self.skew_s = 0.0
        # Do its messages tell their numbers here, by which other brokers know them again?
        self.tells_places = True
        # What the broker's session has sent and not seen done, by number, with its first id and the
        # groups here that had it; no crash touches it.
        self.session: dict[int, tuple[Message, MessageId, list[str]]] = {}
        # What the broker is to retain if nothing newer comes soon.
        self._late: dict[str, RetainLocally] = {}
        self.numbered = 0
        self._numbers: dict[MessageId, int] = {}
        self._armed = float("inf")
        self._calls = 0

    @property
    def member(self) -> FederationMember:
        assert self.core is not None
        return self.core

    def start(self) -> None:
        world = self.world
        self.life += 1
        self.has_failed = False
        self.disk.epoch += world.epoch_step
        world.step_epochs()
        self._armed = float("inf")
        self._late.clear()
        self.core = FederationMember(
            Identity(self.node, self.disk.epoch),
            f"mqtt://{self.number}",
            world.config,
            world.now,
            self.filters,
            stored=list(self.disk.custody.values()),
            positions=dict(self.disk.positions),
            former=dict(self.disk.former),
            remembered=self.disk.remembered,
            retained=self.disk.retained.values(),
            wall_s=WALL_S + world.now + self.skew_s,
            disputed=self.disk.disputed,
        )
        self.call(lambda core, now: core.desired_topology(self.desired, now))
        for topic in sorted(self.broker.keys() | self.disk.retained.keys()):
            self.broker_has(topic, self.broker.get(topic, b""))
        for number, (message, first, had) in list(self.session.items()):
            missed = [group for group in self.groups(message.topic) if group not in had]
            is_replaced = message.is_retained and (
                message.topic in self.brought
                or (message.payload != b"" and message.topic not in self.broker)
            )
            message = replace(message, missed_by=tuple(missed), is_replaced=is_replaced)
            self._hand_over(number, message, first, had)

    def publish(self, message: Message) -> MessageId | None:
        self.numbered += 1
        is_known = self.tells_places or message.qos == 1
        message = replace(message, is_repeatable=is_known)
        return self._hand_over(self.numbered, message, None, self.groups(message.topic))

    def _hand_over(
        self, number: int, message: Message, first: MessageId | None, had: list[str]
    ) -> MessageId | None:
        wanting = self.member.interested(message.topic)
        # What is sent at once is sent within the call.
        id = self.call(lambda core, now: core.local_publish(message, now))
        assert id is None or isinstance(id, MessageId)
        if id is None or not message.qos:
            self.session.pop(number, None)
        else:
            self._numbers[id] = number
            self.handing = message
            self.world.handed_over(id, first or id, number, wanting)
            self.session[number] = (message, first or id, had)
        return id

    def _done(self, id: MessageId) -> None:
        """The broker's session sees it done."""
        number = self._numbers.pop(id, None)
        if number is not None and self.session.pop(number, None) is not None:
            self.world.promise(id)

    def broker_has(self, topic: str, payload: bytes) -> None:
        found = Message(topic, payload, 1, True)
        self.call(lambda core, now: core.broker_has_retained(found, now))

    def subscribe(self, filter: str) -> None:
        self.filters.append(filter)
        if self.core is not None:
            self.call(lambda core, now: core.local_interest([filter], [], now))

    def unsubscribe(self, filter: str) -> None:
        self.filters.remove(filter)
        if self.core is not None:
            self.call(lambda core, now: core.local_interest([], [filter], now))

    def groups(self, topic: str) -> list[str]:
        return sorted(
            filter
            for filter in set(self.filters)
            if is_shared(filter) and matches(plain_of(filter), topic)
        )

    def call(self, input: Callable[[FederationMember, float], object]) -> object:
        """Do it, carry out what follows, arm the timer."""
        core = self.member
        if self.has_failed:
            return None
        result = input(core, self.world.now)
        for effect in core.take_effects():
            self._carry_out(effect)
            if self.has_failed:
                return None
        self._calls += 1
        if self._calls % CHECKED_EACH == 0:
            core.check()
        at = core.timer(self.world.now)
        if at < self._armed:
            self._armed = at
            life = self.life
            self.world.at(at, lambda: self._ring(life, at))
        return result

    def _ring(self, life: int, at: float) -> None:
        if life != self.life or self.core is None or self._armed != at:
            return
        self._armed = float("inf")
        self.call(lambda core, now: core.handle_timers(now))

    def _carry_out(self, effect: Effect) -> None:
        world = self.world
        if isinstance(effect, Send):
            world.send(self, effect.peer, effect.data)
        elif isinstance(effect, DeliverLocally):
            self._deliver(effect)
        elif isinstance(effect, Store):
            if effect.id not in self.disk.custody and not self._may_go(effect):
                world.unstored.add(effect.id)
            self._sync(lambda: self._stored_custody(effect))
        elif isinstance(effect, Delete):
            self._sync(lambda: self.disk.custody.pop(effect.id, None))
            self._done(effect.id)
        elif isinstance(effect, RetainLocally):
            self._retain(effect)
        elif isinstance(effect, StoreRetained):
            self._sync(lambda: self._stored_retained(effect))
        elif isinstance(effect, DeleteRetained):
            self._sync(lambda: self.disk.retained.pop(effect.topic, None))
        elif isinstance(effect, Dial):
            world.dial(self, effect.node)
        elif isinstance(effect, CloseLink):
            world.close(self.node, effect.peer)
        elif isinstance(effect, IdentityConflict):
            world.conflicted(self, effect.epoch)
        else:
            world.dropped.append(effect)

    def _retain(self, effect: RetainLocally) -> None:
        topic = effect.message.topic
        self._late.pop(topic, None)
        if not effect.may_wait:
            self._sync(lambda: self.broker_retains(effect.message, True))
            return
        self._late[topic] = effect
        life = self.life

        def give() -> None:
            if life == self.life and self._late.get(topic) is effect:
                del self._late[topic]
                self._sync(lambda: self.broker_retains(effect.message, True))

        self.world.at(self.world.now + MAY_WAIT_S, give)

    def _sync(self, then: Callable[[], object]) -> None:
        """In order: one disk."""
        life = self.life
        world = self.world
        at = max(world.now + world.rng.uniform(*world.weather.sync_s), world.synced_at[self.number])
        world.synced_at[self.number] = at

        def done() -> None:
            if life == self.life and self.core is not None:
                then()

        world.at(at, done)

    def _stored_custody(self, store: Store) -> None:
        self.disk.custody[store.id] = store.data
        self.world.unstored.discard(store.id)
        self.world.promise(store.id)
        self._done(store.id)
        self.call(lambda core, now: core.stored(store.id, now))

    def broker_retains(self, message: Message, is_brought: bool) -> None:
        self.brought.discard(message.topic)
        if message.payload and is_brought:
            self.brought.add(message.topic)
        if message.payload:
            self.broker[message.topic] = message.payload
        else:
            self.broker.pop(message.topic, None)

    def _stored_retained(self, effect: StoreRetained) -> None:
        self.disk.retained[effect.topic] = effect.data
        self.world.retained(self, effect)

    def _deliver(self, effect: DeliverLocally) -> None:
        if effect.message.is_retained:
            self._late.pop(effect.message.topic, None)
        self.world.check_delivery(self, effect)
        # Who leaves before the broker has it has left with it.
        groups = [
            group
            for group in self.groups(effect.message.topic)
            if effect.granted is None or group in effect.granted
        ]
        if effect.message.qos:
            self._sync(lambda: self._stored_delivery(effect, groups))
        elif effect.message.stamp:
            # In order with what else the broker is to retain.
            self._sync(lambda: self.world.arrived(self, effect, groups))
        else:
            self.world.arrived(self, effect, groups)

    def _stored_delivery(self, effect: DeliverLocally, groups: list[str]) -> None:
        if not self._has(effect):
            self.world.arrived(self, effect, groups)
        self.disk.delivered[effect.id] = effect.message.topic
        self._pass(effect.id.node, (effect.id.epoch, effect.place + 1))
        self.call(lambda core, now: core.stored(effect.id, now))

    def _pass(self, origin: bytes, position: tuple[int, int]) -> None:
        newest = self.disk.positions.get(origin, position)
        if position[0] != newest[0]:
            epoch, place = min(position, newest)
            self.disk.former[origin, epoch] = place
        self.disk.positions[origin] = max(position, newest)

    def _may_go(self, store: Store) -> bool:
        """Before it is stored: what repetitions do no harm of, or are found out."""
        data = decode(store.data)
        assert isinstance(data, Data)
        is_known = self.tells_places or data.qos == 1
        return is_known and not data.is_retained and not data.grants

    def _has(self, effect: DeliverLocally) -> bool:
        """By its number, as `node.federating.is_stored` looks it up."""
        origin = effect.id.node
        number = self.world.number_of_message(effect.id)
        if number is None or effect.is_regranted or not self.world.by_id[origin].tells_places:
            return False
        if number > self.disk.places.get(origin, 0):
            self.disk.places[origin] = number
            return False
        self.world.check_known(self, effect)
        return True
