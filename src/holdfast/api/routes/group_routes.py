"""Commits and serves offsets of consumer groups, which read the log and are no MQTT clients.

A group's offset of a partition is the retained message of a topic that only the broker publishes
to. So it is a record of the log: as durable as the messages, on every replica, in every snapshot,
and as old as the group, because retention does not touch the retained store. Each partition has a
topic of its own: members of a group that read different partitions do not overwrite each other.

Invariant: a member commits an offset only when it has processed everything below it. So the offset
of two members that read the same partition is right whichever is committed last: the next member
repeats messages at worst, and leaves none out.
"""

import asyncio
import re
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from holdfast.api.endpoints import ApiRefusal, Call, Caller, Endpoint, Text, Whole, bad_request
from holdfast.api.nodes.own_node import COMMIT_S, OwnNode, into
from holdfast.api.views.pages import PAGE_MAX
from holdfast.log.partition import partition_of
from holdfast.log.record import FLAG_RETAIN, RETAINED, Record
from holdfast.node.node_state import CallbackPromise, NodeState
from holdfast.node.state.log_groups import PREFIX, StoredOffset, scan_groups
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

GROUPS_MAX: Final = 1000
"""The most groups of a log."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")

GROUP: Final = Text("group", "the name: letters, digits and ._-", required=True, most=128)
LIMIT: Final = Whole("limit", "the most groups", least=1, most=PAGE_MAX, default=100)
AFTER: Final = Text("after", "`next` of the page before: a group", most=128)


class CommittedOffset(Struct):
    """A group's offset of one partition: the first one that it has not processed."""

    partition: int
    offset: int
    at_us: int
    """Time of the commit, in microseconds since 1970."""
    by: str
    """The caller who committed it."""


class ConsumerGroup(Struct):
    """The offsets of one group. A partition without one has not been committed yet."""

    group: str
    offsets: list[CommittedOffset]
    lag: int = 0
    """The records behind those offsets. Not every record is a message."""


class ConsumerGroups(Struct):
    """A page of groups, by name."""

    groups: list[ConsumerGroup]
    next: str = ""


class CommitRequest(Struct, forbid_unknown_fields=True):
    """The offsets that a member commits: pairs of a partition and its offset."""

    offsets: list[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0, le=1 << 62)]]]
    generation: int | None = None
    """The generation of the log that they are of. Without it nothing is checked."""


