"""One broker process: data directory, recovery, node, listeners, admin port, maintenance."""

import asyncio
import errno
import logging
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from holdfast.api.admin import AdminServer
from holdfast.api.cluster_routes import ClusterAdmin
from holdfast.api.readiness import Readiness
from holdfast.broker import federation_session as federating
from holdfast.broker.config import NodeConfig
from holdfast.broker.node import Node
from holdfast.cluster.lease.tenure import LeaseLost
from holdfast.config.schema import Config, Listener
from holdfast.federation.sidecar.federator import FederatorError
from holdfast.security.acl import AclError, AclFile
from holdfast.security.enhanced_authentication import scram_factories
from holdfast.security.passwords import PasswordError, PasswordFile
from holdfast.security.scram_file import ScramError, ScramFile
from holdfast.security.tls import TlsError, server_context
from holdfast.server.cluster import ClusterMembership
from holdfast.server.disk.storage import Storage, StorageError
from holdfast.server.event_loop import descriptors
from holdfast.server.event_loop.broker import Broker
from holdfast.server.event_loop.failures import stop_on_unexpected, watched
from holdfast.server.federation import BrokerFederation
from holdfast.server.maintenance import Maintenance
from holdfast.server.shared_directory import SharedDirectory
from holdfast.server.sockets.acceptor import AcceptLoop
from holdfast.server.sockets.listeners import listen, reserve
from holdfast.storage.journal.journal import Journal

logger = logging.getLogger("holdfast")

T = TypeVar("T")

SHUTDOWN_S = 5.0
"""The time in seconds at shutdown for clients to take their last bytes, and for the disk."""
PORT_WAIT_S = 5.0
PORT_PAUSE_S = 0.1
"""The time in seconds that a standby waits for an occupied port, and the pause between checks."""

STAND_BY_AGAIN = -1
"""The result of `run` instead of an exit code: start the program again, as a standby."""
START_ANEW = -2
"""The result of `run`: start the program again, to set its data directory aside."""


class StartError(Exception):
    """The broker cannot start. The text says why and what to do."""


@dataclass(frozen=True)
class SecurityFiles:
    """The loaded files of passwords, access rules and SCRAM credentials."""

    passwords: PasswordFile | None
    acl: AclFile | None
    scram: ScramFile | None


def node_config(config: Config) -> NodeConfig:
    limits = config.limits
    return NodeConfig(
        node_id=config.node.id,
        partitions=(
            config.cluster.partitions if config.cluster.peer_bind else config.log.partitions
        ),
        memory_durability=config.log.durability == "memory",
        qos_max=limits.qos_max,
        retain_available=limits.retain_available,
        packet_bytes_max=limits.packet_bytes,
        keep_alive_s_max=limits.keep_alive_s_max,
        session_expiry_s_max=limits.session_expiry_s_max,
        receive_maximum=limits.receive_maximum,
        inflight_max=limits.inflight_max,
        topic_alias_max=limits.topic_alias_max,
        outbox_messages=limits.outbox_messages,
        outbox_bytes=limits.outbox_bytes,
        retained_max=limits.retained_max,
        retained_bytes_max=limits.retained_bytes,
        wildcard_available=limits.wildcard_available,
        shared_available=limits.shared_available,
        pending_bytes_max=limits.pending_bytes_max,
        subscriptions_per_session=limits.subscriptions_per_session,
        filter_bytes_per_session=limits.filter_bytes_per_session,
        sessions_max=limits.sessions,
        connections=limits.connections or descriptors.for_clients(),
        connect_bytes=limits.connect_bytes,
        pending_connect_bytes=limits.pending_connect_bytes,
        pending_connects_per_address=limits.pending_connects_per_address,
        connect_timeout_s=limits.connect_timeout_s,
        allow_anonymous=bool(config.security.allow_anonymous),
        sys_interval_s=config.sys.interval_s,
        producers_max=limits.producers_max,
        producer_expiry_s=limits.producer_expiry_s,
        authenticates_users=authenticates_users(config),
        qos0_logged=list(config.log.qos0),
    )


def admin_hosts(config: Config) -> list[str]:
    """Return the host names that the operator has given to this machine."""
    advertised = (config.node.advertise, config.cluster.peer_advertise)
    return [*config.admin.hosts, *(each.rpartition(":")[0] for each in advertised if each)]


