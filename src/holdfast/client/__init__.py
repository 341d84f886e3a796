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
    from holdfast.client.authentication import Authentication as Authentication
    from holdfast.client.client import Client as Client
    from holdfast.client.connection import PublishResult as PublishResult
    from holdfast.client.errors import AuthenticationFailed as AuthenticationFailed
    from holdfast.client.errors import ClientError as ClientError
    from holdfast.client.errors import ConnectionLost as ConnectionLost
    from holdfast.client.errors import ConnectionRefused as ConnectionRefused
    from holdfast.client.errors import NotConnected as NotConnected
    from holdfast.client.errors import ProtocolError as ProtocolError
    from holdfast.client.errors import PublishRefused as PublishRefused
    from holdfast.client.errors import QueueFull as QueueFull
    from holdfast.client.errors import SubscribeRefused as SubscribeRefused
    from holdfast.client.errors import TimedOut as TimedOut
    from holdfast.client.options import Options as Options
    from holdfast.client.protocol.effects import Message as Message
    from holdfast.client.pubqueue.format import PaperFormat as PaperFormat
    from holdfast.client.pubqueue.messages import MessageExpired as MessageExpired
    from holdfast.client.pubqueue.messages import MessagesLeft as MessagesLeft
    from holdfast.client.pubqueue.messages import ProducerFenced as ProducerFenced
    from holdfast.client.pubqueue.messages import QueueClosed as QueueClosed
    from holdfast.client.pubqueue.messages import StoreError as StoreError
    from holdfast.client.pubqueue.messages import StoreFull as StoreFull
    from holdfast.client.pubqueue.ordered import ordered_messages as ordered_messages
    from holdfast.client.pubqueue.queue import PublishQueue as PublishQueue
    from holdfast.client.pubqueue.sqlite import SqliteStore as SqliteStore
    from holdfast.client.pubqueue.store import MemoryStore as MemoryStore
    from holdfast.client.reconnect import Reconnect as Reconnect
    from holdfast.client.scram import ScramAuthentication as ScramAuthentication
    from holdfast.client.servers import Server as Server
    from holdfast.protocol.mqtt.packets import SubscriptionRequest as SubscriptionRequest
    from holdfast.protocol.mqtt.packets import Will as Will

_HOMES: Final = {
    "authentication": "Authentication",
    "client": "Client",
    "connection": "PublishResult",
    "errors": "AuthenticationFailed ClientError ConnectionLost ConnectionRefused NotConnected "
    "ProtocolError PublishRefused QueueFull SubscribeRefused TimedOut",
    "protocol.effects": "Message",
    "pubqueue.messages": "MessageExpired MessagesLeft ProducerFenced QueueClosed StoreError "
    "StoreFull",
    "pubqueue.format": "PaperFormat",
    "pubqueue.ordered": "ordered_messages",
    "pubqueue.queue": "PublishQueue",
    "pubqueue.sqlite": "SqliteStore",
    "pubqueue.store": "MemoryStore",
    "reconnect": "Reconnect",
    "scram": "ScramAuthentication",
    "servers": "Server",
    "transport.deadline": "SubscriptionRequest",
    "options": "Options Will",
}
"""The names, by the module of this package that has them."""
_MODULES: Final = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
