"""A lake as one more server of records: of those that retention has removed from the log.

A FETCH for `LAKE` goes to a process of its own beside the node, and its FETCHED comes back like
that of another node. The lake counts as away from the first request that fails until one succeeds.

Invariant: a reader passes records of the lake that it has not read only if the lake reports that it
lacks them, or belongs to another log, or was away for `LAKE_WAIT_S` since the reader began to wait.
"""

from collections.abc import Callable
from typing import Final

LAKE: Final = "(lake)"
"""The name of the lake among those of the nodes. No node has a name with parentheses."""
LAKE_WAIT_S: Final = 300.0
"""The longest time in seconds for which a reader waits for a lake that is away, like that of the
log client. Then it goes on at the start of the log."""
ANSWER_S: Final = 60.0
"""The time in seconds after the last sign of the process after which it is killed, while a request
waits. The process reports a store that does not respond before that (`cli.log.lake_reader`)."""
RETRY_S: Final = 1.0
"""The time in seconds from a failure to the next request."""
FAILURE: Final = 0
ANSWER: Final = 1
PIECE: Final = 2
"""The first byte of a message of the process: the text of a failure, a FETCHED, or one that the
next message continues."""

assert ANSWER_S + RETRY_S < LAKE_WAIT_S, "a reader must see more than one attempt"


class LakeAccess:
    """The lake of this node: whether it may be asked now, and the readers that wait for it."""

    def __init__(self) -> None:
        self.ask: Callable[[bytes], None] | None = None
        """Sends a FETCH. None: the node has no lake."""
        self.error = ""
        """Why the lake cannot be read now, or ""."""
        self.is_refused = False
        """Whether it is the lake of another log, so that no reader waits for it. It is tried again,
        because it may be replaced."""
        self.given_up = 0
        """The readers that went on without the lake."""
        self._retry_at = 0.0
        # The readers that wait, and since when.
        self._waits: dict[object, float] = {}

    @property
    def waiting(self) -> int:
        """The number of readers that wait."""
        return len(self._waits)

    def wait_of(self, readers: tuple[object, ...]) -> str:
        """Returns why one of these readers waits, or ""."""
        return self.error if any(each in self._waits for each in readers) else ""

    def may_ask(self, now: float) -> bool:
        """Whether a FETCH may be sent now."""
        return self.ask is not None and not self.is_refused and now >= self._retry_at

    def succeeded(self) -> None:
        """The lake has answered a request, perhaps of another reader.

        Smallest counter-example for the end of all waits here: one file is damaged. Each reader of
        it would wait for ever, because each check of the lake succeeds meanwhile.
        """
        self.error = ""
        self.is_refused = False

    def end_wait(self, reader: object) -> None:
        """Ends the wait of a reader that the lake has answered, or that has left."""
        self._waits.pop(reader, None)

    def failed(self, text: str, now: float, *, is_final: bool) -> bool:
        """A request has failed. Returns whether this is news."""
        is_news = text != self.error
        self.error = text
        self.is_refused = is_final
        self._retry_at = now + RETRY_S
        return is_news

    def gives_up(self, reader: object, now: float) -> bool:
        """Whether a reader that needs the lake goes on without it."""
        if self.is_refused:
            self.given_up += 1
            return True
        if not self.error:
            return False
        since = self._waits.setdefault(reader, now)
        if now < since + LAKE_WAIT_S:
            return False
        del self._waits[reader]
        self.given_up += 1
        return True

    def forget_old(self, now: float) -> None:
        """Forgets the readers that left while they waited."""
        oldest = now - 2 * LAKE_WAIT_S
        self._waits = {each: since for each, since in self._waits.items() if since > oldest}
