"""A broker's membership of a federation: a federator in the broker's loop.

Its edge is inside the broker, and its state in the broker's data directory. A failure of the
federator does not affect the broker's clients. Their messages wait in the log for the next start of
the federator, which is repeated until it succeeds.
"""

import asyncio
import logging
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from holdfast.config.federation import Federation
from holdfast.config.schema import Node
from holdfast.federation.core.routing.mesh import Mesh
from holdfast.federation.sidecar.edge_broker.edge import BrokerEdge
from holdfast.federation.sidecar.edge_broker.log_starts import NAME as LOG_STARTS
from holdfast.federation.sidecar.edge_broker.log_starts import LogStart, begin_start, start_of
from holdfast.federation.sidecar.edge_broker.origin_offset import LOG_BYTES_MAX
from holdfast.federation.sidecar.federator import Federator, FederatorError
from holdfast.federation.sidecar.store.identity import IN_A_BROKER
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.failures import watched
from holdfast.log.files.layout import Manifest

logger = logging.getLogger("holdfast")

AGAIN_S: Final = 1.0
"""The delay in seconds before the next start after a failure."""
COMPLAINT_S: Final = 30.0
"""The shortest time in seconds between two log lines with the same reason."""


class GraphMember(Struct):
    """A member as it last announced itself."""

    id: str
    name: str
    """The name of its site; empty if it is not known here."""
    address: str
    leaving: bool
    filters: int
    """The topic filters that it wants."""
    queued: int
    """The messages that wait here for it."""


class GraphLink(Struct):
    """A link between two members, `a` before `b`."""

    a: str
    b: str
    mutual: bool
    """Whether both announce it. Only then messages take it."""


class FederationGraph(Struct):
    """The members of a federation, and their links."""

    id: str
    """The member that replies."""
    members: list[GraphMember]
    links: list[GraphLink]


