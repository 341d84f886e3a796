"""The edge to an MQTT broker whose retained messages are the federation's, too."""

from collections.abc import Callable

from holdfast.client.options import LEVEL_5
from holdfast.federation.core.effects import Message
from holdfast.federation.core.identity import MessageId
from holdfast.federation.sidecar.edge_mqtt.edge import MqttEdge
from holdfast.federation.sidecar.edge_mqtt.settings import EdgeSettings
from holdfast.federation.sidecar.edge_mqtt.subscription_set import within


class RetainingMqttEdge(MqttEdge):
    """A RetainingEdge. Over MQTT 5 only: the mark tells which of a broker's retained messages the
    federation has brought, and MQTT 3 has nowhere to keep one."""

    def read_retained(self, filters: frozenset[str], done: Callable[[list[Message]], None]) -> None:
        allowed = within(filters, self._settings.export_filters)
        self._reader.read(frozenset(allowed), done)

    def retain(self, id: MessageId, message: Message, done: Callable[[], None]) -> None:
        """Clients take it for a publication, which MQTT cannot help."""
        self._give(id, message, 0, done, True)


def edge_for(settings: EdgeSettings) -> MqttEdge:
    """Raises ValueError for what no client can be made of, InvalidFilter."""
    return RetainingMqttEdge(settings) if settings.level == LEVEL_5 else MqttEdge(settings)
