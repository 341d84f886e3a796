"""Who publishes and who subscribes with QoS 1 and 2, retains, or leaves a will; and what each of
them must see."""

from typing import TYPE_CHECKING, Final

from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt.packets import Publish
from holdfast.protocol.mqtt.properties import encode_block
from tests.sim.checks import Message
from tests.sim.client import Client, Outgoing

if TYPE_CHECKING:
    from tests.sim.world import World

TOPICS: Final = ("t/0", "t/1", "t/2")
WINDOW: Final = 5


class Party:
    """A client and what it is there for: it connects to any node, and moves now and then."""

    def __init__(self, world: "World", client: Client) -> None:
        self.world = world
        self.client = client
        self.chance = client.chance
        self.is_active = False
        """It may begin something new."""
        self.wanders = True
        """It changes the node now and then."""
        world.schedule.after(self.chance.random() * 0.2, self._look)

    def _look(self) -> None:
        """Be connected."""
        self.world.schedule.after(0.05 + self.chance.random() * 0.2, self._look)
        client = self.client
        if client.is_stuck():
            client.schedule.note(client.name, "has waited too long")
            client.drop()
        if client.socket is None:
            if self.is_wanted():
                self._connect()
        elif self.is_active and self.wanders:
            roll = self.chance.random()
            if roll < 0.03:
                client.drop()
            elif roll < 0.06:
                # Takes itself over.
                self._connect()
        self.look()

    def is_wanted(self) -> bool:
        return True

    def is_ready(self) -> bool:
        """The work may begin."""
        return self.client.is_subscribed

    def look(self) -> None:
        """Now and then."""

    def _connect(self) -> None:
        open_hosts = [
            host
            for host in self.world.client_hosts
            if host.process is not None and host.process.is_ready
        ]
        if open_hosts:
            self.before_connect()
            self.client.connect(self.chance.choice(open_hosts))

    def before_connect(self) -> None:
        """The client is about to."""

    def unsettled(self) -> str:
        """What it still waits for; "": nothing."""
        return ""

    def check_quiet(self) -> None:
        """What was to be seen while nothing went wrong."""

    def check(self) -> None:
        """At the end."""


class Subscriber(Party):
    """A durable session. `prefixes`: of the topics it gets."""

    def __init__(self, world: "World", client: Client, prefixes: tuple[str, ...]) -> None:
        super().__init__(world, client)
        self.prefixes = prefixes
        self.received: dict[str, int] = {}
        # By text, how often without DUP.
        self._first_sent: dict[str, int] = {}
        self._newest: dict[tuple[str, str], int] = {}
        # The same on the present connection, and the number of that connection.
        self._resumed: dict[tuple[str, str], int] = {}
        self._connection = 0
        client.on_message = self._arrived

    def _arrived(self, packet: Publish) -> None:
        text = packet.payload.decode()
        topic = packet.topic.decode()
        checks = self.world.checks
        name = self.client.name
        if topic.startswith("w/"):
            if not checks.wills.get(text):
                checks.fail(f"{name} has received the will {text}, which is not committed")
            stored = checks.wills[text]
        else:
            stored = checks.stored.get(text, 0)
            if not stored:
                checks.fail(f"{name} has received {text}, which is not committed")
        count = self.received.get(text, 0) + 1
        self.received[text] = count
        if packet.qos == 2 and count > stored:
            checks.fail(f"{name} has received {text} {count} times with QoS 2")
        if not packet.dup:
            self._first_sent[text] = self._first_sent.get(text, 0) + 1
            if self._first_sent[text] > stored:
                checks.fail(f"{name} has received {text} {count} times, now without DUP")
        message = checks.messages.get(text)
        if message is None or not message.is_ordered:
            return
        key = (message.publisher, topic)
        self._check_order(key, message, stored)
        if count > 1:
            return
        newest = self._newest.get(key, -1)
        if newest > message.number:
            checks.fail(f"{name} has received {text} behind number {newest}")
        self._newest[key] = message.number

    def _check_order(self, key: tuple[str, str], message: Message, stored: int) -> None:
        """A repetition comes behind a later message on another connection only: the broker sends
        again what is not acknowledged, in its order, and then what is new. [MQTT-4.4.0-1]
        [MQTT-4.6.0-1] A message that is stored twice has two places."""
        if self._connection != self.client.connects:
            self._connection = self.client.connects
            self._resumed.clear()
        newest = self._resumed.get(key, -1)
        if newest > message.number and stored == 1:
            name = self.client.name
            text = f"{name} has received {message.text} again behind number {newest}"
            self.world.checks.fail(text)
        self._resumed[key] = max(newest, message.number)

    def missing(self) -> list[str]:
        checks = self.world.checks
        wanted = [
            text for text in checks.stored if checks.messages[text].topic.startswith(self.prefixes)
        ]
        if "w/" in self.prefixes:
            wanted += checks.wills
        return [text for text in wanted if text not in self.received]

    def unsettled(self) -> str:
        missing = self.missing()
        if missing:
            return f"{self.client.name} has not received {missing[:5]} ({len(missing)})"
        return ""


