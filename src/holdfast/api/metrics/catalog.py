"""Declares every metric of a broker and a federation's sidecar: kind, labels, meaning.

Collectors make their families here, so a metric that is not declared does not exist. The tests
compare docs/metrics.md, the dashboard and the alert rules with these declarations.
"""

from typing import Final, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

PREFIX: Final = "holdfast_"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Declared(NamedTuple):
    """One metric."""

    kind: str
    labels: tuple[str, ...]
    help: str

    def exposed(self, name: str) -> str:
        """Returns the name in a scrape."""
        full = name if name.startswith("process_") else PREFIX + name
        return f"{full}_total" if self.kind == COUNTER else full


def _table(kind: str, labels: str, rows: dict[str, str]) -> dict[str, Declared]:
    return {name: Declared(kind, tuple(labels.split()), text) for name, text in rows.items()}


NODE_COUNTERS: Final = _table(COUNTER, "node", {
    "bytes_received": "Bytes received from clients.",
    "bytes_sent": "Bytes written to clients.",
    "packets_received": "MQTT packets received.",
    "publish_sent": "PUBLISH packets sent to clients.",
    "duplicates_received": "QoS 2 PUBLISH packets received again before PUBREL.",
    "producer_duplicates": "Messages dropped: their producer sequence was already stored.",
    "producer_fenced": "Messages refused: their producer has a newer epoch.",
    "producer_evicted": "Positions of producers forgotten because of limits.producers_max.",
    "connections_opened": "CONNECT packets accepted.",
    "connections_refused": "CONNECT packets refused, and sockets closed because of a limit.",
    "handshakes_failed": "TLS handshakes, WebSocket upgrades and PROXY headers that failed.",
    "connections_displaced": "Connections closed before CONNECT to make room for others.",
    "sessions_expired": "Sessions ended by their expiry interval.",
    "sessions_taken_over": "Connections replaced by another one with the same client id.",
    "authentications_failed": "Connections with wrong or missing credentials.",
    "authentications_shed": "CONNECT packets refused unchecked: too many passwords waited.",
    "topic_questions_failed": "Topics that the HTTP service did not decide about.",
    "authorizations_denied": "Publishes denied: by the access control list, or another's producer.",
    "subscriptions_denied": "Filters refused in SUBSCRIBE or UNSUBSCRIBE: the client has no right.",
    "reads_denied": "Messages not delivered to a client that may not read their topic.",
    "wills_denied": "Wills to topics that their client may not write, refused or dropped.",
    "sessions_denied": "CONNECT packets refused: the client id is another user's.",
    "protocol_errors": "Connections closed because the client broke the protocol.",
    "internal_errors": "Connections cut because a packet made the node fail; the log has each.",
    "invariants_broken": "Times a partition or a session was stopped: its state was wrong.",
    "inputs_throttled": "Times a client was not read for a while, because of a rate.",
    "hook_events_dropped": "Events that no hook was told of, because too many waited.",
    "lockouts": "Names locked out after failed authentications.",
    "keep_alive_timeouts": "Connections closed because the client was silent for too long.",
    "wills_published": "Wills published.",
    "delayed_published": "Delayed messages published when they were due.",
    "delayed_denied": "Delayed messages dropped: their client may not publish them any more.",
    "reloads": "Reloads of settings and files that were applied.",
    "reloads_failed": "Reloads that changed nothing: a file cannot be used.",
    "log_reads": "Reads of the log for sessions that are behind.",
    "log_fetches": "Reads of the log at other nodes, for partitions that are not stored here.",
    "log_fetches_served": "Reads of the log for other nodes.",
    "log_records_read": "Records read from the log for sessions that are behind.",
    "readers_fell_behind": "Times a session left the live tail for the log.",
})  # fmt: skip
"""Counters of `node.stats.Stats` with the same name."""

