"""Connects the lease of a shared data directory with the event loop."""

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.config.schema import Config
from holdfast.io.disk.filesystem_type import NETWORK, file_system_type, objection
from holdfast.io.disk.mastership import OLD_EPOCHS_KEPT_S, Adopt, Mastership, clock
from holdfast.io.disk.standby import Standby
from holdfast.io.disk.storage import Storage, StorageError, now_text
from holdfast.io.event_loop.failures import watched
from holdfast.io.settings.addresses import admin_address, client_addresses
from holdfast.io.settings.node_settings import node_config, of_one
from holdfast.log.files.data_directory import DataDirectoryError, create_or_open_shared
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import Manifest
from holdfast.node.lease.directory import HolderInfo
from holdfast.node.lease.standby_watch import LeaseTimes
from holdfast.node.lease.tenure import LeaseLost
from holdfast.node.state.replicated import ReplicatedState

logger = logging.getLogger("holdfast")

NETWORK_TIMEOUT_S: Final = 2.0
"""The recommended shortest lease in seconds over a network."""
OPEN_ATTEMPTS: Final = 20
OPEN_PAUSE_S: Final = 0.1
"""The attempts to open the directory: nodes started together create it one by one."""


class SharedDirectory:
    """Takes part in the lease of a shared directory, in its threads and in the loop.

    A holder whose loop stops beating, or whose directory hangs, must lose the lease. Both are
    checked, because either one alone would leave clients with a broker that does not respond.
    """

    def __init__(
        self,
        config: Config,
        *,
        adopt: Adopt,
        on_holding: Callable[[ReplicatedState, Storage], None],
        on_failed: Callable[[BaseException], None],
        on_handover: Callable[[], None],
    ) -> None:
        """Opens the directory. Raises `StorageError` if it cannot be shared.

        The callbacks are those of `Mastership`.
        """
        self._on_failed = on_failed
        path = Path(config.node.data)
        manifest = _open(path, config)
        kind = file_system_type(path)
        text = objection(kind)
        if text:
            raise StorageError(f"{path}: cannot be shared: {text}")
        if kind in NETWORK and config.lease.timeout_s < NETWORK_TIMEOUT_S:
            logger.warning(
                "lease_timeout_short timeout_s=%s file_system=%s recommended_s=%s",
                config.lease.timeout_s,
                kind,
                NETWORK_TIMEOUT_S,
            )
        times = LeaseTimes(
            config.lease.timeout_s, config.lease.heartbeat_s, config.lease.heartbeat_s / 5
        )
        self._loop = asyncio.get_running_loop()
        self._heartbeat: asyncio.TimerHandle | None = None
        self._tidying: asyncio.Task[None] | None = None
        self.node_id = config.node.id
        """The name of this process among those that share the directory."""
        self.directory_id = manifest.node_id
        """The id of the node whose directory it is, in the log, the metadata and the Raft log.
        The processes are its lives, so it keeps its id, incarnation and votes at a takeover."""
        files = OsFileSystem(path)
        limits = node_config(of_one(config, manifest.node_id))
        self.mastership = Mastership(
            files,
            path,
            Standby(files, path, config.log.segment_bytes, limits),
            HolderInfo(config.node.id, client_addresses(config), admin_address(config)),
            times,
            file_system=kind,
            kills_stale_holder=config.lease.kill_stale_holder,
            adopt=adopt,
            call_soon=self._loop.call_soon_threadsafe,
            on_holding=on_holding,
            on_failed=on_failed,
            on_handover=on_handover,
        )

    def start(self) -> None:
        """Begins to watch the lease. Raises `StorageError` or `OSError` if that is impossible."""
        try:
            self.mastership.start()
        except ValueError as error:
            raise StorageError(str(error)) from error

    def serving(self) -> None:
        """Begins to beat: the node that took over has opened its listeners."""
        # The standby's state lives long, so the collector need not traverse it.
        gc.freeze()
        self._beat()
        self._tidying = watched(self._tidy())

    def confirm(self) -> None:
        """Waits for the right to promise: see `Renewal.confirm`. Runs in the journal's thread."""
        renewal = self.mastership.renewal
        assert renewal is not None
        renewal.confirm()

    def sys_values(self) -> dict[str, str]:
        """Returns the values of $SYS. Only the holder of the lease publishes them."""
        return {"lease/holder": self.node_id, "lease/epoch": str(self.mastership.epoch)}

    def role(self) -> str:
        return "holder" if self.mastership.is_holder else "standby"

    async def others(self) -> str:
        """Returns the addresses of possible successors if this node holds the lease.

        The form is that of `holdfast.addresses`.
        """
        if not self.mastership.is_holder:
            return ""
        try:
            nodes = await asyncio.to_thread(self.mastership.other_nodes)
        except OSError as error:
            logger.warning("nodes_not_read error=%r", str(error))
            return ""
        return ",".join(node.address for node in nodes if node.address)

    async def stop(self) -> None:
        """Releases the lease. The caller makes no promises any more."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._tidying is not None:
            self._tidying.cancel()
        await asyncio.to_thread(self.mastership.stop)

    def _beat(self) -> None:
        renewal = self.mastership.renewal
        assert renewal is not None
        if renewal.tenure.has_run_out(clock()):
            # The directory hangs, and so does every thread that uses it. Another node may serve by
            # now, and no read will ever return to report that.
            timeout_s = self.mastership.times.timeout_s
            self._on_failed(LeaseLost(f"not renewed for {timeout_s:g} s: the directory hangs"))
            return
        renewal.loop_is_alive()
        self._heartbeat = self._loop.call_later(self.mastership.times.heartbeat_s, self._beat)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(OLD_EPOCHS_KEPT_S)
            try:
                await asyncio.to_thread(self.mastership.forget_old_epochs)
                return
            except LeaseLost:
                return  # The renewal reports it.
            except OSError as error:
                # Their hard links occupy space, so this is repeated until it succeeds.
                logger.warning("old_epochs_not_removed error=%r", str(error))


def _open(path: Path, config: Config) -> Manifest:
    for attempt in range(OPEN_ATTEMPTS):
        try:
            return create_or_open_shared(
                path,
                config.node.id,
                config.log.partitions,
                now_text(),
                secrets.token_hex(8),
            )
        except DataDirectoryError as error:
            if not error.in_use or attempt == OPEN_ATTEMPTS - 1:
                raise StorageError(str(error)) from error
        time.sleep(OPEN_PAUSE_S)
    raise AssertionError
