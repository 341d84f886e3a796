"""What depends on time: wills with a delay, sessions that expire, messages that do.

Most of what they must not do is seen from the log (`story`): a will that is too early or comes
though the session is back, a session that is dropped too early. The end of a session is compared
with the true time, too: an interval must not end early because the clocks of two nodes differ.
"""

from typing import TYPE_CHECKING, Final

from holdfast.node.state.replicated import CLOCK_SLACK_S
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt.packets import Publish
from holdfast.protocol.mqtt.properties import encode_block
from tests.sim.client import Client
from tests.sim.host import EPOCH_US
from tests.sim.sockets import ClientSocket
from tests.sim.workload import Party, Publisher, Subscriber

if TYPE_CHECKING:
    from tests.sim.world import World

TOPICS: Final = ("e/0", "e/1")
SHORT_S: Final = 1
LONG_S: Final = 1000
"""Of messages: these must all come."""
PAUSED_S: Final = 0.3
"""So long after a pause a node's clock may still be that from before."""
SLACK_S: Final = 0.15
WITH_WILL: Final = 0x04


class Visitor(Party):
    """Comes and goes while it is active; then stays away."""

    def __init__(self, world: "World", client: Client, longest_away_s: float) -> None:
        super().__init__(world, client)
        self._longest_away_s = longest_away_s
        self._ends_at = 0.0
        self._away_until = 0.0

    def is_wanted(self) -> bool:
        return self.is_active and self.world.schedule.now >= self._away_until

    def is_ready(self) -> bool:
        return True

    def before_connect(self) -> None:
        self._ends_at = self.world.schedule.now + self.chance.random() * 1.5

    def look(self) -> None:
        client = self.client
        now = self.world.schedule.now
        if client.socket is None:
            return
        if self.is_active and (not client.is_connected or now < self._ends_at):
            return
        self.go()
        is_long = self.chance.random() < 0.5
        away_s = self._longest_away_s if is_long else 0.3
        self._away_until = now + self.chance.random() * away_s

    def go(self) -> None:
        self.client.drop()


class Delayed(Visitor):
    """Has a will with a delay."""

    def __init__(self, world: "World", client: Client, delay_s: int) -> None:
        super().__init__(world, client, delay_s + 2.0)
        self._delay_s = delay_s
        client.on_connected = self._accepted

    def before_connect(self) -> None:
        super().before_connect()
        client = self.client
        client.will = m.Will(
            f"w/{client.name}",
            f"{client.name}#{client.connects + 1}".encode(),
            self.chance.choice((1, 2)),
            False,
            {p.WILL_DELAY_INTERVAL: self._delay_s},
        )

    def _accepted(self) -> None:
        will = self.client.will
        assert will is not None
        text = will.payload.decode()
        if not self.world.checks.sessions.has_will(self.client.name, text):
            self.world.checks.fail(f"{self.client.name} is accepted, and nobody knows {text}")

    def go(self) -> None:
        roll = self.chance.random()
        if roll < 0.2:
            self.client.disconnect()
        elif roll < 0.4:
            self.client.disconnect(WITH_WILL)
        else:
            self.client.drop()

    def unsettled(self) -> str:
        if self.client.socket is not None:
            return f"{self.client.name} has not ended"
        # Not that of its last connection, maybe: an earlier one may have reached its node later.
        return self.world.checks.sessions.still_due(self.client.name)


class Fleeting(Visitor):
    """Its session expires, at times, and in the end."""

    def __init__(self, world: "World", client: Client) -> None:
        super().__init__(world, client, client.expiry_s + 2.0)
        client.on_message = self._arrived
        world.checks.sessions.on_end[client.name] = self._ended

    def _ended(self) -> None:
        """In true time, as long as the clocks differ by no more than right ones may."""
        client = self.client
        after_s = self.world.schedule.now - client.left_at
        if after_s < client.expiry_s - max(0.0, self.world.skew_s - CLOCK_SLACK_S):
            self.world.checks.fail(
                f"the session of {client.name} has ended {after_s:.2f} s after its connection,"
                f" of {client.expiry_s}"
            )

    def _arrived(self, packet: Publish) -> None:
        text = packet.payload.decode()
        if not self.world.checks.stored.get(text):
            self.world.checks.fail(f"{self.client.name} has received {text}: it is not committed")

    def unsettled(self) -> str:
        name = self.client.name
        if self.client.socket is not None:
            return f"{name} has not ended"
        for host in self.world.client_hosts:
            if host.process is not None and name in host.process.images.state.sessions:
                return f"{host.name} still has the session of {name}"
        return ""


