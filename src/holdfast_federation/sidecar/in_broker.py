"""A broker's membership of a federation: a federator in the loop of one node.

Its edge is inside the broker, and its state in the broker's log. The node that leads the home of
the member runs it; after a failover the next leader does. A failure of the federator does not
affect the broker's clients. Their messages wait in the log for the next start of the federator,
which is repeated until it succeeds.

Two nodes may run the member for a moment, and no harm comes of it. Only the later start can store
anything (`edge_broker.member_log`), and only one of them owns the federation's session.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from holdfast.config.federation import Federation
from holdfast.config.schema import Node
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.failures import watched
from holdfast.io.peers.complaints import Complaints
from holdfast.log.files.layout import Manifest
from holdfast.node import federation_session as federating
from holdfast_federation.core.graph import FederationGraph, GraphLink, GraphMember, Mesh
from holdfast_federation.sidecar.edge_broker.edge import BrokerEdge
from holdfast_federation.sidecar.edge_broker.member_log import MemberLog
from holdfast_federation.sidecar.edge_broker.origin_offset import LOG_BYTES_MAX, start_of
from holdfast_federation.sidecar.federator import Federator, FederatorError
from holdfast_federation.sidecar.store.identity import IN_A_BROKER

logger = logging.getLogger("holdfast")

AGAIN_S: Final = 1.0
"""The delay in seconds before the next start after a failure."""
LOOK_S: Final = 0.2
"""The interval in seconds between two looks at the node that runs the member."""
STOP_S: Final = 3.0
"""The longest time in seconds in which a federator that stops stores its last changes."""
COMPLAINT_S: Final = 30.0
"""The shortest time in seconds between two log lines with the same reason."""


class BrokerFederation:
    """Keeps a federator running while this node runs the member, and reports its status."""

    def __init__(
        self, config: Federation, broker: Broker, data: Path, manifest: Callable[[], Manifest]
    ) -> None:
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
        self._log: MemberLog | None = None
        self._watch: asyncio.Task[None] | None = None
        # Set after the first attempt to start.
        self._attempted = asyncio.Event()
        self.restarts = 0
        self.failure = ""
        """The reason why no federator runs now, or ""."""
        self._complained_at = -COMPLAINT_S

    @property
    def federator(self) -> Federator | None:
        """The running federator, or None."""
        return self._federator

    @property
    def node(self) -> str:
        """The node that runs the member, as far as this one knows; "": none at present."""
        return self._broker.runtime.cluster_node.member.node(self._broker.loop.time())

    @property
    def is_up(self) -> bool:
        """Whether the member runs: here, or at another node, which reports its own failures."""
        others = self._broker.runtime.cluster_node.member.others_with_table()
        return self._federator is not None or self.node in (others or ())

    async def start(self) -> None:
        """Starts the federator once. Raises `FederatorError` if that fails.

        `start_soon` would try again instead.
        """
        self.start_soon()
        await self._attempted.wait()
        if self._federator is None:
            failure = self.failure
            await self.stop()
            raise FederatorError(failure)

    def start_soon(self) -> None:
        """Starts the federator whenever this node runs the member, repeating until it succeeds.

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
        """Returns the status for people and the API, as plain values that JSON can express."""
        found: dict[str, object] = {
            "federation": self._settings.name,
            "running": self._federator is not None,
            "node": self.node,
            "failure": self.failure,
            "restarts": self.restarts,
        }
        if self._federator is not None and self._edge is not None:
            found |= self._federator.status()
            found["edge"] = self._edge.status()
        return found

    def mesh(self, topic: str) -> dict[str, object]:
        """Returns the mesh of a valid topic name, empty while no federator runs."""
        return {} if self._federator is None else mesh_fields(self._federator.mesh(topic))

    def graph(self) -> FederationGraph:
        """Returns the members and links that this member knows, none while no federator runs."""
        return FederationGraph("", [], []) if self._federator is None else graph_of(self._federator)

    def sys_values(self) -> dict[str, str]:
        """Returns the values under $SYS/broker/."""
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

    def _is_here(self) -> bool:
        return self.node == self._broker.node.state.config.node_id

    async def _keep_running(self) -> None:
        while True:
            if self._federator is None:
                if not self._is_here():
                    self.failure = "" if self.node else "no node leads the member's home"
                    await asyncio.sleep(LOOK_S)
                    continue
                try:
                    await self._begin()
                except FederatorError as error:
                    self._complain(str(error))
                    self._attempted.set()
                    await asyncio.sleep(AGAIN_S)
                    continue
                self._attempted.set()
                if self.restarts or self._complained_at > 0:
                    logger.warning("federation_goes_on restarts=%d", self.restarts)
            failure = await self._wait_for_end()
            await self._end()
            if not failure:
                logger.info("federation_moved node=%s", self.node or "?")
                continue
            self.restarts += 1
            self._complain(failure)
            await asyncio.sleep(AGAIN_S)

    async def _wait_for_end(self) -> str:
        """Waits until the federator must end. Returns the failure, "" if another node runs it."""
        assert self._federator is not None
        assert self._edge is not None
        failed = asyncio.ensure_future(self._federator.failed())
        try:
            while not failed.done():
                if not self._is_here():
                    return ""
                if self._edge.has_lost_session:
                    return "the broker has closed the federation's session"
                await asyncio.wait((failed,), timeout=LOOK_S)
            return str(failed.result()) if self._is_here() else ""
        finally:
            failed.cancel()

    async def _begin(self) -> None:
        """Begins a start. Raises `FederatorError` if that fails, or another node is to run it."""
        beginning = asyncio.ensure_future(self._begin_here())
        try:
            while not beginning.done():
                if self._log is not None and not self._is_here():
                    self._log.abandon()
                await asyncio.wait((beginning,), timeout=LOOK_S)
            beginning.result()
        finally:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)

    async def _begin_here(self) -> None:
        settings, broker = self._settings, self._broker
        edge = BrokerEdge(broker, settings.export_filters, settings.import_filters)
        self._log = log = MemberLog(
            broker,
            Path(settings.data),
            self._manifest().created,
            broker.generation,
            is_alone=not broker.runtime.cluster_node.member.has_other_nodes(),
        )
        federator = Federator(settings, edge, state=log)
        await federator.open()
        edge.identify(lambda: federator.node, partial(self._log_of, log, self._manifest()))
        await federator.start()
        self._federator, self._edge = federator, edge
        self.failure = ""

    def _log_of(self, log: MemberLog, manifest: Manifest, partition: int, offset: int) -> str:
        """Returns the name of the log that gave an offset to its message.

        What was written before a restore keeps its name, because other members may have it
        already. If the directory was put back in another way, what is written after it is of
        another start. If that start was used before, it is not known what was written in it. So
        everything is of another log then, and may arrive twice.
        """
        generation = log.generation
        for number, same in manifest.former:
            if offset < same[partition]:
                generation = number
                break
        return _log_name(
            log.name, generation, log.disputed, start_of(log.starts, partition, offset)
        )

    async def _end(self) -> None:
        """Stops the federator. What a node without the leadership cannot commit is not waited
        for."""
        federator, self._federator = self._federator, None
        log, self._log = self._log, None
        if federator is None or log is None:
            return
        if not self._is_here():
            log.abandon()
        stopping = asyncio.ensure_future(federator.stop())
        await asyncio.wait((stopping,), timeout=STOP_S)
        if not stopping.done():
            log.abandon()
        await stopping

    def _complain(self, text: str) -> None:
        now = self._broker.loop.time()
        if text != self.failure or now >= self._complained_at + COMPLAINT_S:
            logger.error("federation_down error=%r again_s=%s", text, AGAIN_S)
            self._complained_at = now
        self.failure = text


