"""Errors of the log's readers, and the gaps in the log that they report."""

from dataclasses import dataclass


class LogOptionError(ValueError):
    """An argument that cannot be used. The text names it, its value and the allowed values."""


class LogClosed(Exception):
    """The cursor was closed while it was read."""


@dataclass(frozen=True)
class LogGap:
    """Offsets of one partition that the log does not have any more: `start` (included) to `end`
    (excluded). Retention has removed them, or they are damaged on every node."""

    partition: int
    start: int
    end: int

    @property
    def offsets(self) -> int:
        """The number of offsets. Not every one was a message."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"offsets {self.start} to {self.end} of partition {self.partition}"


@dataclass(frozen=True)
class LogRestored(LogGap):
    """Offsets that the reader has passed, and that belong to other messages now: the log was
    restored to a time before. The read goes on at `start`. In a cluster `start` is not known, and
    messages before it may have been passed unread."""


class LogGapError(Exception):
    """A gap in the log before the next message. A cursor that goes on after it has to be told so:
    with `on_gap`, or with a start behind it."""

    def __init__(self, gap: LogGap) -> None:
        super().__init__(
            f"{gap} are not in the log: retention has removed them, or they are damaged. Keep the "
            "log for longer, or pass on_gap to read() to be told of gaps and go on"
        )
        self.gap = gap


class LogTruncatedError(Exception):
    """The log ends before a position that was read or given: it lost its end, or is another log.

    Going on there would leave out the messages that get these offsets next.
    """

    def __init__(self, partition: int, position: int, end: int) -> None:
        super().__init__(
            f"the position in partition {partition} is {position}, but the log ends at {end}: it "
            "lost its end, or is another log. Begin again with another start"
        )
        self.partition = partition
        self.position = position
        self.end = end


class LogRestoredError(LogTruncatedError):
    """The log was restored since a position was taken, to a time before it."""

    def __init__(self, text: str, gap: LogRestored) -> None:
        Exception.__init__(self, text)
        self.partition = gap.partition
        self.position = gap.end
        self.end = gap.start
        self.gap = gap
