"""The last notes of the broker's core, for the admin port.

A note is a line for the log of the process: a client that connected, a refusal, a leader that
changed. The ring has them whatever the level of the log, so that a reader may begin with the past.
"""

from collections import deque
from typing import Final, NamedTuple

from holdfast.broker.effects import Note

NOTES_MAX: Final = 2000
"""The most notes that are kept."""


CLUSTER_NOTES_MAX: Final = 2000
"""The most notes about the cluster that are kept besides, so that many clients do not displace
them."""
CLUSTER_EVENTS: Final = frozenset((
    "node_suspected", "node_heard_again", "metadata_leader", "disk_stalled", "disk_goes_on",
    "disk_full", "disk_has_space", "node_damaged", "node_removed", "older_copy",
))  # fmt: skip

TEXT_MAX: Final = 500
"""The most characters of a value in a kept note: a client id may have 65,535."""


class RecentNote(NamedTuple):
    """A note, its number and its time in microseconds since 1970."""

    number: int
    at_us: int
    note: Note


class NoteRing:
    """The newest notes of one process, numbered from 1."""

    def __init__(self) -> None:
        self.last = 0
        """The number of the newest note."""
        self._notes: deque[RecentNote] = deque(maxlen=NOTES_MAX)
        self._of_cluster: deque[RecentNote] = deque(maxlen=CLUSTER_NOTES_MAX)

    def add(self, at_us: int, note: Note) -> None:
        """Keep a note, and drop the oldest one if there is no room."""
        self.last += 1
        recent = RecentNote(self.last, at_us, _cut(note))
        self._notes.append(recent)
        if note.event in CLUSTER_EVENTS:
            self._of_cluster.append(recent)

    def after(self, number: int) -> list[RecentNote]:
        """The notes behind a number, oldest first."""
        count = min(self.last - number, len(self._notes))
        if count <= 0:
            return []
        notes = self._notes
        return [notes[index] for index in range(len(notes) - count, len(notes))]

    def of_cluster(self, since_us: int) -> list[RecentNote]:
        """The notes about the cluster since a time, oldest first."""
        return [each for each in self._of_cluster if each.at_us >= since_us]


def _cut(note: Note) -> Note:
    """The note with its long values cut."""
    fields = note.fields
    if all(not isinstance(value, str) or len(value) <= TEXT_MAX for value in fields.values()):
        return note
    cut = {
        name: value[:TEXT_MAX] if isinstance(value, str) else value
        for name, value in fields.items()
    }
    return Note(note.level, note.event, cut)
