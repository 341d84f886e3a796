"""QoS 0: at most once, in order while connected, and while nothing goes wrong everything that is
published after the SUBACK, on whatever node."""

from typing import TYPE_CHECKING, Final

from holdfast.protocol.mqtt.packets import Publish
from tests.sim.checks import Message
from tests.sim.client import Client
from tests.sim.workload import Party

if TYPE_CHECKING:
    from tests.sim.world import World

TOPICS: Final = ("q/0", "q/1")
PAUSE_S: Final = 0.02
UNDER_WAY_S: Final = 0.3
"""Not longer, while nothing goes wrong."""
STAY_S: Final = 0.4
"""Of one that hops, on average."""


class Whisper(Message):
    """`connection`: of its publisher, by number."""

    def __init__(self, text: str, topic: str, number: int, connection: tuple[str, int]) -> None:
        super().__init__(text, connection[0], topic, number, 0)
        self.connection = connection
        self.sent_at = 0.0


class Whisperer(Party):
    def __init__(self, world: "World", client: Client) -> None:
        super().__init__(world, client)
        self.number = 0
        self._next()

    def _next(self) -> None:
        self.world.schedule.after(self.chance.expovariate(1 / PAUSE_S), self._next)
        if self.client.is_connected and (self.is_active or self.world.is_quiet):
            self._publish()

    def _publish(self) -> None:
        client = self.client
        self.number += 1
        topic = self.chance.choice(TOPICS)
        text = f"{client.name}#{self.number}"
        message = Whisper(text, topic, self.number, (client.name, client.connects))
        message.sent_at = self.world.schedule.now
        self.world.checks.whispers[text] = message
        if self.world.is_quiet:
            self.world.checks.quiet_whispers.append(message)
        client.send(message)

    def unsettled(self) -> str:
        return "" if self.client.is_connected else f"{self.client.name} is not connected"


class WhisperTeam:
    """A shared subscription: one member gets it."""

    def __init__(self, world: "World") -> None:
        self.filter = ("$share/turns/q/#", 0)
        self.received: dict[str, str] = {}
        self._checks = world.checks

    def received_by(self, name: str, text: str) -> None:
        other = self.received.setdefault(text, name)
        if other != name:
            self._checks.fail(f"{name} has received {text}, as {other} had, of {self.filter[0]}")

    def check_quiet(self) -> None:
        for message in self._checks.quiet_whispers:
            if message.text not in self.received:
                self._checks.fail(f"nobody of {self.filter[0]} has received {message.text}")


class Listener(Party):
    """`hops`: changes the node while all is quiet, too."""

    def __init__(
        self, world: "World", client: Client, team: WhisperTeam | None = None, hops: bool = False
    ) -> None:
        super().__init__(world, client)
        self.team = team
        self.hops = hops
        # Of this connection; the SUBACK came then, if it did.
        self._since = -1.0
        self._received: set[str] = set()
        self._newest: dict[tuple[tuple[str, int], str], int] = {}
        client.on_connected = self._connected
        client.on_subscribed = self._subscribed
        client.on_message = self._arrived

    def _connected(self) -> None:
        # A session that is resumed does not wait until all nodes know its filters.
        now = self.world.schedule.now
        self._since = now + UNDER_WAY_S if self.client.is_subscribed else -1.0
        self._received = set()
        self._newest = {}

    def _subscribed(self) -> None:
        self._since = self.world.schedule.now

    def _arrived(self, packet: Publish) -> None:
        checks = self.world.checks
        name = self.client.name
        text = packet.payload.decode()
        message = checks.whispers.get(text)
        if message is None or message.topic != packet.topic.decode() or packet.qos:
            checks.fail(f"{name} has received {text}, which nobody has sent so")
        if text in self._received:
            checks.fail(f"{name} has received {text} twice with QoS 0")
        self._received.add(text)
        key = (message.connection, message.topic)
        newest = self._newest.get(key, -1)
        if newest > message.number:
            checks.fail(f"{name} has received {text} behind number {newest}")
        self._newest[key] = message.number
        if self.team is not None:
            self.team.received_by(name, text)

    def look(self) -> None:
        world = self.world
        if self.hops and world.is_quiet and self._since >= 0 and self.chance.random() < 0.3:
            self._check_received(world.schedule.now - UNDER_WAY_S)
            self._since = -1.0
            self.client.drop()

    def _check_received(self, until: float) -> None:
        """What was sent since the SUBACK, and before `until`."""
        checks = self.world.checks
        if self._since < 0 or self.team is not None:
            return
        for message in checks.quiet_whispers:
            if self._since <= message.sent_at < until and message.text not in self._received:
                checks.fail(
                    f"{self.client.name} has not received {message.text}, though nothing was wrong"
                    f" and it has subscribed at {self._since:.4f}"
                )

    def check_quiet(self) -> None:
        self._check_received(self.world.schedule.now)
        if self.team is not None:
            self.team.check_quiet()

    def unsettled(self) -> str:
        if not self.client.is_connected or not 0 <= self._since <= self.world.schedule.now:
            return f"{self.client.name} has not subscribed"
        return ""
