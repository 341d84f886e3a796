"""The language of transcripts: one command a line, words as in a shell.

    set FIELD=VALUE ...              of NodeConfig; before the first command
    acl LINE                         of the ACL file; before the first command
    nodes N, partitions N            other numbers than the form has; before the first command
    connect NAME [v3.1|v3.1.1|v5] [clean] [at=NODE] [id=ID] [as=USER] [keep=S] [PROPERTY=VALUE ...]
            [will=TOPIC:PAYLOAD[:QOS[:retain]]] [will-delay=S] [will-expiry=S] [hold]
    open NAME [v...] [at=NODE]       connects without CONNECT
    subscribe NAME FILTER[@QOS] ... [no-local] [rap] [rh=N] [PROPERTY=VALUE ...]
    unsubscribe NAME FILTER ...
    publish NAME TOPIC PAYLOAD [q1|q2] [retain] [dup] [pid=N] [alias=N] [PROPERTY=VALUE ...]
    pubrel NAME PID, ping NAME, raw NAME HEX ...
    hold NAME, ack NAME [COUNT]      keeps acknowledgements, sends them
    disconnect NAME [reason=N] [PROPERTY=VALUE ...]
    drop NAME                        closes the socket without DISCONNECT
    wait SECONDS
    ban SCOPE NAME, unban SCOPE NAME
    kill NODE, start NODE, stop NODE
    copy NODE, put-back NODE         copies a disk; the node is killed and has the copy again

A line that ends with `&` takes no time: the next command follows at once. A payload `x*100` is
that character 100 times. Properties have their names in the specification; `user=KEY:VALUE` is a
user property.
"""

import shlex
from collections.abc import Callable
from typing import Final

from holdfast.node.admission.bans import Ban
from holdfast.node.state.ban_records import record_ban, record_lift
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt.properties import TABLE, encode_block
from tests.sim.disk import SimDisk
from tests.sim.host import Host
from tests.transcripts.actors import Actor, Told
from tests.transcripts.stage import STEP_S, Setup, Stage

VERSIONS: Final = {"v3.1": 3, "v3.1.1": 4, "v5": 5}
PROPERTIES: Final = {info.name: key for key, info in TABLE.items()}
SETUP: Final = ("set", "acl", "nodes", "partitions")


def read_setup(lines: list[str]) -> Setup:
    """The settings of a transcript."""
    setup = Setup()
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "set":
            for pair in rest.split():
                name, _, value = pair.partition("=")
                setup.node[name] = value.split(",") if name == "qos0_logged" else int(value)
        elif word == "acl":
            setup.acl.append(rest)
        elif word == "nodes":
            setup.nodes = int(rest)
        elif word == "partitions":
            setup.partitions = int(rest)
    return setup


class Words:
    """The words of a command after its name: plain ones, and values by name."""

    def __init__(self, words: list[str]) -> None:
        self.plain: list[str] = []
        self._values: dict[str, list[str]] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if equals and name.replace("-", "").isalnum() and name.islower():
                self._values.setdefault(name, []).append(value)
            else:
                self.plain.append(word)

    def flag(self, name: str) -> bool:
        found = name in self.plain
        if found:
            self.plain.remove(name)
        return found

    def value(self, name: str, default: str = "") -> str:
        return self._values.pop(name, [default])[0]

    def properties(self) -> m.Properties:
        """The values that are left."""
        found: m.Properties = {}
        for name, values in self._values.items():
            if name == "user":
                found[p.USER_PROPERTY] = [(key, text) for key, _, text in map(_split, values)]
                continue
            key = PROPERTIES[name]
            value = values[0]
            if key == p.SUBSCRIPTION_IDENTIFIER:
                found[key] = [int(value)]
            elif key == p.CORRELATION_DATA:
                found[key] = value.encode()
            else:
                found[key] = int(value) if value.isdecimal() else value
        return found


def _split(text: str) -> tuple[str, str, str]:
    return text.partition(":")


