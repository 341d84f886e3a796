"""A member and its topology manager: join, report, and follow what the manager wants.

While the manager is away the links stay as they are: nothing here is waited for by a message.
docs/topology.md describes the other side.
"""

import asyncio
import logging
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from re import fullmatch
from typing import Any, Final, Protocol, TypeVar

import msgspec

from holdfast.config.first_line import UnreadableFile, first_word
from holdfast.federation.manager.messages import Desired, JoinAnswer, Neighbor, NodeView, Watched
from holdfast.federation.sidecar.manager_client.http import (
    ManagerHttp,
    ManagerRefuses,
    ManagerUnreachable,
)
from holdfast.server.peers.complaints import Complaints

logger = logging.getLogger("holdfast")

REPORT_S: Final = 5.0
WATCH_S: Final = 25.0
TIMEOUT_S: Final = 15.0
"""Of a request; a join waits for the manager's probe."""
LEAVE_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 1.0
"""Doubled up to `RETRY_S_MAX`, and jittered."""
RETRY_S_MAX: Final = 30.0
LOOK_S: Final = 60.0
"""Between looks at all members, for the ids of those that are linked and are no neighbours."""
LINKS_MAX: Final = 1000
"""Of a report; the manager's bound."""
KEPT: Final = "manager.json"

NODE: Final = "[0-9a-f]{32}"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class LinkState:
    rtt_ms: float | None


class ManagedMember(Protocol):
    """All calls come from the event loop."""

    def links(self) -> dict[bytes, LinkState]:
        """Those that are up."""

    def digest(self) -> bytes: ...

    def interest(self) -> int:
        """Filters of its clients."""

    def set_neighbours(self, neighbours: dict[bytes, str]) -> None:
        """Members that it is to be linked with, and where they are."""


class StoredManager(msgspec.Struct, frozen=True):
    """What a restart needs while the manager is away."""

    url: str
    token: str = ""
    neighbours: dict[str, str] = {}
    """By id, in hexadecimal digits."""


