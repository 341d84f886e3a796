"""Records the progress of shared groups in the log, as CURSOR records of their coordinator."""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from operator import le
from typing import Final

from holdfast.node.context import NEVER
from holdfast.node.groups.control_frames import Place
from holdfast.node.groups.group_state import RANGES_MAX, Coordination
from holdfast.node.groups.sent_records import Offsets
from holdfast.node.node_state import NodeState
from holdfast.node.state.state_records import append_cursor, changed_positions

DONE_IN_RECORD: Final = 10_000
"""The most finished offsets in one CURSOR record, below the limit of its count field."""


def collect_sent(coordination: Coordination) -> Offsets:
    """Finishes the records in no table that no member has any more, and returns them."""
    share = coordination.share
    if share is None or not share.sent.offsets:
        return {}
    finished = share.sent.collect(share.group)
    positions = coordination.positions()
    for partition, offsets in finished.items():
        for offset in offsets[bisect_left(offsets, positions[partition]) :]:
            coordination.finished.append((partition, offset))
            coordination.finished_offsets.add(partition, offset, offset + 1)
    coordination.is_full = len(coordination.finished_offsets) >= RANGES_MAX
    return finished


class ProgressLog:
    """The groups whose progress is to be logged, and the time for it."""

    def __init__(
        self, state: NodeState, after_newest: Callable[[int, Callable[[], None]], None]
    ) -> None:
        self._state = state
        self._after_newest = after_newest
        self._due: dict[Coordination, None] = {}
        self._due_at = -1.0

    def add(self, coordination: Coordination) -> None:
        if not self._due:
            self._due_at = self._state.now + self._state.config.progress_interval_s
        self._due[coordination] = None

    def forget(self, coordination: Coordination) -> None:
        self._due.pop(coordination, None)

    def hasten(self) -> None:
        """Lets the next `flush` log the progress."""
        self._due_at = self._state.now

    def flush(self) -> None:
        """Logs the progress of all groups if it is time."""
        if not self._due or self._due_at > self._state.now:
            return
        due = self._due
        self._due = {}
        for coordination in due:
            if coordination.share is not None:
                coordination.share.is_in_progress = False
            if coordination.is_open:
                try:
                    self._log(coordination)
                except AssertionError as error:
                    # The log keeps the positions before. Nodes report what they have finished.
                    self._state.note_stopped(f"progress of {coordination.key}", str(error))

    def timer(self) -> float:
        return self._due_at if self._due else NEVER

    def _log(self, coordination: Coordination) -> None:
        finished = collect_sent(coordination)
        positions = coordination.positions()
        logged = coordination.logged
        assert logged is None or all(map(le, logged, positions)), "a position of a group falls"
        changed = changed_positions(coordination.logged, positions)
        done = [place for place in coordination.finished if place[1] >= positions[place[0]]]
        coordination.finished = []
        for partition, offset in enumerate(positions):
            coordination.finished_offsets.drop_below(partition, offset)
        coordination.logged = positions
        while changed or done:
            self._append(coordination, changed, done[:DONE_IN_RECORD])
            changed = []
            done = done[DONE_IN_RECORD:]
        share = coordination.share
        if finished and share is not None:
            self._after_newest(coordination.home, partial(share.sent.forget, finished))

    def log_end(self, coordination: Coordination) -> None:
        """Logs that the group has ended: a record without positions."""
        self._append(coordination, [], [])

    def _append(
        self, coordination: Coordination, changed: list[tuple[int, int]], done: list[Place]
    ) -> None:
        key = coordination.key.encode()
        append_cursor(self._state, key, changed, {}, done, coordination.epoch)
