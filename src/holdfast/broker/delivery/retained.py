"""Retained messages for new subscriptions, page by page.

A subscription to `#` may match a million retained topics. They are looked up and sent as the
receiver's window and socket allow, a bounded number per call.
"""

from collections import deque

from holdfast.broker.delivery.transmission import can_send, send_inflight
from holdfast.broker.rights import may_read
from holdfast.broker.session.connection import OPEN
from holdfast.broker.session.message import Message
from holdfast.broker.session.session import Session, Subscription
from holdfast.broker.state import STEPS_AT_ONCE, NodeState, Work
from holdfast.protocol.topics.retained import RetainedScan

PAGE = 100
"""The most topics that one step of a scan looks up."""


class Scan:
    """The retained messages that are still to be sent for one subscription."""

    def __init__(self, subscription: Subscription, scan: RetainedScan[Message]) -> None:
        self.subscription = subscription
        self.scan = scan
        self.page: deque[Message] = deque()


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

    def add(self, subscription: Subscription, scan: RetainedScan[Message]) -> Scan:
        """Start the scan of a subscription, or restart the one of its filter."""
        filter = subscription.filter
        found = self.by_filter.get(filter)
        if found is None:
            found = Scan(subscription, scan)
            self.by_filter[filter] = found
            self.order.append(found)
        else:
            found.subscription = subscription
            found.scan = scan
            found.page.clear()
        return found

    def step(self, state: NodeState, steps: int) -> int:
        session = self.session
        done = 0
        self.has_more = False
        while self.order:
            scan = self.order[0]
            if not _send_page(state, session, scan):
                # It continues when the window or the socket has opened.
                return done
            if scan.scan.done:
                self.order.popleft()
                del self.by_filter[scan.subscription.filter]
                done += 1
                continue
            if done >= steps:
                self.has_more = True
                return done
            for _, entry in scan.scan.next(PAGE, steps - done):
                done += 1
                scan.page.append(entry)
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


def start_scan(state: NodeState, session: Session, subscription: Subscription) -> None:
    """Start to send the retained messages of a new subscription."""
    _scans_of(session).add(subscription, state.retained.scan(subscription.filter))


def send_late_retained(state: NodeState, topic: str, message: Message) -> None:
    """Send a message as retained that was retained elsewhere, and not here, when these clients
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
    """Send a message that became retained after the subscription's scan had begun."""
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
        scan = scans.add(subscription, state.retained.scan(subscription.filter))
        scan.scan.done = True
    scan.page.append(message)
    continue_scans(state, session)


def continue_scans(state: NodeState, session: Session) -> None:
    """Send what there is room for. The part that this turn has no time for becomes Work."""
    scans = session.retained_scans
    if scans is None:
        return
    assert isinstance(scans, SessionScans)
    state.steps_left -= scans.step(state, min(max(0, state.steps_left), STEPS_AT_ONCE))
    if scans.has_more:
        state.start_work(scans)


def _send_page(state: NodeState, session: Session, scan: Scan) -> bool:
    """Send the page of a scan. False: window or socket closed before the page's end."""
    connection = session.connection
    if connection is None or connection.state != OPEN:
        return False
    subscription = scan.subscription
    page = scan.page
    while page:
        message = page[0]
        qos = min(message.qos, subscription.qos)
        if connection.out_bytes > state.config.outbox_bytes:
            return False
        if qos > 0 and not can_send(state, session):
            return False
        page.popleft()
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
