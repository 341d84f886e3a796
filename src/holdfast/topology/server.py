"""The manager as a process: its file, its HTTP server, its end."""

import asyncio
import logging
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import uvicorn

from holdfast.topology.api import Api
from holdfast.topology.brokers import MqttBrokers
from holdfast.topology.manager import Manager
from holdfast.topology.settings import Settings
from holdfast.topology.store import Store

logger = logging.getLogger("holdfast.topology")

SHUTDOWN_S: Final = 2
"""How long answers that are under way may take at the end."""


class _QuietServer(uvicorn.Server):
    """Leaves signals to the manager."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Raises StoreError, and OSError if the address cannot be had."""
    brokers = MqttBrokers(
        settings.probe_timeout_s, settings.broker_username or None, settings.broker_password()
    )
    manager = Manager(settings, Store(settings.database), brokers)
    bind = settings.bind.strip("[]")
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        listener = socket.create_server((bind, settings.port), family=family)
    except OSError:
        await manager.stop()
        raise
    server = _QuietServer(
        uvicorn.Config(
            Api(manager).application(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            ssl_certfile=settings.certificate or None,
            ssl_keyfile=settings.key or None,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    manager.start()
    logger.info(
        "ready api=%s:%d database=%s members=%d revision=%d",
        settings.bind, listener.getsockname()[1], settings.database,
        len(manager.state.members), manager.state.revision,
    )  # fmt: skip
    try:
        ended, _ = await asyncio.wait(
            {serving, stopping, *manager.tasks}, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        stopping.cancel()
        manager.release_watchers()
        server.should_exit = True
        await serving
        await manager.stop()
        listener.close()
        logger.info("stopped")
    for task in ended.intersection(manager.tasks):
        # A manager that no longer looks after its members must not seem to live.
        task.result()
