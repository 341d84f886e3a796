"""Runs a shared directory's lease: one thread watches and takes over, one renews it.

    watching ──(holder down)──▶ taking over ──▶ holding ──▶ released, or lost
        ▲                            │
        └──(another node was faster)─┘

Watching and taking over share one thread with everything that reads or writes the directory, so the
event loop never blocks. Callbacks reach the loop through `call_soon`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from holdfast.io.disk.filesystem_type import NETWORK
from holdfast.io.disk.process_identity import kill_if_same, machine_identity, process_start
from holdfast.io.disk.standby import Standby
from holdfast.io.disk.storage import Storage, StorageError
from holdfast.log.files.data_directory import DataDirectoryError, open_epoch, read_manifest
from holdfast.log.files.filesystem import FileSystem, Lock, WriteFile
from holdfast.log.files.layout import (
    BEFORE_ADOPTION,
    FORMAT_SHARED,
    JOURNAL,
    MANIFEST,
    DataDirectory,
    Manifest,
)
from holdfast.log.journal.epoch_folders import (
    EPOCH_FILE,
    NEVER_SHARED,
    CorruptEpoch,
    Epoch,
    epoch_folders,
    keep_epoch,
    newest_epoch,
    remove_epoch,
)
from holdfast.log.journal.tailing import FollowError
from holdfast.node.lease.claim import Claim, claim, link_epoch, seal
from holdfast.node.lease.directory import RELEASED as RELEASED_FLAG
from holdfast.node.lease.directory import HolderInfo, LeaseDirectory, write_beat
from holdfast.node.lease.standby_watch import EXPIRED, WAIT, HolderWatch, LeaseTimes, Sight
from holdfast.node.lease.tenure import LeaseLost, Tenure
from holdfast.node.state.replicated import ReplicatedState

logger = logging.getLogger("holdfast")

CallSoon = Callable[..., object]
"""The function `loop.call_soon_threadsafe`."""
Adopt = Callable[[Path, DataDirectory, int], DataDirectory]
CLAIM_PAUSE_S: Final = 0.2
"""The pause in seconds after a failed takeover."""
TAKEOVER_TIMEOUT_S: Final = 120.0
"""The longest takeover in seconds. After it the beats end, so that another node may try."""
ADOPTION_TIMEOUT_S: Final = 3600.0
"""The longest takeover in seconds that writes the log of a single broker again."""
OLD_EPOCHS_KEPT_S: Final = 60.0
"""The time in seconds that readers may still use the folder of the epoch before."""
EXIT_TIMEOUT_S: Final = 10.0
"""The time in seconds for the event loop to end the process after the lease was lost."""
EXIT_HANGING: Final = 70
ERROR_REPEAT_S: Final = 10.0
"""The shortest time in seconds between two log lines about the same problem."""


def clock() -> float:
    """Returns a monotonic time that includes suspension, because the lease expires then too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Renewal:
    """The holder's thread: writes beats, looks for newer claims and handover requests."""

    def __init__(
        self,
        directory: LeaseDirectory,
        taken: Claim,
        times: LeaseTimes,
        *,
        syncs: bool,
        on_lost: Callable[[LeaseLost], None],
        on_handover: Callable[[], None],
    ) -> None:
        """`syncs`: beats must be synced to be seen. The callbacks run in this thread."""
        self.tenure = Tenure(directory, taken.epoch, times, clock())
        self._directory = directory
        self._taken = taken
        self._times = times
        self._syncs = syncs
        self._on_lost = on_lost
        self._on_handover = on_handover
        self._beat: WriteFile = directory.create_beat(taken.epoch)
        self._counter = 0
        self._stopping = threading.Event()
        self._handover_told = False
        # The time until which the event loop has proved that it runs. Beats end after it.
        self._alive_until = clock() + TAKEOVER_TIMEOUT_S
        self._thread = threading.Thread(target=self._run, name="lease-renewal", daemon=True)
        self._thread.start()

    def loop_is_alive(self) -> None:
        """Extends the beats every `heartbeat_s`: a node whose loop hangs must lose its lease."""
        self._alive_until = clock() + self._times.timeout_s / 2

    def allow(self, duration_s: float) -> None:
        """Lets a takeover last as long, before others may try."""
        self._alive_until = clock() + duration_s

    def confirm(self) -> None:
        """Waits, in the journal's thread, until promises are allowed. Raises `LeaseLost`."""
        while True:
            now = clock()
            try:
                self.tenure.check(now)
                if self.tenure.may_promise(now):
                    return
            except OSError:
                # Nothing is known, so nothing is promised. If that lasts, renewals fail too.
                pass
            self._stopping.wait(self._times.heartbeat_s / 4)

    def release(self) -> None:
        """Lets another node take over at once. The caller guarantees that every promise is in the
        journal and that it makes no more. Raises `OSError` if the beat cannot be written."""
        self.stop()
        write_beat(self._beat, self._counter + 1, RELEASED_FLAG)
        if self._syncs:
            self._beat.sync()
        self._taken.lock.release()

    def stop(self) -> None:
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._renew()
            except LeaseLost as lost:
                self._on_lost(lost)
                if not self._stopping.wait(EXIT_TIMEOUT_S):
                    logger.critical("event_loop_hangs lease=%r text='the process exits'", str(lost))
                    os._exit(EXIT_HANGING)
                return
            except OSError as error:
                # The tenure decides when missing renewals mean that the lease is lost.
                logger.warning("lease_not_renewed error=%r", str(error))
            self._stopping.wait(self._times.heartbeat_s)

    def _renew(self) -> None:
        began_at = clock()
        self.tenure.check(began_at)
        if began_at <= self._alive_until:
            self._counter += 1
            write_beat(self._beat, self._counter, 0)
            if self._syncs:
                self._beat.sync()
            # After the beat: a process that slept before it may have lost the lease meanwhile.
            self.tenure.check_fence()
            self.tenure.renewed(began_at)
        if not self._handover_told and self._directory.handover_requested(self.tenure.epoch):
            self._handover_told = True
            self._on_handover()


