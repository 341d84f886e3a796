"""Users in force by dynamic security, made of its file, the password file and the ACL file."""

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.security.acl import RuleSource
from holdfast.security.dynamic.document import SecurityDocument
from holdfast.security.dynamic.file import DynamicSecurityFile
from holdfast.security.dynamic.rules import DynamicRules
from holdfast.security.passwords import PasswordFile, PasswordHash


@dataclass(frozen=True)
class DynamicUsers:
    """The users and rights of one moment. A change makes another value, in a thread: with 100,000
    users it costs a tenth of a second."""

    file: DynamicSecurityFile
    password_file: PasswordFile | None
    """The users who are not in `file`."""
    acl_file: RuleSource | None
    """The rights that count where `file` decides nothing."""
    hashes: dict[str, PasswordHash]
    disabled: frozenset[str]
    client_ids: dict[str, str]
    """The only client id of each user that has one."""
    passwords: PasswordFile
    """All users with their passwords."""
    rules: DynamicRules
    version: int = 0
    """The version on which the nodes of a cluster have agreed; 0: the file's."""

    @classmethod
    def of(
        cls,
        file: DynamicSecurityFile,
        password_file: PasswordFile | None,
        acl_file: RuleSource | None,
    ) -> "DynamicUsers":
        """The users of these files."""
        document = file.document
        return _made(file, password_file, acl_file, None, document.users)

    def changed(self, file: DynamicSecurityFile, usernames: Iterable[str]) -> "DynamicUsers":
        """The users of another version of the file, in which these users differ."""
        return _made(file, self.password_file, self.acl_file, self, usernames)


def _made(
    file: DynamicSecurityFile,
    password_file: PasswordFile | None,
    acl_file: RuleSource | None,
    before: DynamicUsers | None,
    usernames: Iterable[str],
) -> DynamicUsers:
    document: SecurityDocument = file.document
    hashes: dict[str, PasswordHash] = {} if before is None else dict(before.hashes)
    disabled = set() if before is None else set(before.disabled)
    client_ids: dict[str, str] = {} if before is None else dict(before.client_ids)
    for name in usernames:
        hashes.pop(name, None)
        disabled.discard(name)
        client_ids.pop(name, None)
        user = document.users.get(name)
        if user is None:
            continue
        if user.clientid is not None:
            client_ids[name] = user.clientid
        if user.disabled:
            disabled.add(name)
            continue
        hashed = user.password_hash()
        if hashed is not None:
            hashes[name] = hashed
    base = PasswordFile.parse("", "") if password_file is None else password_file
    hidden = document.users.keys() - hashes.keys()
    return DynamicUsers(
        file,
        password_file,
        acl_file,
        hashes,
        frozenset(disabled),
        client_ids,
        base.with_users(hashes, hidden, None if before is None else before.passwords),
        DynamicRules(document, acl_file, None if before is None else before.rules),
    )
