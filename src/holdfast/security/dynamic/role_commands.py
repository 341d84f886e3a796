"""Dynamic security commands about roles and the default access."""

from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.security.dynamic.document import (
    ACLS_MAX,
    ROLES_MAX,
    DefaultAccess,
    DynamicSecurityError,
    SecurityRole,
    acls_by_priority,
)
from holdfast.security.dynamic.edit import SecurityEdit, without
from holdfast.security.dynamic.fields import (
    Fields,
    Json,
    acl_in,
    acls_in,
    listed,
    name_in,
    new_name_in,
    shown_texts,
    texts_in,
)


def _create_role(edit: SecurityEdit, command: Fields) -> None:
    roles = edit.document.roles
    name = new_name_in(command, "rolename", "Role", roles, ROLES_MAX)
    roles[name] = SecurityRole(name, **texts_in(command), acls=acls_in(command) or ())


def _delete_role(edit: SecurityEdit, command: Fields) -> None:
    document, name = edit.document, edit.role(command).rolename
    replace = msgspec.structs.replace
    for username, user in document.users.items():
        if any(each.rolename == name for each in user.roles):
            document.users[username] = replace(user, roles=without(user.roles, name))
    for groupname, group in document.groups.items():
        if any(each.rolename == name for each in group.roles):
            document.groups[groupname] = replace(group, roles=without(group.roles, name))
    del document.roles[name]
    edit.changes.are_for_all = True


def _modify_role(edit: SecurityEdit, command: Fields) -> None:
    name = name_in(command, "rolename")
    role = edit.document.roles.get(name)
    if role is None:
        raise DynamicSecurityError("Role does not exist")
    acls = acls_in(command)
    changed = msgspec.structs.replace(role, **texts_in(command))
    edit.replace_acls(changed, changed.acls if acls is None else acls)


def _add_role_acl(edit: SecurityEdit, command: Fields) -> None:
    role = edit.role(command)
    acl = acl_in(command)
    if any((each.acltype, each.topic) == (acl.acltype, acl.topic) for each in role.acls):
        raise DynamicSecurityError("ACL with this topic already exists")
    if len(role.acls) >= ACLS_MAX:
        raise DynamicSecurityError(f"a role has at most {ACLS_MAX} rules")
    edit.replace_acls(role, acls_by_priority([*role.acls, acl]))


def _remove_role_acl(edit: SecurityEdit, command: Fields) -> None:
    role = edit.role(command)
    acl = acl_in(command)
    left = tuple(
        each for each in role.acls if (each.acltype, each.topic) != (acl.acltype, acl.topic)
    )
    if len(left) == len(role.acls):
        raise DynamicSecurityError("ACL not found")
    edit.replace_acls(role, left)


def _get_role(edit: SecurityEdit, command: Fields) -> Json:
    return {"role": _shown_role(edit.role(command))}


def _list_roles(edit: SecurityEdit, command: Fields) -> Json:
    roles = edit.document.roles
    return listed(command, "roles", roles, lambda name: _shown_role(roles[name]))


def _set_default_access(edit: SecurityEdit, command: Fields) -> None:
    acls = command.get("acls")
    if not isinstance(acls, list):
        raise DynamicSecurityError("Missing/invalid actions array")
    found: dict[str, bool] = {}
    for each in acls:
        kind = each.get("acltype") if isinstance(each, dict) else None
        allow = each.get("allow") if isinstance(each, dict) else None
        if isinstance(kind, str) and kind in DEFAULTS and isinstance(allow, bool):
            found[kind] = allow
    edit.document.defaults = msgspec.structs.replace(edit.document.defaults, **found)
    edit.changes.are_for_all = True


def _get_default_access(edit: SecurityEdit, command: Fields) -> Json:
    defaults = edit.document.defaults
    return {"acls": [{"acltype": kind, "allow": getattr(defaults, kind)} for kind in DEFAULTS]}


def _shown_role(role: SecurityRole) -> Json:
    shown: Fields = {"rolename": role.rolename}
    shown |= shown_texts(role)
    shown["acls"] = [msgspec.structs.asdict(each) for each in role.acls]
    return shown


DEFAULTS: Final = tuple(field.name for field in msgspec.structs.fields(DefaultAccess))
"""The kinds of access that have a default."""
ROLE_COMMANDS: Final[dict[str, Callable[[SecurityEdit, Fields], Json]]] = {
    "createRole": _create_role,
    "deleteRole": _delete_role,
    "modifyRole": _modify_role,
    "addRoleACL": _add_role_acl,
    "removeRoleACL": _remove_role_acl,
    "getRole": _get_role,
    "listRoles": _list_roles,
    "setDefaultACLAccess": _set_default_access,
    "getDefaultACLAccess": _get_default_access,
}
