"""The scopes of the admin port: the rights that an endpoint needs and that a role gives."""

from enum import IntEnum
from typing import Final


class Scope(IntEnum):
    """The right that a request needs. A greater scope includes all smaller ones."""

    OPEN = 0
    """Anybody, without credentials: the login."""
    HEALTH = 1
    """Health and metrics. Anybody has it if `admin.open_health` is set, else every role."""
    VIEWER = 2
    """The state of the broker, without payloads of messages."""
    READER = 3
    """The log and the retained messages, with their payloads."""
    OPERATOR = 4
    """Changes that an operation needs: publish, disconnect, reload, move leaderships."""
    ADMIN = 5
    """Users, tokens, the audit, and operations that can lose acknowledged messages."""

    @property
    def role(self) -> str:
        """The name of the smallest role that has this scope."""
        return max(self, Scope.VIEWER).name.lower()


ROLES: Final = {each.name.lower(): each for each in Scope if each >= Scope.VIEWER}
"""The name of each role of users and tokens, and its scope."""