class Director:
    """Plays the commands of a transcript on a stage."""

    def __init__(self, stage: Stage, told: Told) -> None:
        self.stage = stage
        self.actors: dict[str, Actor] = {}
        self._told = told
        self._copies: dict[str, SimDisk] = {}
        self._commands: dict[str, Callable[[Words], None]] = {
            name.removeprefix("_do_").replace("_", "-"): getattr(self, name)
            for name in dir(self)
            if name.startswith("_do_")
        }

    def play(self, line: str) -> None:
        """Carry out a command, and let its time pass."""
        at_once = line.endswith("&")
        words = shlex.split(line.rstrip("&"), comments=False)
        if words[0] in SETUP:
            return
        if words[0] == "wait":
            self.stage.schedule.run(float(words[1]))
            return
        self._commands[words[0]](Words(words[1:]))
        if not at_once:
            self.stage.schedule.run(STEP_S)

    def _actor(self, words: Words) -> Actor:
        name = words.plain.pop(0)
        actor = self.actors.get(name)
        if actor is None:
            actor = self.actors[name] = Actor(self.stage, name, self._told)
        return actor

    def _node(self, words: Words, actor: Actor) -> str:
        """The node that is named, or one after the other in the order of the actors."""
        hosts = list(self.stage.hosts)
        name = words.value("at")
        number = int(name[1:]) - 1 if name else list(self.actors.values()).index(actor)
        return hosts[number % len(hosts)]

    # Clients

    def _do_open(self, words: Words) -> None:
        actor = self._actor(words)
        version = next((v for name, v in VERSIONS.items() if words.flag(name)), 5)
        actor.connect(self._node(words, actor), version, "", None)

    def _do_connect(self, words: Words) -> None:
        actor = self._actor(words)
        version = next((v for name, v in VERSIONS.items() if words.flag(name)), 5)
        node = self._node(words, actor)
        user = words.value("as")
        holds = words.flag("hold")
        will = _will(words)
        packet = m.Connect(
            version,
            words.flag("clean"),
            int(words.value("keep", "0")),
            words.value("id", actor.name).removeprefix("-"),
            will,
            properties=words.properties(),
        )
        actor.connect(node, version, user, packet)
        if holds:
            actor.peer.hold()

    def _do_subscribe(self, words: Words) -> None:
        actor = self._actor(words)
        no_local, rap = words.flag("no-local"), words.flag("rap")
        handling = int(words.value("rh", "0"))
        requests = []
        for word in words.plain:
            filter, at, qos = word.rpartition("@")
            if not at or not qos.isdecimal() or len(qos) > 1:
                filter, qos = word, "0"
            requests.append(m.SubscriptionRequest(filter, int(qos), no_local, rap, handling))
        packet = m.Subscribe(actor.next_packet_id(), requests, words.properties())
        actor.peer.send(packet)

    def _do_unsubscribe(self, words: Words) -> None:
        actor = self._actor(words)
        actor.peer.send(m.Unsubscribe(actor.next_packet_id(), words.plain))

    def _do_publish(self, words: Words) -> None:
        actor = self._actor(words)
        qos = 1 if words.flag("q1") else 2 if words.flag("q2") else 0
        retain, dup = words.flag("retain"), words.flag("dup")
        packet_id = int(words.value("pid", "0"))
        alias = int(words.value("alias", "0"))
        if qos and not packet_id:
            packet_id = actor.next_packet_id()
        topic, payload = words.plain
        block = encode_block(words.properties())
        packet = m.Publish(
            topic.encode(), _payload(payload), qos, retain, dup, packet_id,
            block, alias, -1,
        )  # fmt: skip
        actor.peer.send(packet)

    def _do_pubrel(self, words: Words) -> None:
        self._actor(words).peer.send(m.Ack(m.PUBREL, int(words.plain[-1])))

    def _do_ping(self, words: Words) -> None:
        self._actor(words).peer.send(m.Pingreq())

    def _do_raw(self, words: Words) -> None:
        actor = self._actor(words)
        actor.peer.send_raw(bytes.fromhex("".join(words.plain)))

    def _do_hold(self, words: Words) -> None:
        self._actor(words).peer.hold()

    def _do_ack(self, words: Words) -> None:
        actor = self._actor(words)
        actor.peer.release(int(words.plain[0]) if words.plain else 0)

    def _do_disconnect(self, words: Words) -> None:
        peer = self._actor(words).peer
        reason = int(words.value("reason", "0"))
        peer.send(m.Disconnect(reason, words.properties()))
        peer.close()

    def _do_drop(self, words: Words) -> None:
        self._actor(words).peer.close()

    # Operators

    def _running(self) -> Host:
        return next(host for host in self.stage.hosts.values() if host.process is not None)

    def _do_ban(self, words: Words) -> None:
        process = self._running().process
        assert process is not None
        process.touch()
        scope, name = words.plain
        record_ban(process.state, Ban(scope, name, 0), _no_failure)

    def _do_unban(self, words: Words) -> None:
        process = self._running().process
        assert process is not None
        process.touch()
        record_lift(process.state, *words.plain, _no_failure)

    def _do_kill(self, words: Words) -> None:
        self.stage.kill(self._host(words))

    def _do_start(self, words: Words) -> None:
        self.stage.start(self._host(words))

    def _do_copy(self, words: Words) -> None:
        name = self._host(words)
        self._copies[name] = self.stage.hosts[name].disk.copy()

    def _do_put_back(self, words: Words) -> None:
        name = self._host(words)
        self.stage.kill(name)
        self.stage.hosts[name].disk = self._copies.pop(name)

    def _do_stop(self, words: Words) -> None:
        self.stage.stop(self._host(words))

    def _host(self, words: Words) -> str:
        """A node that the form does not have is the only one."""
        hosts = list(self.stage.hosts)
        return hosts[(int(words.plain[0][1:]) - 1) % len(hosts)]


def _no_failure(failure: str) -> None:
    assert not failure, failure


def _will(words: Words) -> m.Will | None:
    text = words.value("will")
    properties: m.Properties = {}
    for name, key in (
        ("will-delay", p.WILL_DELAY_INTERVAL),
        ("will-expiry", p.MESSAGE_EXPIRY_INTERVAL),
    ):
        value = words.value(name)
        if value:
            properties[key] = int(value)
    if not text:
        return None
    topic, payload, *rest = text.split(":")
    return m.Will(topic, payload.encode(), int((rest or ["0"])[0]), "retain" in rest, properties)


def _payload(word: str) -> bytes:
    character, star, count = word.partition("*")
    if star and len(character) == 1 and count.isdecimal():
        return character.encode() * int(count)
    return word.encode()
