"""One broker process: data directory, recovery, node, listeners, admin port, maintenance."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import astuple, replace

from holdfast.addresses import UNIX, split_address
from holdfast.api.admin import AdminServer, admin_hosts, audit_of
from holdfast.api.census import report_files
from holdfast.api.cluster_operations import ClusterOperations
from holdfast.api.readiness import Readiness, wait_until_spared
from holdfast.config.explain import Setting
from holdfast.config.listener import Listener
from holdfast.config.schema import Config
from holdfast.io.conversion.adoption import adopt, adopt_epoch
from holdfast.io.disk.maintenance import Maintenance
from holdfast.io.disk.shared_directory import SharedDirectory
from holdfast.io.disk.storage import Storage, StorageError
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.failures import stop_on_unexpected, watched
from holdfast.io.event_loop.lake_port import LakePort
from holdfast.io.settings.node_settings import (
    new_node,
    node_config,
    of_one,
)
from holdfast.io.settings.reload import (
    Preparation,
    Preparations,
    Reloaded,
    ReloadError,
    apply_limits,
    apply_listeners,
    apply_security,
)
from holdfast.io.settings.security_files import (
    SecurityFileError,
    SecurityFiles,
    admin_context,
    load_listeners,
    load_security,
)
from holdfast.io.sockets.listeners import OpenListener, reserve, when_free
from holdfast.node import federation_session
from holdfast.node.admission.usage import SharedUsage
from holdfast.node.lease.tenure import LeaseLost
from holdfast.node.metadata.model import WITNESS
from holdfast.node.state.replicated import ReplicatedState
from holdfast.process.cluster import ClusterMembership, Held, check_may_share
from holdfast.process.join import joins, with_cluster
from holdfast.process.place import EXIT_REMOVED, ProcessPlace, node_name, with_directory
from holdfast.process.service_manager import ServiceManager
from holdfast.process.siblings import SiblingNodes
from holdfast.security.access.access_file import AccessError
from holdfast.security.http.server import reserve as reserve_admin

if TYPE_CHECKING:
    from holdfast_federation.sidecar.in_broker import BrokerFederation

logger = logging.getLogger("holdfast")

SHUTDOWN_S = 5.0
"""The time in seconds at shutdown for clients to take their last bytes, and for the disk."""

STAND_BY_AGAIN = -1
"""The result of `run` instead of an exit code: start the program again, as a standby."""
START_ANEW = -2
"""The result of `run`: start the program again, to set its data directory aside."""


def _ports_between_nodes(config: Config) -> Iterator[tuple[str, Listener]]:
    """The ports for other nodes and members, with their tables of the configuration. They are
    opened after the data directory, which a start must not create when one is taken."""
    if config.cluster.peer_bind and not config.cluster.peer_bind.startswith(UNIX):
        yield "cluster", Listener(bind=config.cluster.peer_bind, port=config.cluster.peer_port)
    if config.federation is not None and config.federation.listen and not config.node.standby:
        host, port = split_address(config.federation.listen)
        yield "federation", Listener(bind=host, port=port)


class StartError(Exception):
    """The broker cannot start. The text says why and what to do."""


class Server:
    """A broker process. It serves at once on its own directory, in a cluster once it follows the
    leaders, and on a shared directory while it holds the lease."""

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config] | None = None,
        place: ProcessPlace | None = None,
    ) -> None:
        """`load` reads the configuration again for a reload; None: only the files are read.
        `place`: that of one of several processes."""
        self.config = config
        self.explain: Callable[[], list[Setting]] | None = None
        self.broker: Broker | None = None
        self.storage: Storage | None = None
        self.admin: AdminServer | None = None
        self.maintenance: Maintenance | None = None
        self.sharing: SharedDirectory | None = None
        self.cluster: ClusterOperations | None = None
        self.federation: BrokerFederation | None = None
        self._clustering: ClusterMembership | None = None
        self.audit = audit_of(self)
        self.listeners: list[OpenListener] = []
        self._admin_socket: socket.socket | None = None
        self.admin_port = 0
        self._completed: dict[str, object] = {}
        """The settings of [cluster] that a node which joins has found out."""
        self._read = load or (lambda: config)
        self._security = SecurityFiles()
        self.manager = ServiceManager()
        self._stop = asyncio.Event()
        self.is_stopping = False
        self._departing: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        self._hands_over = self._starts_anew = self._is_removed = False
        self.place = place
        self.siblings: list[str] = []
        self.restarts = 0 if place is None else place.restarts
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._arranging: asyncio.Task[None] | None = None
        self._reloading = asyncio.Lock()
        self._preparations = Preparations()
        self._reload_task: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to serve or to stand by. Raises `StartError` if that is impossible."""
        stop_on_unexpected(asyncio.get_running_loop(), self.fail)
        self._watching = watched(Readiness(self).watch())
        self.config = config = with_directory(self.config)
        if joins(config):
            await self._complete(config)
            if self._stop.is_set():
                return
            config = self.config
        try:
            self._security = load_security(config)
            files = load_listeners(config.listeners)
            admin_context(config.admin)
        except SecurityFileError as error:
            raise StartError(str(error)) from error
        try:
            # Ports are reserved now: a standby must not find out at takeover that one is taken, and
            # a start that fails leaves no data directory.
            for settings, one in zip(config.listeners, files, strict=True):
                if config.cluster.node_role() != WITNESS:
                    sockets = await when_free(
                        partial(reserve, settings, config), config.node.standby
                    )
                    self.listeners.append(OpenListener(settings, one, sockets))
            if config.admin.enabled:
                self._admin_socket = await when_free(
                    partial(reserve_admin, config.admin.bind, config.admin.port),
                    config.node.standby,
                )
        except OSError as error:
            raise StartError(f"cannot listen: {error.strerror or error}") from error
        for table, settings in _ports_between_nodes(config):
            try:
                for each in reserve(settings, config):
                    each.close()
            except OSError as error:
                raise StartError(f"cannot listen, {table}: {error.strerror or error}") from error
        await asyncio.to_thread(report_files, config)
        if config.node.standby:
            self.sharing = self._share()
            await self._start_admin()
            return
        if config.cluster.peer_bind:
            await self._adopt(config)
            clustering = await self._join_cluster(config)
            await self._start_admin()
            self._serving = watched(self._serve_in_cluster(clustering))
            if self.place is not None:
                self._join_siblings(self.place, clustering)
            return
        try:
            await self._serve_as_one()
        except StorageError as error:
            raise StartError(str(error)) from error

    def _join_siblings(self, place: ProcessPlace, clustering: ClusterMembership) -> None:
        """Serves with the other processes of this machine."""
        own = self.config.node.id
        first = own.removesuffix(f"-{place.index}") if place.index else own
        others = [each for each in range(place.count) if each != place.index]
        siblings = [node_name(first, each) for each in others]
        if place.index == 0:
            self.siblings = siblings
        state, context = clustering.cluster_node.state, clustering.cluster_node.context
        clustering.cluster_node.usage = SharedUsage(state, context, frozenset(siblings))
        node, operations = clustering.cluster_node, clustering.operations
        nodes = SiblingNodes(place, node, operations, self._end_removed)
        clustering.broker.runtime.on_news = nodes.changed.set
        self._arranging = watched(nodes.run())

    def _load(self) -> Config:
        """Reads the configuration again, with what the start has found out."""
        config = with_directory(self._read())
        if not joins(config) or not self._completed:
            return config
        return replace(config, cluster=replace(config.cluster, **self._completed))

    async def _complete(self, config: Config) -> None:
        """Finds out what a node that joins was not told, unless it is stopped before. Raises
        `StartError`."""
        completing = asyncio.ensure_future(with_cluster(config))
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({completing, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not completing.done():
            completing.cancel()
            return
        try:
            self.config = await completing
        except StorageError as error:
            raise StartError(str(error)) from error
        names = ("peer_bind", "peer_port", "partitions")
        self._completed = {name: getattr(self.config.cluster, name) for name in names}

    async def _join_cluster(self, config: Config, held: Held | None = None) -> ClusterMembership:
        security = self._security
        try:
            clustering = ClusterMembership(
                config,
                partial(new_node, config, security),
                security.passwords,
                self.fail,
                self.start_anew,
                held,
            )
            self._clustering = clustering
            self.cluster = clustering.operations
            self.storage = clustering.storage
            self.maintenance = clustering.maintenance
            if self.maintenance is not None:
                self.maintenance.start_watching()
            await clustering.start()
        except (StorageError, OSError) as error:
            raise StartError(str(error)) from error
        return clustering

    async def _adopt(self, config: Config) -> None:
        """Adopts the directory of a single broker. Raises `StartError`."""
        node, partitions = config.node, config.cluster.partitions
        try:
            await asyncio.to_thread(adopt, Path(node.data), node.id, partitions)
        except StorageError as error:
            raise StartError(str(error)) from error

    async def _serve_as_one(self, held: Held | None = None) -> None:
        """Serves as a cluster of one node, which waits for no other. Raises `StorageError`."""
        sharing = self.sharing
        config = of_one(self.config, "" if sharing is None else sharing.directory_id)
        if held is None:
            await self._adopt(config)
        clustering = await self._join_cluster(config, held)
        ready = asyncio.ensure_future(clustering.wait_until_ready())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        stopped.cancel()
        if not self._stop.is_set():
            await self._open(clustering.broker, clustering.storage)
        if sharing is None:
            await self._start_admin()
        else:
            sharing.serving()
        if not self._stop.is_set():
            self._log_ready()

    async def _serve_in_cluster(self, cluster: ClusterMembership) -> None:
        """Serves clients once this node follows the leaders of all partitions."""
        await cluster.wait_until_ready()
        if cluster.is_witness:
            logger.info("ready witness=%s", self.config.node.id)
            return
        try:
            await self._open(cluster.broker, cluster.storage)
        except StartError as error:
            self.fail(error)
            return
        self._log_ready()
        if self.place is not None:
            self.manager.report_ready("running")

    def _share(self) -> SharedDirectory:
        try:
            check_may_share(Path(self.config.node.data))
            sharing = SharedDirectory(
                self.config,
                adopt=adopt_epoch,
                on_holding=self._hold,
                on_failed=self.fail,
                on_handover=self.hand_over,
            )
            sharing.start()
        except (StorageError, OSError) as error:
            raise StartError(str(error)) from error
        logger.info("standing_by node=%s data=%s", self.config.node.id, self.config.node.data)
        return sharing

    def _hold(self, images: ReplicatedState, storage: Storage) -> None:
        """Begins to serve as holder of the lease."""
        assert self.sharing is not None
        self.storage = storage
        self._serving = watched(self._serve_held(Held(storage, images, self.sharing.confirm)))

    async def _serve_held(self, held: Held) -> None:
        try:
            await self._serve_as_one(held)
        except (StartError, StorageError) as error:
            self.fail(error)

    async def _open(self, broker: Broker, storage: Storage) -> None:
        """Opens the listeners and starts maintenance. Raises `StartError`."""
        assert self.maintenance is not None
        broker.touch()
        # The node was made before it serves; there may have been a reload since.
        apply_limits(broker.node.state, node_config(self.config))
        apply_security(broker, self._security)
        broker.node.start()
        try:
            for listener in self.listeners:
                await listener.open(broker)
        except OSError as error:
            raise StartError(f"cannot listen: {error}") from error
        self.broker = broker
        if self.sharing is not None:
            broker.node.state.sys_values.append(self.sharing.sys_values)
        self.audit.serve(broker)
        broker.touch()
        self.maintenance.start()
        self._open_lake()
        await self._federate(broker, storage)

    def _open_lake(self) -> None:
        """Begins to read the configured lake."""
        broker, place = self.broker, self.config.log.lake
        if broker is not None and place:
            reads = broker.runtime.cluster_node.remote_reads
            broker.lake = LakePort(broker.loop, place, reads, broker.touch, reads.lake_greeting)

    async def _close_lake(self) -> None:
        if self.broker is not None and self.broker.lake is not None:
            lake, self.broker.lake = self.broker.lake, None
            await lake.stop()

    async def _federate(self, broker: Broker, storage: Storage) -> None:
        """Starts the configured federator. Raises `StartError` if it cannot start."""
        config = self.config
        if config.federation is None:
            if federation_session.has_session(broker.node.state):
                from holdfast_federation.sidecar.in_broker import leave_federation

                self._leaving = watched(leave_federation(broker))
            return
        # A broker without a federation starts with a tenth less CPU without these modules.
        from holdfast_federation.sidecar.federator import FederatorError
        from holdfast_federation.sidecar.in_broker import BrokerFederation

        data = Path(config.node.data)
        federation = BrokerFederation(
            config.federation, broker, data, lambda: storage.directory.manifest
        )
        self.federation = federation
        broker.node.state.sys_values.append(federation.sys_values)
        if self.sharing is not None or config.cluster.peer_bind:
            federation.start_soon()
            return
        try:
            await federation.start()
        except FederatorError as error:
            raise StartError(str(error)) from error

    async def _start_admin(self) -> None:
        if self._admin_socket is not None:
            try:
                server = AdminServer(self, self._admin_socket, admin_hosts(self.config))
            except OSError as error:
                raise StartError(f"cannot listen: {error.strerror or error}") from error
            except (AccessError, SecurityFileError) as error:
                raise StartError(str(error)) from error
            self.admin = server
            self.admin_port = server.port
            server.start()

    def _log_ready(self) -> None:
        config = self.config
        assert self.broker is not None
        state = self.broker.node.state
        logger.info(
            "ready listeners=%s admin=%s data=%s durability=%s sessions=%d records=%d",
            [each.address for each in self.listeners],
            f"{config.admin.bind}:{self.admin_port}" if config.admin.enabled else "off",
            config.node.data,
            config.log.durability,
            state.client_sessions() + state.cluster.away()[0],
            sum(state.journal.high_watermark),
        )

    def fail(self, error: BaseException) -> None:
        """Stops at once: the journal or the state cannot be trusted. The first failure counts."""
        if self.failure is None:
            self.failure = error
        broker = self.broker if self._clustering is None else self._clustering.broker
        if broker is not None:
            broker.has_failed = True
        self._stop.set()

    async def reload(self) -> Reloaded:
        """Applies the configuration and the files as they are now. Raises `ReloadError`, and
        changes nothing then."""
        async with self._reloading:
            if self._stop.is_set():
                raise ReloadError("the broker is stopping")
            try:
                made = await self._preparations.prepare(self._load, self.config, self.listeners)
                if self._stop.is_set():
                    made.discard(self.listeners)
                    raise ReloadError("the broker is stopping")
                return await self._apply(made)
            except ReloadError as error:
                self._count_reload("reloads_failed")
                logger.error("reload_failed error=%r text='everything stays as it was'", str(error))
                raise

    def request_reload(self) -> None:
        """Reloads soon, and reports it to the service manager."""
        self._reload_task = watched(self.manager.report_reload(self.reload))

    def _count_reload(self, name: str) -> None:
        if self.broker is not None:
            stats = self.broker.node.state.stats
            setattr(stats, name, getattr(stats, name) + 1)

    async def _apply(self, made: Preparation) -> Reloaded:
        has_other_lake = self.config.log.lake != made.config.log.lake
        self.config, self._security = made.config, made.security
        broker = self.broker if self._clustering is None else self._clustering.broker
        disconnected = 0
        if broker is not None:
            apply_limits(broker.node.state, node_config(made.config))
            made.apply_rules()
            disconnected = await apply_security(broker, made.security)
        if self.maintenance is not None:
            self.maintenance.reload(made.config)
        if has_other_lake:
            await self._close_lake()
            self._open_lake()
        if self.admin is not None:
            await self.admin.reload(made.admin_context, made.access)
        self.listeners, failed = await apply_listeners(self.listeners, made, self.broker)
        await asyncio.to_thread(report_files, made.config)
        clustering, federating = self._clustering, self.federation
        federator = None if federating is None else federating.federator
        renewed = made.renew_peers(
            {
                "cluster": None if clustering is None else clustering.auth,
                "federation": None if federator is None else federator.auth,
            }
        )
        logger.setLevel(made.config.logging.level.upper())
        self._count_reload("reloads")
        done = Reloaded([*made.applied, *renewed], [*made.needs_restart, *failed], disconnected)
        logger.info("reloaded settings=%s needs_restart=%s disconnected=%d", *astuple(done))
        return done

    def request_stop(self) -> None:
        """Stops once the other nodes and the load balancers can do without this one; at once at the
        second request."""
        if self.broker is None or self._departing is not None:
            self._stop.set()
            return
        self._departing = watched(self._depart())

    async def _depart(self) -> None:
        wait_s, lame_duck_s = self.config.cluster.stop_wait_s, self.config.server.lame_duck_s
        self.manager.report_stop(wait_s + lame_duck_s)
        await wait_until_spared(self, wait_s)
        self.is_stopping = True
        await asyncio.sleep(lame_duck_s)
        self._stop.set()

    def hand_over(self) -> None:
        """Lets another node of the shared directory take over, and stands by afterwards."""
        self._hands_over = True
        self._stop.set()

    def _end_removed(self) -> None:
        """Stops, because the nodes of the other processes have all that this one had."""
        self._is_removed = True
        self._stop.set()

    def start_anew(self) -> None:
        """Stops in order, and starts again as a new process."""
        self._starts_anew = True
        self._stop.set()

    async def run(self) -> int:
        """Runs to the end. Returns the exit code, STAND_BY_AGAIN or START_ANEW."""
        # The supervisor of several processes waits until each of them serves.
        if self.place is None:
            self.manager.report_ready("running")
        await self._stop.wait()
        # A process whose directory hangs ends late, and must take no clients meanwhile.
        for listener in self.listeners if self.failure is not None else ():
            listener.close()
        if isinstance(self.failure, LeaseLost):
            # Without the lease nothing can be saved, and the new holder may already write.
            logger.critical("lease_lost error=%r", str(self.failure))
            return STAND_BY_AGAIN
        if self.failure is not None:
            logger.critical("stopping error=%r", str(self.failure))
            return 1
        await self.stop()
        if self._is_removed:
            return EXIT_REMOVED
        if self._starts_anew:
            return START_ANEW
        return STAND_BY_AGAIN if self._hands_over else 0

    async def _within_shutdown(self, writing: Coroutine[object, object, None]) -> bool:
        """Returns False if a full disk does not accept the rest, of which nothing was promised."""
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await writing
        except TimeoutError:
            logger.error("journal_not_drained timeout_s=%s", SHUTDOWN_S)
            return False
        return True

    async def stop(self) -> None:
        """Disconnects clients and writes everything, with a snapshot if no standby has it."""
        tasks = (self._watching, self._reload_task, self._departing, self._leaving, self._arranging)
        for task in tasks:
            if task is not None:
                task.cancel()
        sharing = self.sharing
        others = "" if sharing is None else await sharing.others()
        if sharing is not None and self._serving is not None:
            await self._serving
        if self._clustering is not None:
            await self._leave_cluster(self._clustering, others)
            return
        for listener in self.listeners:
            listener.close()
        if sharing is not None:
            await sharing.stop()
        if self.admin is not None:
            await self.admin.stop()
        if self.storage is not None:
            self.storage.close()
        logger.info("stopped")

    async def _leave_cluster(self, cluster: ClusterMembership, others: str) -> None:
        """Hands over the leaderships, then tells the clients which nodes to use. `others`: the
        nodes that may take the shared directory over, ""."""
        logger.info("shutting_down")
        if self._serving is not None:
            self._serving.cancel()
        for listener in self.listeners:
            listener.close()
        if self.federation is not None:
            await self.federation.stop()
        sharing, broker = self.sharing, cluster.broker
        broker.touch()
        if others:
            # Received packets are acknowledged first, so that clients do not send them again.
            await self._within_shutdown(broker.settle())
        reference = others or await cluster.leave()
        broker.touch()
        broker.node.shut_down(reference)
        broker.turn()
        if not others:
            await broker.wait_for_disconnects(SHUTDOWN_S)
        is_drained = await self._within_shutdown(broker.drain_journal())
        if self.maintenance is not None:
            await self.maintenance.stop()
            if is_drained and not others:
                await self.maintenance.take_snapshot()
        await self._close_lake()
        await cluster.stop()
        broker.close()
        # Released last: after that, no thread of this process may write to the directory.
        if sharing is not None:
            await sharing.stop()
        if others:
            await broker.wait_for_disconnects(SHUTDOWN_S)
        if self.admin is not None:
            await self.admin.stop()
        cluster.storage.close()
        logger.info("stopped")