LABELLED_COUNTERS: Final = {
    "publish_received": Declared(COUNTER, ("node", "qos"), "PUBLISH packets received."),
    "deliveries_dropped": Declared(
        COUNTER, ("node", "reason"), "Deliveries that will never happen, by reason."
    ),
    "refused": Declared(
        COUNTER,
        ("node", "reason"),
        "Requests refused, by reason; unavailable: no leader in a cluster.",
    ),
    "connection_refusals": Declared(
        COUNTER,
        ("node", "reason"),
        "The refused connections, by the reason of CONNACK, or by the limit.",
    ),
    "descriptor_waits": Declared(
        COUNTER, ("node",), "Openings of files that waited for a file descriptor."
    ),
    "local_process_restarts": Declared(
        COUNTER, (), "Processes that ended at the place of this one, since the broker started."
    ),
    "log_lake_lost_records": Declared(
        COUNTER, ("node",), "Records that retention removed before a registered lake had them."
    ),
    "log_reclaimed_bytes": Declared(
        COUNTER, ("node",), "Bytes given back after partitions moved away from this node."
    ),
}

DROPPED: Final = {
    "qos0_slow": "dropped_qos0_slow",
    "expired": "dropped_expired",
    "too_large": "dropped_too_large",
    "lost": "dropped_lost",
    "unreadable": "dropped_unreadable",
}
"""The counters of `deliveries_dropped`, by reason."""
REFUSED: Final = {
    "disk_full": "refused_disk_full",
    "quota": "refused_quota",
    "unavailable": "refused_unavailable",
    "rate": "refused_rate",
    "connect_rate": "refused_connect_rate",
    "banned": "refused_banned",
}
"""The counters of `refused`, by reason."""

NODE_GAUGES: Final = _table(GAUGE, "node", {
    "connections": "Open client connections.",
    "pending_connects": "Connections without a reply to CONNECT yet.",
    "pending_connect_bytes": "Bytes that connections have sent before their CONNECT is answered.",
    "passwords_waiting": "Password checks that wait for a thread.",
    "sessions": "Sessions, connected or not. In a cluster: those connected here, and all away.",
    "sessions_away": "Durable sessions without a connection. In a cluster every node reports all.",
    "sessions_behind": "Connected sessions that read the log because they cannot keep up.",
    "backlog_records": "Records that sessions away or behind have yet to read, matching or not.",
    "backlog_records_max": "The backlog of the session with the largest one.",
    "subscriptions": "Subscriptions of all sessions.",
    "filter_bytes": "Memory of the filters of all sessions.",
    "shared_groups": "Shared subscription groups.",
    "retained_messages": "Retained messages of clients, without the broker's own $SYS topics.",
    "retained_bytes": "Memory of the retained store, $SYS included.",
    "delayed_messages": "Delayed messages that wait. In a cluster every node reports all.",
    "delayed_bytes": "Memory of the delayed messages.",
    "producers": "Producers in the producer table.",
    "producer_places": "Positions in the producer table, one for each producer and partition.",
    "log_bytes": "Size of the log's segments on this node's disk.",
    "log_dead_bytes": "Bytes in the log of partitions that moved away, in part an estimate.",
    "log_segments": "Number of the log's segments on this node's disk.",
    "journal_pending_bytes": "Bytes appended to the journal and not yet written.",
    "journal_held_promises": "Acknowledgements and deliveries that wait for the disk.",
    "disk_full": "1 while publishes of QoS 1 and 2 are refused for lack of space.",
    "disk_free_bytes": "Free space under the data directory.",
    "disk_full_in_seconds":
        "Time until the disk is full at the growth of the last hour; +Inf: retention prevents it.",
    "log_pinned_bytes":
        "Bytes of the log from the oldest record that a durable session or shared group needs.",
    "log_pinned_bytes_limit":
        "log.retention.session_bytes: beyond it retention deletes what a session needs.",
    "log_lake_pinned_bytes":
        "Bytes of the log from the oldest record that a registered lake has not read.",
    "log_lake_away": "1 while the lake of log.lake cannot be read.",
    "log_lake_waiting_readers": "Sessions and groups that wait for the lake.",
    "ready": "1 while /readyz replies 200.",
    "acknowledgement_wait_seconds":
        "Age of the oldest acknowledgement that waits for the disk or for replicas.",
    "lease_held": "1 while this node holds the lease of a shared directory.",
    "lease_epoch": "The newest epoch of the lease that counts.",
    "lease_takeover_seconds": "Duration of this node's last takeover.",
    "standby_records_followed": "Records of the holder's journal that this standby has followed.",
    "metadata_leader": "1 while this node leads the metadata.",
    "metadata_majority": "1 while this node reaches a majority.",
    "metadata_version": "Changes of the metadata applied here.",
    "partitions_under_replicated": "Partitions with fewer replicas in sync than they should have.",
    "partitions_below_min_insync":
        "Partitions that refuse messages of QoS 1 and 2: too few replicas are in sync.",
    "disk_stalled": "1 while a write to the disk takes too long.",
    "disk_damaged": "1 while this node's log is damaged.",
    "disk_older_copy": "1 while this node's disk is an older copy, and it takes part in nothing.",
    "logs_set_aside":
        "Directories diverged-N of records that the other nodes went on without.",
    "partitions_leaderless": "Partitions without a leader.",
    "partitions_moving": "Partitions that get new replicas.",
    "partitions_under_zoned": "Partitions with more replicas in one zone than there must be.",
    "replicas_uneven": "Replicas above the shares of their nodes.",
    "moves_paused": "1 while an operator has paused the moves of replicas.",
    "partitions_led": "Partitions that this node leads.",
    "partitions_stored": "Partitions of which this node is a replica.",
})  # fmt: skip

