"""An operator's commands for one session: disconnect, end, move in the log."""

import asyncio
from functools import partial
from typing import Final, Literal

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, bad_request
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.loopback import LoopbackClient, LoopbackRefusal
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.views.sessions import SessionDetail, SessionRow, is_connected
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import FLAG_QOS_MASK, Record
from holdfast.node.connections.operations import disconnect_client, move_session
from holdfast.node.delivery.replay import SUBSCRIPTIONS_MAX
from holdfast.node.routing.routing import subscription_to
from holdfast.node.session.session import Session, Subscription
from holdfast.protocol.topics.names import matches
from holdfast.security.http.requests import shown

COUNT_READS_MAX: Final = 64
"""The most reads of the log that count the messages of a move. Each reads at most 16 MiB."""
COUNT_RECORDS: Final = 1000
"""The most messages of one such read."""
AWAY_S: Final = 5.0
"""The time in seconds in which a disconnected session must be released by its node."""
POLL_S: Final = 0.02


class ClientQuestion(Struct):
    """A question about one client's session."""

    client: str
    reason: str = ""


class Disconnected(Struct):
    """The end of a client's connection."""

    client: str
    node: str


class MovePlan(Struct, forbid_unknown_fields=True):
    """A new position in the log."""

    to: Literal["start", "end", "time", "offsets"]
    """The oldest records that the log has, its end, the first record of a time, or `offsets`."""
    time_us: int = 0
    """With `time`: microseconds since 1970."""
    offsets: list[int] = []
    """With `offsets`: the next offset of each partition."""
    dry_run: bool = False
    """Whether only the counts are wanted."""


class Moved(Struct):
    """The result of a move, or of its dry run."""

    client: str
    before: list[int]
    positions: list[int]
    skipped: int
    """The messages of its subscriptions that the session is not sent any more."""
    repeated: int
    """The messages of its subscriptions that the session is sent again."""
    exact: bool
    """Whether the counts are complete; otherwise they are at least so high."""
    dry_run: bool


