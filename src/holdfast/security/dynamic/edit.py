"""Looks up what dynamic security commands name, and changes a document by them."""

from collections.abc import Callable, Collection
from typing import Final, TypeAlias

import msgspec

from holdfast.security.dynamic.document import (
    ACLS_MAX,
    NO_PRIORITY,
    PUBLISHES,
    RECEIVES,
    ROLES_EACH_MAX,
    SUBSCRIBES_PATTERN,
    UNSUBSCRIBES_PATTERN,
    DynamicSecurityError,
    GroupClient,
    RoleAcl,
    RoleGrant,
    SecurityDocument,
    SecurityRole,
    SecurityUser,
    UserGroup,
    acls_by_priority,
    by_priority,
    check_acl,
    check_name,
)
from holdfast.security.passwords import hash_password

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
Fields: TypeAlias = dict[str, Json]


def name_in(command: Fields, key: str) -> str:
    name = command.get(key)
    if not isinstance(name, str) or not name:
        raise DynamicSecurityError(f"Invalid/missing {key}")
    check_name(name, key)
    return name


def new_name_in(command: Fields, key: str, kind: str, names: Collection[str], most: int) -> str:
    """The name of a client, group or role to create. `names`: those that exist; at most `most`."""
    name = name_in(command, key)
    if name in names:
        raise DynamicSecurityError(f"{kind} already exists")
    if len(names) >= most:
        raise DynamicSecurityError(f"there are {most} {kind.lower()}s already")
    return name


def text_in(command: Fields, key: str) -> str | None:
    text = command.get(key)
    if text is None:
        return None
    if not isinstance(text, str):
        raise DynamicSecurityError(f"Invalid/missing {key}")
    check_name(text, key)
    return text


def texts_in(command: Fields) -> dict[str, str]:
    """The descriptions that a command changes."""
    found = {key: text_in(command, key) for key in ("textname", "textdescription")}
    return {key: text for key, text in found.items() if text is not None}


def priority_in(command: Fields, default: int) -> int:
    priority = command.get("priority", default)
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 1 << 31:
        raise DynamicSecurityError("Invalid priority")
    return priority


def entries_in(command: Fields, key: str, name: str) -> list[tuple[str, int]] | None:
    """The names and priorities of a list in a command; None: there is no list."""
    entries = command.get(key)
    if not isinstance(entries, list):
        return None
    if len(entries) > ROLES_EACH_MAX and key != "clients":
        raise DynamicSecurityError(f"there are at most {ROLES_EACH_MAX} {key}")
    return [
        (name_in(each, name), priority_in(each, NO_PRIORITY))
        for each in entries
        if isinstance(each, dict)
    ]


def acl_in(command: Fields) -> RoleAcl:
    kind, topic = command.get("acltype"), command.get("topic")
    if not isinstance(kind, str):
        raise DynamicSecurityError("Invalid/missing acltype")
    if not isinstance(topic, str):
        raise DynamicSecurityError("Invalid/missing topic")
    acl = RoleAcl(kind, topic, priority_in(command, 0), command.get("allow") is True)
    check_acl(acl)
    return acl


def acls_in(command: Fields) -> tuple[RoleAcl, ...] | None:
    """The rules that a command lists; None: it has no list. A later one replaces an earlier one of
    the same kind and topic."""
    entries = command.get("acls")
    if not isinstance(entries, list):
        return None
    acls = [acl_in(each) for each in entries if isinstance(each, dict)]
    if len(acls) > ACLS_MAX:
        raise DynamicSecurityError(f"a role has at most {ACLS_MAX} rules")
    return acls_by_priority(list({(each.acltype, each.topic): each for each in acls}.values()))


def listed(
    command: Fields,
    key: str,
    names: Collection[str],
    show: Callable[[str], Json],
) -> Json:
    count, offset = command.get("count", -1), command.get("offset", 0)
    begin = offset if isinstance(offset, int) and offset > 0 else 0
    end = begin + count if isinstance(count, int) and count > 0 else len(names)
    found = sorted(names)[begin:end]
    is_verbose = command.get("verbose") is True
    return {"totalCount": len(names), key: [show(name) if is_verbose else name for name in found]}


def shown_texts(shown: SecurityUser | UserGroup | SecurityRole) -> dict[str, str]:
    texts = {"textname": shown.textname, "textdescription": shown.textdescription}
    return {key: text for key, text in texts.items() if text}


def shown_roles(shown: SecurityUser | UserGroup) -> list[Json]:
    """The roles of a client or group, as a response lists them."""
    return [shown_grant("rolename", each.rolename, each.priority) for each in shown.roles]


def shown_grant(key: str, name: str, priority: int) -> Json:
    shown: Fields = {key: name}
    if priority != NO_PRIORITY:
        shown["priority"] = priority
    return shown


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


ADMIN: Final = "admin"
_ADMIN_ACLS: Final = (
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
    acls = acls_by_priority([RoleAcl(kind, topic, 0, True) for kind, topic in _ADMIN_ACLS])
    document.roles[ADMIN] = SecurityRole(ADMIN, acls=acls)
    user = SecurityUser(username, roles=(RoleGrant(ADMIN),))
    document.users[username] = with_password(user, password)
    return document


def set_password(document: SecurityDocument, username: str, password: str) -> None:
    """Gives a user another password, and a new one no role. An operator who has lost the password
    of the only administrator gets in again this way."""
    user = document.users.get(username, SecurityUser(username))
    document.users[username] = with_password(user, password)
