"""Views the log over the network, for `option("servers", "host:adminport,...")`.

The driver asks all given servers. So a dead leader, or a follower that learns of commits late, does
not change the result. A node that does not store all partitions names the others, and these are
asked, too. Tasks read from nodes that do not lead the partitions, because leaders have more work.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeVar

from msgspec import Struct

from holdfast.client.admin_access import NO_ACCESS, AdminAccess
from holdfast.client.admin_connection import (
    AdminConnection,
    AdminError,
    Misdirected,
    NoAnswer,
    Server,
    addresses_in,
)
from holdfast.client.log.reading import offsets
from holdfast.client.log.reading.offsets import (
    LogGeneration,
    OffsetRange,
    Offsets,
    PartitionBounds,
    log_identity,
)

ROUNDS: Final = 5
"""The fewest rounds over all servers for one request. They take 3 s, and more of them the time that
the option `serverWait` gives."""
PAUSE_S: Final = 0.2
"""The pause in seconds between the first two rounds. It doubles each time."""
PAUSE_MAX_S: Final = 10.0
"""The longest pause in seconds between two rounds."""
PENALTY_S: Final = 5.0
"""The seconds for which a server that did not respond is left out of the first round."""
LAG_WAIT_S: Final = 15.0
"""The most seconds to wait for records that were seen before and that no server knows now. After a
restart or a failover each server must first learn what is committed."""
SERVERS_MAX: Final = 64
"""The most servers that are asked, with those that others name."""
LAG_PAUSE_S: Final = 0.1
"""The pause in seconds between two looks at lagging servers."""

WAIT_PATH: Final = "/api/v1/log/wait"

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _LogAnswer(Struct):
    ranges: list[tuple[int, int]]
    log: str = ""
    leads: frozenset[int] = frozenset()
    created: str | None = None
    generation: int | None = None
    former: list[tuple[int, list[int]]] = []
    qos0_unlogged: int = 0
    keeps_until_lake: bool = False
    stored: frozenset[int] | None = None
    servers: list[str] = []

    def log_generation(self) -> LogGeneration:
        return LogGeneration(self.generation, dict(self.former))


class _OffsetsAnswer(Struct):
    offsets: list[int]


@dataclass(frozen=True)
class ServerLog:
    """The state of the log at one server: its name, offsets, and the partitions that the server
    leads."""

    server: Server
    log: str
    bounds: tuple[PartitionBounds, ...]
    leads: frozenset[int]
    created: str | None = None
    """The name of the data directory. Empty in a cluster, None from an older server."""
    generation: LogGeneration = LogGeneration()  # noqa: RUF009
    qos0_unlogged: int = 0
    """The QoS 0 messages that the server has received and not stored since its start."""
    keeps_until_lake: bool = False
    """Whether its retention waits for registered lakes."""
    stored: frozenset[int] | None = None
    """The partitions that it stores. None: all, or it is older."""

    def has(self, item: OffsetRange) -> bool:
        """Returns whether the server has the whole range."""
        bound = self.bounds[item.partition]
        if self.stored is not None and item.partition not in self.stored:
            return False
        return bound.first <= item.start and bound.end >= item.end


@dataclass(frozen=True)
class Assignment:
    """The ranges of one task, and its servers in order of preference."""

    ranges: list[OffsetRange]
    servers: list[Server]


class Servers:
    """The connections to all given servers, and the state of the log at each as of the last
    `bounds`."""

    def __init__(
        self,
        servers: Sequence[Server],
        access: AdminAccess = NO_ACCESS,
        wait_s: float = 0.0,
        pause: Callable[[float], object] = time.sleep,
        pause_max_s: float = PAUSE_MAX_S,
    ) -> None:
        """`wait_s` is how long a request waits for servers that are away, at least ROUNDS. `pause`
        waits between two attempts, at most for `pause_max_s`."""
        self._pause_max_s = pause_max_s
        self._wait_s = wait_s
        self._pause = pause
        self._access = access
        self._connections = [AdminConnection(server, access=access) for server in servers]
        self._penalties: dict[Server, float] = {}
        # Gateways, which store nothing of the log.
        self._gateways: set[Server] = set()
        self._states: list[ServerLog] = []
        self.generation = LogGeneration()
        """The generation of the log, as of the last `bounds` or `bounds_after`."""

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._connections:
            connection.close()

    @property
    def partitions(self) -> int:
        """The number of partitions of the log. Valid after the first call of `bounds`."""
        return max((len(state.bounds) for state in self._states), default=0)

    def with_log(self) -> list[Server]:
        """Returns the servers, without those that store nothing of the log."""
        return [each.server for each in self._connections if each.server not in self._gateways]

    def bounds(self, at_least: Mapping[int, int] | None = None) -> dict[int, PartitionBounds]:
        """Returns the offsets that all servers together have.

        The call waits at most LAG_WAIT_S until the ends reach `at_least`, the ends that were seen
        before. Raises AdminError.
        """
        deadline = time.monotonic() + LAG_WAIT_S
        while True:
            self._states = self._request_all(self._log_of)
            generations = [state.generation for state in self._states]
            self.generation = generations[0]
            if any(each != self.generation for each in generations) and time.monotonic() < deadline:
                # Nodes learn one after the other that their cluster was restored.
                self._pause(LAG_PAUSE_S)
                continue
            found = self._merged_status()
            behind = [
                p for p, end in (at_least or {}).items() if p not in found or found[p].end < end
            ]
            if not behind or not self._may_lag() or time.monotonic() > deadline:
                return found
            self._pause(LAG_PAUSE_S)

    def bounds_after(
        self, ends: Sequence[int], server: Server, timeout_s: float
    ) -> dict[int, PartitionBounds]:
        """Waits until a server has records behind these ends of all partitions, or for the timeout,
        and returns the offsets that it has. Raises NoAnswer or AdminError."""
        connection = next(each for each in self._connections if each.server == server)
        request = {"ends": ends, "wait_ms": int(timeout_s * 1000)}
        answer = connection.exchange("POST", WAIT_PATH, request, _LogAnswer)
        self.generation = answer.log_generation()
        return {p: PartitionBounds(*bounds) for p, bounds in enumerate(answer.ranges)}

    def ask(self, question: Callable[[AdminConnection], T]) -> list[T]:
        """Returns the replies of all servers that respond, at least one. Raises AdminError."""
        return self._request_all(question)

    def ask_one(self, question: Callable[[AdminConnection], T]) -> T:
        """Returns the reply of the first server that responds. Raises AdminError."""
        return self._request_all(question, 1)[0]

    def interrupt(self) -> None:
        """Ends the requests in progress from another thread."""
        for connection in self._connections:
            connection.interrupt()

    def offsets_at(self, timestamp_us: int) -> Offsets:
        """Returns per partition the first offset whose record is not older than the time.

        If servers differ, the lowest offset counts.
        """

        def of(connection: AdminConnection) -> list[int]:
            """Returns the offsets of one server."""
            path = f"/api/v1/log/offsets?timestamp_us={timestamp_us}"
            return connection.get(path, _OffsetsAnswer).offsets

        answers = self._request_all(of)
        return {p: min(each) for p, each in enumerate(zip(*answers, strict=False))}

    def assign(
        self, ranges: Sequence[OffsetRange], tasks_max: int, *, whole: bool
    ) -> list[Assignment]:
        """Divides ranges among at most `tasks_max` tasks, by the state of the last `bounds`.

        With `whole`, a partition is not divided. A range goes to a server that has it, preferably
        not its leader, and then to the one with the least load.
        """
        divide = offsets.group if whole else offsets.split
        states = self._states[:tasks_max]
        if len(states) < 2:
            return [
                Assignment(members, self._order([state.server for state in states], number))
                for number, members in enumerate(divide(ranges, tasks_max))
            ]
        of: dict[Server, list[OffsetRange]] = {state.server: [] for state in states}
        load = dict.fromkeys(of, 0)
        for item in sorted(ranges, key=lambda item: (-item.records, item.partition)):
            best = min(
                states,
                key=lambda state: (
                    not state.has(item),
                    item.partition in state.leads,
                    load[state.server],
                ),
            ).server
            of[best].append(item)
            load[best] += item.records
        result: list[Assignment] = []
        left = tasks_max
        used = sorted((server for server in of if of[server]), key=lambda server: load[server])
        for place, server in enumerate(used):
            rest = sum(load[each] for each in used[place:])
            tasks = max(1, min(left - (len(used) - place - 1), round(left * load[server] / rest)))
            left -= tasks
            for members in divide(sorted(of[server], key=lambda each: each.partition), tasks):
                result.append(Assignment(members, self._order([server], len(result))))
        return result

    def identity(self) -> str:
        """Returns what distinguishes the log from all others, as of the last `bounds`. Empty: not
        known."""
        for state in self._states:
            if state.log:
                return log_identity(state.log, state.created, self.generation.number or 0)
        return ""

    def qos0_unlogged(self) -> int:
        """Returns how many QoS 0 messages the servers have not stored, as of the last `bounds`."""
        return sum(state.qos0_unlogged for state in self._states)

    def keep_until_lake(self) -> bool:
        """Returns whether a server keeps its log until lakes have it, as of the last `bounds`."""
        return any(state.keeps_until_lake for state in self._states)

    def _order(self, preferred: list[Server], number: int) -> list[Server]:
        """Returns all servers: the preferred ones, then those that responded, then the silent ones.

        Each task begins its second group with another server, so that fallback spreads the load.
        """
        alive = [state.server for state in self._states if state.server not in preferred]
        turned = alive[number % len(alive) :] + alive[: number % len(alive)] if alive else []
        ordered = [*preferred, *turned]
        return ordered + [server for server in self.with_log() if server not in ordered]

    def _add(self, servers: Sequence[Server]) -> None:
        """Adds nodes that another one has named, at most SERVERS_MAX in all."""
        known = {connection.server for connection in self._connections}
        for server in servers:
            if server not in known and len(known) < SERVERS_MAX:
                known.add(server)
                self._connections.append(AdminConnection(server, access=self._access))

    def _log_of(self, connection: AdminConnection) -> ServerLog:
        """The log of a server, and the servers that it names."""
        answer = connection.get("/api/v1/log", _LogAnswer)
        bounds = tuple(PartitionBounds(first, end) for first, end in answer.ranges)
        self._add(addresses_in(" ".join(answer.servers)))
        if answer.stored == frozenset():
            self._gateways.add(connection.server)
        else:
            self._gateways.discard(connection.server)
        return ServerLog(
            connection.server,
            answer.log,
            bounds,
            answer.leads,
            answer.created,
            answer.log_generation(),
            answer.qos0_unlogged,
            answer.keeps_until_lake,
            answer.stored,
        )

    def _may_lag(self) -> bool:
        return len(self._connections) > 1 or any(
            len(state.leads) < len(state.bounds) for state in self._states
        )

    def _merged_status(self) -> dict[int, PartitionBounds]:
        names = {state.log: state for state in self._states if state.log}
        if len(names) > 1:
            listing = ", ".join(
                f"{state.server[0]}:{state.server[1]} has {name}" for name, state in names.items()
            )
            raise AdminError(f"the servers have different logs: {listing}")
        return {
            partition: PartitionBounds(min(b.first for b in each), max(b.end for b in each))
            for partition, each in enumerate(
                zip(*(state.bounds for state in self._states), strict=False)
            )
        }

    def _request_all(
        self, question: Callable[[AdminConnection], T], answers_max: int | None = None
    ) -> list[T]:
        """Returns the replies of all servers that respond, at least one and at most `answers_max`.
        Raises AdminError, which is a NoAnswer if none responds."""
        pause_s = PAUSE_S
        failure = ""
        listing = ", ".join(connection.name for connection in self._connections)
        began = time.monotonic()
        for round_number in count():
            waited_s = time.monotonic() - began
            if round_number >= ROUNDS and waited_s >= self._wait_s:
                break
            if round_number >= ROUNDS:
                logger.warning(
                    "no answer from %s for %.0f s: %s. It is tried again in %.0f s, for %.0f s",
                    listing, waited_s, failure, pause_s, self._wait_s,
                )  # fmt: skip
            if round_number:
                self._pause(pause_s)
                pause_s = min(2 * pause_s, self._pause_max_s)
            answers: list[T] = []
            # Nodes that a reply names are asked in the same round.
            for connection in self._connections:
                if len(answers) == answers_max:
                    break
                until = self._penalties.get(connection.server, 0.0)
                if round_number == 0 and time.monotonic() < until:
                    continue
                try:
                    answers.append(question(connection))
                except Misdirected as error:
                    failure = str(error)
                    self._gateways.add(connection.server)
                    self._add(error.servers)
                except NoAnswer as error:
                    failure = str(error)
                    self._penalties[connection.server] = time.monotonic() + PENALTY_S
            if answers:
                return answers
        asked = (
            "Is it the admin port (`holdfast serve --admin ADDR:PORT`), and reachable from here?"
        )
        raise NoAnswer(
            f"no answer from {listing} for {time.monotonic() - began:.0f} s; the last error: "
            + (failure if failure.endswith("?") else f"{failure}. {asked}")
        )
