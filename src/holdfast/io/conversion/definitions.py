"""Writes records that define a carried state again, at the end of a converted log.

All records of a session or group are in its home partition. So the state is a function of that
partition, as a cluster requires: a node that follows the log gets the same state as the node that
was converted.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import UNSET

from holdfast.io.conversion.carried import CarriedGroup, CarriedSession, CarriedState, Place
from holdfast.log.partition import partition_of
from holdfast.log.record import CURSOR, SESSION, Record
from holdfast.node.session.session import Inflight
from holdfast.node.session.state import ENTRIES_MAX, encode_cursor
from holdfast.node.state.session_records import (
    CloseRecord,
    OpenRecord,
    SessionRecord,
    SubscribeRecord,
    SubscriptionRow,
    encode_session,
)

FIRST_EPOCH: Final = 1
"""The epoch of every partition of a converted log. The node that serves it leads under a later
one."""


class Definitions:
    """The records of one conversion."""

    def __init__(self, partitions: int, now_us: int, owner: str) -> None:
        """`owner`: the node of the cluster that the log is for."""
        self._partitions = partitions
        self._now_us = now_us
        self._owner = owner

    def records(self, carried: CarriedState) -> Iterator[Record]:
        """The records, in the order in which they must be appended."""
        for session in carried.sessions:
            yield from self._session(session)
        for queue in carried.queues:
            yield self._change(queue, 0)
        for group in carried.groups:
            yield from self._group(group)

    def _record(self, kind: int, key: str, payload: bytes, epoch: int) -> Record:
        return Record(
            partition_of(key.encode(), self._partitions),
            kind,
            timestamp_us=self._now_us,
            client_id=key.encode(),
            sequence=epoch,
            payload=payload,
        )

    def _change(self, change: SessionRecord, epoch: int) -> Record:
        return self._record(SESSION, change.client, encode_session(change), epoch)

    def _session(self, session: CarriedSession) -> Iterator[Record]:
        """Opens the session, as if its client had connected, and closes it again.

        The owner in between is needed: a cluster ignores the QoS 2 records of groups that a session
        without an owner gets.
        """
        epoch = session.epoch
        yield self._change(
            OpenRecord(
                session.client,
                epoch,
                session.expiry_s,
                clean=True,
                username=session.username,
                proved=session.proved,
                owner=self._owner,
                will=session.will,
            ),
            epoch,
        )
        yield from self._subscriptions(session)
        positions = list(enumerate(session.positions))
        for payload in _cursors(positions, dict(session.inflight), session.done):
            yield self._record(CURSOR, session.client, payload, epoch)
        close = CloseRecord(
            session.client, session.expiry_s, session.will is not None, session.was_open
        )
        yield self._change(close, epoch)

    def _subscriptions(self, session: CarriedSession) -> Iterator[Record]:
        by_start: dict[tuple[int, ...], list[SubscriptionRow]] = {}
        for row, start in session.subscriptions:
            by_start.setdefault(tuple(start or ()), []).append(row)
        for at, rows in by_start.items():
            filters = {row[0] for row in rows}
            replays = {key: each for key, each in session.replays.items() if key in filters}
            change = SubscribeRecord(session.client, rows, list(at), replays=replays or UNSET)
            yield self._change(change, session.epoch)

    def _group(self, group: CarriedGroup) -> Iterator[Record]:
        done = sorted(place for place in group.finished if place[1] >= group.positions[place[0]])
        for payload in _cursors(list(enumerate(group.positions)), {}, done):
            yield self._record(CURSOR, group.key, payload, FIRST_EPOCH)


def _cursors(
    positions: list[Place], inflight: dict[int, Inflight | None], done: list[Place]
) -> Iterator[bytes]:
    """The payloads of CURSOR records, each with as many entries as it has room for."""
    room = ENTRIES_MAX - len(inflight)
    yield encode_cursor(positions, inflight, done[:room])
    for at in range(room, len(done), ENTRIES_MAX):
        yield encode_cursor([], {}, done[at : at + ENTRIES_MAX])
