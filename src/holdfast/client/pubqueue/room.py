"""Limits a publish queue, and lets messages wait for room, first come, first served."""

from collections import deque

from holdfast.client.pubqueue.writer import Put


class Room:
    """The room of a queue. Invariant: no message takes room while another one waits for it."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        """Limits below 1 raise `ValueError`."""
        if messages_max < 1:
            raise ValueError(f"messages_max {messages_max}: 1 or more")
        if bytes_max < 1:
            raise ValueError(f"bytes_max {bytes_max}: 1 or more")
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.length = 0
        self.size = 0
        self.waiting: deque[Put] = deque()

    def has_room(self, size: int) -> bool:
        """Whether a message fits without overtaking waiting ones."""
        return not self.waiting and self._fits(size)

    def reserve(self, size: int) -> None:
        """Takes room for a message."""
        self.length += 1
        self.size += size

    def release(self, size: int) -> None:
        """Gives back the room of a message."""
        self.length -= 1
        self.size -= size

    def resize(self, difference: int) -> None:
        """Corrects the room of a message whose size has changed."""
        self.size += difference

    def next_waiting(self) -> Put | None:
        """The next waiting message that now has room, or None."""
        while self.waiting:
            put = self.waiting[0]
            if put.is_cancelled():
                self.waiting.popleft()
                continue
            if not self._fits(put.reserved):
                return None
            self.reserve(put.reserved)
            return self.waiting.popleft()
        return None

    def describe(self) -> str:
        """The use of the limits, for texts."""
        return (
            f"the queue has {self.length} of {self.messages_max} messages, "
            f"{self.size} of {self.bytes_max} bytes"
        )

    def _fits(self, size: int) -> bool:
        return self.length < self.messages_max and self.size + size <= self.bytes_max
