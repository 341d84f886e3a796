"""Counters of one node, as plain integers: the hot path increments them and others read them."""

from holdfast.node.durations import SampledDurations


class Stats:
    """The counters of one node since its start. A counter never decreases."""

    log_fetches = 0
    log_fetches_served = 0

    topic_questions_failed: int = 0
    """Topics that the service which decides about them did not decide about."""

    hook_events_dropped: int = 0

    invariants_broken: int = 0
    """Times that a partition or a session was stopped because an invariant did not hold there."""

    publish_qos0_unlogged: int = 0
    """Messages of QoS 0 that the log does not store, because log.qos0 has no filter for them."""

    delayed_published: int = 0
    delayed_denied: int = 0
    """Delayed messages that their client may not publish any more."""

    def __init__(self) -> None:
        self.durations = SampledDurations()
        self.bytes_received = 0
        self.bytes_sent = 0
        self.packets_received = 0
        self.publish_received = 0
        self.publish_sent = 0
        self.publish_qos0_received = 0
        self.publish_qos1_received = 0
        self.publish_qos2_received = 0
        self.duplicates_received = 0
        # Messages that were already stored, by their producer sequence; messages with an old epoch;
        # positions for which the producer table had no room.
        self.producer_duplicates = 0
        self.producer_fenced = 0
        self.producer_evicted = 0
        self.connections_opened = 0
        self.connections_refused = 0
        self.connection_refusals: dict[str, int] = {}  # the same, by reason code or limit
        # Connections closed before their CONNECT arrived, because others needed the room.
        self.connections_displaced = 0
        # TLS handshakes and WebSocket upgrades that failed: no MQTT packet arrived.
        self.handshakes_failed = 0
        self.clients_maximum = 0
        self.sessions_expired = 0
        self.sessions_taken_over = 0
        self.reloads = 0
        self.reloads_failed = 0
        self.authentications_failed = 0
        # Passwords that were not checked, because too many checks were waiting.
        self.authentications_shed = 0
        self.authorizations_denied = 0
        self.subscriptions_denied = 0
        # Messages not delivered to a client that may not read them; wills refused or dropped.
        self.reads_denied = 0
        self.wills_denied = 0
        self.sessions_denied = 0
        self.protocol_errors = 0
        # Packets that caused an internal error: a defect of the broker.
        self.internal_errors = 0
        self.keep_alive_timeouts = 0
        self.wills_published = 0
        # Deliveries that were given up, by reason.
        self.dropped_qos0_slow = 0
        self.dropped_expired = 0
        self.dropped_too_large = 0
        self.dropped_lost = 0
        # Messages of shared groups that no member may read.
        self.dropped_unreadable = 0
        # Publishes refused, by reason.
        self.refused_disk_full = 0
        self.refused_unavailable = 0
        self.refused_quota = 0
        self.refused_rate = 0
        self.refused_connect_rate = 0
        self.refused_banned = 0
        self.inputs_throttled = 0
        self.lockouts = 0
        self.log_reads = 0
        self.log_records_read = 0
        self.readers_fell_behind = 0

    def refuse_connection(self, reason: str, count: int = 1) -> None:
        """Counts refused connections."""
        self.connections_refused += count
        self.connection_refusals[reason] = self.connection_refusals.get(reason, 0) + count
