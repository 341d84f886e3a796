"""QoS 2 packet ids of publishers, after the directory was put back to an earlier copy.

The copy holds ids that clients have released and used again since. Every short sequence of packets
is sent, each by its own client, in the session that the copy has.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from holdfast.cli.backup.backup import make_backup
from holdfast.cli.backup.restoration import restore
from holdfast.client.log import LogClient
from holdfast.testing import Broker
from tests.e2e import wire as packets
from tests.e2e.cluster_processes import ClusterProcesses
from tests.e2e.wire import Wire

NEW: Final = "N"
"""A PUBLISH with another payload and DUP 0."""
AGAIN: Final = "D"
"""The last PUBLISH, with DUP 1."""
RELEASE: Final = "R"
"""A PUBREL."""
FREE, HELD, DOUBTFUL = range(3)
"""The states of an id: not in use, in use, and in use when the copy was made."""


class Story(NamedTuple):
    """The packets of one client, before the second restart and after it."""

    is_held: bool
    """Whether the copy has an id of the client that is not released."""
    first: str
    second: str

    @property
    def client_id(self) -> str:
        return f"{int(self.is_held)}-{self.first}-{self.second}"

    def stored(self) -> Counter[str]:
        """Count how often each payload is stored, by the invariant in `node.session.session`."""
        found, state, number = Counter[str](), FREE, 0
        if self.is_held:
            found["0"], state = 1, DOUBTFUL
        is_logged = False
        for part in (self.first, self.second):
            if state == HELD and not is_logged:
                # No record or snapshot says that a repetition was answered.
                state = DOUBTFUL
            for packet in part:
                if packet == RELEASE:
                    state = FREE
                    continue
                number += packet == NEW
                if state == FREE or (state == DOUBTFUL and packet == NEW):
                    found[str(number)] += 1
                    is_logged = True
                state = HELD
        return found


STORIES: Final = [
    Story(is_held, "".join(first), second)
    for is_held in (False, True)
    for length in (0, 1, 2)
    for first in product("NDR", repeat=length)
    for second in ("NN", "ND", "DN", "DD", "RN")
]


class Site:
    """A broker, or a cluster of one node, whose directory can be put back."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.port = 0

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def log(self) -> LogClient:
        raise NotImplementedError

    def put_back(self) -> None:
        self.stop()
        shutil.rmtree(self.data)
        restore(self.directory / "backup", self.data, None)
        self.start()


class Single(Site):
    def start(self) -> None:
        self.broker = Broker(data=self.data, admin=True, settings={"log.partitions": 2})
        self.broker.start()
        self.port = self.broker.port

    def stop(self) -> None:
        if isinstance(self, Crashing):
            self.broker.kill()
        else:
            self.broker.stop()

    def log(self) -> LogClient:
        return LogClient(f"127.0.0.1:{self.broker.admin_port}")


class Crashing(Single):
    """A broker that is killed before the restore and after it."""


class OfOneNode(Site):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        settings = {"partitions": 2, "replication_factor": 1, "min_insync": 1}
        self.cluster = ClusterProcesses(directory, 1, {"cluster": settings})
        self.node = self.cluster.nodes["n1"]
        self.data = self.node.data

    def start(self) -> None:
        if self.data.exists():
            self.cluster.restart("n1")
            self.cluster.wait_healthy()
        else:
            self.cluster.start()
        self.port = self.node.port

    def stop(self) -> None:
        self.cluster.end()

    def log(self) -> LogClient:
        return LogClient(f"127.0.0.1:{self.node.admin_port}")


