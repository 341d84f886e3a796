"""Routes QoS 0 messages between nodes.

Each node announces the filters of its connected subscribers to the other nodes, and receives the
messages that match one of them. One node receives a message for a shared group. The publisher's
node picks it round robin among the nodes with members, and names the group with the message.

Invariant: an acknowledged number covers every filter with a lower number. A SUBACK waits until
every connected peer has acknowledged its filters, so that messages published anywhere after it
arrive. A peer that does not reply within WAIT_S is not waited for. Counter-example: without the
wait, a client receives its SUBACK from n1. A second client then publishes at n2, which does not
have the filter yet, and the message is lost.

Invariant: a message that its node published behind a committed record of its topic is delivered
behind that record here, too. It has the offset, and waits until this node has applied the record.
Later ones of the partition wait behind it. Counter-example: a valve is closed at QoS 1 and, after
the PUBACK, opened at QoS 0. The COMMIT comes later than the QOS0 frame, and the subscriber believes
that the valve is closed.

Invariant: a new link brings all filters of this node, in slices. Changes meanwhile are announced as
they happen, and a filter that is removed before its slice is left out. So the peer has exactly the
filters of this node when it has the last frame, which alone has a number. Counter-example: a change
between two slices is acknowledged, and its SUBACK leaves before the peer has an earlier filter.

Invariant: a cached route is what its topic would get now. A filter that changes drops the routes
that it matches. A link that changes drops all of them, because routes contain connected nodes only.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from msgspec import json

from holdfast.log import record as log_record
from holdfast.log.batch import Batch, CorruptBatch
from holdfast.log.record import Record
from holdfast.node.context import ClusterContext
from holdfast.node.delivery.delivery import deliver, send_group_qos0
from holdfast.node.frame_kinds import INTEREST, INTEREST_ACK, BadFrame, decode_json
from holdfast.node.node_state import NodeState, Promise, Route
from holdfast.node.publish.promises import PromiseQueues
from holdfast.node.publish.retained_updates import RetainedUpdates, is_in_store
from holdfast.node.rights import has_rules
from holdfast.node.routing.interest_frames import (
    INTEREST_ACK_DECODER,
    INTEREST_DECODER,
    Interest,
    InterestAck,
)
from holdfast.node.routing.peer_filters import FILTERS_PER_STEP, PeerFilters
from holdfast.node.routing.qos0_frames import Qos0Frames
from holdfast.node.routing.routing import find_route
from holdfast.node.session.message import Message, queued_size, stored_message
from holdfast.node.sweep import Sweep
from holdfast.protocol.topics.names import (
    InvalidFilter,
    InvalidTopic,
    has_wildcard,
    is_shared,
    matches,
)

WAIT_S: Final = 0.5
"""The longest time in seconds that a SUBACK waits for the peers."""
SPREADS_BYTES_MAX: Final = 8 << 20
"""The memory in bytes of the cached routes of topics."""
SPREAD_BYTES: Final = 500
"""The approximate memory in bytes of one cached route without its topic."""
ROUTE_CHECKS_MAX: Final = 20_000
"""The most comparisons of changed filters with cached routes at once. Above it all are dropped."""
ANNOUNCED_MAX: Final = 10_000
"""The most filters in one frame of changes."""
FOLLOWERS_BYTES_MAX: Final = 4 << 20
"""The memory in bytes of messages that wait for the record that they follow. Messages above it are
dropped and counted."""
FOLLOW_S: Final = 5.0
"""The longest time in seconds that a message waits for the record that it follows."""
GROUPS_BYTES_MAX: Final = 65_535
"""The size in bytes of the group names that accompany one message."""


class _Waiting:
    """A SUBACK that waits for acknowledgements of the filters up to `number`."""

    def __init__(self, number: int, promise: Promise, since: float) -> None:
        self.number = number
        self.promise = promise
        self.since = since


class _Follower:
    """A message that waits until the records below `behind` are applied, and the groups for which
    this node is picked."""

    def __init__(self, behind: int, message: Message, keys: bytes, since: float) -> None:
        self.behind = behind
        self.since = since
        self.message = message
        self.keys = keys


class _Pick:
    """The round robin of one shared group among its nodes."""

    def __init__(self, key: str, nodes: list[str], turn: int) -> None:
        self.key = key
        self.nodes = nodes
        self.turn = turn

    def next(self) -> str:
        self.turn = (self.turn + 1) % len(self.nodes)
        return self.nodes[self.turn]


class _Spread:
    """The route of a topic: nodes with subscribers, and the round robins of its shared groups."""

    def __init__(self, nodes: list[str], picks: list[_Pick]) -> None:
        self.nodes = nodes
        self.picks = picks


def _key_and_node(found: object) -> tuple[str, str]:
    assert isinstance(found, tuple)
    key, node = found
    return key, node


class Qos0Routing:
    """The filters of this node and its peers, and the routes of QoS 0 messages that follow from
    them."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        retained_updates: RetainedUpdates,
        promises: PromiseQueues,
    ) -> None:
        self._state = state
        self._promises = promises
        self._retained_updates = retained_updates
        self._context = context
        self._counts: dict[str, int] = {}
        # The number of the last change, and of the last announced one. `changes`: those between.
        self._number = 0
        self._announced = 0
        self.changes: dict[str, bool] = {}
        self._acknowledged: dict[str, int] = {}
        # The announcements of all filters that are under way, by node.
        self._announcing: dict[str, Sweep[int]] = {}
        self._waiting: deque[_Waiting] = deque()
        # Those of shared subscriptions of this node included.
        self._filters = PeerFilters(state, self._acknowledge, self._drop_routes)
        self._routes: dict[str, _Spread] = {}
        self._routes_bytes = 0
        self._turn = 0
        self.frames = Qos0Frames(context)
        # By partition, in the order of arrival.
        self.followers: dict[int, deque[_Follower]] = {}
        self._followers_bytes = 0
        self.dropped = 0
        # Called before a node gets an acknowledgement of its filters. Feeds sets it.
        self.before_ack: Callable[[str], None] = lambda node: None
        # Called before a SUBACK leaves, with the number of its filters. Feeds sets it.
        self.before_suback: Callable[[int], None] = lambda number: None

    def subscribed(self, filter: str) -> None:
        """Counts a subscription of this node, and announces a new filter."""
        count = self._counts.get(filter, 0)
        self._counts[filter] = count + 1
        if not count:
            self._change(filter, True)

    def unsubscribed(self, filter: str) -> None:
        """Removes a subscription of this node, and withdraws a filter without subscriptions."""
        count = self._counts.get(filter, 0) - 1
        if count > 0:
            self._counts[filter] = count
        else:
            self._counts.pop(filter, None)
            self._change(filter, False)

    def _change(self, filter: str, wanted: bool) -> None:
        self._number += 1
        self.changes[filter] = wanted
        if is_shared(filter):
            self._drop_routes([self._filters.learn(filter, self._context.node_id, wanted)])

    def _drop_routes(self, changed: list[str]) -> None:
        """Drops the cached routes of the topics that these filters match."""
        patterns = [filter for filter in changed if has_wildcard(filter)]
        if len(patterns) * len(self._routes) > ROUTE_CHECKS_MAX:
            self._routes = {}
            return
        topics = [filter for filter in changed if filter in self._routes]
        for filter in patterns:
            topics += [topic for topic in self._routes if matches(filter, topic)]
        for topic in topics:
            if self._routes.pop(topic, None) is not None:
                self._routes_bytes -= SPREAD_BYTES + len(topic)

    @property
    def number(self) -> int:
        """The number of the last change of this node's filters."""
        return self._number

    def acknowledged(self, node: str) -> int:
        """The number up to which a node has acknowledged changes; -1: none."""
        return self._acknowledged.get(node, -1)

    def is_announced(self, node: str) -> bool:
        """Whether all filters of this node have left for a connected node, after `flush`."""
        return node not in self._announcing and not self.changes

    def is_applying(self, node: str) -> bool:
        """Whether filters of a node have arrived that are not applied yet."""
        return self._filters.is_applying(node)

    def _acknowledge(self, node: str, number: int) -> None:
        self.before_ack(node)
        self._context.send(node, INTEREST_ACK, json.encode(InterestAck(number)))

    def promise(self, promise: Promise) -> None:
        """Queues a SUBACK until all peers have acknowledged the filters so far."""
        if self._laggards(self._number):
            promise.waiting += 1
            self._waiting.append(_Waiting(self._number, promise, self._state.now))
        else:
            self.before_suback(self._number)
        self._promises.add(promise)

    def _laggards(self, number: int) -> list[str]:
        return [
            node
            for node in self._context.connected
            if self._acknowledged.get(node, -1) < number and not self._context.is_gone(node)
        ]

    def connected(self, node: str) -> None:
        """Announces all filters to a newly connected node, whatever it knew before."""
        self._acknowledged[node] = -1
        self._filters.connected(node)
        self._routes = {}
        size = FILTERS_PER_STEP * self._state.steps_at_once
        filters = list(self._counts)
        self._state.note_list(len(filters))
        starts = list(range(0, max(1, len(filters)), size))
        last = starts[-1]
        sweep: Sweep[int] = Sweep(self._state)
        self._announcing[node] = sweep
        is_first = True

        def announce(at: int) -> int:
            nonlocal is_first
            if self._announcing.get(node) is sweep:
                present = [each for each in filters[at : at + size] if each in self._counts]
                is_last = at == last
                if is_last:
                    del self._announcing[node]
                self._tell(node, present, [], self._announced if is_last else 0, whole=is_first)
                is_first = False
            return self._state.steps_at_once

        sweep.begin(starts, announce)

    def disconnected(self, node: str) -> None:
        """Removes the filters of a node whose link is lost."""
        self._acknowledged.pop(node, None)
        self._announcing.pop(node, None)
        self.frames.forget(node)
        self._filters.disconnected(node)
        self._routes = {}
        self.release()

    def _tell(
        self, node: str, added: list[str], removed: list[str], number: int, *, whole: bool = False
    ) -> None:
        interest = Interest(number, whole, added, removed)
        self._context.send(node, INTEREST, json.encode(interest))

    def _tell_changes(self, node: str, added: list[str], removed: list[str]) -> None:
        """Announces changes to a node, in several frames if they are many. The number is in the
        last frame, because it covers all of them. While the announcement of all filters is under
        way, its last frame has the number."""
        count = max(len(added), len(removed), 1)
        for at in range(0, count, ANNOUNCED_MAX):
            end = at + ANNOUNCED_MAX
            is_last = end >= count and node not in self._announcing
            self._tell(node, added[at:end], removed[at:end], self._number if is_last else 0)

    def flush(self) -> None:
        """Sends changes of filters, at the end of a turn. Positions also move where this node
        receives the replicated state, without a record that is applied."""
        for partition in list(self.followers):
            self.release_followers(partition)
        if self.changes:
            changes = self.changes
            self.changes = {}
            self._announced = self._number
            added = [filter for filter, wanted in changes.items() if wanted]
            removed = [filter for filter, wanted in changes.items() if not wanted]
            for node in sorted(self._context.connected):
                self._tell_changes(node, added, removed)

    def handle_interest(self, node: str, payload: bytes) -> None:
        """Takes the filters of a peer. Raises BadFrame when the frame is malformed."""
        interest = decode_json(INTEREST_DECODER, payload, "an INTEREST")
        try:
            self._filters.change(node, interest)
        except InvalidFilter as error:
            raise BadFrame(str(error)) from None

    def handle_ack(self, node: str, payload: bytes) -> None:
        """Takes a peer's acknowledgement of filters. Raises BadFrame when the frame is
        malformed."""
        number = decode_json(INTEREST_ACK_DECODER, payload, "an INTEREST_ACK").number
        self._acknowledged[node] = max(number, self._acknowledged.get(node, -1))
        self.release()

    def release(self) -> None:
        """Releases the SUBACKs that all peers have acknowledged or that have waited WAIT_S."""
        waiting = self._waiting
        while waiting:
            first = waiting[0]
            if self._laggards(first.number) and first.since + WAIT_S > self._state.now:
                return
            waiting.popleft()
            self.before_suback(first.number)
            self._promises.settle(first.promise)

    def timer(self) -> float | None:
        """Returns the time at which the oldest SUBACK is released at the latest, or None."""
        return self._waiting[0].since + WAIT_S if self._waiting else None

    def watch_peers(self, watch: Callable[[str, bool], None] | None) -> list[str]:
        """Returns the filters of the peers, and reports each that begins or ends from now on."""
        self._filters.watch = watch
        return self._filters.of_peers()

    def has_groups(self) -> bool:
        """Whether a client of any node is a member of a shared group."""
        return len(self._filters.groups) > 0

    def spread(self, message: Message, topic: str, behind: int) -> None:
        """Sends a QoS 0 message to the nodes with receivers for it. They deliver it behind the
        records of the topic's partition below `behind`."""
        route = self.route(topic)
        # A message with RETAIN goes to all nodes. Clients that subscribe there before its record is
        # applied need it too (`publish.retained_updates`).
        nodes = list(self._context.connected) if message.retain else route.nodes
        picks, audience = route.picks, message.audience
        if audience is not None:
            nodes = nodes if audience.is_plain else []
            picks = [pick for pick in picks if pick.key in audience.groups]
        if not picks:
            for node in nodes:
                self._send(node, message, b"", 0, behind)
            return
        picked: dict[str, list[str]] = {node: [] for node in nodes}
        for pick in picks:
            picked.setdefault(pick.next(), []).append(pick.key)
        for node, keys in picked.items():
            if node == self._context.node_id:
                self._deliver_to_groups(keys, message, 0)
            else:
                self._send(node, message, "\0".join(keys).encode(), 0, behind)

    def route(self, topic: str) -> _Spread:
        """The route of a topic."""
        route = self._routes.get(topic)
        if route is None:
            self._routes_bytes += SPREAD_BYTES + len(topic)
            if self._routes_bytes > SPREADS_BYTES_MAX or not self._routes:
                self._routes = {}
                self._routes_bytes = SPREAD_BYTES + len(topic)
            route = self._find(topic)
            self._routes[topic] = route
        return route

    def _find(self, topic: str) -> _Spread:
        # The filters of a node whose link is lost are removed in slices.
        connected = self._context.connected
        nodes = sorted({str(node) for node in self._filters.plain.match(topic)} & connected)
        members: dict[str, list[str]] = {}
        for key, node in self._members(topic):
            members.setdefault(key, []).append(node)
        self._turn += 1
        picks = [
            _Pick(key, sorted(members[key]), self._turn % len(members[key]))
            for key in sorted(members)
        ]
        return _Spread(nodes, picks)

    def _members(self, topic: str) -> list[tuple[str, str]]:
        """Returns the shared groups of a topic, each with a node that has members of it."""
        pairs = map(_key_and_node, self._filters.groups.match(topic))
        reached = {self._context.node_id, *self._context.connected}
        return [(key, node) for key, node in pairs if node in reached]

    def _deliver_to_groups(self, keys: list[str], message: Message, passed: int) -> None:
        """Delivers a message to these groups. `passed`: the number of nodes that have passed it
        on."""
        for key in keys:
            group = self._state.groups.get(key)
            if group is None or send_group_qos0(self._state, group, message):
                continue
            if has_rules(self._state):
                self._pass_on(key, message, passed + 1)

    def _pass_on(self, key: str, message: Message, passed: int) -> None:
        """Passes a message that no member here may read to the next node of the group, at most once
        round."""
        members = self._members(message.topic.decode())
        nodes = sorted(node for found, node in members if found == key)
        later = [node for node in nodes if node > self._context.node_id]
        following = (later or nodes)[:1]
        if passed >= len(nodes) or not following:
            self._state.stats.dropped_unreadable += 1
            return
        self._send(following[0], message, key.encode(), passed)

    def _send(
        self, node: str, message: Message, groups: bytes, passed: int = 0, behind: int = 0
    ) -> None:
        """Queues a message for a node.

        `groups`: the groups for which the node is picked, separated by NUL. `passed`: the number of
        nodes without a member that may read it; above 0 the message is for the group alone.
        `behind`: see `spread`; older versions ignore it.
        """
        builder = self.frames.builder(node, len(message.payload) + len(message.properties))
        if builder is None:
            return
        if len(groups) > GROUPS_BYTES_MAX:
            self.frames.dropped += 1
            groups = b""
        flags = log_record.FLAG_RETAIN if message.retain else 0
        if message.partition >= 0:
            # A delayed message is in the log, whatever its topic. Older versions ignore the flag.
            flags |= log_record.FLAG_DELAYED
        builder.add(
            Record(
                builder.partition,
                log_record.MESSAGE,
                flags=flags,
                timestamp_us=message.timestamp_us,
                topic=message.topic,
                client_id=message.publisher,
                producer=groups,
                producer_epoch=behind >> 32,
                ticket=behind & 0xFFFFFFFF,
                sequence=passed,
                properties=message.properties,
                payload=message.payload,
            )
        )

    def handle_qos0(self, payload: bytes) -> None:
        """Delivers the messages of a QOS0 frame. Raises BadFrame when it is malformed."""
        try:
            batch = Batch(payload)
        except CorruptBatch as error:
            raise BadFrame(f"messages: {error}") from None
        state = self._state
        for record in batch.records():
            message = stored_message(record, 0, record.timestamp_us)
            try:
                route = find_route(state, record.topic)
            except InvalidTopic:
                continue
            passed = record.sequence
            behind = record.producer_epoch << 32 | record.ticket
            if record.flags & log_record.FLAG_DELAYED:
                message.partition = record.partition
            if not passed:
                if behind > state.delivered[route.partition] or route.partition in self.followers:
                    follower = _Follower(behind, message, record.producer, state.now)
                    self._follow(route.partition, follower)
                    continue
                self._deliver(route, message)
            if record.producer:
                keys = record.producer.decode(errors="replace").split("\0")
                self._deliver_to_groups(keys, message, passed)

    def _deliver(self, route: Route, message: Message) -> None:
        deliver(self._state, route, message)
        message.partition = -1
        if message.retain and not is_in_store(self._state, message, route.topic):
            self._retained_updates.delivered(route.topic, message)

    def _follow(self, partition: int, follower: _Follower) -> None:
        size_bytes = queued_size(follower.message) + len(follower.keys)
        if self._followers_bytes + size_bytes > FOLLOWERS_BYTES_MAX:
            self.dropped += 1
            return
        self._followers_bytes += size_bytes
        self.followers.setdefault(partition, deque()).append(follower)

    def release_followers(self, partition: int) -> None:
        """Delivers the messages that follow records of the partition which are applied now."""
        state = self._state
        waiting = self.followers.get(partition)
        while waiting:
            follower = waiting[0]
            is_behind = follower.behind > state.delivered[partition]
            if is_behind and follower.since + FOLLOW_S > state.now:
                return
            waiting.popleft()
            message = follower.message
            self._followers_bytes -= queued_size(message) + len(follower.keys)
            self._deliver(find_route(state, message.topic), message)
            if follower.keys:
                keys = follower.keys.decode(errors="replace").split("\0")
                self._deliver_to_groups(keys, message, 0)
        self.followers.pop(partition, None)
