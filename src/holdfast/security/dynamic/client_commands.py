"""Dynamic security commands about clients."""

from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.security.dynamic.document import CLIENTS_MAX, DynamicSecurityError, SecurityUser
from holdfast.security.dynamic.edit import SecurityEdit, with_password
from holdfast.security.dynamic.fields import (
    Fields,
    Json,
    listed,
    new_name_in,
    shown_grant,
    shown_roles,
    shown_texts,
    text_in,
    texts_in,
)


def _create_client(edit: SecurityEdit, command: Fields) -> None:
    document = edit.document
    name = new_name_in(command, "username", "Client", document.users, CLIENTS_MAX)
    user = SecurityUser(
        name,
        text_in(command, "clientid"),
        text_in(command, "textname") or "",
        text_in(command, "textdescription") or "",
        roles=edit.grants(command) or (),
    )
    groups = edit.groups(command) or []
    password = text_in(command, "password")
    document.users[name] = with_password(user, password) if password else user
    for groupname, priority in groups:
        document.join(name, groupname, priority)
    edit.changes.users.add(name)


def _delete_client(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    for groupname in edit.document.groups_of.get(user.username, frozenset()):
        edit.document.leave(user.username, groupname)
    del edit.document.users[user.username]
    edit.expel(user.username)


def _enable_client(edit: SecurityEdit, command: Fields) -> None:
    edit.replace_user(edit.user(command), disabled=False)


def _disable_client(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    edit.replace_user(user, disabled=True)
    edit.expel(user.username)


def _modify_client(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    replace = msgspec.structs.replace
    changed = user
    if "clientid" in command:
        changed = replace(changed, clientid=text_in(command, "clientid"))
    changed = replace(changed, **texts_in(command))
    roles, groups = edit.grants(command), edit.groups(command)
    if roles is not None:
        changed = replace(changed, roles=roles)
    password = text_in(command, "password")
    if password:
        changed = with_password(changed, password)
    name = user.username
    edit.document.users[name] = changed
    if groups is not None:
        for groupname in edit.document.groups_of.get(name, frozenset()):
            edit.document.leave(name, groupname)
        for groupname, priority in groups:
            edit.document.join(name, groupname, priority)
    edit.changes.users.add(name)
    if password or changed.clientid != user.clientid:
        edit.expel(name)


def _set_client_id(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    edit.replace_user(user, clientid=text_in(command, "clientid"))
    edit.expel(user.username)


def _set_client_password(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    password = command.get("password")
    if not isinstance(password, str):
        raise DynamicSecurityError("Invalid/missing password")
    if not password:
        raise DynamicSecurityError("Empty password is not allowed")
    edit.document.users[user.username] = with_password(user, password)
    edit.expel(user.username)


def _add_client_role(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    edit.replace_user(user, roles=edit.with_grant(user.roles, command, "Client"))


def _remove_client_role(edit: SecurityEdit, command: Fields) -> None:
    user = edit.user(command)
    edit.replace_user(user, roles=edit.without_grant(user.roles, command))


def _get_client(edit: SecurityEdit, command: Fields) -> Json:
    return {"client": _shown_user(edit, edit.user(command))}


def _list_clients(edit: SecurityEdit, command: Fields) -> Json:
    users = edit.document.users
    return listed(command, "clients", users, lambda name: _shown_user(edit, users[name]))


def _shown_user(edit: SecurityEdit, user: SecurityUser) -> Json:
    shown: Fields = {"username": user.username}
    if user.clientid is not None:
        shown["clientid"] = user.clientid
    shown |= shown_texts(user)
    if user.disabled:
        shown["disabled"] = True
    groups = edit.document.groups_by_priority(user.username)
    shown["roles"] = shown_roles(user)
    shown["groups"] = [shown_grant("groupname", *each) for each in groups]
    return shown


CLIENT_COMMANDS: Final[dict[str, Callable[[SecurityEdit, Fields], Json]]] = {
    "createClient": _create_client,
    "deleteClient": _delete_client,
    "enableClient": _enable_client,
    "disableClient": _disable_client,
    "modifyClient": _modify_client,
    "setClientId": _set_client_id,
    "setClientPassword": _set_client_password,
    "addClientRole": _add_client_role,
    "removeClientRole": _remove_client_role,
    "getClient": _get_client,
    "listClients": _list_clients,
}
