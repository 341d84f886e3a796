"""Writes and removes member records at the groups' coordinator (`node.state.groups`).

- A subscription without a member record gets one. Subscriptions of older versions have none.
- A member record without a subscription is removed once no record under way can bring the
  subscription back: the session has a later epoch, or a read barrier has shown that it has ended.
  Counter-example with less: the member record is applied here, and the subscription is still on its
  way to the home of the session. The coordinator removes the record, the subscription is committed,
  and the client gets its SUBACK as the member of a group that may end.
- The MEMBERS record of a home is appended when no node of an older version is left and a read
  barrier that began after that is passed. A later node of an older version suspends it.

Without a MEMBERS record the subscriptions in the replicated state decide, after a read barrier.
"""

from itertools import islice
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.context import ClusterContext
from holdfast.node.features import GROUP_MEMBERS
from holdfast.node.groups.homes import Home, LedHomes
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import (
    MemberRecord,
    MembersRecord,
    encode_session,
)
from holdfast.node.state.state_records import append_change

REVIEWED_MAX: Final = 500
"""The most member records that are reviewed or appended in one call of `tidy`."""


def log_join(
    state: NodeState, key: str, client_id: str, epoch: int, promise: Promise | None
) -> None:
    """Appends the member record of a session."""
    append_change(state, key.encode(), MemberRecord(key, client_id), epoch, promise)


def log_leave(state: NodeState, key: str, client_id: str, epoch: int) -> None:
    """Appends the removal of a member record of this epoch or an earlier one."""
    append_change(state, key.encode(), MemberRecord(key, client_id, left=True), epoch)


class DurableMembers:
    """The member records of the groups whose homes this node leads."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        barriers: Barriers,
        homes: LedHomes,
    ) -> None:
        self._state = state
        self._context = context
        self._replicated = replicated
        self._members = replicated.group_members
        self._barriers = barriers
        self._homes = homes
        # Per member record of a session that is not there: its epoch, and the barrier after which
        # that session has ended.
        self._ended: dict[tuple[str, str], tuple[int, int]] = {}

    def is_complete(self, home: Home) -> bool:
        """True if the member records of the home's groups decide whether a group has a durable
        member."""
        if self._context.nodes_without(GROUP_MEMBERS):
            # Its clients subscribe without member records.
            home.members_barrier = -1
            return False
        if home.members_barrier < 0:
            home.members_barrier = self._barriers.begin()
        return self._members.is_complete[home.partition] and self._barriers.has_passed(
            home.members_barrier
        )

    def tidy(self) -> None:
        """Appends and removes member records, some each time, every `node.TIDY_S`."""
        if not self._context.is_whole:
            return
        for key, client_id in list(islice(self._members.unrecorded, REVIEWED_MAX)):
            session = self._replicated.state.sessions.get(client_id)
            del self._members.unrecorded[(key, client_id)]
            if session is not None:
                log_join(self._state, key, client_id, session.epoch, None)
        for pair in list(islice(self._members.departed, REVIEWED_MAX)):
            # Those that are not certain go to the end.
            del self._members.departed[pair]
            self._members.departed[pair] = None
            self._review_departed(*pair)
        if len(self._ended) > len(self._members.departed):
            self._ended = {
                pair: since for pair, since in self._ended.items() if pair in self._members.departed
            }
        for home in self._homes.led.values():
            if home.is_open and home.groups and not self.is_complete(home):
                self._complete(home)

    def _review_departed(self, key: str, client_id: str) -> None:
        pair = (key, client_id)
        epoch = self._members.recorded[key][client_id]
        session = self._replicated.state.sessions.get(client_id)
        if session is not None:
            is_over = session.epoch > epoch
            self._ended.pop(pair, None)
        else:
            # The record was appended after the session of its epoch was opened. So a barrier that
            # began later has applied that opening, and with it the end.
            if self._ended.get(pair, (-1, 0))[0] != epoch:
                self._ended[pair] = (epoch, self._barriers.begin())
            is_over = self._barriers.has_passed(self._ended[pair][1])
        if is_over:
            del self._members.departed[pair]
            self._ended.pop(pair, None)
            log_leave(self._state, key, client_id, epoch)

    def _complete(self, home: Home) -> None:
        """Appends the MEMBERS record when every durable member has its own."""
        metadata = self._context.metadata
        if metadata is None or self._members.is_complete[home.partition]:
            return
        if home.unconfirmed is None:
            older = [
                name
                for name, info in metadata.nodes.items()
                if info.has_clients and not self._context.understands(name, GROUP_MEMBERS)
            ]
            if (
                older
                or home.members_barrier < 0
                or not self._barriers.has_passed(home.members_barrier)
            ):
                return
            home.unconfirmed = self._all_of(home)
        for key, client_id, epoch in home.unconfirmed[-REVIEWED_MAX:]:
            log_join(self._state, key, client_id, epoch, None)
        del home.unconfirmed[-REVIEWED_MAX:]
        if not home.unconfirmed and not home.is_confirmed:
            home.is_confirmed = True
            record = Record(home.partition, log_record.SESSION, timestamp_us=self._state.wall_us)
            record.payload = encode_session(MembersRecord(""))
            self._state.append(record)

    def _all_of(self, home: Home) -> list[tuple[str, str, int]]:
        """Returns (group, client id, session epoch) of all durable members of the home's groups.

        Those with a record are among them: a node may have ignored it in an older version.
        """
        found = [
            (key, client_id, epoch)
            for key, members in self._members.recorded.items()
            if self._homes.home_of(key) == home.partition
            for client_id, epoch in members.items()
        ]
        for key, group in self._replicated.state.groups.items():
            if self._homes.home_of(key) == home.partition:
                for session in group.members:
                    if session.client_id != key:
                        found.append((key, session.client_id, session.epoch))
        return found
