"""A member's part in the mesh of one topic: its root, its parents and its children.

Invariants:

- Parents are the neighbours whose copy of the root's newest announcement crossed the fewest hops:
  at most R, those with the lowest ids. Once all copies have come they are strictly nearer to the
  root. Until then publications go to the parents of the number before.
- Without a root that counts there are neither parents nor children.
- A member of the mesh answers each parent once per number. It has a subscriber here, or a child
  that has answered the newest number.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Final

from bench.paper.effects import Outbox
from bench.paper.messages import CoreAnnouncement, MembershipAnnouncement


@dataclass(frozen=True)
class TopicView:
    """One member's view of the mesh of a topic."""

    topic: str
    root: int | None
    """The root, in the papers the core. None: no root that counts is known."""
    distance: int | None
    """The number of hops to the root."""
    is_member: bool
    has_subscriber: bool
    parents: tuple[int, ...]
    children: tuple[int, ...]


@dataclass(frozen=True)
class PaperMesh:
    """The whole mesh of a topic at one moment."""

    topic: str
    root: int | None
    """The root if all members that know one agree; None if they differ."""
    members: tuple[int, ...]
    """The members in the mesh: those with subscribers or with children."""
    parents: dict[int, tuple[int, ...]]
    """The parents of each member except the root."""
    children: dict[int, tuple[int, ...]]
    """The children of each member that has any."""


def mesh(topic: str, views: Mapping[int, TopicView]) -> PaperMesh:
    """Builds the mesh from the views of all members at one moment, by member id."""
    roots = {view.root for view in views.values() if view.root is not None}
    inside = {id: view for id, view in sorted(views.items()) if view.is_member}
    return PaperMesh(
        topic,
        roots.pop() if len(roots) == 1 else None,
        tuple(inside),
        {id: view.parents for id, view in inside.items() if view.parents},
        {id: view.children for id, view in inside.items() if view.children},
    )


LOOKS_MAX: Final = 16
"""The number of least recently used topics to search for one that may be forgotten."""

TIMES_MAX: Final = 8
"""The most timer entries, per topic that there is room for."""


class TableFull(Exception):
    """Every topic that may be searched has a subscriber here."""


@dataclass(slots=True)
class OwnRoot:
    """The state of a topic whose root this member is, or was."""

    announce_at: float
    silent_since: float | None = None
    """The time since which no client here or below is subscribed. The other members count it as
    the root for a while longer. Until then it resumes when a child answers."""


@dataclass(slots=True)
class OtherRoot:
    """The state of a topic whose root is another member."""

    id: int
    epoch: int
    number: int
    distance: int
    received_at: float
    parents: dict[int, bool] = field(default_factory=dict)
    """The parents by id, each with whether this member has answered it."""
    reply_at: float | None = None
    """The time at which parents are answered. None: at once."""
    former_parents: tuple[int, ...] = ()
    """The parents of the number before, which serve until `reply_at`. The first copy of an
    announcement may have come a long way round, even from a child of this member."""
    is_joined: bool = False
    """True: a child has answered this number."""

    def next_hops(self) -> tuple[int, ...]:
        """Returns the neighbours that lead to the root."""
        return self.former_parents or tuple(self.parents)


