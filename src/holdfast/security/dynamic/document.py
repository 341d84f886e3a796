"""Users, groups and roles of dynamic security, and their file in Mosquitto's format.

Mosquitto's plugin and `mosquitto_ctrl dynsec init` write the same JSON, so either broker reads the
file of the other. A value of this module never changes, except `SecurityDocument`, which one thread
copies, changes and passes on.
"""

from collections.abc import Collection, Iterator
from typing import Final

import msgspec

from holdfast.protocol.topics.names import InvalidFilter, check_filter
from holdfast.security.passwords import PasswordError, PasswordHash, parse_hash

CLIENTS_MAX: Final = 100_000
"""The most users."""
GROUPS_MAX: Final = 10_000
ROLES_MAX: Final = 10_000
ACLS_MAX: Final = 10_000
"""The most rules of one role."""
ROLES_EACH_MAX: Final = 1000
"""The most roles of one user or group, and the most groups of one user."""
NAME_BYTES_MAX: Final = 1024
"""The most bytes of a name or a text."""
FILE_BYTES_MAX: Final = 256 << 20
"""The most bytes of the file."""

PUBLISHES: Final = "publishClientSend"
RECEIVES: Final = "publishClientReceive"
SUBSCRIBES_LITERAL: Final = "subscribeLiteral"
SUBSCRIBES_PATTERN: Final = "subscribePattern"
UNSUBSCRIBES_LITERAL: Final = "unsubscribeLiteral"
UNSUBSCRIBES_PATTERN: Final = "unsubscribePattern"
ACL_TYPES: Final = (
    PUBLISHES,
    RECEIVES,
    SUBSCRIBES_LITERAL,
    SUBSCRIBES_PATTERN,
    UNSUBSCRIBES_LITERAL,
    UNSUBSCRIBES_PATTERN,
)
NO_PRIORITY: Final = -1
"""The priority of a role or group without one. Larger ones come first."""


class DynamicSecurityError(ValueError):
    """A file or value that cannot be used. The text has the place, and what is allowed."""


class RoleAcl(msgspec.Struct, frozen=True):
    """One rule of a role."""

    acltype: str
    topic: str
    priority: int = 0
    allow: bool = False


class SecurityRole(msgspec.Struct, frozen=True, omit_defaults=True):
    """A named list of rules, those of the highest priority first."""

    rolename: str
    textname: str = ""
    textdescription: str = ""
    acls: tuple[RoleAcl, ...] = ()


class RoleGrant(msgspec.Struct, frozen=True, omit_defaults=True):
    """A role that a user or a group has."""

    rolename: str
    priority: int = NO_PRIORITY


class SecurityUser(msgspec.Struct, frozen=True, omit_defaults=True):
    """A user. `clientid`: the only client id that it may use; None: any."""

    username: str
    clientid: str | None = None
    textname: str = ""
    textdescription: str = ""
    disabled: bool = False
    roles: tuple[RoleGrant, ...] = ()
    password: str = ""
    salt: str = ""
    iterations: int = 0

    def password_hash(self) -> PasswordHash | None:
        """The hash of the password; None: there is none, so nobody can log in with one."""
        if not self.password:
            return None
        try:
            return parse_hash(f"$7${self.iterations}${self.salt}${self.password}")
        except PasswordError as error:
            name = self.username[:80]
            raise DynamicSecurityError(f"the password of client {name!r}: {error}") from None


class GroupClient(msgspec.Struct, frozen=True, omit_defaults=True):
    """A user in a group. `priority` is that of the group for this user."""

    username: str
    priority: int = NO_PRIORITY


class StoredGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group in the file."""

    groupname: str
    textname: str = ""
    textdescription: str = ""
    roles: tuple[RoleGrant, ...] = ()
    clients: tuple[GroupClient, ...] = ()


class UserGroup(msgspec.Struct, frozen=True):
    """A group of users with the same roles. `members`: the priority of the group by user name."""

    groupname: str
    textname: str = ""
    textdescription: str = ""
    roles: tuple[RoleGrant, ...] = ()
    members: dict[str, int] = {}


class DefaultAccess(msgspec.Struct, frozen=True):
    """The rights where no rule decides. They never include `$CONTROL`."""

    publishClientSend: bool = False
    publishClientReceive: bool = True
    subscribe: bool = False
    unsubscribe: bool = True


class StoredSecurity(msgspec.Struct, frozen=True, rename="camel"):
    """The file."""

    default_acl_access: DefaultAccess = msgspec.field(
        default_factory=DefaultAccess, name="defaultACLAccess"
    )
    clients: list[SecurityUser] = []
    groups: list[StoredGroup] = []
    anonymous_group: str = ""
    roles: list[SecurityRole] = []


class SecurityDocument:
    """All users, groups and roles. Its names refer only to what it contains."""

    def __init__(self) -> None:
        self.defaults = DefaultAccess()
        self.users: dict[str, SecurityUser] = {}
        self.groups: dict[str, UserGroup] = {}
        self.roles: dict[str, SecurityRole] = {}
        self.anonymous_group = ""
        # The groups of each user that is in one.
        self.groups_of: dict[str, frozenset[str]] = {}

    def copy(self) -> "SecurityDocument":
        """A copy whose changes leave this document as it is."""
        copy = SecurityDocument()
        copy.defaults = self.defaults
        copy.users = dict(self.users)
        copy.groups = dict(self.groups)
        copy.roles = dict(self.roles)
        copy.anonymous_group = self.anonymous_group
        copy.groups_of = dict(self.groups_of)
        return copy

    def join(self, username: str, groupname: str, priority: int) -> None:
        """Adds a user to a group. Both exist."""
        group = self.groups[groupname]
        members = {**group.members, username: priority}
        self.groups[groupname] = msgspec.structs.replace(group, members=members)
        self.groups_of[username] = self.groups_of.get(username, frozenset()) | {groupname}

    def leave(self, username: str, groupname: str) -> None:
        """Removes a user from a group, if it is in it."""
        group = self.groups[groupname]
        members = {name: priority for name, priority in group.members.items() if name != username}
        self.groups[groupname] = msgspec.structs.replace(group, members=members)
        left = self.groups_of.get(username, frozenset()) - {groupname}
        if left:
            self.groups_of[username] = left
        else:
            self.groups_of.pop(username, None)

    def groups_by_priority(self, username: str) -> list[tuple[str, int]]:
        """The groups of a user with their priorities, the first to count first."""
        found = [
            (name, self.groups[name].members[username])
            for name in self.groups_of.get(username, frozenset())
        ]
        return sorted(found, key=lambda each: (-each[1], each[0]))

    def grants_of(self, username: str | None) -> Iterator[RoleGrant]:
        """The roles of a user, or of clients without a user name, the first to count first."""
        if username is None:
            if self.anonymous_group:
                yield from self.groups[self.anonymous_group].roles
            return
        user = self.users.get(username)
        if user is not None:
            yield from user.roles
            for name, _ in self.groups_by_priority(username):
                yield from self.groups[name].roles

    def chunks(self) -> Iterator[bytes]:
        """The file, in pieces that are encoded one by one: the whole at once would stop the other
        threads of the process for its time."""
        encode = msgspec.json.encode
        yield b'{\n"defaultACLAccess": ' + encode(self.defaults)
        for name, found in (
            (b"clients", iter(self.users.values())),
            (b"groups", (_stored(group) for group in self.groups.values())),
            (b"roles", iter(self.roles.values())),
        ):
            yield b',\n"' + name + b'": ['
            separator = b"\n"
            for each in found:
                yield separator + encode(each)
                separator = b",\n"
            yield b"]"
        if self.anonymous_group:
            yield b',\n"anonymousGroup": ' + encode(self.anonymous_group)
        yield b"\n}\n"


def _stored(group: UserGroup) -> StoredGroup:
    clients = tuple(GroupClient(*each) for each in group.members.items())
    return StoredGroup(group.groupname, group.textname, group.textdescription, group.roles, clients)


def by_priority(grants: list[RoleGrant]) -> tuple[RoleGrant, ...]:
    """Roles in the order in which they count."""
    return tuple(sorted(grants, key=lambda each: -each.priority))


def acls_by_priority(acls: list[RoleAcl]) -> tuple[RoleAcl, ...]:
    """Rules in the order in which they count, by kind."""
    return tuple(sorted(acls, key=lambda each: (ACL_TYPES.index(each.acltype), -each.priority)))


def check_name(text: str, what: str) -> None:
    """Raises `DynamicSecurityError` unless the text can be a name or a description."""
    if "\0" in text or len(text.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise DynamicSecurityError(f"{what} has at most {NAME_BYTES_MAX} bytes, and no NUL")


def check_acl(acl: RoleAcl) -> None:
    """Raises `DynamicSecurityError` unless this can be a rule."""
    if acl.acltype not in ACL_TYPES:
        raise DynamicSecurityError("Unknown acltype")
    try:
        check_filter(acl.topic)
    except InvalidFilter:
        raise DynamicSecurityError("Invalid ACL topic") from None


def parse(data: bytes, name: str) -> SecurityDocument:
    """The content of a file. `name` is its name in errors. Raises `DynamicSecurityError`."""
    try:
        stored = msgspec.json.decode(data, type=StoredSecurity)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DynamicSecurityError(f"{name}: {error}") from None
    try:
        return _built(stored)
    except DynamicSecurityError as error:
        raise DynamicSecurityError(f"{name}: {error}") from None


def _built(stored: StoredSecurity) -> SecurityDocument:
    made = SecurityDocument()
    made.defaults = stored.default_acl_access
    for role in stored.roles:
        made.roles[_new(role.rolename, made.roles, "role", ROLES_MAX)] = _checked_role(role)
    for user in stored.clients:
        name = _new(user.username, made.users, "client", CLIENTS_MAX)
        roles = _checked_grants(user.roles, made.roles, f"client {name!r}")
        user.password_hash()
        made.users[name] = msgspec.structs.replace(user, roles=roles)
    for group in stored.groups:
        name = _new(group.groupname, made.groups, "group", GROUPS_MAX)
        roles = _checked_grants(group.roles, made.roles, f"group {name!r}")
        members = {each.username: each.priority for each in group.clients}
        for username in members:
            if username not in made.users:
                raise DynamicSecurityError(f"group {name!r}: there is no client {username[:80]!r}")
            made.groups_of[username] = made.groups_of.get(username, frozenset()) | {name}
        made.groups[name] = UserGroup(name, group.textname, group.textdescription, roles, members)
    if stored.anonymous_group and stored.anonymous_group not in made.groups:
        named = stored.anonymous_group[:80]
        raise DynamicSecurityError(f"anonymousGroup: there is no group {named!r}")
    made.anonymous_group = stored.anonymous_group
    return made


def _new(name: str, present: Collection[str], kind: str, most: int) -> str:
    check_name(name, f"the name of a {kind}")
    if not name or name in present:
        problem = "is there twice" if name else "has no name"
        raise DynamicSecurityError(f"the {kind} {name!r} {problem}")
    if len(present) >= most:
        raise DynamicSecurityError(f"there are more than {most} {kind}s")
    return name


def _checked_role(role: SecurityRole) -> SecurityRole:
    if len(role.acls) > ACLS_MAX:
        raise DynamicSecurityError(f"role {role.rolename!r} has more than {ACLS_MAX} rules")
    for acl in role.acls:
        try:
            check_acl(acl)
        except DynamicSecurityError as error:
            place = f"role {role.rolename!r}: {acl.acltype[:80]} {acl.topic[:200]!r}"
            raise DynamicSecurityError(f"{place}: {error}") from None
    return msgspec.structs.replace(role, acls=acls_by_priority(list(role.acls)))


def _checked_grants(
    grants: tuple[RoleGrant, ...], roles: dict[str, SecurityRole], place: str
) -> tuple[RoleGrant, ...]:
    if len(grants) > ROLES_EACH_MAX:
        raise DynamicSecurityError(f"{place} has more than {ROLES_EACH_MAX} roles")
    for grant in grants:
        if grant.rolename not in roles:
            raise DynamicSecurityError(f"{place}: there is no role {grant.rolename[:80]!r}")
    return by_priority(list(grants))
