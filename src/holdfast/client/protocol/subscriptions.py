"""Tracks granted subscriptions, to repeat them to a server without its session."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.client.errors import QueueFull
from holdfast.protocol.mqtt.packets import Properties, SubscriptionRequest

FILTERS_MAX: Final = 50_000
"""The most filters remembered; each may need a packet id when all are sent again."""
PACKET_FILTERS_MAX: Final = 200
PACKET_BYTES_MAX: Final = 16_384
"""The most bytes of one repeated SUBSCRIBE (a single filter may be longer)."""
_FILTER_OVERHEAD_BYTES: Final = 3
_PACKET_OVERHEAD_BYTES: Final = 256
"""The bytes of header, packet id and properties, at most."""


@dataclass
class SubscriptionBatch:
    """The content of one repeated SUBSCRIBE."""

    requests: list[SubscriptionRequest]
    properties: Properties


class Subscriptions:
    """The filters that a server has granted, in the order of their first subscription."""

    def __init__(self) -> None:
        self._granted: dict[str, tuple[SubscriptionRequest, Properties]] = {}

    def __len__(self) -> int:
        return len(self._granted)

    def check_room(self, requests: list[SubscriptionRequest]) -> None:
        """Raises `QueueFull` if these are more filters than may be remembered."""
        fresh = {one.filter for one in requests if one.filter not in self._granted}
        if len(self._granted) + len(fresh) > FILTERS_MAX:
            raise QueueFull(f"more than {FILTERS_MAX} subscriptions")

    def grant(
        self, requests: list[SubscriptionRequest], properties: Properties, codes: list[int]
    ) -> None:
        """Records a SUBACK. A refusal changes nothing: an earlier grant of the filter still
        holds."""
        for request, code in zip(requests, codes, strict=True):
            if code < 0x80:
                self._granted[request.filter] = (request, properties)

    def remove(self, filters: list[str], codes: list[int]) -> None:
        """Records an UNSUBACK; MQTT 3 sends no codes."""
        for index, filter in enumerate(filters):
            if index >= len(codes) or codes[index] < 0x80:
                self._granted.pop(filter, None)

    def batches(self, packet_bytes_max: int) -> Iterator[SubscriptionBatch]:
        """All filters as SUBSCRIBEs that the server accepts."""
        limit_bytes = min(PACKET_BYTES_MAX, packet_bytes_max - _PACKET_OVERHEAD_BYTES)
        batch = SubscriptionBatch([], {})
        size_bytes = 0
        for request, properties in self._granted.values():
            more_bytes = len(request.filter.encode()) + _FILTER_OVERHEAD_BYTES
            if batch.requests and (
                properties != batch.properties
                or len(batch.requests) >= PACKET_FILTERS_MAX
                or size_bytes + more_bytes > limit_bytes
            ):
                yield batch
                batch = SubscriptionBatch([], {})
                size_bytes = 0
            batch.properties = properties
            batch.requests.append(request)
            size_bytes += more_bytes
        if batch.requests:
            yield batch
