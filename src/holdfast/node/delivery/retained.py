"""Retained messages for new subscriptions, page by page.

A subscription to `#` may match a million retained topics. They are looked up and sent as the
receiver's window and socket allow, a bounded number per call.

Invariants
- What is sent for a topic is what the store has at that moment. A copy that waits for the window
  may be out of date: a live update overtakes it, and the subscriber ends with the older value.
- A scan ends with its subscription, and continues with the one that replaces it.
  [MQTT-3.10.4-2] [MQTT-3.8.4-4]
- A durable session gets the whole set, whatever interrupts it. The log has the topic up to which it
  was sent (`OwedRetained`), and not the topics themselves. [MQTT-4.4.0-1]
"""

from collections import deque
from typing import Final

from holdfast.node.delivery.transmission import can_send, send_inflight
from holdfast.node.node_state import NodeState, Work
from holdfast.node.rights import may_read
from holdfast.node.session.connection import OPEN
from holdfast.node.session.message import Message
from holdfast.node.session.rare_fields import OwedRetained
from holdfast.node.session.session import FEDERATION_KEY, Session, Subscription
from holdfast.node.state.state_records import note_progress
from holdfast.protocol.topics.names import has_wildcard
from holdfast.protocol.topics.retained import RetainedScan

"""The publisher of messages that may have been retained here without being delivered."""
PAGE: Final = 100
"""The most topics that one step of a scan looks up."""
PROBED_MAX: Final = 8
"""The most topics that are visited to see whether a retained set is empty."""


class Scan:
    """The retained messages that are still to be sent for one subscription."""

    def __init__(
        self, subscription: Subscription, scan: RetainedScan[Message], owed: OwedRetained
    ) -> None:
        self.subscription = subscription
        self.scan = scan
        self.owed = owed
        # Topics of the store, and messages that are retained elsewhere only.
        self.page: deque[str | Message] = deque()


class SessionScans(Work):
    """The scans of one session, one after the other.

    A step is one topic of the store that is checked. So a filter that matches nothing costs as much
    as one that matches everything it checks.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        # A repeated SUBSCRIBE restarts its scan, so there are never more scans than subscriptions.
        self.by_filter: dict[str, Scan] = {}
        self.order: deque[Scan] = deque()

    def add(
        self, subscription: Subscription, scan: RetainedScan[Message], owed: OwedRetained
    ) -> Scan:
        """Starts the scan of a subscription, or restarts the one of its filter."""
        filter = subscription.filter
        found = self.by_filter.get(filter)
        if found is None:
            found = Scan(subscription, scan, owed)
            self.by_filter[filter] = found
            self.order.append(found)
        else:
            found.subscription = subscription
            found.scan = scan
            found.owed = owed
            found.page.clear()
        return found

    def step(self, state: NodeState, steps: int) -> int:
        session = self.session
        done = 0
        self.has_more = False
        while self.order:
            scan = self.order[0]
            filter = scan.subscription.filter
            subscription = session.subscriptions.get(filter)
            if subscription is None or scan.owed.is_complete:
                self.order.popleft()
                del self.by_filter[filter]
                done += 1
                continue
            scan.subscription = subscription
            after = scan.owed.after
            is_sent = _send_page(state, session, scan)
            scan.owed.is_complete = is_sent and scan.scan.done
            if session.expiry_s > 0 and (scan.owed.is_complete or scan.owed.after != after):
                session.note_owed(filter, scan.owed)
                note_progress(state, session)
            if not is_sent:
                # It continues when the window or the socket has opened.
                return done
            if scan.scan.done:
                self.order.popleft()
                del self.by_filter[filter]
                done += 1
                continue
            if done >= steps:
                self.has_more = True
                return done
            for topic, _ in scan.scan.next(PAGE, steps - done):
                done += 1
                scan.page.append(topic)
            done += scan.scan.visits
        if session.retained_scans is self:
            session.retained_scans = None
        return done


def _scans_of(session: Session) -> SessionScans:
    scans = session.retained_scans
    if scans is None:
        scans = SessionScans(session)
        session.retained_scans = scans
    assert isinstance(scans, SessionScans)
    return scans


def may_match(state: NodeState, filter: str) -> bool:
    """Whether the retained set of a filter may have messages. False: it has none."""
    scan = state.retained.scan(filter)
    return bool(scan.next(1, PROBED_MAX)) or not scan.done


def start_scan(
    state: NodeState,
    session: Session,
    subscription: Subscription,
    seam: list[int],
    *,
    is_logged: bool,
) -> None:
    """Starts to send the retained messages of a new subscription. `seam`: the offset per partition
    from which it gets messages live. `is_logged`: its SUBSCRIBE record says that they are owed."""
    filter = subscription.filter
    before = (session.rare.owed or {}).get(filter)
    owed = OwedRetained("", seam)
    owed.is_logged = is_logged or (before is not None and before.is_logged)
    if session.expiry_s > 0:
        session.owe(filter, owed)
        session.note_owed(filter, owed)
    _scans_of(session).add(subscription, state.retained.scan(filter), owed)


def resume_scans(state: NodeState, session: Session) -> None:
    """Continues the retained sets that the log says are owed, in a session with a new connection.
    A session that stayed at this node may have their scans still."""
    scans = _scans_of(session)
    for filter, owed in list((session.rare.owed or {}).items()):
        subscription = session.subscriptions.get(filter)
        if subscription is None or filter in scans.by_filter:
            continue
        if owed.seam is None:
            # The log has no position of the session from behind the SUBSCRIBE.
            owed.seam = session.resume_positions(state.delivered)
            if subscription.start is not None:
                owed.seam = list(map(max, owed.seam, subscription.start))
        scan = scans.add(subscription, state.retained.scan(filter, owed.after), owed)
        scan.scan.done = owed.after != "" and not has_wildcard(filter)
        owed.is_resumed = True


def send_late_retained(state: NodeState, topic: str, message: Message) -> None:
    """Sends a message as retained that was retained elsewhere, and not here, when these clients
    subscribed. Only connected ones receive it."""
    served: set[Session] = set()
    for value in state.subscriptions.match(topic):
        if not isinstance(value, Subscription) or value.retain_handling == 2:
            continue
        session = value.session
        if session in served or session.connection is None:
            continue
        served.add(session)
        send_retained(state, value, message)


def send_retained(state: NodeState, subscription: Subscription, message: Message) -> None:
    """Sends a message that became retained after the subscription's scan had begun."""
    session = subscription.session
    if session.connection is None:
        return
    if session.subscriptions.get(subscription.filter) is not subscription:
        return
    if not may_read(session, message.topic):
        state.stats.reads_denied += 1
        return
    scans = _scans_of(session)
    scan = scans.by_filter.get(subscription.filter)
    if scan is None:
        scan = scans.add(subscription, state.retained.scan(subscription.filter), OwedRetained())
        scan.scan.done = True
    scan.page.append(message)
    continue_scans(state, session)


