"""Helpers with which the asyncio client waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from holdfast.client.errors import ClientError, TimedOut
from holdfast.protocol.mqtt.packets import SubscriptionRequest

Filter: TypeAlias = str | tuple[str, int] | SubscriptionRequest
"""A topic filter (QoS 0), a filter with its QoS, or all subscription options."""


@asynccontextmanager
async def deadline(timeout_s: float, name: str) -> AsyncIterator[None]:
    """A timeout for `async with` that raises TimedOut instead of TimeoutError."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise TimedOut(f"no {name} within {timeout_s:g} s") from None


def fail(future: "asyncio.Future[Any]", error: ClientError) -> None:
    """Fails a future with the error, unless it is done."""
    if not future.done():
        future.set_exception(error)
        # If no task waits (a submitted message), that is no unhandled error.
        future.exception()


def request_of(filter: Filter) -> SubscriptionRequest:
    """The subscription request of a filter in any of its forms."""
    if isinstance(filter, str):
        return SubscriptionRequest(filter, 0)
    if isinstance(filter, tuple):
        return SubscriptionRequest(filter[0], filter[1])
    return filter
