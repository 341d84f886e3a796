"""Makes a new file of dynamic security with its first user, in Mosquitto's default role."""

from typing import Final

from holdfast.security.dynamic.document import (
    PUBLISHES,
    RECEIVES,
    SUBSCRIBES_PATTERN,
    UNSUBSCRIBES_PATTERN,
    RoleAcl,
    RoleGrant,
    SecurityDocument,
    SecurityRole,
    SecurityUser,
    acls_by_priority,
)
from holdfast.security.dynamic.edit import with_password

ADMIN: Final = "admin"
_ACLS: Final = (
    (PUBLISHES, "$CONTROL/dynamic-security/#"),
    (RECEIVES, "$CONTROL/dynamic-security/#"),
    (SUBSCRIBES_PATTERN, "$CONTROL/dynamic-security/#"),
    (RECEIVES, "$SYS/#"),
    (SUBSCRIBES_PATTERN, "$SYS/#"),
    (RECEIVES, "#"),
    (SUBSCRIBES_PATTERN, "#"),
    (UNSUBSCRIBES_PATTERN, "#"),
)


def new_document(username: str, password: str) -> SecurityDocument:
    """A document with one user, who may send commands and receive all messages."""
    document = SecurityDocument()
    acls = acls_by_priority([RoleAcl(kind, topic, 0, True) for kind, topic in _ACLS])
    document.roles[ADMIN] = SecurityRole(ADMIN, acls=acls)
    user = SecurityUser(username, roles=(RoleGrant(ADMIN),))
    document.users[username] = with_password(user, password)
    return document


def set_password(document: SecurityDocument, username: str, password: str) -> None:
    """Gives a user another password, and a new one no role. An operator who has lost the password
    of the only administrator gets in again this way."""
    user = document.users.get(username, SecurityUser(username))
    document.users[username] = with_password(user, password)
