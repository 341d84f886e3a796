"""Histories for those who judge test runs: what clients tell the ledger, call by call, so that
the same history reaches a ledger and an experiment's log; right ones, and ones with mistakes."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from holdfast_lab.log import ExperimentLog
from holdfast_lab.topic_checks import Finding, check_topic
from holdfast_lab.topic_history import OF_ALL, OF_MESSAGES, History, Row
from tests.e2e.ledger import Interest, Key, Ledger
from tests.e2e.ledger_checks import check

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
Broken = Counter[tuple[Any, ...]]
"""Violations, in the form in which two judges must agree."""


class Script:
    """Notes what a ledger is to be told."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **named: Any) -> None:
            self.calls.append((name, arguments, named))

        return note

    def write(self, path: Path, run: str, **parameters: str) -> Ledger:
        """Tells a ledger, which writes the file."""
        with ExperimentLog(run, path, writer="test", parameters=parameters) as log:
            ledger = Ledger(log)
            for name, arguments, named in self.calls:
                getattr(ledger, name)(*arguments, **named)
        return ledger

    def at(self, name: str, **wanted: Any) -> list[int]:
        """Where deliveries, or others whose first arguments are client and key, are."""
        return [
            index
            for index, (called, arguments, _) in enumerate(self.calls)
            if called == name
            and wanted.get("client", arguments[0]) == arguments[0]
            and wanted.get("key", arguments[1]) == arguments[1]
        ]


def broken(ledger: Ledger) -> Broken:
    """What the ledger finds, without what its clients accused the broker of."""
    accusations = set(ledger.accusations)
    found = [one for one in check(ledger) if one not in accusations]
    return counted((one.kind, one.who, one.key) for one in found)


def findings(path: Path) -> list[Finding]:
    """What the pipeline's checks find in one run's file, without Spark."""
    events = [json.loads(line) for line in path.read_bytes().splitlines()]
    topics = sorted({event["topic"] for event in events if event["event"] in OF_MESSAGES})
    found: list[Finding] = []
    for topic in topics:
        rows = [
            Row(
                **{name: value for name, value in event.items() if name in Row._fields},
                time_us=event["at_us"],
                error_us=0,
            )
            for event in events
            if event.get("topic", topic) == topic and event["event"] in (*OF_ALL, *OF_MESSAGES)
        ]
        found += check_topic(History(topic, rows))
    return found


def counted(found: Iterable[tuple[str, str, Key | None]]) -> Broken:
    """The ledger does not say which message a disagreement or a retained one is about, and may
    name a topic's disagreement more than once."""
    counts = Counter(form(*one) for one in found)
    return Counter({one: 1 if one[0] == "disagreement" else count for one, count in counts.items()})


def form(kind: str, who: str, key: Key | None) -> tuple[Any, ...]:
    if kind == "disagreement":
        return (kind,)
    return (kind, who) if kind == "retained" else (kind, who, key)


def right_run(messages: int = 12) -> Script:
    """Two publishers on two topics with QoS 1 and 2, three subscribers and a group of two."""
    script = Script()
    clients = {
        "one": ([Interest("load/#", 1)], ""),
        "two": ([Interest("load/+", 2)], ""),
        "exact": ([Interest("load/a", 2)], ""),
        "m1": ([Interest("load/a", 2)], "team"),
        "m2": ([Interest("load/a", 2)], "team"),
    }
    for client, (interests, group) in clients.items():
        script.subscribe(client, interests, group)
        script.connected(client, 0.5, "n1")
        script.subscribed(client, 1.0)
    for sequence in range(messages):
        for publisher, qos in (("p1", 1), ("p2", 2)):
            for topic in ("load/a", "load/b"):
                key = (publisher, topic, sequence)
                at_s = 2.0 + sequence * 0.1
                script.send(key, qos, at_s)
                script.acknowledge(key, at_s + 0.02)
                receivers = ["one", "two"]
                if topic == "load/a":
                    receivers += ["exact", ("m1", "m2")[sequence % 2]]
                for client in receivers:
                    script.deliver(client, key, at_s + 0.03)
    return script


