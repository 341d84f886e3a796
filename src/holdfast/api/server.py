"""One broker process put together: data directory, recovery, node, listeners, admin port,
snapshots, retention; and its orderly end."""

import asyncio
import logging
import secrets
import signal
import ssl
import time
from pathlib import Path

from holdfast.api.admin import AdminServer
from holdfast.api.maintenance import Maintenance
from holdfast.config.schema import Config, Listener
from holdfast.drivers.broker import Broker
from holdfast.drivers.storage import Storage, StorageError
from holdfast.drivers.tcp import listen
from holdfast.node.config import NodeConfig
from holdfast.node.node import Node
from holdfast.security.acl import AclError, AclFile
from holdfast.security.enhanced import scram_factory
from holdfast.security.passwords import PasswordError, PasswordFile
from holdfast.security.scram import METHOD, ScramError, ScramFile
from holdfast.security.tls import TlsError, server_context

logger = logging.getLogger("holdfast")

SHUTDOWN_S = 5.0
"""How long clients get to take their last bytes at shutdown."""


class StartError(Exception):
    """The broker cannot start; the text says why and what to do."""


def node_config(config: Config) -> NodeConfig:
    limits = config.limits
    return NodeConfig(
        node_id=config.node.id,
        partitions=config.log.partitions,
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
        wildcard_available=limits.wildcard_available,
        shared_available=limits.shared_available,
        pending_bytes_max=limits.pending_bytes_max,
        subscriptions_per_session=limits.subscriptions_per_session,
        connections=limits.connections,
        connect_timeout_s=limits.connect_timeout_s,
        allow_anonymous=bool(config.security.allow_anonymous),
        sys_interval_s=config.sys.interval_s,
        qos0_logged=list(config.log.qos0),
    )


class Server:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.broker: Broker | None = None
        self.storage: Storage | None = None
        self.admin: AdminServer | None = None
        self.maintenance: Maintenance | None = None
        self.listeners: list[asyncio.Server] = []
        self.ports: list[int] = []
        self.admin_port = 0
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Recover, then listen. Raises StartError."""
        loop = asyncio.get_running_loop()
        config = self.config
        passwords, acl, scram = self._load_security()
        contexts = [self._tls_context(listener) for listener in config.listeners]
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
        node = Node(node_config(config), storage.journal)
        state = node.state
        state.acl = acl
        state.checks_passwords = passwords is not None
        state.client_id_prefix = f"auto-{secrets.token_hex(8)}-"
        if scram is not None:
            state.authenticators[METHOD] = scram_factory(scram.lookup)
        node.tick(loop.time(), time.time_ns() // 1000)
        storage.recover_into(node.state)
        broker = Broker(
            node,
            loop,
            storage,
            passwords.verify if passwords is not None else None,
            config.log.memory_flush_ms / 1000,
            self.fail,
        )
        self.broker = broker
        self.maintenance = Maintenance(broker, storage, config)
        node.start()
        try:
            for listener, context in zip(config.listeners, contexts, strict=True):
                server = await listen(
                    broker, listener.bind, listener.port, listener.max_connections, context
                )
                self.listeners.append(server)
                self.ports.append(server.sockets[0].getsockname()[1])
            if config.admin.enabled:
                self.admin = AdminServer(broker, config.admin.bind, config.admin.port)
                self.admin_port = self.admin.port
                self.admin.start()
        except OSError as error:
            raise StartError(f"cannot listen: {error}") from error
        broker.touch()
        self.maintenance.start()
        logger.info(
            "ready listeners=%s admin=%s data=%s durability=%s sessions=%d records=%d",
            [
                f"{each.bind}:{port}"
                for each, port in zip(config.listeners, self.ports, strict=True)
            ],
            f"{config.admin.bind}:{self.admin_port}" if config.admin.enabled else "off",
            config.node.data,
            config.log.durability,
            len(state.sessions),
            sum(state.journal.high_watermark),
        )

    def _load_security(self) -> tuple[PasswordFile | None, AclFile | None, ScramFile | None]:
        security = self.config.security
        try:
            passwords = (
                PasswordFile.load(security.password_file) if security.password_file else None
            )
            acl = AclFile.load(security.acl_file) if security.acl_file else None
            scram = ScramFile.load(security.scram_file) if security.scram_file else None
        except (PasswordError, AclError, ScramError, OSError) as error:
            raise StartError(str(error)) from error
        return passwords, acl, scram

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
        """Stop at once and for good: the journal cannot be trusted to take more."""
        self._failure = error
        self._stop.set()

    async def run(self) -> int:
        """Until a signal or a failure; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        await self._stop.wait()
        if self._failure is not None:
            logger.critical("stopping error=%r", str(self._failure))
            return 1
        await self.stop()
        return 0

    async def stop(self) -> None:
        """Tell the clients, write everything, take a last snapshot."""
        broker = self.broker
        storage = self.storage
        for server in self.listeners:
            server.close()
        if broker is not None:
            logger.info("shutting down")
            if self.maintenance is not None:
                await self.maintenance.stop()
            broker.touch()
            broker.node.shut_down()
            broker.turn()
            await broker.wait_for_disconnects(SHUTDOWN_S)
            await broker.drain_journal()
            if self.maintenance is not None:
                await self.maintenance.take_snapshot()
            broker.close()
        if self.admin is not None:
            await self.admin.stop()
        if storage is not None:
            storage.close()
        logger.info("stopped")
