"""The reply to a scrape, in the form that the client accepts."""

from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


class Scrape(NamedTuple):
    """The reply to a scrape."""

    body: bytes
    media_type: str


def render(registry: CollectorRegistry, accepted: str) -> Scrape:
    """Return all metrics in a form that the client accepts, by the Accept header of its request."""
    encode, media_type = choose_encoder(accepted)
    return Scrape(encode(registry), media_type)
