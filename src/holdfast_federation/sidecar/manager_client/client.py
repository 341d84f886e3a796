"""Member's client of the topology manager: joins, reports, and follows its decisions.

While the manager is unreachable the links stay as they are. No message waits for this client.
docs/topology.md describes the manager.
"""

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from re import fullmatch
from typing import Any, Final, Protocol, TypeVar

import msgspec

from holdfast.config.first_line import first_word
from holdfast.config.problem import ConfigError
from holdfast.io.peers.complaints import Complaints
from holdfast_federation.manager.messages import Desired, JoinAnswer, Neighbor, NodeView, Watched
from holdfast_federation.sidecar.manager_client.http import (
    ManagerHttp,
    ManagerRefuses,
    ManagerUnreachable,
)
from holdfast_federation.sidecar.store.file import MemberStoreError
from holdfast_federation.sidecar.store.member_files import MemberStorage

logger = logging.getLogger("holdfast")

REPORT_S: Final = 5.0
WATCH_S: Final = 25.0
TIMEOUT_S: Final = 15.0
"""The time in seconds for a request. A join includes the manager's probe of the broker."""
LEAVE_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 1.0
"""The first delay in seconds between attempts. It doubles up to `RETRY_S_MAX`, with jitter."""
RETRY_S_MAX: Final = 30.0
LOOK_S: Final = 60.0
"""The interval in seconds of queries of all members, for ids of linked non-neighbours."""
LINKS_MAX: Final = 1000
"""The most links in a report, the limit of the manager."""
NODE: Final = "[0-9a-f]{32}"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class LinkState:
    """The state of one established link, as reported to the manager."""

    rtt_ms: float | None


class ManagedMember(Protocol):
    """The member, as this client sees it. All calls come from the event loop."""

    def links(self) -> dict[bytes, LinkState]:
        """The established links by peer."""

    def digest(self) -> bytes: ...

    def interest(self) -> int:
        """The number of filters of the broker's clients."""

    def set_neighbours(self, neighbours: dict[bytes, str]) -> None:
        """Replaces the members to be linked with, by id, with their addresses."""


class StoredManager(msgspec.Struct, frozen=True):
    """The file that lets a restarted member keep its links while the manager is unreachable."""

    url: str
    token: str = ""
    neighbours: dict[str, str] = {}
    """Addresses by member id in hexadecimal digits."""


