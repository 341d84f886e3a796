"""Plain and group subscribers at every member of a federation: each plain subscription gets each
message once, and each group gets it once in all."""

from collections import Counter
from pathlib import Path

import pytest

from holdfast.protocol.topics.names import matches
from tests.e2e.federated import Member, line
from tests.e2e.pair import wait_until
from tests.interop.paho_client import Paho

SESSION_S = 3600
TOPICS = 6
GROUPS = {"a": ["g"], "b": ["g", "h"], "c": ["g", "h"]}
"""Of each member; `g` wants all topics, `h` one level."""
FILTERS = {"g": "$share/g/t/#", "h": "$share/h/t/+"}
PLAIN = {"a": "t/#", "b": "t/1", "c": "t/#"}
"""So b gets most topics for its groups alone."""


class Subscribers:
    """Of one member: a plain one, and a worker in each of its groups, each a durable session."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.clients: dict[str, Paho] = {}
        for group in GROUPS[member.name]:
            self._come(group).subscribe(FILTERS[group], 2)
        plain = self._come("plain")
        plain.subscribe(PLAIN[member.name], 2)
        # Announced last: who knows of this knows of all.
        plain.subscribe(f"ready/{member.name}", 0)

    def _come(self, role: str, clean: bool = True) -> Paho:
        name = f"{self.member.name}-{role}"
        client = Paho(self.member.port, name, clean=clean, expiry_s=SESSION_S)
        self.clients[role] = client
        return client

    def come_back(self) -> None:
        for role in list(self.clients):
            self._come(role, clean=False)

    def leave(self) -> None:
        for client in self.clients.values():
            client.assert_nothing_more()
            client.close()

    def take(self, role: str) -> list[bytes]:
        messages = self.clients[role].messages
        return [messages.get().payload for _ in range(messages.qsize())]


class Site:
    """Ends with its clients."""

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        for subscribers in self.subscribers.values():
            for client in subscribers.clients.values():
                client.close()

    def __init__(self, members: list[Member]) -> None:
        self.subscribers = {member.name: Subscribers(member) for member in members}
        for member in members:
            member.await_sending(*(f"ready/{one.name}" for one in members if one is not member))
        # By group or plain subscription, how often each message came.
        self.seen: dict[str, Counter[bytes]] = {}
        self.topics: dict[bytes, str] = {}
        """Of all that was published."""
        self.shares: dict[str, Counter[str]] = {group: Counter() for group in FILTERS}

    def take(self) -> None:
        for name, subscribers in self.subscribers.items():
            for role in subscribers.clients:
                found = subscribers.take(role)
                key = role if role in FILTERS else f"{role}-{name}"
                self.seen.setdefault(key, Counter()).update(found)
                if role in FILTERS:
                    self.shares[role][name] += len(found)

    def wanted(self, role: str) -> set[bytes]:
        filter = PLAIN.get(role.removeprefix("plain-"), "t/#")
        return {payload for payload, topic in self.topics.items() if matches(filter, topic)}

    def has_all(self) -> bool:
        self.take()
        return all(self.wanted(role) <= found.keys() for role, found in self.seen.items())

    def check(self) -> None:
        wait_until(self.has_all, "everybody has everything")
        # For a moment; what came to the others meanwhile counts, too.
        self.subscribers["a"].clients["plain"].assert_nothing_more()
        self.take()
        for role, found in self.seen.items():
            assert {one for one, count in found.items() if count != 1} == set(), role
            assert found.keys() == self.wanted(role), role

    def publish(self, member: Member, part: str, count: int, qualities: tuple[int, ...]) -> None:
        with Paho(member.port, f"publisher-{member.name}") as publisher:
            for number in range(count):
                topic, payload = f"t/{number % TOPICS}", f"{part} {member.name} {number}".encode()
                # Every topic at every quality.
                publisher.publish(topic, payload, qualities[number // TOPICS % len(qualities)])
                self.topics[payload] = topic

    def die(self, member: Member) -> None:
        """A client that leaves a will behind."""
        payload = f"will of {member.name}".encode()
        Paho(member.port, f"mortal-{member.name}", will=("t/1", payload, 1, True)).vanish()
        self.topics[payload] = "t/1"


@pytest.mark.timeout(180)
def test_each_plain_subscription_and_each_group_gets_each_message_once(tmp_path: Path) -> None:
    with line(tmp_path) as members, Site(members) as site:
        for member in members:
            site.publish(member, "all here", 36, (0, 1, 2))
            site.die(member)
        site.check()
        # Own clients come first; `h`, which a does not have, is spread by topics.
        assert site.shares["g"] == {"a": 37, "b": 37, "c": 37}
        assert min(site.shares["h"][name] for name in "bc") >= 36

        *others, away = members
        site.subscribers[away.name].leave()
        before = away.count("imported")
        for member in others:
            site.publish(member, "c is away", 24, (1, 2))
        wait_until(lambda: away.count("imported") == before + 48, "c has what its sessions want")
        away.kill()
        for member in others:
            site.publish(member, "c is down", 24, (1, 2))
        away.start()
        site.subscribers[away.name].come_back()
        site.check()
        # What is retained is so for all; a group gets nothing of it.
        for member in members:
            with Paho(member.port, "late") as late:
                late.subscribe("$share/late/t/#", 1)
                late.subscribe("t/#", 1)
                message = late.message()
                assert (message.topic, message.retain) == ("t/1", True)
                assert message.payload.startswith(b"will of ")
                late.assert_nothing_more()