class SessionChanges:
    """The changes of sessions, carried out at the node that has to."""

    def __init__(self, view: OwnNode, everywhere: Everywhere) -> None:
        self._view = view
        self._everywhere = everywhere

    def disconnect(self, client: str, text: str) -> None:
        """Disconnects a client of this node. Raises `ApiRefusal` (404)."""
        view = self._view
        session = view.state.sessions.get(client)
        view.broker.touch()
        if session is None or not disconnect_client(
            view.state, session, text or "disconnected by the operator"
        ):
            raise ApiRefusal(404, f"client {shown(client)} is not connected any more")

    async def end(self, row: SessionRow) -> None:
        """Ends a session: a clean start under its client id, and a disconnect. Raises `ApiRefusal`.

        A takeover works wherever the session is, and its will is published as MQTT says.
        """
        broker = self._view.broker
        user = row.user or None
        try:
            async with LoopbackClient(broker, row.client, client_id=row.client, username=user):
                pass
        except LoopbackRefusal as error:
            raise ApiRefusal(409, f"the session was not ended: {error}") from None

    async def move(self, found: SessionDetail, plan: MovePlan) -> Moved:
        """Moves a durable session. Its client is disconnected first. Raises `ApiRefusal`."""
        row = found.session
        if row.expiry_s == 0:
            text = "its session ends with the connection and has no position in the log"
            raise ApiRefusal(409, f"client {shown(row.client)}: {text}")
        wanted = await self._wanted(plan)
        session = self._view.find_session(row.client)
        if session is None:
            raise ApiRefusal(404, f"there is no session {shown(row.client)}")
        before = found.positions
        if not row.connected and session.owner:
            # The end of its connection is not committed yet.
            session = await self._until_away(row.client)
        elif row.connected and not plan.dry_run:
            session = await self._released(row)
        if session.positions is not None and not (row.connected and plan.dry_run):
            before = list(session.positions)
        epoch = session.epoch
        skipped, is_exact = await self._count(session, before, wanted)
        repeated, is_complete = await self._count(session, wanted, before)
        if not plan.dry_run:
            await self._append(session, wanted, epoch)
        exact = is_exact and is_complete
        return Moved(row.client, before, wanted, skipped, repeated, exact, plan.dry_run)

    async def _wanted(self, plan: MovePlan) -> list[int]:
        """The positions of a plan, within what the log has. Raises `ApiRefusal` (400)."""
        log, state = await self._view.log(), self._view.state
        partitions = range(state.config.partitions)
        first = [log.first_offset(partition) for partition in partitions]
        if plan.to == "start":
            return first
        if plan.to == "end":
            return list(state.delivered)
        if plan.to == "offsets":
            if len(plan.offsets) != len(first):
                raise bad_request(f"offsets: {len(plan.offsets)} given, one of each of the"
                                  f" {len(first)} partitions is needed")  # fmt: skip
            given = plan.offsets
        else:
            given = []
            for partition in partitions:
                work = partial(log.offset_for_time, partition, plan.time_us)
                given.append(await log.in_thread(work))
        return [
            min(max(offset, first[partition]), state.delivered[partition])
            for partition, offset in enumerate(given)
        ]

    async def _released(self, row: SessionRow) -> Session:
        """Disconnects the client, and returns its session once no node owns it."""
        text = "the session is moved in the log"
        if row.node == self._view.node_id:
            self.disconnect(row.client, text)
        else:
            question = ClientQuestion(row.client, text)
            await self._everywhere.ask(row.node, "disconnect", question, Disconnected)
        return await self._until_away(row.client)

    async def _until_away(self, client: str) -> Session:
        view = self._view
        deadline = view.broker.loop.time() + AWAY_S
        while True:
            session = view.recorded.sessions.get(client)
            if session is None:
                raise ApiRefusal(404, f"the session {shown(client)} has ended")
            if not session.owner and not is_connected(session):
                return session
            if view.broker.loop.time() >= deadline:
                text = "its client has connected again, or its node has not released it"
                raise ApiRefusal(409, f"the session {shown(client)} was not moved: {text}")
            await asyncio.sleep(POLL_S)

    async def _count(self, session: Session, start: list[int], end: list[int]) -> tuple[int, bool]:
        """Counts the messages of a session's subscriptions from `start` to `end`, where that is
        later. False: there are more."""
        subscriptions = [
            each
            for each in session.subscriptions.values()
            if each.group is None and (each.qos > 0 or each.replay is not None)
        ]
        interests = [ReadInterest(each.filter, each.start) for each in subscriptions]
        limits = [max(one, other) for one, other in zip(start, end, strict=True)]
        if not interests or limits == start:
            return 0, True
        log = await self._view.log()
        positions, count = start, 0
        for _ in range(COUNT_READS_MAX):
            work = partial(log.read, positions, limits, interests, COUNT_RECORDS, 1 << 20)
            result = await log.in_thread(work)
            count += _count_sent(session, subscriptions, result.records)
            positions = result.positions
            if result.done:
                return count, True
        return count, False

    async def _append(self, session: Session, wanted: list[int], epoch: int) -> None:
        view = self._view
        if is_connected(session) or session.owner:
            text = "its client has connected again"
            raise ApiRefusal(409, f"the session {shown(session.client_id)} was not moved: {text}")
        await view.commit(
            lambda done: move_session(view.state, session, wanted, epoch, done), "the move"
        )


def _count_sent(session: Session, subscriptions: list[Subscription], records: list[Record]) -> int:
    """The number of records that the session is sent when it reads them. That is not each one that
    matches: replays have starts by topic, and finished records above the position are passed."""
    if len(subscriptions) > SUBSCRIPTIONS_MAX:
        # Too many to compare each topic with. Such a session has no replay.
        return sum(record.flags & FLAG_QOS_MASK != 0 for record in records)
    matching: dict[bytes, list[Subscription]] = {}
    count = 0
    for record in records:
        found = matching.get(record.topic)
        if found is None:
            topic = record.topic.decode("utf-8", "replace")
            found = [each for each in subscriptions if matches(each.filter, topic)]
            matching[record.topic] = found
        count += subscription_to(found, record, session.done) is not None
    return count