class Punctual(Fleeting):
    """Returns at the moment at which its session expires, give or take some milliseconds."""

    wanders = False

    def look(self) -> None:
        client = self.client
        if client.socket is None or (self.is_active and not client.is_subscribed):
            return
        client.disconnect()
        away_s = client.expiry_s + self.chance.uniform(-0.004, 0.012)
        self.world.schedule.after(away_s, self._return)
        # If no node accepts it then.
        self._away_until = self.world.schedule.now + away_s + 1.0

    def _return(self) -> None:
        if self.is_active and self.client.socket is None:
            self._connect()


class Perishable(Publisher):
    """Publishes messages that expire."""

    topics = TOPICS
    is_plain = False

    def publish(self) -> None:
        message = self.message(self.chance.choice(self.topics), self.chance.choice((1, 2)))
        message.expiry_s = self.chance.choice((SHORT_S, LONG_S))
        properties = encode_block({p.MESSAGE_EXPIRY_INTERVAL: message.expiry_s})
        self.client.publish(message, properties=properties)


class PerishableSubscriber(Subscriber):
    """Is away for longer than some messages last. With QoS 1: what is sent with QoS 2 waits for the
    log once more."""

    def __init__(self, world: "World", client: Client) -> None:
        super().__init__(world, client, ("e/",))
        self._away_until = 0.0
        # All connections, the present one last: a node may have accepted one that the client had
        # given up, and have sent something.
        self._sockets: list[ClientSocket] = []

    def _connect(self) -> None:
        super()._connect()
        socket = self.client.socket
        if socket is not None and socket not in self._sockets[-1:]:
            self._sockets.append(socket)

    def is_wanted(self) -> bool:
        return not self.is_active or self.world.schedule.now >= self._away_until

    def look(self) -> None:
        if self.is_active and self.client.is_connected and self.chance.random() < 0.1:
            self.client.drop()
            self._away_until = self.world.schedule.now + self.chance.random() * 2.5

    def _arrived(self, packet: Publish) -> None:
        checks = self.world.checks
        text = packet.payload.decode()
        message = checks.messages.get(text)
        if message is not None and checks.stored.get(text, 0) > 1:
            # Its first copy may have expired before this subscriber was there.
            message.is_ordered = False
        super()._arrived(packet)
        assert message is not None
        if self._may_have_come_before(text):
            # It was sent in time, then.
            return
        if not 0 < packet.expiry_s <= message.expiry_s:
            checks.fail(f"{self.client.name} has received {text} for {packet.expiry_s} s")
        socket = self.client.socket
        assert socket is not None
        now = self.world.schedule.now
        if socket.host.is_paused or now < socket.host.paused_until + PAUSED_S:
            return
        late_s = (socket.host.true_us() - checks.stored_us[text]) / 1e6 - message.expiry_s
        if late_s > self.world.skew_s + SLACK_S:
            checks.fail(f"{self.client.name} has received {text} {late_s:.2f} s too late")

    def _may_have_come_before(self, text: str) -> bool:
        """To a connection whose node had not seen its end yet when the message was published."""
        stored_at = (self.world.checks.first_stored_us[text] - EPOCH_US) / 1e6 - self.world.skew_s
        return any(socket.ended_at > stored_at for socket in self._sockets[:-1])

    def missing(self) -> list[str]:
        messages = self.world.checks.messages
        return [text for text in super().missing() if messages[text].expiry_s == LONG_S]


class Scheduler(Publisher):
    """Publishes delayed messages."""

    topics = ("d/0", "d/1")
    is_plain = False
    is_ordered = False

    def publish(self) -> None:
        message = self.message(self.chance.choice(self.topics), self.chance.choice((1, 2)))
        message.delay_s = self.chance.choice((1, 2, 3))
        self.client.publish(message)

    def unsettled(self) -> str:
        waiting = [text for text, _ in self.world.checks.delayed.values()]
        if waiting:
            return f"{waiting[:5]} ({len(waiting)}) wait for their time"
        return super().unsettled()
