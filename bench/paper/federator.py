"""Federator of the published protocol, a client of its own and its neighbours' brokers.

    asyncio.run(run(PaperSettings.from_environment(os.environ)))

`bench.paper` decides, and this module carries out its effects in the event loop. It
retries an unreachable manager or broker forever and logs that once a minute. Only wrong settings
are an error.
"""

import asyncio
import logging
import signal
import time
from collections import Counter, deque
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import msgspec

from bench.paper.config import PaperConfig
from bench.paper.effects import (
    ConnectNeighbour,
    DeliverLocally,
    DisconnectNeighbour,
    Effect,
    PublishToNeighbour,
    Refused,
)
from bench.paper.member import PaperMember
from bench.paper.messages import SUBSCRIPTIONS
from bench.paper.settings import JOIN_PATH, PaperSettings
from bench.paper.topic import TopicView
from holdfast.client import (
    Client,
    ClientError,
    Message,
    Options,
    PublishResult,
    QueueFull,
    Reconnect,
    SubscriptionRequest,
)
from holdfast.client.errors import ConnectionLost, NotConnected
from holdfast.client.servers import Server, parse_server
from holdfast.config.problem import ConfigError
from holdfast.io.event_loop.failures import first_unexpected, watched
from holdfast.io.peers.complaints import Complaints
from holdfast.security.tls import TlsError
from holdfast_federation.manager.messages import JoinAnswer, Neighbor, Watched
from holdfast_federation.sidecar.manager_client.http import (
    ManagerHttp,
    ManagerRefuses,
    ManagerUnreachable,
)

QUEUE_MESSAGES_MAX: Final = 10_000
QUEUE_BYTES_MAX: Final = 16 << 20
INFLIGHT_MAX: Final = 100
"""The most unacknowledged messages; the client queues as many again while it reconnects."""
STALE_S: Final = 5.0
"""The time in seconds of an interruption after which unacknowledged messages are not repeated."""
PAUSE_S: Final = 1.0
"""The pause in seconds before connecting again, after STALE_S of attempts or a refusal."""
KEEP_ALIVE_S: Final = 10
STOP_S: Final = 2.0

Item = tuple[str, bytes, int]
"""A topic, a payload and a QoS."""


def options(client_id: str, username: str | None, password: bytes | None) -> Options:
    """Makes the options of a client without a session, so that no message waits at the broker."""
    return Options(
        client_id=client_id,
        username=username,
        password=password,
        keep_alive_s=KEEP_ALIVE_S,
        inflight_max=INFLIGHT_MAX,
        queue_messages_max=INFLIGHT_MAX,
    )


class Outlet:
    """The queue of messages to one broker, in order.

    A full queue drops its oldest messages and counts them. So no message is late for long, and a
    broker that hangs delays only its own messages.
    """

    def __init__(self, counts: Counter[str], complaints: Complaints, name: str) -> None:
        """`counts`: receives lost messages by reason. `name`: the broker's name for the log."""
        self._counts = counts
        self._complaints = complaints
        self._name = name
        self._queue: deque[Item] = deque()
        self._queue_bytes = 0
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def enqueue(self, item: Item) -> None:
        self._queue.append(item)
        self._queue_bytes += len(item[1])
        while len(self._queue) > QUEUE_MESSAGES_MAX or self._queue_bytes > QUEUE_BYTES_MAX:
            self._queue_bytes -= len(self._queue.popleft()[1])
            self._counts["queue full"] += 1
        self._arrival.set()

    def clear(self) -> None:
        """Drops all messages, because there is no connection and none is expected soon."""
        self._counts["broker away"] += len(self._queue)
        self._queue.clear()
        self._queue_bytes = 0

    async def pump(self, client: Client) -> None:
        """Publishes queued messages until the connection ends."""
        while True:
            while not self._queue:
                self._arrival.clear()
                await self._arrival.wait()
            topic, payload, qos = self._queue.popleft()
            self._queue_bytes -= len(payload)
            try:
                future = await client.submit(topic, payload, qos=qos)
            except (ConnectionLost, NotConnected):
                self._counts["broker away"] += 1
                return
            except ClientError as error:
                # For example QueueFull, or a message larger than the broker accepts.
                self._connection_lost(error)
            else:
                future.add_done_callback(self._resolved)

    def _resolved(self, future: asyncio.Future[PublishResult]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, ConnectionLost | NotConnected):
            self._counts["broker away"] += 1
        elif isinstance(error, ClientError):
            self._connection_lost(error)

    def _connection_lost(self, error: ClientError) -> None:
        reason = "queue full" if isinstance(error, QueueFull) else "refused by the broker"
        self._counts[reason] += 1
        self._complaints.say(f"{self._name} publish", reason, f"{self._name}: {error}")


