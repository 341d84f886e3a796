"""A broker for tests, in a thread of the test's own process.

    from holdfast.testing import Broker

    def test_greeting():
        with Broker() as broker:                # or: async with Broker() as broker
            program = Program(broker.host, broker.port)

It is the broker of `holdfast serve` with its log, its listeners and its checks, and it starts in
some 10 ms once its modules are loaded. It listens on a free port of the loopback interface. With
the plugin `holdfast.pytest_plugin`, pytest has the fixture `holdfast_broker`.
"""

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, cast

if TYPE_CHECKING:
    from holdfast.config.schema import Config
    from holdfast.io.sockets.transport import ClientTransport
    from holdfast.process.server import Server

__all__ = ["Broker", "BrokerFailed"]

MEMORY_DIRECTORY: Final = Path("/dev/shm")
"""The directory for temporary data, if it is there: fsync costs nothing in memory."""
STOP_TIMEOUT_S: Final = 15.0
"""The most seconds to wait for the broker's thread. A stop itself is bounded by
`server.SHUTDOWN_S`."""


class BrokerFailed(Exception):
    """The broker could not start, or stopped by itself. The text has the reason."""


class InProcessBroker:
    """A broker of this process, with a thread and an event loop of its own.

    A test that blocks its own event loop, or has none, therefore does not block the broker. The
    methods are for one thread at a time. A broker that was stopped or killed can be started again,
    on the same port and data directory.
    """

    host: Final = "127.0.0.1"

    def __init__(
        self,
        *,
        port: int = 0,
        users: Mapping[str, str] | None = None,
        acl: str | None = None,
        data: str | os.PathLike[str] | None = None,
        listeners: Sequence[Mapping[str, object]] = ({},),
        admin: bool = False,
        config: str | os.PathLike[str] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Describes a broker; `start` starts it.

        `port`: of the first listener; 0: a free one. `users`: the password of each user name; with
        any, other clients are refused. `acl`: the text of an ACL file. `data`: a directory that is
        kept; None: a temporary one. `listeners`: the keys of each `[[listeners]]` table. `admin`:
        also open the admin port. `config`: a TOML file. `settings`: values by dotted key, such as
        `{"limits.qos_max": 1}`; they win.
        """
        self._users = dict(users or {})
        self._acl = acl
        self._kept = None if data is None else Path(data)
        self._listeners = [dict(each) for each in listeners]
        self._config = None if config is None else Path(config)
        self._settings = dict(settings or {})
        self._ports = [port]
        self._admin = admin
        self._admin_port = 0
        self._directory: Path | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Server | None = None
        self._running: asyncio.Future[int] | None = None
        self._failure: BaseException | None = None

    @property
    def port(self) -> int:
        """The port of the first listener."""
        return self.ports[0]

    @property
    def ports(self) -> list[int]:
        """The ports of the listeners, in their order; 0 of a Unix socket. They stay the same when
        the broker starts again."""
        self._check_started()
        return list(self._ports)

    @property
    def url(self) -> str:
        """The first listener's address, as `holdfast.client.Client(servers=...)` takes it."""
        return f"mqtt://{self.host}:{self.port}"

    @property
    def admin_port(self) -> int:
        """The port of the admin API. Raises ValueError if `admin` is off."""
        self._check_started()
        if not self._admin:
            raise ValueError("the broker was made without an admin port: Broker(admin=True)")
        return self._admin_port

    @property
    def data(self) -> Path:
        """The data directory."""
        return self._check_started() / "data" if self._kept is None else self._kept

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> Self:
        """Starts and returns this broker once clients can connect. Raises `BrokerFailed`."""
        if self.is_running:
            raise BrokerFailed("the broker runs already")
        if self._directory is None:
            memory = MEMORY_DIRECTORY
            base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
            self._directory = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir=base))
        self._failure = None
        started = threading.Event()
        thread = self._thread = threading.Thread(
            target=self._run, args=(started,), name="holdfast-test-broker", daemon=True
        )
        thread.start()
        started.wait()
        if self._failure is not None:
            thread.join()
            failure, self._failure = self._failure, None
            self.close()
            raise BrokerFailed(str(failure)) from failure
        return self

    def stop(self) -> None:
        """Stops as SIGTERM does: clients are disconnected and a snapshot is written. Raises
        `BrokerFailed` if the broker failed before."""
        self._finish(kills=False)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise BrokerFailed(f"the broker stopped by itself: {failure}") from failure

    def kill(self) -> None:
        """Ends as `kill -9` does, as far as clients and the data directory show: connections break
        without a DISCONNECT, wills and snapshots are not written, nothing else is acknowledged."""
        self._finish(kills=True)

    def close(self) -> None:
        """Stops, and removes the temporary directory. `start` then begins with an empty one."""
        try:
            self.stop()
        finally:
            directory, self._directory = self._directory, None
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    def _check_started(self) -> Path:
        if self._directory is None:
            raise BrokerFailed("the broker has not been started")
        return self._directory

    def _finish(self, *, kills: bool) -> None:
        """Ends the thread, if there is one."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            # Both are set before `start` returns.
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._end, kills)
        except RuntimeError:
            # The broker failed, and its loop is closed.
            pass
        thread.join(STOP_TIMEOUT_S)
        if thread.is_alive():
            raise BrokerFailed(f"the broker has not stopped within {STOP_TIMEOUT_S:.0f} s")

    def _end(self, kills: bool) -> None:
        """Called in the broker's thread."""
        if self._server is None or self._running is None:
            return
        if kills:
            self._running.cancel()
        else:
            self._server.request_stop()

    def _run(self, started: threading.Event) -> None:
        """Serves until the end: the thread's work."""
        from holdfast.io.event_loop.loop import new_event_loop

        loop = self._loop = new_event_loop()
        try:
            loop.run_until_complete(self._serve(started))
        except Exception as error:  # noqa: BLE001  `start` or `stop` raises it in the test's thread
            self._failure = error
        finally:
            loop.run_until_complete(_cancel_tasks())
            loop.run_until_complete(loop.shutdown_default_executor())
            # This also closes the connections that are left.
            loop.close()
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        from holdfast.process.server import Server

        config = self._configuration()
        if config.cluster.peer_bind or config.node.standby:
            raise BrokerFailed("holdfast.testing has no clusters and pairs: use `holdfast serve`")
        server = self._server = Server(config)
        try:
            await server.start()
        except Exception:
            await server.stop()
            raise
        self._ports = [each.port for each in server.listeners]
        self._admin_port = server.admin_port
        self._running = asyncio.ensure_future(server.run())
        started.set()
        await asyncio.wait({self._running})
        self._failure = server.failure
        if self._running.cancelled() or server.failure is not None:
            await _abandon(server)

    def _configuration(self) -> "Config":
        """The configuration of the broker. Raises `ConfigError` for an option that is wrong."""
        from holdfast.config.load import load

        directory = self._check_started()
        chosen: dict[str, object] = {
            "node.data": str(self.data),
            "admin.enabled": self._admin,
            "admin.port": self._admin_port,
        }
        for number, listener in enumerate(self._listeners):
            port = self._ports[number] if number < len(self._ports) else 0
            table = {"bind": self.host} if "socket" in listener else {"port": port}
            for key, value in (table | listener).items():
                chosen[f"listeners.{number}.{key}"] = value
        if self._users:
            chosen["security.password_file"] = str(self._write_users(directory))
        if self._acl is not None:
            path = directory / "acl"
            path.write_text(self._acl)
            chosen["security.acl_file"] = str(path)
        return load(self._config, {}, chosen | self._settings)

    def _write_users(self, directory: Path) -> Path:
        """Writes the password file. One iteration is enough where the passwords are in the test."""
        from holdfast.security.passwords import hash_password

        path = directory / "passwords"
        path.touch(mode=0o600)
        path.write_text(
            "".join(
                f"{user}:{hash_password(password, iterations=1)}\n"
                for user, password in self._users.items()
            )
        )
        return path


Broker = InProcessBroker
"""The name for tests."""


async def _abandon(server: "Server") -> None:
    """Releases what a broker has opened, and promises and saves nothing more."""
    for listener in server.listeners:
        listener.close()
    if server.broker is not None:
        server.broker.has_failed = True
        await asyncio.to_thread(server.broker.close)
        for session in server.broker.node.state.sessions.values():
            if session.connection is not None and session.connection.transport is not None:
                cast("ClientTransport", session.connection.transport).cut()
    if server.admin is not None:
        await server.admin.stop()
    if server.storage is not None:
        server.storage.close()


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
