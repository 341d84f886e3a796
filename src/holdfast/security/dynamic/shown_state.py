"""Shows the audit the state that a dynamic security command changes, without passwords.

A password is "set", "none" or "changed". A command about several things shows the one that it
changes: `addGroupClient` shows the client with its groups, `addGroupRole` the group.
"""

from typing import Final

import msgspec

from holdfast.security.dynamic.document import SecurityDocument, SecurityUser
from holdfast.security.dynamic.fields import Fields, Json

MEMBERS_MAX: Final = 100
"""The most members of a group that are shown by name. Of more, only their number is shown."""


class NamedState:
    """The state of what a command names at one moment. The entries are never changed, so the state
    of before stays."""

    def __init__(self, document: SecurityDocument, command: Fields) -> None:
        self._user: SecurityUser | None = None
        self.shown: Fields | None = None
        """None: the document does not have it."""
        name = command.get("username")
        if name is not None:
            if isinstance(name, str):
                self._user = document.users.get(name)
            if self._user is not None:
                self.shown = _shown_user(document, self._user)
        elif command.get("command") == "setAnonymousGroup":
            self.shown = {"anonymousGroup": document.anonymous_group}
        elif command.get("command") == "setDefaultACLAccess":
            self.shown = msgspec.to_builtins(document.defaults)
        elif "groupname" in command:
            self.shown = _shown_group(document, command["groupname"])
        else:
            name = command.get("rolename")
            role = document.roles.get(name) if isinstance(name, str) else None
            self.shown = None if role is None else msgspec.to_builtins(role)

    def mark_password(self, before: "NamedState") -> None:
        """Shows that the password is another one than before."""
        old, new = before._user, self._user
        if old is None or new is None or self.shown is None:
            return
        if (old.password, old.salt) != (new.password, new.salt):
            self.shown["password"] = "changed"


def _shown_user(document: SecurityDocument, user: SecurityUser) -> Fields:
    plain = msgspec.structs.replace(user, password="", salt="", iterations=0)
    shown: Fields = msgspec.to_builtins(plain)
    shown["password"] = "set" if user.password else "none"
    groups = document.groups_by_priority(user.username)
    if groups:
        shown["groups"] = [name for name, _ in groups]
    return shown


def _shown_group(document: SecurityDocument, name: object) -> Fields | None:
    group = document.groups.get(name) if isinstance(name, str) else None
    if group is None:
        return None
    shown: Fields = msgspec.to_builtins(msgspec.structs.replace(group, members={}))
    members = group.members
    names: list[Json] = [*sorted(members)]
    shown["members"] = len(names) if len(names) > MEMBERS_MAX else names
    return shown