class ManagerClient:
    """Keeps one member registered at its manager and applies the neighbours it assigns."""

    def __init__(
        self,
        http: ManagerHttp,
        member: ManagedMember,
        join: Mapping[str, object],
        token_file: str,
        state: MemberStorage,
    ) -> None:
        """`join`: the body of the request, with `uuid` and `epoch`. `token_file`: a file whose
        first line is the token until the manager gives one; empty for none. `state`: has what the
        manager assigned last."""
        self.is_connected = False
        self.id: int | None = None
        self._http = http
        self._member = member
        self._join_body = join
        self._token_file = token_file
        self._state = state
        self._stored = StoredManager(http.url)
        # The newest write of the file. Its thread continues when the waiting task is cancelled.
        self._writing: asyncio.Future[None] | None = None
        self._revision = -1
        self._neighbours: list[Neighbor] = []
        # The manager never reuses an id, so entries stay valid. Empty: a peer of the published
        # protocol, without a uuid.
        self._uuids: dict[int, str] = {}
        self._poll_at = 0.0
        self._wait_s = RETRY_S
        self._complaints = Complaints(asyncio.get_running_loop().time, "federation")

    async def run(self) -> None:
        """Joins and follows the manager until the task is cancelled."""
        self._stored = await self._read()
        if self._stored.neighbours:
            self._member.set_neighbours(
                {bytes.fromhex(node): address for node, address in self._stored.neighbours.items()}
            )
        while True:
            try:
                if self.id is None:
                    await self._join()
                await self._follow()
            except ManagerUnreachable as error:
                text = f"{error}; the federation goes on as it is"
                self._complaints.say("manager", "unreachable", f"manager {text}")
            except ManagerRefuses as error:
                self._refused(error)
            self.is_connected = False
            await asyncio.sleep(random.uniform(self._wait_s / 2, self._wait_s))
            self._wait_s = min(2 * self._wait_s, RETRY_S_MAX)

    async def leave(self) -> None:
        """Asks the manager to link the other members without this one, and forgets its token."""
        if self.id is None:
            return
        path = f"/api/v1/nodes/{self.id}"
        try:
            await self._http.request("DELETE", path, None, self._token(), LEAVE_TIMEOUT_S)
        except (ManagerUnreachable, ManagerRefuses) as error:
            logger.warning(
                "federation_leave_unsent text='the manager was not told of the end' error=%r",
                str(error),
            )
            return
        self.id = None
        if self._writing is not None:
            await self._writing
        await self._write(b"")

    # Join

    async def _join(self) -> None:
        answer = await self._request("POST", "/join", JoinAnswer, self._join_body)
        if isinstance(answer.token, str):
            await self._save(token=answer.token)
        self.id = answer.id
        revision = answer.revision if isinstance(answer.revision, int) else -1
        self._welcome()
        logger.info("federation_joined node=%d manager=%s", answer.id, self._http.url)
        await self._apply(revision, answer.neighbors)

    def _refused(self, error: ManagerRefuses) -> None:
        if error.status in (401, 403) and self._stored.token:
            # The manager may have lost its state; then the configured token may be valid.
            self._stored = msgspec.structs.replace(self._stored, token="")
            self._wait_s = RETRY_S
        if error.status == 404 and self.id is not None:
            logger.warning("federation_removed text='joining again'")
            self._wait_s = RETRY_S
        self.id = None
        self._complaints.say("manager", str(error), f"manager refuses: {error}", logging.ERROR)

    def _welcome(self) -> None:
        self.is_connected = True
        self._wait_s = RETRY_S
        self._complaints.forget("manager")

    # Follow

    async def _follow(self) -> None:
        """Watches and reports until a request fails.

        Raises `ManagerUnreachable` or `ManagerRefuses` of that request.
        """
        tasks = [
            asyncio.ensure_future(self._watch_on()),
            asyncio.ensure_future(self._report_on()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch_on(self) -> None:
        while True:
            path = f"/watch?since={max(self._revision, 0)}&node={self.id}&timeout={WATCH_S:g}"
            watched = await self._request("GET", path, Watched, timeout_s=WATCH_S + TIMEOUT_S)
            self._welcome()
            await self._apply(watched.revision, watched.neighbors or [])

    async def _report_on(self) -> None:
        while True:
            desired = await self._request(
                "POST", f"/nodes/{self.id}/report", Desired, await self._report()
            )
            self._welcome()
            if desired.revision > self._revision:
                await self._apply(desired.revision, desired.neighbors)
            await asyncio.sleep(REPORT_S)

    async def _report(self) -> dict[str, object]:
        links = self._member.links()
        ids = await self._ids_of(links)
        reported = [
            {"peer": ids[node], "up": True, "rtt_ms": state.rtt_ms}
            for node, state in links.items()
            if node in ids
        ]
        linked = {each["peer"] for each in reported}
        reported += [
            {"peer": each.id, "up": False} for each in self._neighbours if each.id not in linked
        ]
        return {
            "links": reported[:LINKS_MAX],
            "epoch": self._join_body["epoch"],
            "digest": self._member.digest().hex(),
            "interest": self._member.interest(),
        }

    async def _ids_of(self, links: Mapping[bytes, object]) -> dict[bytes, int]:
        """Returns the known ids of linked members. Unknown ones cause a query every `LOOK_S`."""
        known = {uuid: id for id, uuid in sorted(self._uuids.items())}
        now = asyncio.get_running_loop().time()
        if now >= self._poll_at and any(node.hex() not in known for node in links):
            self._poll_at = now + LOOK_S
            await self._poll()
            known = {uuid: id for id, uuid in sorted(self._uuids.items())}
        return {node: known[node.hex()] for node in links if node.hex() in known}

    async def _poll(self) -> None:
        for view in await self._request("GET", "/nodes", list[NodeView]):
            self._uuids[view.id] = view.uuid

    async def _apply(self, revision: int, neighbours: list[Neighbor]) -> None:
        wanted: dict[bytes, str] = {}
        if any(each.id not in self._uuids for each in neighbours):
            await self._poll()
        for each in neighbours:
            # A member that left a moment ago is missing in the next revision.
            uuid = self._uuids.get(each.id, "")
            if fullmatch(NODE, uuid) is None:
                self._complaints.say(
                    f"neighbour {each.id}",
                    "no member",
                    f"{each.ip} is a neighbour by the manager, and speaks the published protocol:"
                    " there is no link with it",
                )
            elif isinstance(each.advertise, str) and each.advertise:
                wanted[bytes.fromhex(uuid)] = each.advertise
        self._revision = revision
        self._neighbours = neighbours
        self._member.set_neighbours(wanted)
        await self._save(neighbours={node.hex(): address for node, address in wanted.items()})

    # Requests and tokens

    async def _request(
        self,
        method: str,
        path: str,
        kind: type[Answer],
        body: object = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        data: Any = await self._http.request(
            method, f"/api/v1{path}", body, self._token(), timeout_s
        )
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            raise ManagerUnreachable(f"{self._http.url}: {path}: {error}") from None

    def _token(self) -> str:
        if self._stored.token or not self._token_file:
            return self._stored.token
        try:
            return first_word(self._token_file)
        except ConfigError as error:
            raise ManagerUnreachable(str(error)) from None

    async def _read(self) -> StoredManager:
        nothing = StoredManager(self._http.url)
        try:
            data = await self._state.read_assignment()
            kept = msgspec.json.decode(data, type=StoredManager) if data else nothing
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("federation_assignment_unreadable error=%r", str(error))
            return nothing
        if kept.url != self._http.url or any(
            fullmatch(NODE, node) is None for node in kept.neighbours
        ):
            return nothing
        return kept

    async def _save(self, **changes: object) -> None:
        kept = msgspec.structs.replace(self._stored, **changes)
        if kept != self._stored:
            self._stored = kept
            self._writing = asyncio.ensure_future(self._write(msgspec.json.encode(kept)))
            await asyncio.shield(self._writing)

    async def _write(self, data: bytes) -> None:
        """Stores it durably: a join token is valid for one join only."""
        try:
            await self._state.write_assignment(data)
        except (OSError, MemberStoreError) as error:
            logger.error("federation_assignment_not_kept error=%r", str(error))
