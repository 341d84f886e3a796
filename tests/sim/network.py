"""The links between the nodes: one TCP connection per pair, as io/peers/links.py has it.

Frames of one direction arrive in order, each link and direction with delays of its own. A direction
that is cut holds back what is sent; if that lasts, the ends give the connection up, each at its own
time, and what was on its way is lost. The end that gives up tells the other one, if it can.
"""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tests.sim.schedule import Schedule, Work

CONNECTED = "connected"
CLOSED = "closed"
Frame = tuple[int, bytes]
Item = Frame | str


class Endpoint(Protocol):
    """A node's machine."""

    name: str
    process_number: int
    """Of the process that runs, or ran last."""

    @property
    def is_running(self) -> bool: ...

    @property
    def is_on(self) -> bool:
        """The machine: it refuses connections if no process runs."""

    @property
    def is_paused(self) -> bool: ...

    def post(self, work: Work) -> None:
        """Run it in the process, which may be paused; never if that has ended."""

    def link(self, other: str) -> "PeerConnection | None":
        """As its process sees it."""

    def shuns(self, other: str) -> bool:
        """Its process wants no link to the other node."""

    def link_up(self, connection: "PeerConnection", other: str) -> None: ...

    def link_down(self, connection: "PeerConnection", other: str) -> None: ...

    def frame(self, connection: "PeerConnection", other: str, kind: int, data: bytes) -> None: ...

    def refused(self, other: str) -> None: ...


class PeerConnection:
    def __init__(self, network: "Network", first: Endpoint, second: Endpoint) -> None:
        self.processes = {
            first.name: first.process_number,
            second.name: second.process_number,
        }
        # By receiver.
        self.pipes = {
            second.name: Pipe(network, self, first, second),
            first.name: Pipe(network, self, second, first),
        }
        self.is_settled = False

    def push(self, receiver: str, item: Item) -> None:
        self.pipes[receiver].push(item)

    def is_of_running(self, end: Endpoint) -> bool:
        return end.is_running and self.processes[end.name] == end.process_number


class Pipe:
    """One direction."""

    def __init__(
        self, network: "Network", connection: PeerConnection, source: Endpoint, target: Endpoint
    ) -> None:
        self.network = network
        self.connection = connection
        self.source = source
        self.target = target
        self._items: deque[tuple[float, Item]] = deque()
        self._last_at = 0.0
        self._is_scheduled = False

    def push(self, item: Item) -> None:
        network = self.network
        if network.on_push is not None:
            network.on_push(self.source.name, self.target.name, item)
        now = network.schedule.now
        delay_s = network.delay(self.source.name, self.target.name)
        self._last_at = max(self._last_at, now + delay_s)
        self._items.append((self._last_at, item))
        self.arrange()

    def arrange(self) -> None:
        if self._items and not self._is_scheduled:
            self._is_scheduled = True
            self.network.schedule.at(self._items[0][0], self._deliver)

    def drop(self, keep: int = 0) -> None:
        """What is on its way, except the first ones."""
        while len(self._items) > keep:
            self._items.pop()

    def __len__(self) -> int:
        return len(self._items)

    def _deliver(self) -> None:
        self._is_scheduled = False
        if not self._items or self.network.is_cut(self.source.name, self.target.name):
            return
        due, item = self._items[0]
        if due > self.network.schedule.now:
            self.arrange()
            return
        self._items.popleft()
        if self.connection.is_of_running(self.target):
            self.target.post(lambda: self._receive(item))
        self.arrange()

    def _receive(self, item: Item) -> None:
        connection = self.connection
        source = self.source.name
        if item == CONNECTED:
            self.target.link_up(connection, source)
        elif self.target.link(source) is not connection:
            return
        elif item == CLOSED:
            self.target.link_down(connection, source)
        else:
            assert not isinstance(item, str)
            self.target.frame(connection, source, *item)