class NeighbourLink:
    """The connection to a neighbour's broker, used only to publish there."""

    def __init__(
        self,
        id: int,
        address: str,
        options: Options,
        counts: Counter[str],
        complaints: Complaints,
    ) -> None:
        """Begins to connect at once. Raises `ValueError` if the address is malformed."""
        self.id = id
        self.address = address
        self.is_up = False
        self._counts = counts
        self._complaints = complaints
        self._name = f"neighbour {id} at {address}"
        self._outlet = Outlet(counts, complaints, self._name)
        self._options = options
        parse_server(address)
        self._task = watched(self._run())

    @property
    def queued(self) -> int:
        return len(self._outlet)

    def enqueue(self, item: Item) -> None:
        if self.is_up:
            self._outlet.enqueue(item)
        else:
            self._counts["broker away"] += 1

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            client = Client(
                servers=[self.address],
                reconnect=Reconnect(give_up_after_s=STALE_S),
                options=self._options,
            )
            try:
                await client.connect()
                self.is_up = True
                self._complaints.forget(self._name)
                await serve(client, self._outlet)
            except ClientError as error:
                self._complaints.say(self._name, type(error).__name__, f"{self._name}: {error}")
            finally:
                self.is_up = False
                self._outlet.clear()
                await close(client)
            await asyncio.sleep(PAUSE_S)


async def serve(client: Client, outlet: Outlet) -> None:
    """Publishes until the connection ends for good. Raises the `ClientError` that ended it."""
    pumping = watched(outlet.pump(client))
    try:
        error = await client.wait_closed()
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
    if error is not None:
        raise error


async def close(client: Client) -> None:
    """Sends DISCONNECT and closes, or aborts after STOP_S."""
    try:
        async with asyncio.timeout(STOP_S):
            await client.disconnect()
    except TimeoutError:
        client.abort()


TIMEOUT_S: Final = 15.0
"""The time in seconds for a request. A join includes the manager's probe of the broker."""
RETRY_S: Final = 0.5
"""The first delay in seconds between attempts. It doubles up to RETRY_S_MAX."""
RETRY_S_MAX: Final = 30.0
NO_SUCH_MEMBER: Final = 404


@dataclass(frozen=True)
class AssignedMember:
    """The identity, configuration and neighbours that the manager assigns."""

    id: int
    config: PaperConfig
    neighbours: dict[int, str]
    """The addresses of the neighbours' brokers by member id."""

    def is_same_member(self, other: "AssignedMember") -> bool:
        return (self.id, self.config) == (other.id, other.config)


