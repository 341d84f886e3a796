"""The holder's side: its renewals, and when it must not promise any more.

Two things keep a promise back. The *fence*: after a write is durable and before it is promised,
`epochs` is looked at; if a newer epoch is there, nothing is promised any more, ever. That alone
makes promises safe, without any assumption about clocks: a claimant reads the journal's length
after it has announced its epoch, so what was durable before a look that found nothing is inside.
And the *tenure*: a holder whose renewals do not get through stops promising after half the time
after which others take over, and gives up after all of it.
"""

from holdfast.cluster.lease.directory import LeaseDirectory
from holdfast.cluster.lease.watch import LeaseTimes


class LeaseLost(Exception):
    """This node is not the holder any more: another took over, or it could not renew."""


class Tenure:
    """One epoch's holder. Its methods may be called from several threads."""

    def __init__(
        self, directory: LeaseDirectory, epoch: int, times: LeaseTimes, now: float
    ) -> None:
        self.epoch = epoch
        self._directory = directory
        self._times = times
        self._renewed_at = now
        self._lost = ""

    def renewed(self, began_at: float) -> None:
        """A renewal that began then is in the file."""
        self._renewed_at = max(self._renewed_at, began_at)

    def check(self, now: float) -> None:
        """Raises LeaseLost, once and for all, if another node took over or the lease ran out."""
        if self._lost:
            raise LeaseLost(self._lost)
        silent_s = now - self._renewed_at
        if silent_s > self._times.timeout_s:
            # Before the look, which may not be possible any more.
            self._lost = f"not renewed for {silent_s:.3f} s"
            raise LeaseLost(self._lost)
        self.check_fence()

    def has_run_out(self, now: float) -> bool:
        """The same by the clock alone, without a look that may not come back."""
        return now - self._renewed_at > self._times.timeout_s

    def check_fence(self) -> None:
        """The look at `epochs` alone. Raises LeaseLost, and OSError: then nothing is known, and
        nothing may be promised."""
        newest = self._directory.newest_claimed()
        if newest != self.epoch:
            # Smaller: the file was replaced or cut. Whoever did it, this is not our lease.
            self._lost = f"epoch {newest} was claimed, ours is {self.epoch}"
            raise LeaseLost(self._lost)

    def may_promise(self, now: float) -> bool:
        """False: wait for the next renewal. Call `check` too, first."""
        return now - self._renewed_at <= self._times.timeout_s / 2
