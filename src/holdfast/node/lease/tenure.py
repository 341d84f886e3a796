"""Renews a held lease, and decides when its holder must stop promising.

Two checks delay a promise. The *fence*: after a write is durable and before it is promised, the
holder reads `epochs`. If a newer epoch is there, it never promises again. The fence alone makes
promises safe, without any assumption about clocks. A claimant reads the journal's length after it
has announced its epoch. So everything that was durable before a fence check that passed is in that
length.

The *tenure*: a holder whose renewals fail stops promising after half of `timeout_s`, after which
others take over. It gives up after all of it.
"""

from holdfast.node.lease.directory import LeaseDirectory
from holdfast.node.lease.standby_watch import LeaseTimes


class LeaseLost(Exception):
    """This node is no longer the holder: another took over, or it could not renew."""


class Tenure:
    """The tenure of one epoch's holder. Once lost, it stays lost. Its methods may be called from
    several threads."""

    def __init__(
        self, directory: LeaseDirectory, epoch: int, times: LeaseTimes, now: float
    ) -> None:
        self.epoch = epoch
        self._directory = directory
        self._times = times
        self._renewed_at = now
        self._lost = ""

    def renewed(self, began_at: float) -> None:
        """Notes that a renewal that began at `began_at` is in the file. The start counts, because a
        standby may have seen the beat as early as that."""
        self._renewed_at = max(self._renewed_at, began_at)

    def check(self, now: float) -> None:
        """Checks the fence and the time of the last renewal.

        Raises `LeaseLost`, from then on always, if another node took over or the lease ran out.
        """
        if self._lost:
            raise LeaseLost(self._lost)
        silent_s = now - self._renewed_at
        if silent_s > self._times.timeout_s:
            # The time comes first, because the fence check may no longer be possible.
            self._lost = f"not renewed for {silent_s:.3f} s"
            raise LeaseLost(self._lost)
        self.check_fence()

    def has_run_out(self, now: float) -> bool:
        """True if the lease ran out by the clock alone. It does not read the directory, which may
        hang."""
        return now - self._renewed_at > self._times.timeout_s

    def check_fence(self) -> None:
        """Checks the fence alone.

        Raises `LeaseLost` if another epoch is the newest. Raises `OSError` if the check failed: the
        holder then must not promise.
        """
        newest = self._directory.newest_claimed()
        if newest != self.epoch:
            # A smaller epoch means that the file was replaced or cut. Whatever the cause, this is
            # not our lease.
            self._lost = f"epoch {newest} was claimed, ours is {self.epoch}"
            raise LeaseLost(self._lost)

    def may_promise(self, now: float) -> bool:
        """True while the last renewal is recent enough. Otherwise wait for the next one. Call
        `check` first in either case."""
        return now - self._renewed_at <= self._times.timeout_s / 2
