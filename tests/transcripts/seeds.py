"""Scripts of chance: a seed is a scene that nobody has thought of.

Some have files, as scenes. Of all others `compare_forms` compares a cluster of one with three
nodes: `python -m tests.model --models brokers`.
"""

import random
import re
from typing import Final

from tests.transcripts.scenes import Scene, Sections, play
from tests.transcripts.stage import ONE, THREE

COMMANDS: Final = 45
TOPICS: Final = ("t/a", "t/b", "u", "v/x")
FILTERS: Final = ("t/#", "t/+", "t/a", "u", "v/x", "#", "+/x")
SHARED: Final = ("$share/g/t/#", "$share/h/u", "$queue/v/x")
REPLAYS: Final = ("$stream/@earliest/t/a", "$stream/@last:2/t/#", "$stream/@offsets:1:0/u")


class Client:
    def __init__(self, name: str, chance: random.Random) -> None:
        self.name = name
        self.version = chance.choice(("v3.1", "v3.1.1", "v5", "v5", "v5"))
        self.is_durable = chance.random() < 0.6
        self.expiry_s = chance.choice((1, 1000, 1000))
        self.receive_maximum = chance.choice((0, 0, 1, 2))
        self.is_connected = False
        self.holds = False

    def connect(self, chance: random.Random) -> str:
        words = ["connect", self.name, self.version]
        is_clean = not self.is_durable or chance.random() < 0.1
        words += ["clean"] * is_clean
        if self.version == "v5":
            words += [f"session-expiry-interval={self.expiry_s}"] * self.is_durable
            words += [f"receive-maximum={self.receive_maximum}"] * (self.receive_maximum > 0)
        if chance.random() < 0.3:
            words.append(f"will=t/will-{self.name}:will-of-{self.name}:{chance.randint(0, 2)}")
            words += [f"will-delay={chance.choice((1, 2, 100))}"] * (self.version == "v5")
        self.is_connected = True
        self.holds = False
        return " ".join(words)


class Author:
    def __init__(self, seed: int, *, is_plain: bool) -> None:
        self._chance = random.Random(f"transcript/{seed}")
        count = self._chance.randint(3, 5)
        self.clients = [Client(name, self._chance) for name in "abcde"[:count]]
        self._number = 0
        self._is_plain = is_plain
        self.has_groups = self._chance.random() < 0.4 and not is_plain
        self.is_killed = self._chance.random() < 0.3 and not is_plain

    def script(self) -> list[str]:
        lines = [each.connect(self._chance) for each in self.clients]
        for _ in range(COMMANDS):
            lines += self._commands()
        # All that is still to come.
        for client in self.clients:
            if client.holds:
                lines.append(f"ack {client.name}")
            if not client.is_connected:
                lines.append(client.connect(self._chance))
        lines.append("wait 4")
        # What falls due in whole seconds never meets another command.
        lines = [each for line in lines for each in (line, *["wait 0.03"] * _is_timed(line))]
        # Only a publish may follow at once: what overtakes what is else a matter of turns.
        return [
            line
            if following.startswith("publish") and not self._is_plain
            else line.removesuffix(" &")
            for line, following in zip(lines, [*lines[1:], ""], strict=True)
        ]

    def _commands(self) -> list[str]:
        chance = self._chance
        if self.is_killed and chance.random() < 0.03:
            for client in self.clients:
                client.is_connected = False
            again = [client.connect(chance) for client in self.clients]
            return ["kill n1", "wait 1", "start n1", "wait 2", *again]
        client = chance.choice(self.clients)
        if not client.is_connected:
            return [client.connect(chance)] if chance.random() < 0.6 else []
        roll = chance.random()
        for share, command in (
            (0.5, self._publish),
            (0.7, self._subscribe),
            (0.75, self._unsubscribe),
            (0.83, self._hold),
            (0.92, self._leave),
            (0.95, self._take_over),
        ):
            if roll < share:
                return [command(client)]
        return [f"wait {chance.choice((0.5, 1, 2))}"]

    def _publish(self, client: Client) -> str:
        chance = self._chance
        self._number += 1
        topic = chance.choice(TOPICS)
        if chance.random() < 0.05:
            topic = f"$delayed/{chance.randint(1, 2)}/{topic}"
        words = ["publish", client.name, topic, str(self._number)]
        if chance.random() < 0.05:
            words[-1] = '""'
        words += chance.choice(([], ["q1"], ["q1"], ["q2"]))
        words += ["retain"] * (chance.random() < 0.2)
        if client.version == "v5" and chance.random() < 0.15:
            words.append(f"message-expiry-interval={chance.choice((1, 2, 100))}")
        return " ".join(words) + " &" * (chance.random() < 0.25)

    def _subscribe(self, client: Client) -> str:
        chance = self._chance
        filters = FILTERS + SHARED if self.has_groups else FILTERS
        if chance.random() < 0.15:
            filters = REPLAYS
        chosen = chance.sample(filters, chance.choice((1, 1, 2)))
        words = ["subscribe", client.name, *(f"{each}@{chance.randint(0, 2)}" for each in chosen)]
        is_shared = any(each in SHARED for each in chosen)
        if client.version == "v5":
            words += ["no-local"] * (chance.random() < 0.1 and not is_shared)
            words += ["rap"] * (chance.random() < 0.2)
            words += [f"rh={chance.randint(1, 2)}"] * (chance.random() < 0.2)
            words += ["subscription-identifier=7"] * (chance.random() < 0.1)
        return " ".join(words)

    def _unsubscribe(self, client: Client) -> str:
        return f"unsubscribe {client.name} {self._chance.choice(FILTERS + SHARED)}"

    def _hold(self, client: Client) -> str:
        client.holds = not client.holds
        return f"{'hold' if client.holds else 'ack'} {client.name}"

    def _leave(self, client: Client) -> str:
        client.is_connected = False
        client.holds = False
        if self._chance.random() < 0.5:
            return f"drop {client.name}"
        reason = self._chance.choice(("", "", " reason=4")) * (client.version == "v5")
        return f"disconnect {client.name}{reason}"

    def _take_over(self, client: Client) -> str:
        return client.connect(self._chance)


