"""Saved states of the brokers beside the table `records`: what a log is, beside its messages.

    LAKE/_state/<µs>.snapshot     the replicated state: sessions, retained messages, groups
                <µs>.json         its log and its offsets; without this file it does not count

A state has what the records before `SavedState.ends` define, and perhaps not all of them. So it
fits a table that has the log up to there, and `holdfast restore --from-lake` makes a data directory
of both.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Final

import msgspec
from msgspec import Struct

from holdfast.client.log.lake.commits import Commit
from holdfast.client.log.lake.errors import LakeError
from holdfast.client.log.lake.files import complete, open_new, remove_all, write_atomically
from holdfast.client.log.lake.objects import LakePath, ObjectPath
from holdfast.client.log.reading.offsets import from_json, generation_in

STATES: Final = "_state"
FORMAT: Final = 1
KEPT: Final = 2
"""The newest states that are kept of those that fit the table."""
EVERY_S: Final = 300.0
"""The least seconds between two states."""
BYTES_PER_S: Final = 1 << 20
"""The most bytes of states a second, on average. A large state is saved less often."""
LEFTOVER_US: Final = 3_600_000_000
"""The µs after which a state without a description was interrupted."""
_NAME: Final = re.compile(r"(\d{20})\.(json|snapshot)")


class SavedState(Struct, frozen=True, kw_only=True):
    """The description of a saved state."""

    log: str
    """The identity of the log, with its generation (`offsets.log_identity`)."""
    taken_us: int
    """The time at which it was requested, in µs since 1970."""
    ends: dict[int, int]
    """Per partition an offset that nothing in the state is behind."""
    bytes: int
    format: int = FORMAT

    def fits(self, offsets: Mapping[int, int]) -> bool:
        """Returns whether a table that ends at these offsets has all that the state is about."""
        return all(end <= offsets.get(p, 0) for p, end in self.ends.items())

    def snapshot(self, lake: LakePath) -> LakePath:
        """Returns the path of the state itself."""
        return _path(lake, self.taken_us, "snapshot")

    def is_due(self, now_us: int) -> bool:
        """Returns whether it is time for another one."""
        wait_s = max(EVERY_S, self.bytes / BYTES_PER_S)
        return not 0 <= now_us - self.taken_us < wait_s * 1e6


def saved_states(lake: LakePath) -> list[SavedState]:
    """Returns the saved states, oldest first. Raises LakeError."""
    place = lake / STATES
    try:
        found = [_NAME.fullmatch(each.name) for each in place.iterdir()]
    except FileNotFoundError:
        return []
    names = sorted(each[0] for each in found if each is not None and each[2] == "json")
    return [each for name in names if (each := _read(place / name)) is not None]


def _read(path: LakePath) -> SavedState | None:
    try:
        text = path.read_bytes()
        number = msgspec.json.decode(text, type=_Number).format
        if number != FORMAT:
            raise LakeError(f"{path} has format {number}, this version reads {FORMAT}: use a newer")
        return msgspec.json.decode(text, type=SavedState)
    except FileNotFoundError:
        return None  # A run has just removed it.
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LakeError(f"{path} is damaged: {error}. Remove it to do without it") from None


def save_state(
    lake: LakePath,
    write: Callable[[IO[bytes]], None],
    describe: Callable[[int], SavedState],
    taken_us: int,
) -> SavedState:
    """Saves the state that `write` writes. `describe` describes it afterwards, from its bytes.

    It counts when its description is there. So no crash leaves half a state that counts.
    """
    path = _path(lake, taken_us, "snapshot")
    if not isinstance(path, ObjectPath):
        path.parent.mkdir(parents=True, exist_ok=True)
    file = open_new(path)
    try:
        write(file)
        state = describe(complete(file, path))
    except BaseException:
        file.close()
        remove_all([path])
        raise
    write_atomically(_path(lake, taken_us, "json"), msgspec.json.encode(state))
    return state


def usable(
    states: Sequence[SavedState], commit: Commit, ends: Mapping[int, int]
) -> list[SavedState]:
    """Returns the states that fit the messages of a commit below some offsets, oldest first.

    A state of a former generation of the log was saved before the commit that notes the restore. It
    fits below the offsets where the generations part.
    """
    name, _ = generation_in(commit.log)
    parted = dict(ends)
    for restored in commit.restored:
        for p, at in restored.offsets.items():
            parted[int(p)] = min(at, parted.get(int(p), 0))
    return [
        each
        for each in states
        if generation_in(each.log)[0] == name
        and each.fits(ends if each.log == commit.log else parted)
    ]


def remove_old(lake: LakePath, commit: Commit) -> None:
    """Removes the states that no restore needs, and what was left of interrupted ones. States that
    are ahead of the table stay. Raises LakeError."""
    states = saved_states(lake)
    fitting = usable(states, commit, from_json(commit.offsets))
    ahead = [each for each in states if each.log == commit.log and each not in fitting]
    kept = {each.taken_us for each in (*fitting[-KEPT:], *ahead)}
    newest_us = max(kept, default=0)
    old = [each for each in (lake / STATES).iterdir() if _is_old(each.name, kept, newest_us)]
    # The descriptions first: without its state none may count.
    remove_all(sorted(old, key=lambda each: each.name.endswith(".snapshot")))


def _is_old(name: str, kept: Collection[int], newest_us: int) -> bool:
    """Returns whether a file is not of a kept state, and not of one that is being written."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) in kept:
        return False
    return match[2] == "json" or int(match[1]) < newest_us - LEFTOVER_US


def _path(lake: LakePath, taken_us: int, ending: str) -> LakePath:
    return lake / STATES / f"{taken_us:020}.{ending}"


class _Number(Struct):
    format: int
