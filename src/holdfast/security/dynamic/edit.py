"""Looks up what dynamic security commands name, and changes a document by them."""

import msgspec

from holdfast.security.dynamic.document import (
    NO_PRIORITY,
    ROLES_EACH_MAX,
    DynamicSecurityError,
    GroupClient,
    RoleAcl,
    RoleGrant,
    SecurityDocument,
    SecurityRole,
    SecurityUser,
    UserGroup,
    by_priority,
)
from holdfast.security.dynamic.fields import Fields, entries_in, name_in, priority_in
from holdfast.security.passwords import hash_password


class SecurityChanges:
    """The effects of commands beside the document itself."""

    def __init__(self) -> None:
        self.users: set[str] = set()
        """The users who may have another password, client id or rights."""
        self.are_for_all = False
        """Whether the rights of any client may have changed."""
        self.expelled: set[str] = set()
        """The users whose clients have to connect again."""
        self.count = 0
        """The number of commands that changed something."""


class SecurityEdit:
    """A document that commands change. A method raises `DynamicSecurityError` for a name or value
    that cannot be used, before it changes anything."""

    def __init__(self, document: SecurityDocument, changes: SecurityChanges) -> None:
        self.document = document
        self.changes = changes

    def user(self, command: Fields) -> SecurityUser:
        user = self.document.users.get(name_in(command, "username"))
        if user is None:
            raise DynamicSecurityError("Client not found")
        return user

    def group(self, command: Fields) -> UserGroup:
        group = self.document.groups.get(name_in(command, "groupname"))
        if group is None:
            raise DynamicSecurityError("Group not found")
        return group

    def role(self, command: Fields) -> SecurityRole:
        role = self.document.roles.get(name_in(command, "rolename"))
        if role is None:
            raise DynamicSecurityError("Role not found")
        return role

    def grants(self, command: Fields) -> tuple[RoleGrant, ...] | None:
        """The roles that a command lists; None: it has no list."""
        entries = entries_in(command, "roles", "rolename")
        if entries is None:
            return None
        for name, _ in entries:
            if name not in self.document.roles:
                raise DynamicSecurityError("Role not found")
        return by_priority([RoleGrant(*each) for each in dict(entries).items()])

    def groups(self, command: Fields) -> list[tuple[str, int]] | None:
        entries = entries_in(command, "groups", "groupname")
        for name, _ in entries or ():
            if name not in self.document.groups:
                raise DynamicSecurityError("Group not found")
        return None if entries is None else list(dict(entries).items())

    def members(self, command: Fields) -> list[GroupClient] | None:
        entries = entries_in(command, "clients", "username")
        for name, _ in entries or ():
            if name not in self.document.users:
                raise DynamicSecurityError("Client not found")
        if entries is None:
            return None
        return [GroupClient(*each) for each in dict(entries).items()]

    def with_grant(
        self, grants: tuple[RoleGrant, ...], command: Fields, kind: str
    ) -> tuple[RoleGrant, ...]:
        name = self.role(command).rolename
        if any(each.rolename == name for each in grants):
            raise DynamicSecurityError(f"{kind} is already in this role")
        if len(grants) >= ROLES_EACH_MAX:
            raise DynamicSecurityError(f"there are at most {ROLES_EACH_MAX} roles of one")
        return by_priority([*grants, RoleGrant(name, priority_in(command, NO_PRIORITY))])

    def without_grant(
        self, grants: tuple[RoleGrant, ...], command: Fields
    ) -> tuple[RoleGrant, ...]:
        return without(grants, self.role(command).rolename)

    def replace_user(
        self,
        user: SecurityUser,
        **changes: "bool | str | tuple[RoleGrant, ...] | None",
    ) -> None:
        self.document.users[user.username] = msgspec.structs.replace(user, **changes)
        self.changes.users.add(user.username)

    def replace_grants(self, group: UserGroup, grants: tuple[RoleGrant, ...]) -> None:
        changed = msgspec.structs.replace(group, roles=grants)
        self.document.groups[group.groupname] = changed
        self.change_members(group)

    def replace_acls(self, role: SecurityRole, acls: tuple[RoleAcl, ...]) -> None:
        self.document.roles[role.rolename] = msgspec.structs.replace(role, acls=acls)
        self.changes.are_for_all = True

    def change_members(self, group: UserGroup) -> None:
        self.changes.users.update(group.members)
        if group.groupname == self.document.anonymous_group:
            self.changes.are_for_all = True

    def expel(self, username: str) -> None:
        self.changes.users.add(username)
        self.changes.expelled.add(username)


def with_password(user: SecurityUser, password: str) -> SecurityUser:
    """The user with the hash of a password, which costs milliseconds."""
    _, _, iterations, salt, digest = hash_password(password, "sha512-pbkdf2").split("$")
    return msgspec.structs.replace(user, password=digest, salt=salt, iterations=int(iterations))


def without(grants: tuple[RoleGrant, ...], name: str) -> tuple[RoleGrant, ...]:
    return tuple(each for each in grants if each.rolename != name)