class PaperManager:
    """The member's client of its topology manager."""

    def __init__(self, settings: PaperSettings, complaints: Complaints) -> None:
        """Reads token and certificates. Raises `ConfigError` or `TlsError` if that fails."""
        self.is_reached = False
        self._settings = settings
        self._http = ManagerHttp(
            settings.manager,
            settings.manager_ca,
            settings.manager_certificate,
            settings.manager_key,
        )
        self._token = settings.manager_token()
        self._complaints = complaints

    async def join(self) -> AssignedMember:
        """Joins, repeating the request until the manager replies."""
        wait_s = RETRY_S
        while True:
            try:
                return await self._join()
            except (ManagerUnreachable, ManagerRefuses) as error:
                self.is_reached = False
                self._complaints.say("manager", str(error), f"cannot join: {error}")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_S_MAX)

    async def neighbours(self, id: int) -> dict[int, str] | None:
        """Returns the neighbours of a member, or None while the manager is unreachable.

        Raises `ManagerRefuses`, with status 404 if there is no such member.
        """
        path = f"/api/v1/watch?since=0&timeout=0&node={id}"
        try:
            data = await self._http.request("GET", path, None, self._token, TIMEOUT_S)
            watched = msgspec.convert(data, Watched)
        except (ManagerUnreachable, msgspec.ValidationError) as error:
            self.is_reached = False
            self._complaints.say("manager", "unreachable", f"the manager is not asked: {error}")
            return None
        except ManagerRefuses as error:
            self.is_reached = error.status == NO_SUCH_MEMBER
            raise
        self._reached()
        return _addresses(watched.neighbors or [])

    async def _join(self) -> AssignedMember:
        body = {"ip": self._settings.advertised}
        data = await self._http.request("POST", JOIN_PATH, body, self._token, TIMEOUT_S)
        try:
            answer = msgspec.convert(_convert(data), JoinAnswer)
            config = self._settings.config(
                answer.core_ann_interval / 1e9, answer.beacon_interval / 1e9, answer.redundancy
            )
        except (msgspec.ValidationError, ConfigError) as error:
            raise ManagerUnreachable(f"{self._http.url}: no answer to a join: {error}") from None
        self._reached()
        return AssignedMember(answer.id, config, _addresses(answer.neighbors))

    def _reached(self) -> None:
        self.is_reached = True
        self._complaints.forget("manager")


def _convert(data: Any) -> Any:
    """Converts a response of the published manager: `Id`, `Ip`, and null for no neighbours."""
    if not isinstance(data, dict) or not isinstance(data.get("neighbors"), list | None):
        return data
    neighbours = [
        {str(name).lower(): value for name, value in each.items()}
        if isinstance(each, dict)
        else each
        for each in data.get("neighbors") or []
    ]
    return data | {"neighbors": neighbours}


def _addresses(neighbours: list[Neighbor]) -> dict[int, str]:
    return {each.id: each.ip for each in neighbours}


logger = logging.getLogger("holdfast")

CHECK_S: Final = 3.0
"""The interval in seconds of requests to the manager. A reconnect of the broker adds one."""
CORE_ANN_INTERVAL_S: Final = 10.0
"""The intervals in seconds and the redundancy without a manager and settings."""
BEACON_INTERVAL_S: Final = 10.0
REDUNDANCY: Final = 2


