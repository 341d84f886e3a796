"""MQTT 3.1, 3.1.1 and 5 clients: a pure protocol core, its asyncio driver, a blocking facade.

    from holdfast.client import Client, Options, Reconnect

    servers = ["mqtt://a", "mqtt://b"]
    options = Options(client_id="meter", session_expiry_s=3600, response_timeout_s=1)
    async with Client(servers=servers, reconnect=Reconnect(), options=options) as client:
        await client.publish("power", b"42", qos=1)      # on whichever server is there

`holdfast.client.blocking.Client` has the same methods without `await`. The names here are loaded
when they are first used, so that a program that needs only a core does not load asyncio.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.client.authentication import Authentication
    from holdfast.client.client import Client
    from holdfast.client.connection import PublishResult
    from holdfast.client.errors import (
        AuthenticationFailed,
        ClientError,
        ConnectionLost,
        ConnectionRefused,
        NotConnected,
        ProtocolError,
        PublishRefused,
        QueueFull,
        SubscribeRefused,
        TimedOut,
    )
    from holdfast.client.options import Options
    from holdfast.client.protocol.effects import Message
    from holdfast.client.pubqueue.errors import (
        MessageExpired,
        MessagesLeft,
        ProducerFenced,
        QueueClosed,
        StoreError,
        StoreFull,
    )
    from holdfast.client.pubqueue.format import PaperFormat
    from holdfast.client.pubqueue.ordered import ordered_messages
    from holdfast.client.pubqueue.queue import PublishQueue
    from holdfast.client.pubqueue.sqlite import SqliteStore
    from holdfast.client.pubqueue.store import MemoryStore
    from holdfast.client.reconnect import Reconnect
    from holdfast.client.scram import ScramAuthentication
    from holdfast.client.servers import Server
    from holdfast.protocol.mqtt.packets import SubscriptionRequest, Will

__all__ = [
    "Authentication",
    "AuthenticationFailed",
    "Client",
    "ClientError",
    "ConnectionLost",
    "ConnectionRefused",
    "MemoryStore",
    "Message",
    "MessageExpired",
    "MessagesLeft",
    "NotConnected",
    "Options",
    "PaperFormat",
    "ProducerFenced",
    "ProtocolError",
    "PublishQueue",
    "PublishRefused",
    "PublishResult",
    "QueueClosed",
    "QueueFull",
    "Reconnect",
    "ScramAuthentication",
    "Server",
    "SqliteStore",
    "StoreError",
    "StoreFull",
    "SubscribeRefused",
    "SubscriptionRequest",
    "TimedOut",
    "Will",
    "ordered_messages",
]

_ERRORS: Final = "holdfast.client.errors"
_QUEUE_ERRORS: Final = "holdfast.client.pubqueue.errors"
_HOMES: Final = {
    "Authentication": "holdfast.client.authentication",
    "Client": "holdfast.client.client",
    "MemoryStore": "holdfast.client.pubqueue.store",
    "Message": "holdfast.client.protocol.effects",
    "MessageExpired": _QUEUE_ERRORS,
    "MessagesLeft": _QUEUE_ERRORS,
    "Options": "holdfast.client.options",
    "PaperFormat": "holdfast.client.pubqueue.format",
    "ProducerFenced": _QUEUE_ERRORS,
    "PublishQueue": "holdfast.client.pubqueue.queue",
    "PublishResult": "holdfast.client.connection",
    "QueueClosed": _QUEUE_ERRORS,
    "Reconnect": "holdfast.client.reconnect",
    "ScramAuthentication": "holdfast.client.scram",
    "Server": "holdfast.client.servers",
    "SqliteStore": "holdfast.client.pubqueue.sqlite",
    "StoreError": _QUEUE_ERRORS,
    "StoreFull": _QUEUE_ERRORS,
    "SubscriptionRequest": "holdfast.protocol.mqtt.packets",
    "Will": "holdfast.protocol.mqtt.packets",
    "ordered_messages": "holdfast.client.pubqueue.ordered",
}
"""The modules of the names in `__all__`; the rest are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, _ERRORS)), name)
