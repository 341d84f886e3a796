"""The $SYS tree, with Mosquitto's topic names (note the blank in `retained messages`)."""

from holdfast import __version__
from holdfast.node.delivery.delivery import deliver, send_group_qos0
from holdfast.node.node_state import NodeState
from holdfast.node.routing.routing import find_route
from holdfast.node.session.message import Message

VERSION = f"holdfast version {__version__}"
"""The value of `$SYS/broker/version`."""
LOADS = (("1min", 60.0), ("5min", 300.0), ("15min", 900.0))
"""The windows of the averaged rates, with their names."""


class SysTopics:
    """The $SYS tree of one node. Each interval it publishes the values that have changed.

    Its messages are retained and in no log: after a restart the node publishes them again.
    """

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._last: dict[str, str] = {}
        self._loads: dict[str, float] = {}
        self._before: dict[str, int] = {}

    def values(self) -> dict[str, str]:
        """The current value of each topic, by its name below `$SYS/broker/`."""
        state = self._state
        stats = state.stats
        connected = state.connections
        sessions, subscriptions, groups = state.cluster.away()
        total = max(state.client_sessions() + sessions, connected)
        values = {
            "version": VERSION,
            "uptime": f"{max(0, state.wall_us - state.started_us) // 1_000_000} seconds",
            "clients/connected": str(connected),
            "clients/active": str(connected),
            "clients/disconnected": str(max(0, total - connected)),
            "clients/inactive": str(max(0, total - connected)),
            "clients/total": str(total),
            "clients/maximum": str(stats.clients_maximum),
            "clients/expired": str(stats.sessions_expired),
            "bytes/received": str(stats.bytes_received),
            "bytes/sent": str(stats.bytes_sent),
            "messages/received": str(stats.packets_received),
            "messages/sent": str(stats.publish_sent),
            "publish/messages/received": str(stats.publish_received),
            "publish/messages/sent": str(stats.publish_sent),
            "publish/messages/dropped": str(self._dropped()),
            "retained messages/count": str(len(state.retained)),
            "subscriptions/count": str(state.subscription_count + subscriptions),
            "shared_subscriptions/count": str(len(state.groups) + groups),
            "producers/count": str(len(state.producers)),
            "producers/duplicates": str(stats.producer_duplicates),
            "producers/fenced": str(stats.producer_fenced),
            "producers/evicted": str(stats.producer_evicted),
            "store/messages/count": str(sum(state.journal.high_watermark)),
        }
        for further in state.sys_values:
            values.update(further())
        for name, rate in self._loads.items():
            values[f"load/{name}"] = f"{rate:.2f}"
        return values

    def _dropped(self) -> int:
        """The messages that were dropped or refused."""
        stats = self._state.stats
        return (
            stats.dropped_qos0_slow
            + stats.dropped_expired
            + stats.dropped_too_large
            + stats.dropped_lost
            + stats.refused_disk_full
        )

    def _update_loads(self) -> None:
        """Updates the rates per minute, exponentially averaged over 1, 5 and 15 minutes."""
        stats = self._state.stats
        interval_s = self._state.config.sys_interval_s
        counters = {
            "messages/received": stats.packets_received,
            "messages/sent": stats.publish_sent,
            "publish/received": stats.publish_received,
            "publish/sent": stats.publish_sent,
            "bytes/received": stats.bytes_received,
            "bytes/sent": stats.bytes_sent,
            "connections": stats.connections_opened,
        }
        for name, count in counters.items():
            per_minute = (count - self._before.get(name, 0)) * 60.0 / interval_s
            self._before[name] = count
            for label, window_s in LOADS:
                key = f"{name}/{label}"
                share = min(1.0, interval_s / window_s)
                self._loads[key] = self._loads.get(key, 0.0) * (1 - share) + per_minute * share

    def publish(self) -> None:
        """Publishes the values that differ from the last ones published."""
        self._update_loads()
        last = self._last
        for name, value in self.values().items():
            if last.get(name) != value:
                last[name] = value
                publish_own(self._state, f"$SYS/broker/{name}".encode(), value.encode(), True)


def publish_own(state: NodeState, topic: bytes, payload: bytes, retain: bool) -> None:
    """Publishes a QoS 0 message of the broker ($SYS). Its retained copy is not in the log."""
    message = Message(topic, payload, 0, retain, b"", -1, state.wall_us, b"")
    route = find_route(state, topic)
    if retain:
        state.retained.set(route.topic, message)
    deliver(state, route, message)
    # Each node publishes its own $SYS topics to its own clients.
    for group in route.groups:
        send_group_qos0(state, group, message)