LABELLED_GAUGES: Final = {
    "build_info": Declared(
        GAUGE, ("node", "version", "python", "form", "loop"), "1, with the build as labels."
    ),
    "certificate_expiry_timestamp_seconds": Declared(
        GAUGE,
        ("node", "door", "file"),
        "End of a file's first certificate or revocation list to end, seconds since 1970.",
    ),
    "local_process_up": Declared(
        GAUGE, ("process",), "1 for each process of the machine that replies, with several."
    ),
    "not_ready": Declared(GAUGE, ("node", "reason"), "1 for each reason why a node is not ready."),
    "maintenance_failing": Declared(
        GAUGE, ("node", "work"), "1 for maintenance that failed when tried last; see the log."
    ),
    "partition_first_offset": Declared(
        GAUGE, ("node", "partition"), "The first offset that retention has kept."
    ),
    "partition_high_watermark": Declared(
        GAUGE, ("node", "partition"), "The first offset that is not committed yet."
    ),
    "node_zone": Declared(GAUGE, ("node", "zone"), "1 for the zone of this node."),
    "peer_connected": Declared(GAUGE, ("node", "peer"), "1 while there is a link to the peer."),
    "peer_relayed": Declared(
        GAUGE, ("node", "peer"), "1 while the link to the peer goes through another node."
    ),
    "clock_skew_seconds": Declared(
        GAUGE,
        ("node", "peer"),
        "Seconds by which a node's wall clock is ahead of the clock the cluster agrees on.",
    ),
    "replication_lag_records": Declared(
        GAUGE,
        ("node", "follower"),
        "Records of the partitions led here that a follower does not have on disk yet.",
    ),
}

CLUSTER_COUNTERS: Final = _table(COUNTER, "node", {
    "failovers": "Partitions taken over from a leader that was down.",
    "publish_forwarded": "Publishes sent to the node that leads their partition.",
    "peer_bytes_relayed": "Bytes passed on between two other nodes without a link of their own.",
    "peer_frames_sent": "Frames sent to other nodes.",
    "peer_bytes_sent": "Bytes sent to other nodes.",
})  # fmt: skip

