"""Topics that a member tracks, up to a bound, and the time at which the next one is due."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import Final

from holdfast.federation.paper.topic import Topic

LOOKS_MAX: Final = 16
"""The number of least recently used topics to search for one that may be forgotten."""

TIMES_MAX: Final = 8
"""The most timer entries, per topic that there is room for."""


class TopicTable:
    """The topics of a member, in order of their last use."""

    def __init__(self, topics_max: int) -> None:
        self._topics_max = topics_max
        # The order of the dict is the order of use.
        self._topics: OrderedDict[str, Topic] = OrderedDict()
        # Times and names. A topic may have several entries; the earliest is never after its timer.
        self._due: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._topics)

    def __iter__(self) -> Iterator[Topic]:
        return iter(self._topics.values())

    def peek(self, name: str) -> Topic | None:
        """Returns the topic like `get`, without counting this as a use."""
        return self._topics.get(name)

    def get(self, name: str) -> Topic | None:
        topic = self._topics.get(name)
        if topic is not None:
            self._topics.move_to_end(name)
        return topic

    def make_room(self, now: float) -> str | None:
        """Makes room for one more topic and returns the name of the one forgotten for it, if any.

        Raises TableFull when the least recently used topics all have subscribers here.
        """
        if len(self._topics) < self._topics_max:
            return None
        for name, topic in islice(self._topics.items(), LOOKS_MAX):
            if not topic.is_member(now):
                del self._topics[name]
                return name
        raise TableFull

    def schedule(self, topic: Topic) -> None:
        """Arms the timer of a topic. Call it after every event of the topic."""
        self._topics[topic.name] = topic
        due = topic.timer()
        if due < min(topic.armed, default=inf):
            topic.armed.append(due)
            heapq.heappush(self._due, (due, topic.name))
            if len(self._due) > TIMES_MAX * self._topics_max:
                self._forget_times()

    def _forget_times(self) -> None:
        """Removes timers of forgotten topics and timers that no longer apply."""
        self._due = []
        for name, topic in self._topics.items():
            topic.armed = [topic.timer()]
            self._due.append((topic.armed[0], name))
        heapq.heapify(self._due)

    def timer(self) -> float:
        return self._due[0][0] if self._due else inf

    def handle_timers(self, now: float) -> None:
        entries: list[tuple[float, str]] = []
        while self._due and self._due[0][0] <= now:
            entries.append(heapq.heappop(self._due))
        for due, name in entries:
            topic = self._topics.get(name)
            if topic is None or due not in topic.armed:
                # The timer of a topic that was forgotten.
                continue
            topic.armed.remove(due)
            topic.handle_timer(now)
            if topic.is_over(now):
                del self._topics[name]
            else:
                self.schedule(topic)


class TableFull(Exception):
    """Every topic that may be searched has a subscriber here."""
