"""A member's part in the mesh of one topic: who is the root, who is nearer to it, who is below.

Invariants:

- Parents are neighbours whose announcement of the newest number of the root came over the fewest
  hops; at most R, those with the lowest ids. So they are strictly nearer to the root, once all
  copies have come: until then publications go to those of the number before.
- Without a root that counts there are neither parents nor children.
- Who is in the mesh (a subscriber here, or a child that has answered the newest number) answers
  each parent once per number.
"""

from dataclasses import dataclass, field
from math import inf

from holdfast.federation.paper.messages import CoreAnnouncement, MembershipAnnouncement
from holdfast.federation.paper.outbox import Voice


@dataclass(slots=True)
class OwnRoot:
    """This member is, or was, the root."""

    announce_at: float
    silent_since: float | None = None
    """Nobody wants the topic any more. The others still take it for the root for a while: as long
    it goes on when somebody answers them."""


@dataclass(slots=True)
class OtherRoot:
    id: int
    epoch: int
    number: int
    distance: int
    heard_at: float
    parents: dict[int, bool] = field(default_factory=dict)
    """By id, and whether it was answered."""
    answer_at: float | None = None
    """None: parents of this number are answered at once."""
    former_parents: tuple[int, ...] = ()
    """Of the number before: they serve until `answer_at`, for the first copy of an announcement may
    have come a long way round, even from who has this member for a parent."""
    is_joined: bool = False
    """A child has answered this number."""

    def next_hops(self) -> tuple[int, ...]:
        """Toward the root."""
        return self.former_parents or tuple(self.parents)


class Topic:
    def __init__(self, name: str, voice: Voice) -> None:
        self.name = name
        self.root: OwnRoot | OtherRoot | None = None
        """Look at it after `expire`."""
        self.children: dict[int, float] = {}
        """When each answered last; look at them through `current_children`."""
        self.armed: list[float] = []
        """For the table of topics."""
        self._beacon_at = -inf
        self._voice = voice
        self._config = voice.config

    # What is the case

    def has_subscriber(self, now: float) -> bool:
        return now < self._subscriber_until()

    def current_children(self, now: float) -> list[int]:
        return [
            child
            for child, answered_at in self.children.items()
            if now < answered_at + self._config.root_expires_s
        ]

    def is_member(self, now: float) -> bool:
        """Of the mesh: somebody here or below wants the topic."""
        return self.has_subscriber(now) or bool(self.current_children(now))

    def is_over(self, now: float) -> bool:
        """Nothing of it counts any more: it may be forgotten without a difference."""
        self.expire(now)
        return self.root is None and not self.has_subscriber(now)

    def next_hops(self, source: int | None, now: float) -> list[int] | None:
        """Where a publication goes that came from the neighbour `source`, or was published here.
        None: nobody is to get it from here, since no root is known, or since it came down to where
        nobody wants it."""
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

    # What happens

    def beacon(self, now: float) -> None:
        self.expire(now)
        self._beacon_at = now
        if self.root is None:
            self.root = OwnRoot(now)
            self._announce(self.root, now)
        elif isinstance(self.root, OwnRoot):
            self._resume(self.root, now)
        elif self.root.answer_at is None:
            self._answer(self.root)

    def announced(self, message: CoreAnnouncement, now: float) -> str | None:
        """A neighbour's. Returns why it changes nothing, if so."""
        self.expire(now)
        if message.root == self._voice.id:
            return "own announcement"
        if message.distance >= self._config.distance_max:
            return "root too far"
        root = self.root
        if isinstance(root, OtherRoot) and root.id == message.root:
            return self._announced_again(root, message, now)
        if not self._gives_way(message.root, now):
            return "higher root"
        self.children.clear()
        self.root = OtherRoot(
            message.root, message.epoch, message.number, message.distance + 1, now
        )
        self._follow(self.root, message, now)
        return None

    def answered(self, message: MembershipAnnouncement, now: float) -> str | None:
        """By a neighbour. Returns why it changes nothing, if so."""
        self.expire(now)
        root = self.root
        if isinstance(root, OwnRoot):
            if message.root != self._voice.id:
                return "answer for another root"
            if message.epoch not in (0, self._voice.epoch):
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
        if root.answer_at is None:
            self._answer(root)
        return None

    def neighbour_removed(self, neighbour: int) -> None:
        self.children.pop(neighbour, None)
        if isinstance(self.root, OtherRoot):
            root = self.root
            root.parents.pop(neighbour, None)
            root.former_parents = tuple(each for each in root.former_parents if each != neighbour)

    # Time

    def timer(self) -> float:
        """When `handle_timer` is due; inf: never."""
        root = self.root
        if root is None:
            # It ends with its subscriber.
            return self._subscriber_until()
        if isinstance(root, OtherRoot):
            due = self._root_until(root)
            return due if root.answer_at is None else min(root.answer_at, due)
        return root.announce_at if root.silent_since is None else self._root_until(root)

    def handle_timer(self, now: float) -> None:
        self.expire(now)
        root = self.root
        if isinstance(root, OtherRoot):
            if root.answer_at is not None and now >= root.answer_at:
                root.answer_at = None
                root.former_parents = ()
                if root.is_joined or self.has_subscriber(now):
                    self._answer(root)
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
        since = root.heard_at if isinstance(root, OtherRoot) else root.silent_since
        return inf if since is None else since + self._config.root_expires_s

    # Rules

    def _gives_way(self, other: int, now: float) -> bool:
        """To another root that is announced. Ids decide between those who announce themselves."""
        root = self.root
        if root is None:
            return True
        if isinstance(root, OwnRoot):
            return root.silent_since is not None or other < self._voice.id
        return other < root.id or now - root.heard_at > self._config.root_doubted_s

    def _announced_again(
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
            root.answer_at = None
        elif (epoch, message.number) < (root.epoch, root.number) or distance > root.distance:
            return "old announcement"
        elif distance == root.distance:
            return self._another_parent(root, message.sender, now)
        root.distance = distance
        root.heard_at = now
        root.parents = {}
        self._follow(root, message, now)
        return None

    def _follow(self, root: OtherRoot, message: CoreAnnouncement, now: float) -> None:
        """The sender is the only parent so far; everybody else is told."""
        root.parents[message.sender] = False
        if root.answer_at is None:
            root.answer_at = now + self._config.answer_delay_s
        announcement = CoreAnnouncement(
            root.id, self._voice.id, root.number, root.distance, root.epoch
        )
        self._voice.announce(self.name, announcement, message.sender)
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
        if root.answer_at is None and (root.is_joined or self.has_subscriber(now)):
            self._answer(root)
        return None

    def _answer(self, root: OtherRoot) -> None:
        for parent, is_answered in root.parents.items():
            if not is_answered:
                self._voice.answer(self.name, parent, root.id, root.epoch, root.number)
                root.parents[parent] = True

    def _announce(self, root: OwnRoot, now: float) -> None:
        self._voice.announce_own(self.name)
        root.announce_at = now + self._config.core_ann_interval_s

    def _resume(self, root: OwnRoot, now: float) -> None:
        if root.silent_since is not None:
            root.silent_since = None
            self._announce(root, now)