class Mastership:
    """A node's part in the lease: standby, then holder, once. A lost lease ends the process."""

    def __init__(
        self,
        root: FileSystem,
        path: Path,
        standby: Standby,
        info: HolderInfo,
        times: LeaseTimes,
        *,
        file_system: str,
        kills_stale_holder: bool,
        adopt: Adopt,
        call_soon: CallSoon,
        on_holding: Callable[[ReplicatedState, Storage], None],
        on_failed: Callable[[BaseException], None],
        on_handover: Callable[[], None],
    ) -> None:
        """`info`: without role and process. `adopt`: fills the folder of a new epoch with the
        content of an epoch of a single broker, in the form of a cluster's node. Callbacks in the
        loop: `on_holding` once, with a state to serve; `on_failed` when the lease is lost or the
        directory fails."""
        self.directory = LeaseDirectory(root)
        self.standby = standby
        self.times = times
        self.renewal: Renewal | None = None
        self.took_over_because = ""
        self.takeover_s = 0.0
        """The seconds from the decision to take over until the loop received the state."""
        self._root = root
        self._path = path
        self._info = replace(
            info,
            machine=machine_identity(),
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
        )
        self._watch = HolderWatch(times)
        self._syncs = file_system in NETWORK
        self._kills = kills_stale_holder
        self._adopt = adopt
        self._call_soon = call_soon
        self._on_holding = on_holding
        self._on_failed = on_failed
        self._on_handover = on_handover
        self._node_lock: Lock | None = None
        self._counting = NEVER_SHARED
        self._troubled_at = -ERROR_REPEAT_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    @property
    def epoch(self) -> int:
        """The epoch that this node holds, else the newest valid one it has seen."""
        renewal = self.renewal
        return self._counting.number if renewal is None else renewal.tenure.epoch

    @property
    def is_holder(self) -> bool:
        return self.renewal is not None

    def start(self) -> None:
        """Begins to watch. Raises `OSError`, and `ValueError` for a node with the same id."""
        lock = self.directory.lock_node(self._info.node_id)
        if lock is None:
            raise ValueError(
                f"a node {self._info.node_id!r} is running on this directory already: give each"
                " its own id (--id, or node.id)"
            )
        self._node_lock = lock
        self.directory.mark_form(self._info)
        self._tell_role("standby")
        self._thread.start()

    def stop(self) -> None:
        """Stops watching, and releases the lease if it is held: see `Renewal.release`."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            if self.renewal is not None:
                self.renewal.release()
            self.directory.remove_node(self._info.node_id)
        except OSError as error:
            logger.warning("lease_not_released error=%r", str(error))
        if self._node_lock is not None:
            self._node_lock.release()

    def other_nodes(self) -> list[HolderInfo]:
        """Returns the other nodes that run on the directory. Raises `OSError`."""
        return [each for each in self.directory.nodes() if each.node_id != self._info.node_id]

    def forget_old_epochs(self) -> None:
        """Removes earlier epochs, which keep freed space. Raises `OSError` or `LeaseLost`."""
        renewal = self.renewal
        if renewal is None:
            return
        epoch = renewal.tenure.epoch
        renewal.tenure.check_fence()
        try:
            manifest = self._manifest()
        except DataDirectoryError as error:
            # The directory may come back.
            raise OSError(str(error)) from None
        for number in [0, *epoch_folders(self._root)]:
            if number < epoch:
                self._keep_former(DataDirectory(Epoch(number).files(self._root), manifest), number)
                remove_epoch(self._root, number)
        self.directory.forget_before(epoch)

    def _keep_former(self, directory: DataDirectory, number: int) -> None:
        """Keeps the content of an epoch that was adopted, not that of a takeover in vain."""
        names = directory.files.list("")
        # An epoch of a single broker has no manifest of its own.
        is_own = number != 0 and (MANIFEST in names or EPOCH_FILE not in names)
        if not is_own and not directory.manifest.is_replica and directory.files.list(JOURNAL):
            keep_epoch(self._root, number, BEFORE_ADOPTION)

    def _tell_role(self, role: str) -> None:
        self.directory.write_node(replace(self._info, role=role, since_us=time.time_ns() // 1000))

    # The watching thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._step():
                    return
        except BaseException as error:  # noqa: BLE001
            self._report(self._on_failed, error)

    def _step(self) -> bool:
        """Looks once and acts on it. Returns True if this node holds the lease now."""
        pause_s = self.times.poll_s
        try:
            began_at = clock()
            sight = self._look()
            reason = self._watch.judge(sight, began_at, clock())
            if reason != WAIT:
                if self._take_over(reason):
                    return True
                pause_s = CLAIM_PAUSE_S
            else:
                self._follow()
        except (OSError, CorruptEpoch, DataDirectoryError) as error:
            # The directory may come back. A node without the lease makes no promises meanwhile.
            self._complain(error)
            pause_s = CLAIM_PAUSE_S
        self._stopping.wait(pause_s)
        return False

    def _look(self) -> Sight:
        directory = self.directory
        epoch = directory.newest_claimed()
        if epoch != self._counting.number:
            self._counting = newest_epoch(self._root)
        beat = directory.read_beat(epoch)
        return Sight(
            epoch,
            self._counting.number == epoch,
            beat.counter,
            directory.is_locked(epoch),
            beat.is_released,
        )

    def _follow(self) -> None:
        standby = self.standby
        try:
            if standby.is_loaded:
                standby.follow(self._counting)
            else:
                standby.load(self._counting)
        except (FollowError, FileNotFoundError) as error:
            logger.warning("standby_reloads reason=%r", str(error))
            standby.load(newest_epoch(self._root))

    def _complain(self, error: BaseException) -> None:
        now = clock()
        if now - self._troubled_at >= ERROR_REPEAT_S:
            self._troubled_at = now
            logger.error("lease_directory_failed error=%r", str(error))

    def _take_over(self, reason: str) -> bool:
        """Tries to take over. Returns False if another node was faster or claimed later."""
        started = clock()
        if self._must_wait():
            return False
        taken = claim(self.directory, replace(self._info, since_us=time.time_ns() // 1000))
        if taken is None:
            return False
        logger.warning("lease_claimed epoch=%d reason=%s", taken.epoch, reason)
        try:
            # Beats begin now: otherwise others would count a long takeover as a dead holder.
            renewal = self._renew(taken)
        except OSError:
            taken.lock.release()
            raise
        try:
            state, storage = self._become_holder(taken, renewal, reason)
            renewal.tenure.check(clock())
        except BaseException as error:
            renewal.stop()
            taken.lock.release()
            self.standby.forget()
            if not isinstance(error, LeaseLost):
                raise
            logger.warning("lease_not_taken epoch=%d reason=%r", taken.epoch, str(error))
            return False
        self.renewal = renewal
        self.took_over_because = reason
        self.takeover_s = clock() - started
        logger.warning(
            "lease_held epoch=%d reason=%s seconds=%.3f", taken.epoch, reason, self.takeover_s
        )
        self._report(self._on_holding, state, storage)
        self._tell_role("holder")
        return True

    def _must_wait(self) -> bool:
        """Whether a node runs that would take an adopted log for that of a single broker."""
        if self.standby.is_loaded:
            return False
        if self._open(newest_epoch(self._root)).manifest.is_replica:
            return False
        older = self.directory.nodes_without_form()
        if older:
            self._complain(
                StorageError(f"stop {', '.join(older)}: an older version on {self._path}")
            )
        return bool(older)

    def _open(self, epoch: Epoch) -> DataDirectory:
        return open_epoch(self._root, self._path, epoch)

    def _renew(self, taken: Claim) -> Renewal:
        return Renewal(
            self.directory,
            taken,
            self.times,
            syncs=self._syncs,
            on_lost=lambda lost: self._report(self._on_failed, lost),
            on_handover=lambda: self._report(self._on_handover),
        )

    def _become_holder(
        self, taken: Claim, renewal: Renewal, reason: str
    ) -> tuple[ReplicatedState, Storage]:
        old = self._counting = newest_epoch(self._root)
        if reason == EXPIRED:
            self._kill_stale_holder(taken.epoch)
        before = self._open(old)
        if before.manifest.is_replica:
            folder = link_epoch(self._root, before.manifest, old, taken.epoch)
        else:
            renewal.allow(ADOPTION_TIMEOUT_S)
            folder = self._adopt(self._path, before, taken.epoch)
        self._bar_older_versions()
        storage = self.standby.take_over(old, folder, taken.lock)
        journal = storage.journal
        last = journal.segments[-1] if journal.segments else None
        seal(
            self.directory,
            taken,
            folder,
            self._info.node_id,
            datetime.now(UTC).isoformat(timespec="milliseconds"),
            None if last is None else last.sequence,
            0 if last is None else last.size_bytes,
        )
        journal.start_segment()
        return self.standby.finish(), storage

    def _bar_older_versions(self) -> None:
        manifest = self._manifest()
        if manifest.format != FORMAT_SHARED:
            later = replace(manifest, format=FORMAT_SHARED)
            DataDirectory(self._root, manifest).write_manifest(later)

    def _manifest(self) -> Manifest:
        """The manifest of the directory, which epochs without their own have."""
        return read_manifest(self._root, self._path)

    def _kill_stale_holder(self, epoch: int) -> None:
        """Kills a local holder that hangs, so that its clients notice and reconnect."""
        if not self._kills:
            return
        holder = self.directory.read_claim(self._counting.number)
        # A former holder that is a standby again, in the same process, has released its lock.
        hangs = self._counting.number < epoch and self.directory.is_locked(self._counting.number)
        if holder is not None and hangs and kill_if_same(holder):
            logger.warning("stale_holder_killed node=%s pid=%d", holder.node_id, holder.pid)

    def _report(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._call_soon(callback, *args)
        except RuntimeError:
            # The loop is closed, so there is no receiver for the report.
            return