@pytest.fixture(params=[Single, Crashing, pytest.param(OfOneNode, marks=pytest.mark.long)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    made: Site = request.param(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


class Client:
    """The client of one story."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.number = 0

    def send(self, site: Site, part: str) -> None:
        with Wire(site.port) as wire:
            wire.connect(self.story.client_id, clean=False, expiry_s=3600)
            for packet in part:
                if packet == RELEASE:
                    wire.send(packets.ack(packets.PUBREL, 1))
                    wire.expect(packets.PUBCOMP)
                    continue
                self.number += packet == NEW
                self.publish(wire, packet == AGAIN)
            wire.send(packets.disconnect())

    def publish(self, wire: Wire, is_dup: bool) -> None:
        topic, payload = f"t/{self.story.client_id}", str(self.number).encode()
        wire.send(packets.publish(topic, payload, 2, 1, dup=is_dup))
        assert wire.expect(packets.PUBREC).reason in (0, 0x10)


def test_a_packet_id_of_a_publisher(site: Site) -> None:
    """DUP 1 repeats the message that the copy has, and DUP 0 is another message. Once it is stored,
    or the id is released, the id is like any other."""
    clients = [Client(story) for story in STORIES]
    for client in clients:
        with Wire(site.port) as wire:
            wire.connect(client.story.client_id, clean=False, expiry_s=3600)
            if client.story.is_held:
                client.publish(wire, False)
    make_backup(site.data, site.directory / "backup")
    site.put_back()
    for client in clients:
        client.send(site, client.story.first)
    site.stop()
    site.start()
    for client in clients:
        client.send(site, client.story.second)
    site.stop()
    site.start()
    found: dict[str, Counter[str]] = {}
    for message in site.log().read():
        name = message.topic.partition("/")[2]
        found.setdefault(name, Counter())[message.payload.decode()] += 1
    wrong = {
        story.client_id: (wanted, known)
        for story in STORIES
        for wanted in [story.stored()]
        for known in [found.get(story.client_id, Counter())]
        if wanted != known
    }
    assert not wrong, "\n".join(f"{each} {wrong[each]}" for each in wrong)


class Receiver:
    """A subscriber that keeps the ids of QoS 2 messages until their PUBREL, as MQTT wants it."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.received: list[str] = []

    def connect(self, site: Site) -> Wire:
        wire = Wire(site.port)
        wire.connect("receiver", clean=False, expiry_s=3600)
        return wire

    def take(self, wire: Wire, text: str, completes: bool = True) -> None:
        """Receive until this message is there, and if `completes`, answer its PUBREL."""
        while text not in self.received or (completes and self.held):
            frame = wire.receive()
            packet_id = frame.packet_id
            if frame.kind == packets.PUBLISH:
                message = packets.read_publish(frame, 5)
                packet_id = message.packet_id
                if packet_id not in self.held:
                    self.held.add(packet_id)
                    self.received.append(message.payload.decode())
                wire.send(packets.ack(packets.PUBREC, packet_id))
            elif frame.kind == packets.PUBREL:
                reason = 0 if packet_id in self.held else 0x92
                self.held.discard(packet_id)
                wire.send(packets.ack(packets.PUBCOMP, packet_id, reason))


def publish(site: Site, text: str) -> None:
    with Wire(site.port) as wire:
        wire.connect("publisher")
        assert wire.publish("r/a", text.encode(), 2) == 0


def test_a_packet_id_towards_a_subscriber(site: Site) -> None:
    """It has id 1 of a message that the log has lost, and no PUBREL for it comes any more. The next
    message gets id 1, too."""
    receiver = Receiver()
    with receiver.connect(site) as wire:
        wire.subscribe(("r/#", 2))
    make_backup(site.data, site.directory / "backup")
    with receiver.connect(site) as wire:
        publish(site, "lost")
        receiver.take(wire, "lost", completes=False)
    assert receiver.held
    site.put_back()
    sent = [f"after {number}" for number in range(5)]
    with receiver.connect(site) as wire:
        for text in sent:
            publish(site, text)
            receiver.take(wire, text)
    site.stop()
    site.start()
    with receiver.connect(site) as wire:
        publish(site, "last")
        receiver.take(wire, "last")
    assert receiver.received == ["lost", *sent, "last"]