def continue_scans(state: NodeState, session: Session) -> None:
    """Sends what there is room for. The part that this turn has no time for becomes Work."""
    scans = session.retained_scans
    if scans is None:
        return
    assert isinstance(scans, SessionScans)
    state.steps_left -= scans.step(state, min(max(0, state.steps_left), state.steps_at_once))
    if scans.has_more:
        state.start_work(scans)


def _current(state: NodeState, scan: Scan, entry: str | Message) -> Message | None:
    """The message to send for an entry of a page. None: the topic has none any more, or the
    subscription gets it otherwise."""
    if isinstance(entry, Message):
        return entry
    message = state.retained.get(entry)
    if message is None or state.cluster.is_retained_behind(entry, scan.subscription):
        return None
    place = (message.partition, message.offset)
    inflight = scan.subscription.session.rare.owed_inflight
    if inflight and scan.owed.is_resumed and place in inflight:
        inflight.discard(place)
        return None
    if min(message.qos, scan.subscription.qos) == 0 or message.audience is not None:
        # The live copy may have met a full socket, or had other receivers.
        return message
    seam = scan.owed.seam
    assert seam is not None
    is_live = message.publisher != FEDERATION_KEY
    return None if is_live and message.offset >= seam[message.partition] else message


def _pass(scan: Scan, entry: str | Message) -> None:
    """Removes the first entry of the page."""
    scan.page.popleft()
    if isinstance(entry, str):
        scan.owed.after = entry


def _send_page(state: NodeState, session: Session, scan: Scan) -> bool:
    """Sends the page of a scan. False: window or socket closed before the page's end."""
    connection = session.connection
    if connection is None or connection.state != OPEN:
        return False
    subscription = scan.subscription
    page = scan.page
    while page:
        entry = page[0]
        message = _current(state, scan, entry)
        if message is None:
            _pass(scan, entry)
            continue
        qos = min(message.qos, subscription.qos)
        if connection.out_bytes > state.config.outbox_bytes:
            return False
        if qos > 0 and not can_send(state, session):
            return False
        _pass(scan, entry)
        if not may_read(session, message.topic):
            state.stats.reads_denied += 1
            continue
        if message.is_expired(state.wall_us):
            continue
        if subscription.no_local and message.publisher == session.key:
            continue
        # [MQTT-3.3.1-8] RETAIN is 1 on a message sent because of a new subscription
        if qos > 0:
            send_inflight(state, session, message, qos, True, subscription.additions, True, None)
            continue
        frame = message.frame_special(
            connection.version,
            0,
            True,
            False,
            0,
            state.wall_us,
            subscription.additions,
            connection.topic_of(message.topic),
            0,
        )
        if not 0 < len(frame) <= connection.packet_bytes_max:
            state.stats.dropped_too_large += 1
            continue
        state.stats.publish_sent += 1
        connection.send(frame, state.dirty)
    return True
