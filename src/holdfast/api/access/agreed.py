"""Agrees on the users and tokens of the admin ports of a cluster's nodes.

A change over the admin port of any node is proposed as the successor of the agreed users and
tokens, and replied when the nodes have agreed on it and it is in force here. The other nodes put it
in force when the metadata brings it to them. Each node keeps the agreed ones in its own file
(`security.access.agreed`), so they count without a majority and after a restart, too.

Invariants
- A node that was told to join a cluster serves no process of its machine as administrator before it
  knows the users of the cluster. Counter-example: the disk of a node is replaced, and every local
  user drains the cluster there.
- A change over the port is refused while nothing can be agreed. A node that changed its own file
  would have other users than the others.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from holdfast.api.endpoints import ApiRefusal
from holdfast.io.event_loop.commands.agreement import AccessAgreement
from holdfast.node.metadata.model import USERS_BYTES_MAX, AgreedUsers
from holdfast.node.metadata.requests import Accepted, Outcome, RequestRefused
from holdfast.security.access.access_file import AccessData, AccessError
from holdfast.security.access.agreed import merged, pack, taken, unpack
from holdfast.security.access.changes import Change
from holdfast.security.access.credentials import AdminCredentials

T = TypeVar("T")
logger = logging.getLogger("holdfast")

ATTEMPTS_MAX: Final = 20
"""The most times that a change is made because other nodes were first."""


class AgreedAccess:
    """The users and tokens of one node of a cluster."""

    def __init__(self, agreement: AccessAgreement, credentials: AdminCredentials) -> None:
        self._agreement = agreement
        self._credentials = credentials
        # One change at a time: each begins with what the one before has put in force.
        self._lock = asyncio.Lock()
        self._problem = ""
        # The agreed users and the file that were followed last.
        self._followed: tuple[AgreedUsers | None, AccessData] | None = None

    def is_locked(self) -> bool:
        """Whether this node does not know yet who may use its admin port. Any thread may ask."""
        if self._credentials.is_set_up:
            return False
        current = self._agreement.current()
        if self._agreement.is_entered():
            return current is not None and not self._is_taken(current)
        return self._agreement.was_told_to_join or self._agreement.cluster_id() != ""

    def _is_taken(self, current: AgreedUsers) -> bool:
        mark = self._credentials.own.agreed
        here = (self._agreement.cluster_id(), current.version)
        return mark is not None and (mark.cluster, mark.version) == here

    def call_on_change(self, call: Callable[[], None]) -> None:
        """Calls this whenever the nodes may have agreed on something else. Then `follow`."""
        self._agreement.on_change = call

    async def change(self, make: Change[T]) -> T:
        """Makes a change, agrees on it, and puts it in force here. Raises `AccessError` if it is
        not allowed, and `ApiRefusal` (503) if nothing can be agreed."""
        async with self._lock:
            older = self._agreement.older_nodes()
            if older and self._agreement.current() is None:
                # Until all nodes are upgraded each has its own users, as those of the older ones.
                return await asyncio.to_thread(self._credentials.change, make)
            refusal = older or self._agreement.refusal()
            if refusal:
                raise ApiRefusal(503, f"not changed: {refusal}")
            return await self._agree(make)

    async def follow(self) -> None:
        """Puts the agreed users and tokens in force, and proposes what was changed in this node's
        file. Called whenever one of the two may have changed."""
        async with self._lock:
            try:
                await self._follow()
                self._problem = ""
            except (AccessError, ApiRefusal) as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    logger.error("access_not_agreed error=%r", self._problem)

    async def _follow(self) -> None:
        if not self._agreement.is_entered():
            return
        current = self._agreement.current()
        own = self._credentials.own
        if current is not None and self._is_behind(current, own):
            return
        known = self._followed
        if known is not None and known[0] is current and known[1] is own:
            return
        agreed = AccessData() if current is None else await asyncio.to_thread(_unpack, current)
        wanted = merged(own, agreed, self._agreement.cluster_id())
        if wanted != agreed and self._may_propose(current):
            await self._agree(lambda data: (data, None))
        elif current is not None:
            await self._take(agreed, current.version, None)
            if wanted == agreed and self._credentials.is_written:
                self._followed = (current, self._credentials.own)

    def _may_propose(self, current: AgreedUsers | None) -> bool:
        """Whether a change of the file may be proposed. The first one waits for every node, because
        a node of an older version that is away could not start any more."""
        agreement = self._agreement
        if current is None and not agreement.has_met_all():
            return False
        return not (agreement.older_nodes() or agreement.refusal())

    def _is_behind(self, current: AgreedUsers, own: AccessData) -> bool:
        """Whether the metadata of a node that starts are older than its file. Counter-example: the
        log of Raft is applied again from a snapshot on, and a removed token would count again until
        its removal is applied."""
        mark = own.agreed
        return (
            not self._agreement.is_ready
            and mark is not None
            and mark.cluster == self._agreement.cluster_id()
            and mark.version > current.version
        )

    async def _agree(self, make: Change[T]) -> T:
        cluster_id = self._agreement.cluster_id()
        for _ in range(ATTEMPTS_MAX):
            current, own = self._agreement.current(), self._credentials.own
            expected = 0 if current is None else current.version
            attempt = partial(_attempt, make, current, own, cluster_id)
            made, result, data = await asyncio.to_thread(attempt)
            outcome = await self._outcome(expected, data)
            if isinstance(outcome, Accepted):
                await self._take(made, outcome.version, own)
                return result
            if not isinstance(outcome, RequestRefused):
                raise ApiRefusal(503, f"maybe changed: {outcome.text}")
            present = self._agreement.current()
            if (0 if present is None else present.version) == expected:
                raise ApiRefusal(503, f"not changed: {outcome.text}")
        raise ApiRefusal(503, "not changed: other nodes change the users all the time, try again")

    async def _outcome(self, expected_version: int, data: bytes) -> Outcome:
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def resolve(outcome: Outcome) -> None:
            if not done.done():
                done.set_result(outcome)

        self._agreement.propose(expected_version, data, resolve)
        return await done

    async def _take(self, agreed: AccessData, version: int, settled: AccessData | None) -> None:
        cluster_id = self._agreement.cluster_id()

        def make(own: AccessData) -> AccessData:
            return taken(own, agreed, cluster_id, version, settled)

        credentials = self._credentials
        is_known = make(credentials.own) == credentials.own
        if credentials.is_written and is_known:
            return
        await asyncio.to_thread(credentials.take, make)
        # A file that cannot be written is tried again each second.
        if not is_known:
            logger.info(
                "access_agreed version=%d users=%d tokens=%d",
                version, len(agreed.users), len(agreed.tokens),
            )  # fmt: skip


def _unpack(current: AgreedUsers) -> AccessData:
    return unpack(current.data)


def _attempt(
    make: Change[T], current: AgreedUsers | None, own: AccessData, cluster_id: str
) -> tuple[AccessData, T, bytes]:
    agreed = AccessData() if current is None else unpack(current.data)
    made, result = make(merged(own, agreed, cluster_id))
    return made, result, pack(made, USERS_BYTES_MAX)
