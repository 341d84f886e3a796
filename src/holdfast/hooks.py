"""Hooks: Python code of the operator that the broker calls about its clients.

A hook is a class derived from `Hooks`, made once without arguments. A package names it as an entry
point of the group `holdfast.hooks`, and the setting `hooks.enabled` names the entry point. Hooks
run in threads, never in the event loop. docs/hooks.md has a worked example.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.security.identity.identity import (
    Answer,
    ClientIdentity,
    LoginRefusal,
    LoginRequest,
)

__all__ = [
    "Answer",
    "ClientIdentity",
    "Grants",
    "HookClient",
    "HookMessage",
    "Hooks",
    "LoginRefusal",
    "LoginRequest",
]


@dataclass(frozen=True)
class HookClient:
    """A client whose user name is proved; None: it is anonymous."""

    client_id: str
    username: str | None
    address: str
    """The address and port that it connects from."""
    listener: str


@dataclass(frozen=True)
class Grants:
    """The rights of a client, as topic filters. %u and %c stand for user name and client id."""

    publish: Sequence[str] = ()
    subscribe: Sequence[str] = ()


@dataclass(frozen=True)
class HookMessage:
    """A message that the broker has accepted. It need not be on the disk yet."""

    client_id: str
    topic: str
    payload: bytes
    qos: int
    retain: bool


class Hooks:
    """The base of a hook. Methods that are not overridden are not called and cost nothing.

    `authenticate` and `authorise` have `hooks.timeout_s` to return. One that takes longer or raises
    refuses the client with 0x88. The others are called in the order of the events, in a thread of
    their own, and their exceptions are logged.
    """

    publish_filters: Sequence[str] = ("#",)
    """The topic filters of the messages that `on_publish` is called for."""

    def authenticate(self, request: LoginRequest) -> Answer:
        """Accepts the client, refuses it, or returns None to leave it to the others."""
        return None

    def authorise(self, client: HookClient) -> Grants | None:
        """Returns the rights of a client that has proved its name, or None for those that it has
        without this hook. Called once for each connection, before CONNACK."""
        return None

    def on_connect(self, client: HookClient) -> None:
        """Handles a client that is connected."""

    def on_disconnect(self, client: HookClient, reason: str) -> None:
        """Handles the end of a connection. `reason` is the name of the reason code."""

    def on_publish(self, message: HookMessage) -> None:
        """Handles a message that a client has published."""