def _is_timed(line: str) -> bool:
    return (
        line.startswith(("drop", "disconnect", "connect"))
        or "$delayed" in line
        or ("message-expiry" in line)
    )


def scene_of(seed: int, *, is_plain: bool = False) -> Scene:
    """`is_plain`: without shared groups, kills, and publishes of two clients at once, of which the
    nodes of a cluster see another order."""
    author = Author(seed, is_plain=is_plain)
    return Scene(f"seed-{seed}", [f"# A script of chance: seed {seed}.", *author.script()])


# Fresh seeds

_PUBLISH: Final = re.compile(r"< PUBLISH (\d+ )?(.*?(q\d) (retain )?(\S+) .*)")
_OWN: Final = re.compile(r"< PUB(?:ACK|REC|COMP) |> PUBREL ")
_NO_SUBSCRIBERS: Final = re.compile(r"(< PUB(?:ACK|REC) \d+) 16$")
"""A reason code that a cluster of several nodes does not have."""
_RECEIVED: Final = re.compile(r"> PUB(?:ACK|REC|COMP) |< PUBREL ")


def compare_forms(seed: int) -> None:
    """Play a plain seed with a cluster of one and with three nodes. Raises AssertionError with what
    differs for no known reason."""
    scene = scene_of(seed, is_plain=True)
    found = differences(play(scene, ONE), play(scene, THREE))
    if found:
        raise AssertionError("\n".join((*found, *scene.script)))


def differences(first: Sections, second: Sections) -> list[str]:
    """Differences that the clients of two forms see and no reason explains.

    Compared per connection: the acknowledgements of its publishes, the number of its own, the other
    packets, the packet ids of messages, and the messages of each topic and QoS above 0, each in
    their order.
    """
    found = []
    for name in dict.fromkeys([*first, *second]):
        if name.startswith("log"):
            continue
        one, two = (_plain(each.get(name, [])) for each in (first, second))
        for key in dict.fromkeys([*one, *two]):
            here, there = one.get(key, []), two.get(key, [])
            if here != there:
                found.append(f"{name}, {key}: {here} and {there}")
    return found


def _plain(lines: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in lines:
        # Without the time, which is that of a turn.
        text = _NO_SUBSCRIBERS.sub(r"\1", line.split(maxsplit=1)[1])
        key = "acknowledgements" if _OWN.match(text) else "other packets"
        received = _RECEIVED.match(text)
        if received is not None:
            # Which message has which packet id depends on the order between topics.
            key = text = received.group()
        message = _PUBLISH.match(text)
        if message is not None:
            packet_id, text, qos, retain, topic = message.groups()
            if packet_id is None:
                # No promise: it may be at another node when a client has just connected.
                continue
            found.setdefault("packet ids", []).append(packet_id)
            # Retained ones for a new subscription come beside the others.
            key = f"{topic} {qos}{', retained' * bool(retain)}"
        found.setdefault(key, []).append(text)
    return found
