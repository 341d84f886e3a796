"""Durable members of shared groups, as the home partition of each group records them.

A member's session is in another partition, which a coordinator may not have applied. So the session
appends a member record to the home of the group beside its subscription, and the SUBACK waits for
both. A group ends by these records alone. Counter-example without them: the coordinator does not
reach the leader of the session's home, does not find the session, and ends the group of a member
that is away. What was published meanwhile is lost.

A member record may be there without a subscription: after a crash between the two, or while the
subscription is under way. Such a record only keeps the group. The coordinator removes it when that
is certain (`node.groups.durable_members`).

Logs of older versions have no member records. A MEMBERS record in a home partition says that all
durable members of its groups have one.
"""

from collections.abc import Iterator
from typing import Final

from msgspec.json import encode

from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.state.fields import MEMBERS, MembersEntry
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.session_records import MemberRecord, MembersRecord, decode_json
from holdfast.protocol.topics.names import is_shared

MEMBERS_MAX: Final = 500
"""The most members in one entry of a snapshot or a transfer."""


class GroupMembers:
    """The member records of all shared groups, and their differences from the subscriptions."""

    def __init__(self, state: RecordedState) -> None:
        self._state = state
        # By group and client id, the session epoch of the newest member record.
        self.recorded: dict[str, dict[str, int]] = {}
        # Per home partition: True once all durable members of its groups have a record.
        self.is_complete: list[bool] = [False] * state.config.partitions
        # The home partitions whose differences are noted.
        self.watched: set[int] = set()
        # The (group, client id) of subscriptions without a member record, and of member records
        # without a subscription, both as far as records are applied here.
        self.unrecorded: dict[tuple[str, str], None] = {}
        self.departed: dict[tuple[str, str], None] = {}

    def _home(self, key: str) -> int:
        return partition_of(key.encode(), self._state.config.partitions)

    def has_any(self, key: str) -> bool:
        """True if the group has a durable member, or is a queue."""
        return key in self.recorded or key in self._state.queues

    def has_unapplied(self, key: str) -> bool:
        """True if a member of a watched group has a member record and no subscription yet."""
        return any(each[0] == key for each in self.departed)

    def is_recorded(self, key: str, client_id: str) -> bool:
        return client_id in self.recorded.get(key, ())

    def apply(self, record: Record, change: MemberRecord | MembersRecord) -> None:
        """Applies a member record. A removal applies to its epoch and those before."""
        if isinstance(change, MembersRecord):
            self.is_complete[record.partition] = True
            return
        key, client_id = change.client, change.member
        if not is_shared(key) or self._home(key) != record.partition:
            raise ValueError("a member record of a group with another home")
        epoch = self.recorded.get(key, {}).get(client_id, -1)
        if not change.left:
            self._set(key, client_id, record.sequence)
        elif 0 <= epoch <= record.sequence:
            self._remove(key, client_id)
        self.review(key, client_id)

    def _set(self, key: str, client_id: str, epoch: int) -> None:
        members = self.recorded.setdefault(key, {})
        members[client_id] = max(epoch, members.get(client_id, -1))

    def _remove(self, key: str, client_id: str) -> None:
        members = self.recorded[key]
        del members[client_id]
        if not members:
            del self.recorded[key]

    def review(self, key: str, client_id: str) -> None:
        """Notes whether the subscription and the member record of a session differ."""
        if client_id == key or self._home(key) not in self.watched:
            return
        session = self._state.sessions.get(client_id)
        subscribes = session is not None and key in session.subscriptions
        pair = (key, client_id)
        self.unrecorded.pop(pair, None)
        self.departed.pop(pair, None)
        if subscribes != self.is_recorded(key, client_id):
            differing = self.unrecorded if subscribes else self.departed
            differing[pair] = None

    def watch(self, home: int) -> None:
        """Begins to note differences, with those that there are."""
        self.watched.add(home)
        for key, members in self.recorded.items():
            if self._home(key) == home:
                for client_id in members:
                    self.review(key, client_id)
        for key, group in self._state.groups.items():
            if self._home(key) == home:
                for session in group.members:
                    self.review(key, session.client_id)

    def unwatch(self, home: int) -> None:
        """Ends `watch`."""
        self.watched.discard(home)
        for differing in (self.unrecorded, self.departed):
            for pair in [each for each in differing if self._home(each[0]) == home]:
                del differing[pair]

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Yields (home, entry) of all groups and homes. The state may change between two of
        them."""
        for key in list(self.recorded):
            home = self._home(key)
            members = list(self.recorded.get(key, {}).items())
            for start in range(0, len(members), MEMBERS_MAX):
                yield home, encode(MembersEntry(home, key, members[start : start + MEMBERS_MAX]))
        for home, is_complete in enumerate(self.is_complete):
            if is_complete:
                yield home, encode(MembersEntry(home))

    def restore(self, data: bytes) -> None:
        """Loads an entry. Raises ValueError when it is malformed."""
        entry = decode_json(MEMBERS, data, "members of a group")
        if not 0 <= entry.home < len(self.is_complete):
            raise ValueError(f"members of groups with the home {entry.home}")
        if not entry.group:
            self.is_complete[entry.home] = True
        elif is_shared(entry.group) and self._home(entry.group) == entry.home:
            for client_id, epoch in entry.members:
                self._set(entry.group, client_id, epoch)
                self.review(entry.group, client_id)

    def drop(self, home: int) -> None:
        """Removes the records of a home partition, before they are loaded from another node."""
        self.unwatch(home)
        self.is_complete[home] = False
        for key in [each for each in self.recorded if self._home(each) == home]:
            del self.recorded[key]
