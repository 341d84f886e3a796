"""Replies to a scrape in the form that the client accepts."""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder


class Scrape(NamedTuple):
    """The reply to a scrape."""

    body: bytes
    media_type: str


class _Collected:
    """Metrics that are collected, for an encoder."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def render(families: Iterable[Metric], accepted: str) -> Scrape:
    """Returns metrics in a form that the client accepts, by the Accept header of its request.

    Only the collection belongs to the event loop. The text of some hundred partitions takes longer
    than a turn may, so a thread makes it.
    """
    encode, media_type = choose_encoder(accepted)
    collected = _Collected(list(families))
    body = await asyncio.to_thread(encode, cast(CollectorRegistry, collected))
    return Scrape(body, media_type)