class GroupRoutes:
    """The routes of consumer groups."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node

    def endpoints(self) -> list[Endpoint]:
        v1 = "/api/v1/log/group"
        return [
            Endpoint("GET", f"{v1}s", Scope.READER, "the consumer groups", self._list,
                     ConsumerGroups, (LIMIT, AFTER), refusals=(503,)),
            Endpoint("GET", v1, Scope.READER, "the committed offsets of a consumer group",
                     self._read, ConsumerGroup, (GROUP,), refusals=(503,)),
            # The progress of a reader is no change of the broker: the audit would have a record for
            # every batch that somebody reads.
            Endpoint("POST", v1, Scope.READER, "commit offsets of a consumer group", self._commit,
                     ConsumerGroup, (GROUP,), body=CommitRequest, refusals=(409, 503),
                     reads_only=True),
            Endpoint("DELETE", v1, Scope.OPERATOR, "forget the offsets of a consumer group",
                     self._delete, ConsumerGroup, (GROUP,), refusals=(503,)),
        ]  # fmt: skip

    async def _list(self, call: Call) -> ConsumerGroups:
        groups = await self._groups()
        names = sorted(name for name in groups if name > (call.get(AFTER) or ""))
        chosen = names[: call[LIMIT]]
        following = chosen[-1] if len(chosen) < len(names) else ""
        return ConsumerGroups([self._group(name, groups[name]) for name in chosen], following)

    async def _read(self, call: Call) -> ConsumerGroup:
        name = _checked(call[GROUP])
        return self._group(name, (await self._groups(name)).get(name, []))

    async def _commit(self, call: Call) -> ConsumerGroup:
        name = _checked(call[GROUP])
        partitions = self._node.state.config.partitions
        offsets = dict(call.body(CommitRequest).offsets)
        if len(offsets) < len(call.body(CommitRequest).offsets):
            raise bad_request("offsets: each partition at most once")
        if offsets and max(offsets) >= partitions:
            raise bad_request(f"offsets: partition {max(offsets)}, this log has 0 to "
                              f"{partitions - 1}")  # fmt: skip
        if call.body(CommitRequest).generation not in (None, self._node.broker.generation()):
            raise ApiRefusal(409, "the log has another generation: it was restored since these"
                             " offsets were read")  # fmt: skip
        known = (await self._groups(name)).get(name, [])
        if not known:
            _check_room(await self._groups(), call.caller)
        at_us = self._node.state.wall_us
        before = {each.partition: each.offset for each in known}
        changed = {
            partition: msgspec.json.encode(StoredOffset(offset, at_us, call.caller.name))
            for partition, offset in offsets.items()
            if before.get(partition) != offset
        }
        await self._store(name, changed)
        return self._group(name, (await self._groups(name)).get(name, []))

    async def _delete(self, call: Call) -> ConsumerGroup:
        name = _checked(call[GROUP])
        group = self._group(name, (await self._groups(name)).get(name, []))
        call.before = group
        await self._store(name, {each.partition: b"" for each in group.offsets})
        return group

    async def _store(self, name: str, payloads: dict[int, bytes]) -> None:
        """Stores the payload of each partition's topic, and returns once all are committed and
        applied here. Raises `ApiRefusal` (503)."""
        state = self._node.state
        if state.disk_full:
            raise ApiRefusal(503, "the disk of this node is full")
        if state.is_congested():
            raise ApiRefusal(503, "too much waits for this node's log", {"Retry-After": "1"})
        topics = {f"{PREFIX}{name}/{partition}": each for partition, each in payloads.items()}
        commits = [self._append(state, topic, payload) for topic, payload in topics.items()]
        try:
            async with asyncio.timeout(COMMIT_S):
                failures = await asyncio.gather(*commits)
        except TimeoutError:
            text = f"not committed within {COMMIT_S:g} s: it may still be"
            raise ApiRefusal(503, text) from None
        for failure in filter(None, failures):
            raise ApiRefusal(503, failure)
        for topic, payload in topics.items():
            if payload and state.retained.get(topic) is None:
                raise ApiRefusal(503, "the retained store is full, see limits.retained_bytes")

    def _append(self, state: NodeState, topic: str, payload: bytes) -> "asyncio.Future[str]":
        """Appends a record. The future gets "" once it is committed, or the reason of a refusal."""
        raw = topic.encode()
        record = Record(
            partition_of(raw, state.config.partitions),
            RETAINED,
            FLAG_RETAIN | 1,
            timestamp_us=state.wall_us,
            topic=raw,
            payload=payload,
        )
        done: asyncio.Future[str] = self._node.broker.loop.create_future()

        # The record is applied here before its promise is kept.
        state.publish(record, CallbackPromise(into(done)))
        return done

    async def _groups(self, name: str = "") -> dict[str, list[CommittedOffset]]:
        """The offsets of one group, or of all, by name."""
        found: dict[str, list[CommittedOffset]] = {}

        def steps() -> Iterator[None]:
            for step in scan_groups(self._node.state.retained, name):
                for group, partition, stored in step:
                    offset = CommittedOffset(partition, stored.offset, stored.at_us, stored.by)
                    found.setdefault(group, []).append(offset)
                yield

        await self._node.slices.run(steps())
        for offsets in found.values():
            offsets.sort(key=lambda each: each.partition)
        return found

    def _group(self, name: str, offsets: list[CommittedOffset]) -> ConsumerGroup:
        ends = self._node.committed()
        lag = sum(max(0, ends[each.partition] - each.offset) for each in offsets)
        return ConsumerGroup(name, offsets, lag)


def _check_room(groups: dict[str, list[CommittedOffset]], caller: Caller) -> None:
    """Raises `ApiRefusal` (409) unless the caller may begin a group. A group belongs to those who
    committed its present offsets."""
    left = GROUPS_MAX - len(groups)
    if left <= 0:
        raise ApiRefusal(409, f"there are {GROUPS_MAX} groups already: delete one first")
    own = sum(any(each.by == caller.name for each in offsets) for offsets in groups.values())
    # Who may delete groups needs no share.
    if caller.scope < Scope.OPERATOR and own >= left:
        raise ApiRefusal(409, f"{own} groups are of this caller: the rest is for the others")


def _checked(name: str) -> str:
    """The name of a group. Raises `ApiRefusal` (400)."""
    if not _NAME.fullmatch(name):
        raise bad_request(f"group={shown(name)}: 1 to 128 letters, digits and ._-")
    return name
