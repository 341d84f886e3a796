"""Retained messages for new subscriptions, page by page.

A subscription to `#` may match a million retained topics: they are looked up and sent as the
receiver's window and socket allow, a bounded number per call.
"""

from collections import deque

from holdfast.node.delivery import can_send, send_inflight
from holdfast.node.routing import may_read
from holdfast.node.state import SCAN, NodeState
from holdfast.session.connection import OPEN
from holdfast.session.message import Message
from holdfast.session.session import Session, Subscription
from holdfast.topics.retained import RetainedScan

PAGE = 100
PAGES_PER_CALL = 10


class Scan:
    """One subscription's retained messages still to be sent."""

    def __init__(self, subscription: Subscription, scan: RetainedScan) -> None:
        self.subscription = subscription
        self.scan = scan
        self.page: deque[Message] = deque()


def start_scan(state: NodeState, session: Session, subscription: Subscription) -> None:
    scan = Scan(subscription, state.retained.scan(subscription.filter))
    if session.retained_scans is None:
        session.retained_scans = {}
    # A repeated SUBSCRIBE begins anew, so there are never more than subscriptions.
    session.retained_scans[subscription.filter] = scan


def send_late(state: NodeState, topic: str, message: Message) -> None:
    """It was retained elsewhere, and not here, when these clients subscribed: now it comes to those
    that are connected, as retained."""
    served: set[Session] = set()
    for value in state.subscriptions.match(topic):
        if not isinstance(value, Subscription) or value.retain_handling == 2:
            continue
        session = value.session
        if session in served or session.connection is None or not may_read(session, topic):
            continue
        served.add(session)
        if session.retained_scans is None:
            session.retained_scans = {}
        scan = session.retained_scans.get(value.filter)
        if scan is None:
            scan = Scan(value, state.retained.scan(value.filter))
            scan.scan.done = True
            session.retained_scans[value.filter] = scan
        assert isinstance(scan, Scan)
        scan.page.append(message)
        continue_scans(state, session)


def continue_scans(state: NodeState, session: Session) -> None:
    scans = session.retained_scans
    pages = 0
    while scans:
        filter = next(iter(scans))
        scan = scans[filter]
        assert isinstance(scan, Scan)
        if not _send_page(state, session, scan):
            return
        if scan.scan.done:
            del scans[filter]
            continue
        pages += 1
        if pages > PAGES_PER_CALL:
            state.arm(state.now, SCAN, session)
            return
        for topic, entry in scan.scan.next(PAGE):
            assert isinstance(entry, Message)
            if may_read(session, topic):
                scan.page.append(entry)
    session.retained_scans = None


def _send_page(state: NodeState, session: Session, scan: Scan) -> bool:
    """False: window or socket closed before the page's end."""
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
        if message.is_expired(state.wall_us):
            continue
        if subscription.no_local and message.publisher == session.key:
            continue
        # [MQTT-3.3.1-8] RETAIN is 1 on a message sent because of a new subscription
        if qos > 0:
            send_inflight(
                state, session, message, qos, True, subscription.subscription_ids, True, None
            )
            continue
        frame = message.frame_special(
            connection.version,
            0,
            True,
            False,
            0,
            state.wall_us,
            subscription.subscription_ids,
            message.topic,
            0,
        )
        if len(frame) > connection.packet_bytes_max:
            state.stats.dropped_too_large += 1
            continue
        state.stats.publish_sent += 1
        connection.send(frame, state.dirty)
    return True
