"""What an edge remembers over a restart: its name at the broker, the subscriptions that the broker
may have of it, and what clients wanted not long ago."""

import secrets
import time
from pathlib import Path
from typing import Final

import msgspec

from holdfast.log.filesystem import OsFileSystem, read_whole, write_whole

FILE: Final = "edge.json"


class BadState(Exception):
    """The file is not what an edge writes. The text says what to do."""


class EdgeState(msgspec.Struct):
    token: str
    """A random name, of this directory: 10 hexadecimal digits."""
    subscribed: dict[str, int] = msgspec.field(default_factory=dict)
    """Filters that the broker may have, with the subscription identifier of each."""
    interest: list[tuple[str, str, str, float]] = msgspec.field(default_factory=list)
    """As `InterestSources.snapshot`, of `written_at`."""
    written_at: float = 0.0
    """Unix time."""

    def remembered_interest(self) -> list[tuple[str, str, str, float]]:
        """With the seconds that are left of each now."""
        gone_s = max(0.0, time.time() - self.written_at)
        return [
            (source, owner, filter, left_s - gone_s)
            for source, owner, filter, left_s in self.interest
            if left_s > gone_s
        ]


class StateFile:
    """Blocking."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._files = OsFileSystem(directory)

    def load(self) -> EdgeState:
        """Raises BadState, OSError."""
        self._files.make_folder(".")
        try:
            return msgspec.json.decode(read_whole(self._files, FILE), type=EdgeState)
        except FileNotFoundError:
            state = EdgeState(secrets.token_hex(5))
            self.save(state)
            return state
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadState(
                f"{self._path}: {error}; delete it: the federator then has another name at its"
                " broker, and what waits there under the old one is lost"
            ) from None

    def save(self, state: EdgeState) -> None:
        """Durably. Raises OSError."""
        state.written_at = time.time()
        write_whole(self._files, FILE, [msgspec.json.encode(state)])