FEDERATION: Final = {
    **_table(COUNTER, "", {
        "federation_published": "Messages of this broker that other members want.",
        "federation_unwanted": "Messages of this broker that no member wanted any more.",
        "federation_delivered": "Messages of other members that arrived.",
        "federation_control_frames": "Frames sent that carry no message.",
        "federation_control_bytes": "Bytes of frames sent that carry no message.",
        "federation_data_frames": "Frames sent that carry a message.",
        "federation_data_bytes": "Bytes of frames sent that carry a message.",
        "federation_links_up": "Links that were made.",
        "federation_links_down": "Links that were lost.",
    }),
    **_table(COUNTER, "reason", {
        "federation_dropped": "Messages and frames that were dropped, by reason.",
        "federation_refused": "Connections of peers that were refused, by reason.",
    }),
    **_table(COUNTER, "hops", {
        "federation_hops": "Messages that arrived, by the number of links behind them.",
    }),
    **_table(COUNTER, "outcome", {
        "federation_edge_messages": "Messages between the member and its broker, by outcome.",
    }),
    **_table(GAUGE, "", {
        "federation_up": "1 while the federator runs, here or at another node.",
        "federation_epoch": "Starts of this member.",
        "federation_members": "Members that are known, this one included.",
        "federation_links": "Links that are up.",
        "federation_interest_local": "Filters that this member announces to others.",
        "federation_interest_remote": "Filters that other members want.",
        "federation_custody_messages": "Messages that other members have yet to confirm.",
        "federation_custody_bytes": "Bytes of messages that other members have yet to confirm.",
        "federation_clock_wrong": "1 while this member knows that its own clock is wrong.",
        "federation_clock_disputed":
            "1 while its clock is more than a day apart from a linked member's.",
        "federation_clock_ahead_seconds":
            "Seconds by which its clock is ahead of the linked members' clocks.",
        "federation_custody_disk_full": "1 while custody has no room.",
        "federation_waiting_for_broker": "Messages from other members that wait for the disk.",
    }),
    **_table(GAUGE, "member site", {
        "federation_queued": "Messages in custody for a member.",
        "federation_link_rtt_ms": "Round trip of a link in milliseconds.",
    }),
}  # fmt: skip

PROCESS: Final = {
    **_table(COUNTER, "", {"process_cpu_seconds": "CPU time of the process, in seconds."}),
    **_table(GAUGE, "", {
        "process_resident_memory_bytes": "Resident memory of the process.",
        "process_virtual_memory_bytes": "Virtual memory of the process.",
        "process_start_time_seconds": "Start of the process, in seconds since 1970.",
        "process_open_fds": "Open file descriptors.",
        "process_max_fds": "The limit on open file descriptors.",
        "process_threads": "Threads of the process.",
    }),
}  # fmt: skip

HISTOGRAMS: Final = _table(HISTOGRAM, "node", {
    "publish_acknowledge_seconds":
        "From the arrival of a publish of QoS 1 or 2 to its acknowledgement.",
    "publish_deliver_seconds":
        "From the time of a message in the log to its delivery to a client that has room.",
    "fdatasync_seconds": "Duration of a fdatasync of the journal.",
    "replication_seconds": "From a leader's batch to its commit by all replicas in sync.",
})  # fmt: skip

METRICS: Final[dict[str, Declared]] = {
    **NODE_COUNTERS,
    **LABELLED_COUNTERS,
    **NODE_GAUGES,
    **LABELLED_GAUGES,
    **CLUSTER_COUNTERS,
    **HISTOGRAMS,
    **FEDERATION,
    **PROCESS,
}
"""All metrics by name, without `holdfast_` and `_total`."""


def counter(name: str) -> CounterMetricFamily:
    """Returns an empty family of a declared counter."""
    declared = METRICS[name]
    assert declared.kind == COUNTER
    exposed = declared.exposed(name).removesuffix("_total")
    return CounterMetricFamily(exposed, declared.help, labels=declared.labels)


def gauge(name: str) -> GaugeMetricFamily:
    """Returns an empty family of a declared gauge."""
    declared = METRICS[name]
    assert declared.kind == GAUGE
    return GaugeMetricFamily(declared.exposed(name), declared.help, labels=declared.labels)


def histogram(name: str) -> HistogramMetricFamily:
    """Returns an empty family of a declared histogram."""
    declared = METRICS[name]
    assert declared.kind == HISTOGRAM
    return HistogramMetricFamily(declared.exposed(name), declared.help, labels=declared.labels)