class ManagerClient:
    def __init__(
        self,
        http: ManagerHttp,
        member: ManagedMember,
        join: Mapping[str, object],
        token_file: str,
        directory: Path,
    ) -> None:
        """`join`: the body of the request, with `uuid` and `epoch`. `token_file`: empty for none;
        its first line is used where the manager has given no token yet."""
        self.is_connected = False
        self.id: int | None = None
        self._http = http
        self._member = member
        self._join_body = join
        self._token_file = token_file
        self._path = directory / KEPT
        self._kept = StoredManager(http.url)
        # The newest; its thread goes on when whoever waits for it is cancelled.
        self._writing: asyncio.Future[None] | None = None
        self._revision = -1
        self._neighbours: list[Neighbor] = []
        # Ids are given once: what is known stays true. Empty: a member without one.
        self._uuids: dict[int, str] = {}
        self._look_at = 0.0
        self._wait_s = RETRY_S
        self._complaints = Complaints(asyncio.get_running_loop().time, "federation:")

    async def run(self) -> None:
        """Until it is cancelled."""
        self._kept = await asyncio.to_thread(self._read)
        if self._kept.neighbours:
            self._member.set_neighbours(
                {bytes.fromhex(node): address for node, address in self._kept.neighbours.items()}
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
        """The others are linked without this member."""
        if self.id is None:
            return
        path = f"/api/v1/nodes/{self.id}"
        try:
            await self._http.ask("DELETE", path, None, self._token(), LEAVE_TIMEOUT_S)
        except (ManagerUnreachable, ManagerRefuses) as error:
            logger.warning("federation: the manager was not told of the end: %s", error)
            return
        self.id = None
        if self._writing is not None:
            await self._writing
        with suppress(FileNotFoundError):
            self._path.unlink()

    # Join

    async def _join(self) -> None:
        answer = await self._ask("POST", "/join", JoinAnswer, self._join_body)
        if isinstance(answer.token, str):
            await self._keep(token=answer.token)
        self.id = answer.id
        revision = answer.revision if isinstance(answer.revision, int) else -1
        self._welcome()
        logger.info("federation: member %d of the manager at %s", answer.id, self._http.url)
        await self._take(revision, answer.neighbors)

    def _refused(self, error: ManagerRefuses) -> None:
        if error.status in (401, 403) and self._kept.token:
            # As after the manager's state was lost; the configured one may do.
            self._kept = msgspec.structs.replace(self._kept, token="")
            self._wait_s = RETRY_S
        if error.status == 404 and self.id is not None:
            logger.warning("federation: the manager has removed this member: joining again")
            self._wait_s = RETRY_S
        self.id = None
        self._complaints.say("manager", str(error), f"manager refuses: {error}", logging.ERROR)

    def _welcome(self) -> None:
        self.is_connected = True
        self._wait_s = RETRY_S
        self._complaints.forget("manager")

    # Follow

    async def _follow(self) -> None:
        """Returns by raising ManagerUnreachable or ManagerRefuses."""
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
            watched = await self._ask("GET", path, Watched, timeout_s=WATCH_S + TIMEOUT_S)
            self._welcome()
            await self._take(watched.revision, watched.neighbors or [])

    async def _report_on(self) -> None:
        while True:
            desired = await self._ask(
                "POST", f"/nodes/{self.id}/report", Desired, await self._report()
            )
            self._welcome()
            if desired.revision > self._revision:
                await self._take(desired.revision, desired.neighbors)
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
        """Of those that are known; who is not is looked for, now and then."""
        known = {uuid: id for id, uuid in sorted(self._uuids.items())}
        now = asyncio.get_running_loop().time()
        if now >= self._look_at and any(node.hex() not in known for node in links):
            self._look_at = now + LOOK_S
            await self._look()
            known = {uuid: id for id, uuid in sorted(self._uuids.items())}
        return {node: known[node.hex()] for node in links if node.hex() in known}

    async def _look(self) -> None:
        for view in await self._ask("GET", "/nodes", list[NodeView]):
            self._uuids[view.id] = view.uuid

    async def _take(self, revision: int, neighbours: list[Neighbor]) -> None:
        wanted: dict[bytes, str] = {}
        if any(each.id not in self._uuids for each in neighbours):
            await self._look()
        for each in neighbours:
            # Who is gone in this moment is no neighbour in the next revision.
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
        await self._keep(neighbours={node.hex(): address for node, address in wanted.items()})

    # Requests and tokens

    async def _ask(
        self,
        method: str,
        path: str,
        kind: type[Answer],
        body: object = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        data: Any = await self._http.ask(method, f"/api/v1{path}", body, self._token(), timeout_s)
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            raise ManagerUnreachable(f"{self._http.url}: {path}: {error}") from None

    def _token(self) -> str:
        if self._kept.token or not self._token_file:
            return self._kept.token
        try:
            return first_word(self._token_file)
        except UnreadableFile as error:
            raise ManagerUnreachable(str(error)) from None

    def _read(self) -> StoredManager:
        nothing = StoredManager(self._http.url)
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=StoredManager)
        except FileNotFoundError:
            return nothing
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("federation: %s: %s; it is made anew", self._path, error)
            return nothing
        if kept.url != self._http.url or any(
            fullmatch(NODE, node) is None for node in kept.neighbours
        ):
            return nothing
        return kept

    async def _keep(self, **changes: object) -> None:
        kept = msgspec.structs.replace(self._kept, **changes)
        if kept != self._kept:
            self._kept = kept
            self._writing = asyncio.ensure_future(
                asyncio.to_thread(self._write, msgspec.json.encode(kept))
            )
            await asyncio.shield(self._writing)

    def _write(self, data: bytes) -> None:
        """Durably: a join token is good for one join."""
        new = self._path.with_suffix(".new")
        try:
            with os.fdopen(
                os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            ) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        except OSError as error:
            logger.error("federation: what the manager said is not kept: %s", error)