class RandomRun:
    """A history in which anything may be wrong, none of it certain."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.script = Script()
        self._now = 1.0
        self._connection: Counter[str] = Counter()
        self._subscribers = {
            "all": [Interest("#", rng.choice([1, 2]))],
            "plus": [Interest("load/+", rng.choice([0, 1, 2]))],
            "two": [Interest("load/a", 2), Interest("x.y/#", 1)],
            "late": [Interest("load/#", 2)],
        }
        self._members = ["m1", "m2"]
        self._error = rng.choice([0.0, 0.01, 0.1])

    def make(self) -> Script:
        for client in ("all", "plus", "two", *self._members):
            self._join(client)
        if self._happens(0.3):
            self.script.may_reorder("p1")
        for sequence in range(self._rng.randrange(4, 16)):
            if sequence == 3:
                self._join("late")
            if self._happens(0.3):
                self._reconnect(self._rng.choice(["all", "plus", *self._members]))
            if self._happens(0.1):
                begin = self._now
                self.script.fault("kill -9", begin, self._tick(0.3))
            for publisher, qos in (("p1", 1), ("p2", 2)):
                for topic in ("load/a", "load/b", "x.y", "x.y/z"):
                    self._publish((publisher, topic, sequence), qos)
        for number in range(3):
            self._will(number)
        self._end()
        return self.script

    def _tick(self, most_s: float = 0.02) -> float:
        self._now += self._rng.uniform(0.0001, most_s)
        return self._now

    def _happens(self, chance: float) -> bool:
        return self._rng.random() < chance

    def _errs(self) -> bool:
        return self._rng.random() < self._error

    def _join(self, client: str) -> None:
        if client in self._members:
            self.script.subscribe(client, [Interest("load/#", 1)], "team")
        else:
            self.script.subscribe(client, self._subscribers[client])
        self._reconnect(client)
        self.script.subscribed(client, self._tick())

    def _reconnect(self, client: str) -> None:
        if self._connection[client]:
            self.script.disconnected(client, self._tick())
        self._connection[client] += 1
        self.script.connected(client, self._tick(), "n1")

    def _publish(self, key: Key, qos: int, retain: bool = False) -> None:
        self.script.send(key, qos, self._tick(), retain=retain)
        if self._happens(0.05):
            self.script.send(key, qos, self._tick(), retain=retain)
        if not self._errs():
            self.script.acknowledge(key, self._tick())
        elif self._happens(0.3):
            self.script.refuse(key)
            return
        receivers = [
            client
            for client, interests in self._subscribers.items()
            if self._connection[client] and any(one.matches(key[1]) for one in interests)
        ]
        if key[1].startswith("load/"):
            receivers.append(self._rng.choice(self._members))
        for client in receivers:
            self._deliver(client, key)

    def _deliver(self, client: str, key: Key) -> None:
        if self._errs() and self._happens(0.5):
            return
        self.script.deliver(client, key, self._tick(), self._connection[client])
        if self._errs() and self._happens(0.5):
            self._reconnect(client)
        if self._errs():
            other = (
                self._rng.choice([client, *self._members]) if client in self._members else client
            )
            number = self._connection[other]
            self.script.deliver(other, key, self._tick(), number, dup=self._happens(0.5))
        if self._errs() and len(self.script.calls) > 40:
            # Something older comes now.
            deliveries = [one for one in self.script.calls[-40:] if one[0] == "deliver"]
            late = self._rng.choice(deliveries)
            self.script.calls.remove(late)
            self.script.calls.append(late)

    def _will(self, number: int) -> None:
        key = ("mortal", "load/wills", number)
        self.script.send(key, 2, self._tick(), is_will=True)
        if self._happens(0.5):
            self.script.withdraw(key, self._tick())
            if self._errs():
                self._deliver("all", key)
        else:
            self.script.acknowledge(key, self._tick())
            for client in ("all", "plus", "late", "m1"):
                if self._connection[client]:
                    self._deliver(client, key)

    def _end(self) -> None:
        for sequence in range(3):
            self._publish(("keeper", "state/a", sequence), 1, retain=True)
        found = ("keeper", "state/a", 1 if self._errs() else 2)
        self.script.find_retained("state/a", "reader", None if self._errs() else found)
        if self._errs():
            self.script.deliver("all", ("nobody", "load/a", 7), self._tick())
        if self._connection["all"] > 1:
            self.script.deliver_former("all", 1, ("p1", "load/a", self._rng.randrange(4)))
        if self._errs():
            self.script.accuse("session lost", "all", "at connection 2")


A3 = ("p1", "load/a", 3)
A4 = ("p1", "load/a", 4)
B3 = ("p2", "load/b", 3)


def lose(script: Script) -> None:
    del script.calls[script.at("deliver", client="one", key=A3)[0]]


def lose_for_group(script: Script) -> None:
    del script.calls[script.at("deliver", client="m2", key=A3)[0]]


def miss_first(script: Script) -> None:
    del script.calls[script.at("deliver", client="exact", key=("p1", "load/a", 0))[0]]


def repeat_at_qos_2(script: Script) -> None:
    script.deliver("two", B3, 9.0, 2, dup=True)


def repeat_on_one_connection(script: Script) -> None:
    script.deliver("one", A3, 9.0)


def swap(script: Script) -> None:
    first = script.at("deliver", client="one", key=A3)[0]
    second = script.at("deliver", client="one", key=A4)[0]
    calls = script.calls
    calls[first], calls[second] = calls[second], calls[first]


def disagree(script: Script) -> None:
    """Each publisher's messages are in order; the two are not in one."""
    first = script.at("deliver", client="two", key=A3)[0]
    second = script.at("deliver", client="two", key=("p2", "load/a", 3))[0]
    calls = script.calls
    calls[first], calls[second] = calls[second], calls[first]


def invent(script: Script) -> None:
    script.deliver("one", ("p9", "load/a", 1), 9.0)


def allow(script: Script) -> None:
    """What looks wrong and is not."""
    script.deliver("one", A3, 9.0, 2, dup=True)
    script.send(A4, 1, 9.1)
    script.deliver("one", A4, 9.2)
    script.fault("kill -9", 2.0, 3.0, ["n1"])
    script.deliver("one", ("p1", "load/b", 4), 9.3)
    script.send(("p1", "load/a", 90), 1, 9.4)


PLANTED: dict[str, tuple[Callable[[Script], None], set[tuple[str, str]]]] = {
    "right": (lambda script: None, set()),
    "allowed": (allow, set()),
    "lost": (lose, {("lost", "one")}),
    "lost-group": (lose_for_group, {("lost", "team")}),
    "missed": (miss_first, {("missed after SUBACK", "exact")}),
    "duplicate-2": (repeat_at_qos_2, {("duplicate", "two")}),
    "duplicate-1": (repeat_on_one_connection, {("duplicate", "one")}),
    "reordered": (swap, {("reordered", "one"), ("disagreement", "load/a")}),
    "disagreement": (disagree, {("disagreement", "load/a")}),
    "invented": (invent, {("invented", "one")}),
}