async def leave_federation(broker: Broker) -> None:
    """Ends the federation's session of an earlier run, at a node without [federation].

    In a cluster the leader of the session's home does that, once it knows that no other node has
    the table. Otherwise it only reports that the member does not run, and messages wait.
    """
    complaints = Complaints(broker.loop.time, "federation")
    state = broker.node.state
    while federating.has_session(state):
        member = broker.runtime.cluster_node.member
        if member.node(broker.loop.time()) == state.config.node_id:
            others = member.others_with_table()
            if others:
                text = (
                    f"this node leads the member's home and has no [federation], {others[0]} has:"
                    " add the table to all nodes, or take it out everywhere"
                )
                complaints.say("table", text, f"the member does not run: {text}", logging.ERROR)
            elif others is not None:
                broker.touch()
                federating.end(state)
                logger.warning("federation_left text='what waited in the log is dropped'")
                return
        await asyncio.sleep(AGAIN_S)


@lru_cache(maxsize=64)
def _log_name(created: str, generation: int, disputed: int, start: int) -> str:
    name = created + (f" {generation}" if generation else "")
    name += f" disputed {disputed}" if disputed else ""
    name += f" start {start}" if start else ""
    return sha256(name.encode()).hexdigest()[:LOG_BYTES_MAX]


def _name_of(node_id: str) -> str:
    """Returns the name that a node id gives its site. The default id tells no sites apart."""
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
