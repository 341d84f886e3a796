"""Topic aliases of clients."""

from holdfast.node.node_state import NodeState
from holdfast.node.session.connection import ALIASES_IN_BYTES_MAX, AliasesIn, Connection
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.errors import MalformedPacket, ProtocolViolation
from holdfast.protocol.mqtt.publish import Publish


def resolve_alias(state: NodeState, connection: Connection, publish: Publish) -> None:
    """Replaces a topic alias by its topic, or sets it. An alias lasts as long as its connection."""
    alias = publish.topic_alias
    if not alias:
        if connection.version >= 5:
            # [MQTT-3.3.2-8] a topic or an alias
            raise ProtocolViolation(reasons.PROTOCOL_ERROR, "empty topic name without topic alias")
        raise MalformedPacket("empty topic name")
    # [MQTT-3.3.2-8] [MQTT-3.3.2-9] [MQTT-3.2.2-17]
    if alias > state.config.topic_alias_max:
        raise ProtocolViolation(
            reasons.TOPIC_ALIAS_INVALID,
            f"topic alias {alias}, the maximum here is {state.config.topic_alias_max}",
        )
    aliases = connection.aliases_in
    if aliases is None:
        aliases = AliasesIn()
        connection.aliases_in = aliases
    if publish.topic:
        if not aliases.set(alias, publish.topic):
            raise ProtocolViolation(
                reasons.QUOTA_EXCEEDED,
                f"topic aliases for more than {ALIASES_IN_BYTES_MAX} bytes of topics",
            )
        return
    topic = aliases.topics.get(alias)
    if topic is None:
        raise ProtocolViolation(
            reasons.PROTOCOL_ERROR, f"topic alias {alias} was not set on this connection"
        )
    publish.topic = topic