class BrokerFederation:
    """Keeps a federator running and reports its status."""

    def __init__(self, config: Federation, broker: Broker, data: Path, manifest: Manifest) -> None:
        """`data`: the data directory. A standby on a shared directory thus shares the member.

        `manifest`: that of the directory. Its time of creation and its generation distinguish its
        log from other logs of this member, also from the log that it was before a restore.
        """
        site = config.site or _name_of(broker.node.state.config.node_id)
        self._settings = replace(config, data=str(data / IN_A_BROKER), site=site)
        self._broker = broker
        self._manifest = manifest
        self._federator: Federator | None = None
        self._edge: BrokerEdge | None = None
        self._watch: asyncio.Task[None] | None = None
        self.restarts = 0
        self.failure = ""
        """The reason why no federator runs now, or ""."""
        self._complained_at = -COMPLAINT_S

    @property
    def federator(self) -> Federator | None:
        """The running federator, or None."""
        return self._federator

    async def start(self) -> None:
        """Start the federator once. Raises `FederatorError` if that fails.

        `start_soon` would try again instead.
        """
        await self._begin()
        self._watch = watched(self._keep_running())

    def start_soon(self) -> None:
        """Start the federator, repeating until it succeeds.

        On a shared directory the previous node may still have it open.
        """
        self.failure = "not started yet"
        self._watch = watched(self._keep_running())

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._end()

    def status(self) -> dict[str, object]:
        """Return the status for people and the API, as plain values that JSON can express."""
        found: dict[str, object] = {
            "federation": self._settings.name,
            "running": self._federator is not None,
            "failure": self.failure,
            "restarts": self.restarts,
        }
        if self._federator is not None and self._edge is not None:
            found |= self._federator.status()
            found["edge"] = self._edge.status()
        return found

    def mesh(self, topic: str) -> dict[str, object]:
        """Return the mesh of a valid topic name, empty while no federator runs."""
        return {} if self._federator is None else mesh_fields(self._federator.mesh(topic))

    def graph(self) -> FederationGraph:
        """Return the members and links that this member knows, none while no federator runs."""
        return FederationGraph("", [], []) if self._federator is None else graph_of(self._federator)

    def sys_values(self) -> dict[str, str]:
        """Return the values under $SYS/broker/."""
        federator, edge = self._federator, self._edge
        if federator is None or edge is None:
            return {"federation/running": "0"}
        member = federator.member
        values = {
            "running": 1,
            "id": federator.node.hex(),
            "epoch": federator.epoch,
            "members": len(member.database.entries),
            "links": len(member.links.peers()),
            "custody": len(member.custody),
            "messages/exported": edge.counts["exported"],
            "messages/imported": edge.counts["imported"],
        }
        return {f"federation/{name}": str(value) for name, value in values.items()}

    async def _keep_running(self) -> None:
        while True:
            if self._federator is None:
                try:
                    await self._begin()
                except FederatorError as error:
                    self._complain(str(error))
                    await asyncio.sleep(AGAIN_S)
                    continue
                if self.restarts or self._complained_at > 0:
                    logger.warning("federation_goes_on restarts=%d", self.restarts)
            assert self._federator is not None
            failure = await self._federator.failed()
            await self._end()
            self.restarts += 1
            self._complain(str(failure))
            await asyncio.sleep(AGAIN_S)

    async def _begin(self) -> None:
        settings = self._settings
        edge = BrokerEdge(self._broker, settings.export_filters, settings.import_filters)
        federator = Federator(settings, edge)
        await federator.open()
        try:
            ends = list(self._broker.node.state.journal.next_offset)
            directory = Path(settings.data)
            starts = await asyncio.to_thread(begin_start, directory, federator.epoch, ends)
        except (OSError, ValueError) as error:
            await federator.stop()
            path = directory / LOG_STARTS
            raise FederatorError(f"{path}: {error}: remove it if it is damaged") from error
        log = partial(self._log_of, federator, starts)
        edge.identify(lambda: federator.node, log)
        await federator.start()
        self._federator, self._edge = federator, edge
        self.failure = ""

    def _log_of(
        self, federator: Federator, starts: list[LogStart], partition: int, offset: int
    ) -> str:
        """Return the name of the log that gave an offset to its message.

        What was written before a restore keeps its name, because other members may have it
        already. If the directory was put back in another way, what is written after it is of
        another start. If that start was used before, it is not known what was written in it. So
        everything is of another log then, and may arrive twice.
        """
        manifest = self._manifest
        generation = manifest.log_generation
        for number, same in manifest.former:
            if offset < same[partition]:
                generation = number
                break
        start = start_of(starts, partition, offset)
        return _log_name(manifest.created, generation, federator.disputed, start)

    async def _end(self) -> None:
        federator, self._federator = self._federator, None
        if federator is not None:
            await federator.stop()

    def _complain(self, text: str) -> None:
        now = self._broker.loop.time()
        if text != self.failure or now >= self._complained_at + COMPLAINT_S:
            logger.error("federation_down error=%r again_s=%s", text, AGAIN_S)
            self._complained_at = now
        self.failure = text


@lru_cache(maxsize=64)
def _log_name(created: str, generation: int, disputed: int, start: int) -> str:
    name = created + (f" {generation}" if generation else "")
    name += f" disputed {disputed}" if disputed else ""
    name += f" start {start}" if start else ""
    return sha256(name.encode()).hexdigest()[:LOG_BYTES_MAX]


def _name_of(node_id: str) -> str:
    """Return the name that a node id gives its site. The default id tells no sites apart."""
    return "" if node_id == Node().id else node_id


def mesh_fields(mesh: Mesh) -> dict[str, object]:
    return {
        "topic": mesh.topic,
        "root": None if mesh.root is None else mesh.root.hex(),
        "members": [node.hex() for node in mesh.members],
        "parents": {node.hex(): parent.hex() for node, parent in mesh.parents.items()},
        "children": {
            node.hex(): [child.hex() for child in children]
            for node, children in mesh.children.items()
        },
    }


def graph_of(federator: Federator) -> FederationGraph:
    """The members and links in the link-state database of a federator."""
    member, names = federator.member, federator.links.names
    entries = member.database.entries
    members = [
        GraphMember(
            node.hex(),
            names.name_of(node),
            entry.address,
            entry.is_leaving,
            len(entry.filters),
            0 if node == member.node else member.custody.queued(node),
        )
        for node, entry in sorted(entries.items())
    ]
    pairs = {
        (min(node, peer), max(node, peer))
        for node, entry in entries.items()
        for peer in entry.links
    }
    links = [
        GraphLink(
            a.hex(),
            b.hex(),
            a in entries and b in entries and b in entries[a].links and a in entries[b].links,
        )
        for a, b in sorted(pairs)
    ]
    return FederationGraph(member.node.hex(), members, links)
