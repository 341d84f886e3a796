"""Delays an fdatasync when that lets more records share it.

A sync of the disk costs the processor more than a message does, and the publishes of several
clients may share one. So records gather for a moment before a sync, if messages come at a rate of
their own. They do not gather if publishers wait for their acknowledgements. Counter-example: a
client that sends a message after each PUBACK would send a third as many.

The broker measures which case it is. A trial has a stretch without gathering and one with it.
Records gather after it if at least as many came in the second stretch, within a tolerance.
"""

from typing import Final

TRIAL_S: Final = 0.1
"""The seconds of each of the two stretches of a trial."""
STAY_S: Final = 2.0
"""The seconds from a trial to the next one. After each that failed they are doubled."""
STAY_S_MAX: Final = 32.0
"""The most seconds between two trials."""
SHARE: Final = 0.8
"""The least records with gathering, as a share of those without."""
GATHERED_MIN: Final = 0.5
"""The records expected in one wait below which gathering is not tried."""
GROUP_RECORDS: Final = 16
"""The records of a commit from which on gathering is not tried, because they share it already."""


class JournalWaits:
    """The longest waits of records for others, in seconds; 0.0: none."""

    def __init__(self, durable_s: float = 0.0, *, among_others: bool = False) -> None:
        """`durable_s`: with durability "fsync", in a cluster with other nodes only if
        `among_others`."""
        self.durable_s = durable_s
        self.among_others = among_others


class CommitPace:
    """Decides by trials whether the records of a node gather before they are committed."""

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._gathers = False
        self._in_trial = False
        self._ends_at = 0.0
        self._stay_s = STAY_S
        # Of the stretch without gathering, when that with it runs; else 0.0.
        self._rate = 0.0
        # The stretch that runs.
        self._began_at = 0.0
        self._sequence = 0
        self._commits = 0

    def wait_s(self, now: float, sequence: int) -> float:
        """Returns how long the records that wait for a commit should wait for others. Call it once
        for each commit. `sequence`: the number of records appended so far."""
        if now >= self._ends_at:
            self._end_stretch(now, sequence)
        self._commits += 1
        return self._gather_s if self._gathers else 0.0

    def _end_stretch(self, now: float, sequence: int) -> None:
        elapsed_s = now - self._began_at
        records = sequence - self._sequence
        rate = records / elapsed_s if elapsed_s else 0.0
        if not self._in_trial or elapsed_s > 2 * TRIAL_S:
            # A stretch that was too long had a pause in it, so its rate says nothing.
            self._begin(now, sequence, False, TRIAL_S)
            self._in_trial = True
            self._rate = 0.0
        elif self._rate:
            succeeded = rate >= SHARE * self._rate
            self._stay_s = STAY_S if succeeded else min(STAY_S_MAX, 2 * self._stay_s)
            self._begin(now, sequence, succeeded, self._stay_s)
            self._in_trial = False
        elif rate * self._gather_s >= GATHERED_MIN and records < GROUP_RECORDS * self._commits:
            self._begin(now, sequence, True, TRIAL_S)
            self._rate = rate
        else:
            self._begin(now, sequence, False, STAY_S)
            self._in_trial = False

    def _begin(self, now: float, sequence: int, gathers: bool, duration_s: float) -> None:
        self._gathers = gathers
        self._ends_at = now + duration_s
        self._began_at = now
        self._sequence = sequence
        self._commits = 0