async def run(settings: PaperSettings) -> None:
    """Runs a federator until SIGTERM or SIGINT. Raises `ConfigError` for unusable settings."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    federator = PaperFederator(settings)
    await federator.start()
    stopping, failing = loop.create_task(stop.wait()), loop.create_task(federator.wait())
    unexpected = first_unexpected(loop)
    ends: set[asyncio.Future[Any]] = {stopping, failing, unexpected}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await federator.stop()
        stopping.cancel()
    if unexpected.done():
        raise unexpected.result()
    await failing
    logger.info("federation_stopped")


class PaperFederator:
    """A member of the published protocol with its clients.

    It has at most one member at a time. When the manager assigns another id or configuration, it
    ends the member and starts a new one with a higher epoch.
    """

    def __init__(self, settings: PaperSettings) -> None:
        self.settings = settings
        # Messages lost on their way to a broker, by reason.
        self.lost: Counter[str] = Counter()
        self._member: PaperMember | None = None
        self._manager: PaperManager | None = None
        self._links: dict[int, NeighbourLink] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._client: Client | None = None
        self._epoch = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._changes = 0
        """The number of announced changes of neighbours."""

    # Start and stop

    async def start(self) -> None:
        """Begins to join and returns at once. Raises `ConfigError` for unusable settings."""
        loop = asyncio.get_running_loop()
        self._check = asyncio.Event()
        self._complaints = Complaints(loop.time, "federation")
        self._outlet = Outlet(self.lost, self._complaints, f"broker {self.settings.broker}")
        self._password = await asyncio.to_thread(self.settings.password)
        if self.settings.manager:
            try:
                self._manager = await asyncio.to_thread(
                    PaperManager, self.settings, self._complaints
                )
            except TlsError as error:
                raise ConfigError(f"manager: {error}") from None
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Stops. The protocol has no message for leaving, so others notice the silence."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait(self) -> None:
        """Waits until `stop`. Raises the error that ended the federator otherwise, a bug."""
        assert self._task is not None, "not started"
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("federation_failed error=%r", str(error), exc_info=error)

    async def _run(self) -> None:
        standing = await self._first_assignment()
        while True:
            try:
                standing = await self._be(standing)
            finally:
                await self._end()

    async def _first_assignment(self) -> AssignedMember:
        settings = self.settings
        if self._manager is not None:
            return await self._manager.join()
        assert settings.id is not None
        config = settings.config(CORE_ANN_INTERVAL_S, BEACON_INTERVAL_S, REDUNDANCY)
        return AssignedMember(settings.id, config, dict(settings.neighbours))

    async def _be(self, standing: AssignedMember) -> AssignedMember:
        """Serves as the assigned member until the manager assigns another, and returns that."""
        now = self._now()
        self._epoch = max(self._epoch + 1, self.settings.epoch or time.time_ns() // 1_000_000)
        self._member = PaperMember(
            standing.id, self._epoch, standing.config, standing.neighbours, now
        )
        logger.info(
            "federation_paper_member node=%d neighbours=%d",
            standing.id,
            len(standing.neighbours),
        )
        self._carry_out()
        serving = asyncio.create_task(self._serve_broker(standing.id))
        checking = asyncio.create_task(self._poll_manager(standing))
        try:
            await asyncio.wait({serving, checking}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                # `_serve_broker` never returns, so it has failed.
                await serving
            return await checking
        finally:
            for task in (serving, checking):
                task.cancel()
            await asyncio.gather(serving, checking, return_exceptions=True)

    async def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._member = None
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.stop() for link in links), *self._ending)

    # Status

    def status(self) -> dict[str, object]:
        """Returns the status as plain values that JSON can express."""
        member, client = self._member, self._client
        return {
            "mode": "paper",
            "id": None if member is None else member.id,
            "epoch": self._epoch,
            "manager": {
                "url": self.settings.manager,
                "reached": self._manager is not None and self._manager.is_reached,
            },
            "broker": {
                "url": self.settings.broker,
                "connected": client is not None and client.is_connected,
                "queued": len(self._outlet),
            },
            "neighbours": [
                {"id": link.id, "broker": link.address, "connected": link.is_up,
                 "queued": link.queued}
                for _, link in sorted(self._links.items())
            ],
            "topics": 0 if member is None else len(list(member.topics)),
            "refused": {} if member is None else dict(member.counts),
            "lost": dict(self.lost),
        }  # fmt: skip

    def view(self, topic: str) -> TopicView | None:
        """Returns what the member knows of a topic's mesh, or None before it has joined."""
        return None if self._member is None else self._member.view(topic, self._now())

    # The federator's own broker

    async def _serve_broker(self, id: int) -> None:
        name = f"broker {self.settings.broker}"
        subscriptions = [
            # No Local and Retain Handling 2: own publications and retained messages are not new.
            SubscriptionRequest(filter, 2, no_local=True, retain_handling=2)
            for filter in SUBSCRIPTIONS
        ]
        while True:
            client = Client(
                servers=[self.settings.broker],
                reconnect=Reconnect(),
                options=self._options(id),
                on_message=self._arrived,
                on_connect=self._connected,
                on_connection_lost=self._connection_lost,
            )
            self._client = client
            try:
                await client.connect()
                await client.subscribe(*subscriptions)
                logger.info("federation_edge_connected name=%r", name)
                await serve(client, self._outlet)
            except ClientError as error:
                self._complaints.say(name, type(error).__name__, f"{name}: {error}")
            finally:
                self._client = None
                self._outlet.clear()
                await close(client)
            await asyncio.sleep(PAUSE_S)

    def _connected(self, session_present: bool, server: Server) -> None:
        # Announcements during the interruption were missed, so the manager is asked.
        self._check.set()

    def _connection_lost(self, error: ClientError) -> None:
        name = f"broker {self.settings.broker}"
        self._complaints.say(name, type(error).__name__, f"{name} is away: {error}")

    def _arrived(self, message: Message) -> None:
        member = self._member
        if member is not None and not message.retain:
            member.handle(message.topic, message.payload, self._now())
            self._carry_out()

    # Effects and timers

    def _carry_out(self) -> None:
        member = self._member
        if member is None:
            return
        for effect in member.take_effects():
            self._do(effect)
        at = member.timer()
        # A timer that rings early sets the next one. That costs less than one per message.
        if at < inf and (self._timer is None or at < self._timer.when()):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._member is not None:
            self._member.handle_timers(self._now())
            self._carry_out()

    def _do(self, effect: Effect) -> None:
        match effect:
            case PublishToNeighbour(neighbour, topic, payload, qos):
                link = self._links.get(neighbour)
                if link is not None:
                    link.enqueue((topic, payload, qos))
            case DeliverLocally(topic, payload, qos):
                self._outlet.enqueue((topic, payload, qos))
            case ConnectNeighbour(neighbour, address):
                self._changes += 1
                self._disconnect(neighbour)
                self._connect(neighbour, address)
            case DisconnectNeighbour(neighbour):
                self._changes += 1
                logger.info("federation_neighbour_left node=%d", neighbour)
                self._disconnect(neighbour)
            case Refused(topic, reason, text):
                self._complaints.say(f"refused {reason}", reason, f"{topic} is refused: {text}")

    def _connect(self, neighbour: int, address: str) -> None:
        member = self._member
        assert member is not None
        try:
            self._links[neighbour] = NeighbourLink(
                neighbour, address, self._options(member.id), self.lost, self._complaints
            )
        except ValueError as error:
            self.lost["no address"] += 1
            text = f"neighbour {neighbour} cannot be reached: {error}"
            self._complaints.say(f"address {neighbour}", address, text)
            return
        logger.info("federation_neighbour node=%d address=%r", neighbour, address)

    def _disconnect(self, neighbour: int) -> None:
        link = self._links.pop(neighbour, None)
        if link is not None:
            ending = asyncio.create_task(link.stop())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    # The manager

    async def _poll_manager(self, standing: AssignedMember) -> AssignedMember:
        """Asks the manager regularly, and returns the new assignment when it differs."""
        if self._manager is None:
            await asyncio.Event().wait()
        while True:
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._check.wait()
            except TimeoutError:
                if self._client is None or not self._client.is_connected:
                    # The manager removes a member without a broker: it joins when that is back.
                    continue
            self._check.clear()
            changed = await self._request_assignment(standing)
            if changed is not None:
                return changed

    async def _request_assignment(self, standing: AssignedMember) -> AssignedMember | None:
        manager, member = self._manager, self._member
        assert manager is not None
        assert member is not None
        changes = self._changes
        try:
            neighbours = await manager.neighbours(standing.id)
        except ManagerRefuses as error:
            if error.status != NO_SUCH_MEMBER:
                self._complaints.say("manager", str(error), f"the manager refuses: {error}")
                return None
            logger.warning("federation_removed node=%d text='joining again'", standing.id)
            joined = await manager.join()
            if not joined.is_same_member(standing):
                return joined
            neighbours = joined.neighbours
        if neighbours is None:
            return None
        if changes != self._changes:
            # A neighbour was announced while the request was in progress. The response may be older
            # than the announcement, so the manager is asked again.
            self._check.set()
        else:
            member.set_neighbours(neighbours)
            self._carry_out()
        return None

    def _options(self, id: int) -> Options:
        return options(f"federator_{id}", self.settings.username, self._password)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