class Network:
    """`user_timeout_s`: how long an end waits for the other end's word."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ends: dict[str, Endpoint] = {}
        self.user_timeout_s = 5.0
        # Called with sender, receiver and item when something leaves.
        self.on_push: Callable[[str, str, Item], None] | None = None
        self._chance = schedule.chance("network")
        self._delays: dict[tuple[str, str], random.Random] = {}
        # Directions that are cut, and since when.
        self._cut: dict[tuple[str, str], float] = {}
        # Those that `heal` does not mend.
        self.severed: set[tuple[str, str]] = set()
        self._connections: dict[tuple[str, str], list[PeerConnection]] = {}
        # How often a frame is late, and by how much at most.
        self.late = 0.01
        self.late_s = 0.02

    def add(self, end: Endpoint) -> None:
        for other in self.ends.values():
            self._connections[(other.name, end.name)] = []
            self.schedule.after(self._chance.random() * 0.05, partial(self._dial, other, end))
        self.ends[end.name] = end

    def delay(self, source: str, target: str) -> float:
        stream = self._delays.get((source, target))
        if stream is None:
            stream = self.schedule.chance(f"{source}>{target}")
            self._delays[(source, target)] = stream
        delay_s = 0.0001 + stream.random() * 0.0004
        if stream.random() < self.late:
            delay_s += stream.random() * self.late_s
        return delay_s

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cut

    def cut(self, source: str, target: str) -> None:
        """This direction, until `heal`."""
        if (source, target) in self._cut:
            return
        since = self._cut[(source, target)] = self.schedule.now
        for connection in self._all(source, target):
            for name in (source, target):
                wait_s = self.user_timeout_s * (0.1 + 0.9 * self._chance.random())
                work = partial(self._give_up, connection, name, (source, target), since)
                self.schedule.after(wait_s, work)

    def heal(self) -> None:
        for source, target in list(self._cut):
            if (source, target) not in self.severed:
                self.mend(source, target)

    def mend(self, source: str, target: str) -> None:
        if self._cut.pop((source, target), None) is not None:
            for connection in self._all(source, target):
                self.schedule.after(self._chance.random() * 0.3, connection.pipes[target].arrange)

    def reset(self, first: str, second: str) -> None:
        """Break the connection of two nodes; both hear of it."""
        for connection in self._all(first, second):
            for pipe in connection.pipes.values():
                pipe.drop(self._chance.randint(0, len(pipe)))
                pipe.push(CLOSED)

    def close(self, connection: PeerConnection, closer: str, other: str) -> None:
        """By one end, which knows."""
        connection.push(other, CLOSED)

    def ended(self, name: str, *, quietly: bool) -> None:
        """The process at a node has. `quietly`: with its machine, so nobody is told."""
        for pair, connections in self._connections.items():
            if name not in pair:
                continue
            other = pair[1] if pair[0] == name else pair[0]
            for connection in connections:
                connection.pipes[name].drop()
                pipe = connection.pipes[other]
                if quietly or self._chance.random() < 0.5:
                    pipe.drop(self._chance.randint(0, len(pipe)))
                if not quietly:
                    pipe.push(CLOSED)
                elif connection.is_of_running(self.ends[other]):
                    # Nothing answers any more.
                    wait_s = self.user_timeout_s * (0.3 + 0.7 * self._chance.random())
                    self.schedule.after(wait_s, partial(connection.push, other, CLOSED))

    def _all(self, first: str, second: str) -> list[PeerConnection]:
        found = self._connections.get((first, second))
        return self._connections[(second, first)] if found is None else found

    def _give_up(
        self, connection: PeerConnection, name: str, cut: tuple[str, str], since: float
    ) -> None:
        if self._cut.get(cut) != since or not connection.is_of_running(self.ends[name]):
            return
        other = next(each for each in connection.processes if each != name)
        connection.pipes[name].drop()
        connection.push(other, CLOSED)
        end = self.ends[name]
        end.post(lambda: self._lose(end, connection, other))

    def _lose(self, end: Endpoint, connection: PeerConnection, other: str) -> None:
        if end.link(other) is connection:
            end.link_down(connection, other)

    # Dialling

    def _dial(self, first: Endpoint, second: Endpoint) -> None:
        self.schedule.after(0.05 + self._chance.random() * 0.2, lambda: self._dial(first, second))
        if self.is_cut(first.name, second.name) or self.is_cut(second.name, first.name):
            return
        connections = self._connections[(first.name, second.name)]
        connections[:] = [
            each for each in connections if each.is_of_running(first) or each.is_of_running(second)
        ]
        if not first.is_running or not second.is_running:
            self._knock(first, second)
            self._knock(second, first)
            return
        if first.is_paused or second.is_paused:
            return
        if any([first.shuns(second.name), second.shuns(first.name)]):
            # Both are asked: each may have something to say.
            return
        for each in connections:
            if not each.is_of_running(first) or not each.is_of_running(second):
                continue
            if not each.is_settled:
                return
            if first.link(second.name) is each or second.link(first.name) is each:
                # One end may have lost it: the other one will hear.
                return
        connection = PeerConnection(self, first, second)
        connections.append(connection)
        connection.push(first.name, CONNECTED)
        connection.push(second.name, CONNECTED)
        self.schedule.after(0.1, lambda: self._settle(connection))

    def _settle(self, connection: PeerConnection) -> None:
        connection.is_settled = True

    def _knock(self, dialler: Endpoint, other: Endpoint) -> None:
        if dialler.is_running and not other.is_running and other.is_on:
            dialler.post(lambda: self._refuse(dialler, other))

    def _refuse(self, dialler: Endpoint, other: Endpoint) -> None:
        if dialler.link(other.name) is None:
            dialler.refused(other.name)
