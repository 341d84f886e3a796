"""Shares an MQTT broker's retained messages with the federation."""

from collections.abc import Callable

from holdfast.client.options import LEVEL_5
from holdfast_federation.core.effects import Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.edge import ReadingDone
from holdfast_federation.sidecar.edge_mqtt.edge import MqttEdge
from holdfast_federation.sidecar.edge_mqtt.settings import EdgeSettings
from holdfast_federation.sidecar.edge_mqtt.subscriptions import within


class RetainingMqttEdge(MqttEdge):
    """The `RetainingEdge` over MQTT 5.

    The mark shows which of a broker's retained messages came from the federation. MQTT 3 has no
    properties and thus no mark.
    """

    def read_retained(self, filters: frozenset[str], done: ReadingDone) -> None:
        allowed = within(filters, self._settings.export_filters)
        self._reader.read(frozenset(allowed), done)

    def retain(self, id: MessageId, message: Message, done: Callable[[], None]) -> None:
        """Publishes the message with RETAIN. Clients receive it too, because MQTT has no other
        way."""
        self._deliver(id, message, 0, done, True)


def edge_for(settings: EdgeSettings) -> MqttEdge:
    """Makes the edge for the MQTT version of the settings.

    Raises `ValueError` if no client can be made of them, `InvalidFilter` for a bad filter.
    """
    return RetainingMqttEdge(settings) if settings.level == LEVEL_5 else MqttEdge(settings)
