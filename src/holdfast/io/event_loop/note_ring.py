"""Logs the notes of the broker's core, and keeps the last ones for the admin port.

A note is a line for the log of the process: a client that connected, a refusal, a leader that
changed. The ring has them whatever the level of the log, so that a reader may begin with the past.
"""

import logging
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from holdfast.node.effects import Note

logger = logging.getLogger("holdfast")

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
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


_Kept: TypeAlias = tuple[int, str, str, tuple[str, ...], tuple[object, ...]]
"""The time, level, event, names and values of a note. A Note with its dictionary takes twice the
memory, and there is one for each of the last clients."""


class NoteRing:
    """The newest notes of one process, numbered from 1."""

    def __init__(self) -> None:
        self.last = 0
        """The number of the newest note."""
        self._notes: deque[_Kept] = deque(maxlen=NOTES_MAX)
        # The names of fields are those of a few kinds of notes, which share them.
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._of_cluster: deque[RecentNote] = deque(maxlen=CLUSTER_NOTES_MAX)

    def add(self, at_us: int, note: Note) -> None:
        """Keeps a note, and drops the oldest one if there is no room."""
        self.last += 1
        note = _cut(note)
        fields = note.fields
        names = tuple(fields)
        names = self._names.setdefault(names, names)
        self._notes.append((at_us, note.level, note.event, names, tuple(fields.values())))
        if note.event in CLUSTER_EVENTS:
            self._of_cluster.append(RecentNote(self.last, at_us, note))

    def after(self, number: int) -> list[RecentNote]:
        """The notes behind a number, oldest first."""
        count = min(self.last - number, len(self._notes))
        if count <= 0:
            return []
        found: list[RecentNote] = []
        for at_us, level, event, names, values in islice(
            self._notes, len(self._notes) - count, None
        ):
            number = self.last - count + len(found) + 1
            note = Note(level, event, dict(zip(names, values, strict=True)))
            found.append(RecentNote(number, at_us, note))
        return found

    def of_cluster(self, since_us: int) -> list[RecentNote]:
        """The notes about the cluster since a time, oldest first."""
        return [each for each in self._of_cluster if each.at_us >= since_us]


def _cut(note: Note) -> Note:
    """The note with its long values cut."""
    fields = note.fields
    for value in fields.values():
        if isinstance(value, str) and len(value) > TEXT_MAX:
            break
    else:
        return note
    cut = {
        name: value[:TEXT_MAX] if isinstance(value, str) else value
        for name, value in fields.items()
    }
    return Note(note.level, note.event, cut)


class NoteLines:
    """Writes notes to the log.

    `suppresses`: whether the log would leave out a line of this event and level, which it then
    counts; None: it leaves out none. Asked first, because a line that is made and left out costs a
    third of a CONNECT.
    """

    def __init__(self) -> None:
        self.suppresses: Callable[[str, int], bool] | None = None

    def write(self, note: Note) -> None:
        level = LEVELS[note.level]
        if not logger.isEnabledFor(level):
            return
        suppresses = self.suppresses
        if suppresses is not None and suppresses(note.event, level):
            return
        # The values stay arguments, because the log's handler truncates each of them.
        text = " ".join([note.event, *[f"{key}=%r" for key in note.fields]])
        logger.log(level, text, *note.fields.values())


NOTE_LINES: Final = NoteLines()
"""Those of this process."""