class Topic:
    """One topic's root, parents, children and timers at this member."""

    def __init__(self, name: str, voice: Outbox) -> None:
        self.name = name
        self.root: OwnRoot | OtherRoot | None = None
        """The root; valid only after `expire`."""
        self.children: dict[int, float] = {}
        """The time of each child's last answer; read them through `current_children`."""
        self.armed: list[float] = []
        """The times at which the topic table has armed a timer for this topic."""
        self._beacon_at = -inf
        self._outbox = voice
        self._config = voice.config

    # Queries

    def has_subscriber(self, now: float) -> bool:
        return now < self._subscriber_until()

    def current_children(self, now: float) -> list[int]:
        return [
            child
            for child, answered_at in self.children.items()
            if now < answered_at + self._config.root_expires_s
        ]

    def is_member(self, now: float) -> bool:
        """Returns whether a client here, or a child, is subscribed: then this member is in the
        mesh."""
        return self.has_subscriber(now) or bool(self.current_children(now))

    def is_over(self, now: float) -> bool:
        """Returns whether the topic has neither root nor subscriber and may be forgotten."""
        self.expire(now)
        return self.root is None and not self.has_subscriber(now)

    def next_hops(self, source: int | None, now: float) -> list[int] | None:
        """Returns the next hops of a publication from the neighbour `source`, or from here if None.

        Returns None when it ends here: no root is known, or a parent sent it and no client here or
        below is subscribed.
        """
        self.expire(now)
        if self.root is None:
            return None
        hops = self.current_children(now)
        if isinstance(self.root, OtherRoot):
            parents = self.root.next_hops()
            if source in parents and not hops and not self.has_subscriber(now):
                return None
            hops += [parent for parent in parents if parent not in hops]
        return [hop for hop in hops if hop != source]

    # Events

    def beacon(self, now: float) -> None:
        self.expire(now)
        self._beacon_at = now
        if self.root is None:
            self.root = OwnRoot(now)
            self._announce(self.root, now)
        elif isinstance(self.root, OwnRoot):
            self._resume(self.root, now)
        elif self.root.reply_at is None:
            self._reply(self.root)

    def announced(self, message: CoreAnnouncement, now: float) -> str | None:
        """Handles a neighbour's announcement. Returns the reason if it changes nothing."""
        self.expire(now)
        if message.root == self._outbox.id:
            return "own announcement"
        if message.distance >= self._config.distance_max:
            return "root too far"
        root = self.root
        if isinstance(root, OtherRoot) and root.id == message.root:
            return self._handle_repeated(root, message, now)
        if not self._gives_way(message.root, now):
            return "higher root"
        self.children.clear()
        self.root = OtherRoot(
            message.root, message.epoch, message.number, message.distance + 1, now
        )
        self._follow(self.root, message, now)
        return None

    def handle_reply(self, message: MembershipAnnouncement, now: float) -> str | None:
        """Handles a neighbour's answer. Returns the reason if it changes nothing."""
        self.expire(now)
        root = self.root
        if isinstance(root, OwnRoot):
            if message.root != self._outbox.id:
                return "answer for another root"
            if message.epoch not in (0, self._outbox.epoch):
                return "old answer"
            self.children[message.sender] = now
            self._resume(root, now)
            return None
        if root is None or message.root != root.id:
            return "answer for another root"
        if message.number != root.number or message.epoch not in (0, root.epoch):
            return "old answer"
        self.children[message.sender] = now
        root.is_joined = True
        if root.reply_at is None:
            self._reply(root)
        return None

    def neighbour_removed(self, neighbour: int) -> None:
        self.children.pop(neighbour, None)
        if isinstance(self.root, OtherRoot):
            root = self.root
            root.parents.pop(neighbour, None)
            root.former_parents = tuple(each for each in root.former_parents if each != neighbour)

    # Time

    def timer(self) -> float:
        """Returns the time in seconds at which `handle_timer` is due; inf: never."""
        root = self.root
        if root is None:
            # It ends with its subscriber.
            return self._subscriber_until()
        if isinstance(root, OtherRoot):
            due = self._root_until(root)
            return due if root.reply_at is None else min(root.reply_at, due)
        return root.announce_at if root.silent_since is None else self._root_until(root)

    def handle_timer(self, now: float) -> None:
        self.expire(now)
        root = self.root
        if isinstance(root, OtherRoot):
            if root.reply_at is not None and now >= root.reply_at:
                root.reply_at = None
                root.former_parents = ()
                if root.is_joined or self.has_subscriber(now):
                    self._reply(root)
        elif root is not None and root.silent_since is None and now >= root.announce_at:
            self.children = {each: self.children[each] for each in self.current_children(now)}
            if self.has_subscriber(now) or self.children:
                self._announce(root, now)
            else:
                root.silent_since = now

    def expire(self, now: float) -> None:
        if self.root is not None and now >= self._root_until(self.root):
            self.root = None
            self.children.clear()

    # A timer is due when what it is for is the case: both ask these.

    def _subscriber_until(self) -> float:
        return self._beacon_at + self._config.beacon_expires_s

    def _root_until(self, root: OwnRoot | OtherRoot) -> float:
        since = root.received_at if isinstance(root, OtherRoot) else root.silent_since
        return inf if since is None else since + self._config.root_expires_s

    # Rules

    def _gives_way(self, other: int, now: float) -> bool:
        """To another root that is announced. Ids decide between those who announce themselves."""
        root = self.root
        if root is None:
            return True
        if isinstance(root, OwnRoot):
            return root.silent_since is not None or other < self._outbox.id
        return other < root.id or now - root.received_at > self._config.root_doubted_s

    def _handle_repeated(
        self, root: OtherRoot, message: CoreAnnouncement, now: float
    ) -> str | None:
        # Who passes an epoch over, or does not know it, can only mean the one we know.
        epoch = message.epoch or root.epoch
        distance = message.distance + 1
        if (epoch, message.number) > (root.epoch, root.number):
            root.epoch = epoch
            root.number = message.number
            root.former_parents = root.next_hops()
            root.is_joined = False
            root.reply_at = None
        elif (epoch, message.number) < (root.epoch, root.number) or distance > root.distance:
            return "old announcement"
        elif distance == root.distance:
            return self._another_parent(root, message.sender, now)
        root.distance = distance
        root.received_at = now
        root.parents = {}
        self._follow(root, message, now)
        return None

    def _follow(self, root: OtherRoot, message: CoreAnnouncement, now: float) -> None:
        """The sender is the only parent so far; everybody else is told."""
        root.parents[message.sender] = False
        if root.reply_at is None:
            root.reply_at = now + self._config.reply_delay_s
        announcement = CoreAnnouncement(
            root.id, self._outbox.id, root.number, root.distance, root.epoch
        )
        self._outbox.announce(self.name, announcement, message.sender)
        self.handle_timer(now)

    def _another_parent(self, root: OtherRoot, sender: int, now: float) -> str | None:
        if sender in root.parents:
            return "repeated announcement"
        if len(root.parents) >= self._config.redundancy:
            highest = max(root.parents)
            if sender > highest:
                return "enough parents"
            del root.parents[highest]
        root.parents[sender] = False
        if root.reply_at is None and (root.is_joined or self.has_subscriber(now)):
            self._reply(root)
        return None

    def _reply(self, root: OtherRoot) -> None:
        for parent, is_answered in root.parents.items():
            if not is_answered:
                self._outbox.reply(self.name, parent, root.id, root.epoch, root.number)
                root.parents[parent] = True

    def _announce(self, root: OwnRoot, now: float) -> None:
        self._outbox.announce_own(self.name)
        root.announce_at = now + self._config.core_ann_interval_s

    def _resume(self, root: OwnRoot, now: float) -> None:
        if root.silent_since is not None:
            root.silent_since = None
            self._announce(root, now)


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