class Mover(Subscriber):
    """Goes to another node again and again, without a word to the one before."""

    def look(self) -> None:
        if self.is_active and self.client.is_connected and self.chance.random() < 0.15:
            self._connect()


class Publisher(Party):
    """Publishes numbered messages."""

    topics: tuple[str, ...] = TOPICS
    pause_s = 0.03
    window = WINDOW
    is_ordered = True
    is_plain = True
    """Its messages have no properties."""

    def __init__(self, world: "World", client: Client) -> None:
        super().__init__(world, client)
        self.number = 0
        self.refused = 0
        self.newest: Message
        client.on_done = self.done
        client.on_refused = self._refused
        # Of its own: what else the seed does stays the same.
        self._reuse = world.schedule.chance(f"reuse/{client.name}")
        self._next()

    def _next(self) -> None:
        self.world.schedule.after(self.chance.expovariate(1 / self.pause_s), self._next)
        client = self.client
        if self.may_publish() and client.is_connected and len(client.outgoing) < self.window:
            self.publish()

    def may_publish(self) -> bool:
        return self.is_active

    def _refused(self, outgoing: Outgoing, packet_id: int) -> None:
        """The packet id is free, and another message may have it at once. If the refused one is
        stored all the same, the broker takes this one for its repetition: it acknowledges it and
        does not store it."""
        is_wanted = self.is_active and self.is_plain and self._reuse.random() < 0.5
        if is_wanted and self.client.socket is not None and packet_id not in self.client.outgoing:
            message = self.message(outgoing.message.topic, 2)
            self.client.publish_as(packet_id, message)

    def message(self, topic: str, qos: int) -> Message:
        self.number += 1
        client = self.client
        message = Message(f"{client.name}#{self.number}", client.name, topic, self.number, qos)
        message.is_ordered = self.is_ordered
        self.world.checks.published(message)
        self.newest = message
        return message

    def publish(self) -> None:
        message = self.message(self.chance.choice(self.topics), self.chance.choice((1, 2)))
        self.client.publish(message)

    def done(self, outgoing: Outgoing, reason: int) -> None:
        if reason >= 0x80:
            self.refused += 1
            node = "" if self.client.socket is None else self.client.socket.host.name
            self.world.checks.refused(outgoing.message, node)

    def unsettled(self) -> str:
        waiting = [each.message.text for each in self.client.outgoing.values()]
        return f"{self.client.name} waits for {waiting}" if waiting else ""


class SlowPublisher(Publisher):
    """What it publishes in a second fits into the window of a client that acknowledges nothing."""

    pause_s = 0.15


class Device(Publisher):
    """Starts again and again, each time with Clean Start and a session that lasts, and takes the
    lowest packet id at once. What it had sent before is no matter of its own any more."""

    topics = TOPICS[:1]
    window = 2
    pause_s = 0.1
    is_ordered = False

    def __init__(self, world: "World", client: Client) -> None:
        super().__init__(world, client)
        client.reuses_ids = True
        client.on_connected = self._started

    def _started(self) -> None:
        if self.is_active:
            self.publish()

    def publish(self) -> None:
        self.client.publish(self.message(self.chance.choice(self.topics), 2))

    def look(self) -> None:
        if self.is_active and self.client.outgoing and self.chance.random() < 0.4:
            self._connect()


