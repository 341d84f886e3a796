"""Counters of one node. Plain integers: they are bumped on the hot path and read elsewhere."""


class Stats:
    def __init__(self) -> None:
        self.bytes_received = 0
        self.bytes_sent = 0
        self.packets_received = 0
        self.publish_received = 0
        self.publish_sent = 0
        self.publish_qos0_received = 0
        self.publish_qos1_received = 0
        self.publish_qos2_received = 0
        self.duplicates_received = 0
        # Messages that were already stored, by their producer sequence; ones with an old epoch;
        # places that the producer table had no room for.
        self.producer_duplicates = 0
        self.producer_fenced = 0
        self.producer_evicted = 0
        self.connections_opened = 0
        self.connections_refused = 0
        # Closed before a CONNECT arrived, because others needed the room.
        self.connections_displaced = 0
        self.clients_maximum = 0
        self.sessions_expired = 0
        self.sessions_taken_over = 0
        self.authentications_failed = 0
        # Not checked at all: too many passwords were.
        self.authentications_shed = 0
        self.authorizations_denied = 0
        # Messages not handed to a client that may not read them; wills not left or published.
        self.reads_denied = 0
        self.wills_denied = 0
        # Clients that wanted another user's session.
        self.sessions_denied = 0
        self.protocol_errors = 0
        # Packets that made the node fail: defects of its own.
        self.internal_errors = 0
        self.keep_alive_timeouts = 0
        self.wills_published = 0
        # Deliveries that will never happen, by reason.
        self.dropped_qos0_slow = 0
        self.dropped_expired = 0
        self.dropped_too_large = 0
        self.dropped_lost = 0
        # Of shared groups of which no member may read them.
        self.dropped_unreadable = 0
        # Publishes not taken, by reason.
        self.refused_disk_full = 0
        self.refused_unavailable = 0
        self.refused_quota = 0
        self.log_reads = 0
        self.log_records_read = 0
        self.readers_fell_behind = 0
