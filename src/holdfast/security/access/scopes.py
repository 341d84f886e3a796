"""Scopes of the admin port: the rights that an endpoint needs and that a role gives."""

from enum import IntEnum
from typing import Final


class Scope(IntEnum):
    """The right that a request needs. A greater scope includes all smaller ones."""

    OPEN = 0
    """Anybody, without credentials: the login."""
    HEALTH = 1
    """Whether the process runs and serves. Every role has it, and anybody if `admin.open` has
    "health"."""
    METRICS = 2
    """The metrics. Every role has it, and anybody if `admin.open` has "metrics"."""
    VIEWER = 3
    """The state of the broker, without payloads of messages."""
    READER = 4
    """The log and the retained messages, with their payloads."""
    OPERATOR = 5
    """Changes that an operation needs: publish, disconnect, reload, move leaderships."""
    ADMIN = 6
    """Users, tokens, the audit, and operations that can lose acknowledged messages."""

    @property
    def role(self) -> str:
        """The name of the smallest role that has this scope."""
        return max(self, Scope.VIEWER).name.lower()


ROLES: Final = {each.name.lower(): each for each in Scope if each >= Scope.VIEWER}
"""The name of each role of users and tokens, and its scope."""
