"""Fields of dynamic security's commands and responses."""

from collections.abc import Callable, Collection
from typing import TypeAlias

from holdfast.security.dynamic.document import (
    ACLS_MAX,
    NO_PRIORITY,
    ROLES_EACH_MAX,
    DynamicSecurityError,
    RoleAcl,
    SecurityRole,
    SecurityUser,
    UserGroup,
    acls_by_priority,
    check_acl,
    check_name,
)

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
