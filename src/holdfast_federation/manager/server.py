"""The manager's process: its settings file, its HTTP server and its end."""

import asyncio
import logging
import resource
import signal
import ssl
from pathlib import Path
from typing import Final

from holdfast.security.certificates import certificate_identity
from holdfast.security.http.connections import BoundedConnection, bounded
from holdfast.security.http.guard import Guard
from holdfast.security.http.requests import hosts_of_bind
from holdfast.security.http.server import HttpServer, listen
from holdfast.security.tls import server_context
from holdfast_federation.manager.api import CERTIFICATE_NAME, Api, envelope_of_refusal
from holdfast_federation.manager.brokers import MqttBrokers
from holdfast_federation.manager.graph.health import measured_ms
from holdfast_federation.manager.manager import Manager
from holdfast_federation.manager.settings import ManagerSettings
from holdfast_federation.manager.state.federation_state import Member
from holdfast_federation.manager.state.store import StateStore, StateStoreError, file_of

logger = logging.getLogger("holdfast.topology")

PROBES_AT_ONCE: Final = 32


class Rounds:
    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self.tasks: list[asyncio.Task[None]] = []
        """The running tasks. A task that ends without being cancelled has a defect."""

    def start(self) -> None:
        self.tasks = [
            asyncio.create_task(self._probe_for_ever()),
            asyncio.create_task(self._manager.changes.maintain(self._manager.adopted)),
        ]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def probe_all(self) -> None:
        """Probes all members once and removes the dead ones. Raises StateStoreError when the
        database fails."""
        manager = self._manager
        slots = asyncio.Semaphore(PROBES_AT_ONCE)

        async def probe(member: Member) -> tuple[Member, float | None]:
            async with slots:
                return member, await manager.brokers.round_trip_ms(member.ip, member.is_vouched)

        for member, trip_ms in await asyncio.gather(
            *(probe(each) for each in manager.state.members.values())
        ):
            if manager.state.members.get(member.id) != member:
                # It has left, or joined again, since.
                continue
            # A member that used to report and is silent does not live, whatever its broker does.
            is_silent = member.id in manager.reports and manager.reports.fresh(member.id) is None
            succeeded = measured_ms(trip_ms) is not None and not is_silent
            manager.health.probed(member.id, succeeded)
            manager.round_trips.add_measurement(member.id, trip_ms)
            manager.counts["probes_failed"] += not succeeded
        if manager.verdict().dead:
            await manager.remove_dead()

    async def _probe_for_ever(self) -> None:
        manager = self._manager
        while True:
            start = manager.clock()
            try:
                await self.probe_all()
            except StateStoreError as error:
                logger.error("not_repaired error=%r", str(error))
            interval_s = manager.settings.probe_interval_s
            await asyncio.sleep(max(0.0, start + interval_s - manager.clock()))


CONNECTIONS_MAX: Final = 4096
"""2,000 of them may watch for changes. At most three quarters of the process's descriptors."""
SHUTDOWN_S: Final = 2
"""The longest time for responses under way at the end."""


class _CertifiedProtocol(BoundedConnection):
    """An HTTP connection that adds the name of the client's certificate to its requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        name = certificate_identity(transport.get_extra_info("peercert"))
        self.app_state = {**self.app_state, CERTIFICATE_NAME: name}
        super().connection_made(transport)


def _connections_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if soft < 0 else min(CONNECTIONS_MAX, soft * 3 // 4)


def _tls(settings: ManagerSettings) -> ssl.SSLContext | None:
    """Returns the TLS context. Raises TlsError."""
    if not settings.certificate:
        return None
    return server_context(
        Path(settings.certificate),
        Path(settings.key),
        Path(settings.client_ca) if settings.client_ca else None,
        require_certificate=settings.access in ("certificate", "both"),
    )


async def serve(settings: ManagerSettings) -> None:
    """Runs the manager until SIGTERM or SIGINT. Raises StateStoreError, TlsError, or OSError if the
    address cannot be used."""
    tls = _tls(settings)
    brokers = MqttBrokers(
        settings.probe_timeout_s, settings.broker_username or None, settings.broker_password()
    )
    store = StateStore(file_of(settings.db_url))
    manager = Manager(settings, store, brokers)
    rounds = Rounds(manager)
    try:
        await manager.repair()
        listener = listen(settings.bind, settings.port)
    except (OSError, StateStoreError):
        await manager.stop()
        raise
    server = HttpServer(
        Guard(Api(manager).application(), hosts_of_bind(settings.bind), envelope_of_refusal),
        bounded(_CertifiedProtocol, _connections_max()),
        SHUTDOWN_S,
        tls,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    rounds.start()
    logger.info(
        "ready api=%s:%d database=%s members=%d revision=%d",
        settings.bind, listener.getsockname()[1], store.name,
        len(manager.state.members), manager.state.revision,
    )  # fmt: skip
    try:
        ended, _ = await asyncio.wait(
            {serving, stopping, *rounds.tasks}, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        stopping.cancel()
        manager.release_watchers()
        server.should_exit = True
        await serving
        await rounds.stop()
        await manager.stop()
        listener.close()
        logger.info("stopped")
    for task in ended.intersection(rounds.tasks):
        # A manager that no longer looks after its members must not seem to live.
        task.result()