def authenticates_users(config: Config) -> bool:
    """Return whether a client can prove a user name to this broker on any listener."""
    security = config.security
    return bool(security.password_file or security.scram_file) or any(
        listener.client_ca for listener in config.listeners
    )


def new_node(config: Config, security: SecurityFiles, journal: Journal) -> Node:
    """Make a node without recovered state. It may run in any thread."""
    node = Node(node_config(config), journal)
    state = node.state
    state.acl = security.acl
    state.checks_passwords = security.passwords is not None
    state.client_id_prefix = f"auto-{secrets.token_hex(8)}-"
    if security.scram is not None:
        state.authenticators.update(scram_factories(security.scram))
    # The same clock as the loop's, which must not be used in another thread.
    node.tick(time.monotonic(), time.time_ns() // 1000)
    return node


class Server:
    """A broker process. It serves at once on its own directory, in a cluster once it follows the
    leaders, and on a shared directory while it holds the lease."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.broker: Broker | None = None
        self.storage: Storage | None = None
        self.admin: AdminServer | None = None
        self.maintenance: Maintenance | None = None
        self.sharing: SharedDirectory | None = None
        self.cluster: ClusterAdmin | None = None
        self.federation: BrokerFederation | None = None
        self._clustering: ClusterMembership | None = None
        self.listeners: list[asyncio.Server | AcceptLoop] = []
        self.ports: list[int] = []
        self.admin_port = 0
        self._contexts: list[ssl.SSLContext | None] = []
        self._sockets: list[list[socket.socket]] = []
        self._security = SecurityFiles(None, None, None)
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._hands_over = False
        self._starts_anew = False
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve or to stand by. Raises `StartError` if that is impossible."""
        loop = asyncio.get_running_loop()
        stop_on_unexpected(loop, self.fail)
        self._watching = watched(Readiness(self).watch())
        descriptors.watch_files()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        config = self.config
        security = self._security = self._load_security()
        self._contexts = [self._tls_context(listener) for listener in config.listeners]
        try:
            # Ports are reserved now: a standby must not find out at takeover that one is taken.
            self._sockets = [
                await self._when_free(partial(reserve, listener))
                for listener in config.listeners
                if not config.cluster.witness
            ]
        except OSError as error:
            raise StartError(f"cannot listen: {error.strerror}") from error
        if config.node.standby:
            self.sharing = self._share(security)
            await self._start_admin()
            return
        if config.cluster.peer_bind:
            await self._start_cluster(security)
            return
        try:
            storage = Storage.open(
                Path(config.node.data),
                config.node.id,
                config.log.partitions,
                config.log.segment_bytes,
            )
        except StorageError as error:
            raise StartError(str(error)) from error
        self.storage = storage
        node = new_node(config, security, storage.journal)
        storage.recover_into(node.state)
        await self._serve(node, storage)
        await self._start_admin()
        self._log_ready()

    async def _when_free(self, take: Callable[[], T]) -> T:
        """Return the result of `take`, waiting for an occupied port. Raises `OSError`. An outgoing
        connection of any process may take a port while a standby starts again, and soon ends."""
        deadline: float | None = None
        while True:
            try:
                return take()
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not self.config.node.standby:
                    raise
                if deadline is None:
                    deadline = time.monotonic() + PORT_WAIT_S
                    logger.warning("port_taken error=%r wait_s=%s", error.strerror, PORT_WAIT_S)
                elif time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(PORT_PAUSE_S)

    async def _start_cluster(self, security: SecurityFiles) -> None:
        try:
            clustering = ClusterMembership(
                self.config,
                lambda journal: new_node(self.config, security, journal),
                security.passwords,
                self.fail,
            )
            self._clustering = clustering
            self.cluster = clustering.operations
            self.storage = clustering.storage
            clustering.start_anew = self.start_anew
            if not clustering.is_witness:
                self.maintenance = maintenance = Maintenance(
                    clustering.broker, clustering.storage, self.config
                )
                clustering.take_snapshot = partial(maintenance.take_snapshot, always=True)
                maintenance.start_watching()
            await clustering.start()
        except (StorageError, OSError) as error:
            raise StartError(str(error)) from error
        await self._start_admin()
        self._serving = watched(self._serve_in_cluster(clustering))

    async def _serve_in_cluster(self, cluster: ClusterMembership) -> None:
        """Serve clients once this node follows the leaders of all partitions."""
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

    def _share(self, security: SecurityFiles) -> SharedDirectory:
        try:
            sharing = SharedDirectory(
                self.config,
                new_node=lambda journal: new_node(self.config, security, journal),
                on_holding=self._hold,
                on_failed=self.fail,
                on_handover=self.hand_over,
            )
            sharing.start()
        except (StorageError, OSError) as error:
            raise StartError(str(error)) from error
        logger.info("standing_by node=%s data=%s", self.config.node.id, self.config.node.data)
        return sharing

    def _hold(self, node: Node, storage: Storage) -> None:
        """Begin to serve as holder of the lease."""
        self.storage = storage
        self._serving = watched(self._serve_held(node, storage))

    async def _serve_held(self, node: Node, storage: Storage) -> None:
        try:
            await self._serve(node, storage)
        except StartError as error:
            self.fail(error)
            return
        self._log_ready()

    async def _serve(self, node: Node, storage: Storage) -> None:
        """Serve with a recovered node. Raises `StartError` if a port cannot be used."""
        config = self.config
        sharing = self.sharing
        broker = Broker(
            node,
            asyncio.get_running_loop(),
            storage,
            self._security.passwords,
            config.log.memory_flush_ms / 1000,
            self.fail,
            sharing.confirm if sharing is not None else None,
        )
        await self._open(broker, storage)
        if sharing is not None:
            sharing.serving()

    async def _open(self, broker: Broker, storage: Storage) -> None:
        """Open the listeners and start maintenance. Raises `StartError`."""
        config = self.config
        if self.maintenance is None:
            self.maintenance = Maintenance(broker, storage, config)
        broker.set_clock()
        broker.node.start()
        try:
            for listener, context, sockets in zip(
                config.listeners, self._contexts, self._sockets, strict=True
            ):
                servers = await listen(broker, listener, context, sockets)
                self.listeners += servers
                self.ports.append(servers[0].sockets[0].getsockname()[1])
        except OSError as error:
            raise StartError(f"cannot listen: {error}") from error
        self.broker = broker
        broker.touch()
        self.maintenance.start()
        if self._clustering is None:
            await self._federate(broker, storage)

    async def _federate(self, broker: Broker, storage: Storage) -> None:
        """Start the configured federator. Raises `StartError` if it cannot start."""
        config = self.config
        if config.federation is None:
            if federating.end(broker.node.state):
                logger.warning("federation_left text='what waited in the log is dropped'")
            return
        created = storage.directory.manifest.created
        federation = BrokerFederation(config.federation, broker, Path(config.node.data), created)
        self.federation = federation
        broker.node.state.sys_values = federation.sys_values
        if self.sharing is not None:
            federation.start_soon()
            return
        try:
            await federation.start()
        except FederatorError as error:
            raise StartError(str(error)) from error

    async def _start_admin(self) -> None:
        admin = self.config.admin
        if admin.enabled:
            try:
                hosts = admin_hosts(self.config)
                server = await self._when_free(
                    lambda: AdminServer(self, admin.bind, admin.port, hosts)
                )
            except OSError as error:
                raise StartError(f"cannot listen: {error}") from error
            self.admin = server
            self.admin_port = server.port
            server.start()

    def _log_ready(self) -> None:
        config = self.config
        assert self.broker is not None
        state = self.broker.node.state
        logger.info(
            "ready listeners=%s admin=%s data=%s durability=%s sessions=%d records=%d",
            [
                f"{each.bind}:{port}"
                for each, port in zip(config.listeners, self.ports, strict=True)
            ],
            f"{config.admin.bind}:{self.admin_port}" if config.admin.enabled else "off",
            config.node.data,
            config.log.durability,
            state.client_sessions(),
            sum(state.journal.high_watermark),
        )

    def _load_security(self) -> SecurityFiles:
        security = self.config.security
        try:
            passwords = (
                PasswordFile.load(security.password_file) if security.password_file else None
            )
            acl = AclFile.load(security.acl_file) if security.acl_file else None
            scram = ScramFile.load(security.scram_file) if security.scram_file else None
        except (PasswordError, AclError, ScramError, OSError) as error:
            raise StartError(str(error)) from error
        if acl is not None and acl.names_users() and not authenticates_users(self.config):
            logger.warning(
                "unproved_users acl_file=%r text='clients cannot prove user names, so the rules of"
                " users apply to none: set password_file, scram_file or client_ca'",
                security.acl_file,
            )
        return SecurityFiles(passwords, acl, scram)

    def _tls_context(self, listener: Listener) -> ssl.SSLContext | None:
        if not listener.certificate:
            return None
        try:
            return server_context(
                Path(listener.certificate),
                Path(listener.key),
                Path(listener.client_ca) if listener.client_ca else None,
                listener.require_certificate,
            )
        except TlsError as error:
            raise StartError(str(error)) from error

    def fail(self, error: BaseException) -> None:
        """Stop at once: the journal or the state cannot be trusted. The first failure counts."""
        if self._failure is None:
            self._failure = error
        broker = self.broker if self._clustering is None else self._clustering.broker
        if broker is not None:
            broker.has_failed = True
        self._stop.set()

    def hand_over(self) -> None:
        """Let another node of the shared directory take over, and stand by afterwards."""
        self._hands_over = True
        self._stop.set()

    def start_anew(self) -> None:
        """Stop in order, and start again as a new process."""
        self._starts_anew = True
        self._stop.set()

    async def run(self) -> int:
        """Run to the end. Returns the exit code, STAND_BY_AGAIN or START_ANEW."""
        await self._stop.wait()
        if isinstance(self._failure, LeaseLost):
            # Without the lease nothing can be saved, and the new holder may already write.
            logger.critical("lease_lost error=%r", str(self._failure))
            return STAND_BY_AGAIN
        if self._failure is not None:
            logger.critical("stopping error=%r", str(self._failure))
            return 1
        await self.stop()
        if self._starts_anew:
            return START_ANEW
        return STAND_BY_AGAIN if self._hands_over else 0

    async def _within_shutdown(self, writing: Coroutine[object, object, None]) -> bool:
        """Return False if a full disk does not accept the rest, of which nothing was promised."""
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await writing
        except TimeoutError:
            logger.error("journal_not_drained timeout_s=%s", SHUTDOWN_S)
            return False
        return True

    async def stop(self) -> None:
        """Disconnect clients and write everything, with a snapshot if no standby has it."""
        if self._watching is not None:
            self._watching.cancel()
        sharing = self.sharing
        broker = self.broker
        reference = "" if sharing is None else await sharing.others()
        if self._clustering is not None:
            await self._leave_cluster(self._clustering)
            return
        if self._serving is not None:
            await self._serving
        for server in self.listeners:
            server.close()
        if self.federation is not None:
            await self.federation.stop()
        if broker is not None:
            logger.info("shutting_down")
            if self.maintenance is not None:
                await self.maintenance.stop()
            broker.touch()
            if reference:
                # Received packets are acknowledged first, so that clients do not send them again.
                await self._within_shutdown(broker.settle())
            broker.node.shut_down(reference)
            broker.turn()
            if not reference:
                await broker.wait_for_disconnects(SHUTDOWN_S)
            is_drained = await self._within_shutdown(broker.drain_journal())
            if self.maintenance is not None and not reference and is_drained:
                await self.maintenance.take_snapshot()
            broker.close()
        # Released last: after that, no thread of this process may write to the directory.
        if sharing is not None:
            await sharing.stop()
        if broker is not None and reference:
            await broker.wait_for_disconnects(SHUTDOWN_S)
        if self.admin is not None:
            await self.admin.stop()
        if self.storage is not None:
            self.storage.close()
        logger.info("stopped")

    async def _leave_cluster(self, cluster: ClusterMembership) -> None:
        """Hand over the leaderships, then tell the clients which nodes to use."""
        logger.info("shutting_down")
        if self._serving is not None:
            self._serving.cancel()
        for server in self.listeners:
            server.close()
        broker = cluster.broker
        reference = await cluster.leave()
        broker.touch()
        broker.node.shut_down(reference)
        broker.turn()
        await broker.wait_for_disconnects(SHUTDOWN_S)
        is_drained = await self._within_shutdown(broker.drain_journal())
        if self.maintenance is not None:
            await self.maintenance.stop()
            if is_drained:
                await self.maintenance.take_snapshot()
        await cluster.stop()
        broker.close()
        if self.admin is not None:
            await self.admin.stop()
        cluster.storage.close()
        logger.info("stopped")