class Producer(Publisher):
    """With producer sequences: sends again from the first that is not confirmed."""

    def __init__(self, world: "World", client: Client) -> None:
        super().__init__(world, client)
        self._unconfirmed: dict[int, Message] = {}
        client.on_connected = self._resend

    def publish(self) -> None:
        if len(self._unconfirmed) < self.window * 2:
            message = self.message(self.chance.choice(TOPICS), 1)
            message.once = True
            self._unconfirmed[message.number] = message
            self._send(message)

    def _send(self, message: Message) -> None:
        name = self.client.name
        pairs = [("hf-seq", f"{name}:1:{message.number}")]
        self.client.publish(message, properties=encode_block({p.USER_PROPERTY: pairs}))

    def _resend(self) -> None:
        for message in self._unconfirmed.values():
            self._send(message)

    def done(self, outgoing: Outgoing, reason: int) -> None:
        if reason < 0x80:
            self._unconfirmed.pop(outgoing.message.number, None)
            return
        self.refused += 1
        if self.client.socket is not None:
            self.client.drop()

    def unsettled(self) -> str:
        waiting = [message.text for message in self._unconfirmed.values()]
        return f"{self.client.name} waits for {waiting}" if waiting else ""


class Retainer(Publisher):
    """Sets one retained message after the other, and gives up what it has no answer for."""

    pause_s = 0.08
    window = 1
    is_ordered = False

    def __init__(self, world: "World", client: Client) -> None:
        super().__init__(world, client)
        self.topic = f"r/{client.name}"
        # What may be the newest one: the last acknowledged, and those without an answer.
        self.possible: set[str] = set()

    def publish(self) -> None:
        message = self.message(self.topic, 1)
        self.possible.add(message.text)
        self.client.publish(message, retain=True)

    def done(self, outgoing: Outgoing, reason: int) -> None:
        super().done(outgoing, reason)
        if reason >= 0x80:
            self.possible.discard(outgoing.message.text)
            return
        unanswered = {
            text for text in self.possible if not self.world.checks.messages[text].is_acknowledged
        }
        self.possible = unanswered | {outgoing.message.text}

    def unsettled(self) -> str:
        return ""

    def check(self) -> None:
        found = self.world.checks.retained.get(self.topic)
        acknowledged = any(
            self.world.checks.messages[text].is_acknowledged for text in self.possible
        )
        if found is None and not acknowledged:
            return
        if found not in self.possible:
            self.world.checks.fail(
                f"retained on {self.topic} is {found}, it should be of {sorted(self.possible)}"
            )


class RetainedReader(Party):
    """Subscribes again and again. In the end it has the retained message of each topic last, as
    retained or live."""

    def __init__(self, world: "World", client: Client) -> None:
        super().__init__(world, client)
        self._last: dict[str, str] = {}
        self._seen: set[str] = set()
        client.on_message = self._arrived

    def before_connect(self) -> None:
        if self.client.clean:
            self._last.clear()
            self._seen.clear()

    def _arrived(self, packet: Publish) -> None:
        """A repetition is of a message whose PUBACK was late, and behind a later one perhaps."""
        text = packet.payload.decode()
        if text not in self._seen:
            self._seen.add(text)
            self._last[packet.topic.decode()] = text

    def look(self) -> None:
        if self.is_active and self.client.is_connected and self.chance.random() < 0.15:
            self._connect()

    def unsettled(self) -> str:
        client = self.client
        if not client.is_connected:
            return f"{client.name} is not connected"
        for topic, text in self.world.checks.retained.items():
            if topic.startswith("r/") and self._last.get(topic) != text:
                return f"{client.name} has {self._last.get(topic)} of {topic}, which retains {text}"
        return ""


class Dying(Party):
    """Comes with a will, and ends without a word, mostly. Every will must come whose connection was
    accepted and did not end with a DISCONNECT."""

    def __init__(self, world: "World", client: Client) -> None:
        super().__init__(world, client)
        self.awaited: list[str] = []
        self._ends_at = 0.0
        client.on_connected = self._accepted

    def is_wanted(self) -> bool:
        return self.is_active

    def before_connect(self) -> None:
        client = self.client
        text = f"{client.name}#{client.connects + 1}"
        client.will = m.Will(f"w/{client.name}", text.encode(), self.chance.choice((1, 2)), False)
        self._ends_at = self.world.schedule.now + self.chance.random() * 2

    def _accepted(self) -> None:
        will = self.client.will
        assert will is not None
        self.awaited.append(will.payload.decode())

    def look(self) -> None:
        client = self.client
        if not client.is_connected or (self.is_active and client.schedule.now < self._ends_at):
            return
        if self.is_active and self.chance.random() < 0.3:
            self.awaited.pop()
            client.disconnect()
        else:
            client.drop()

    def unsettled(self) -> str:
        if self.client.socket is not None:
            return f"{self.client.name} has not ended"
        missing = [text for text in self.awaited if not self.world.checks.wills.get(text)]
        return f"the wills {missing} have not come" if missing else ""
