"""Users in force by dynamic security, made of its file, the password file and the ACL file.

The rights of clients are those that Mosquitto would give them. The roles of a user count in the
order of their priority, then those of its groups. Within a role the rules of the wanted kind count
in the order of their priority, and the first one that is about the topic decides. Where none does,
the default decides, except below `$CONTROL`, and then the ACL file, if there is one.

One thing is stricter than Mosquitto. A client receives a message only while it may subscribe to
some filter that matches its topic. Counter-example without that: a client subscribes with a
persistent session, loses the role, connects again, and receives as before.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from msgspec import Struct

from holdfast.protocol.topics.names import covers, is_shared, matches, split_shared
from holdfast.protocol.topics.trie import SubscriptionTrie
from holdfast.security.acl import (
    DENY,
    READ,
    WRITE,
    AccessRule,
    AccessVerdict,
    ClientRules,
    OrderedRule,
    RuleSource,
    substitute,
)
from holdfast.security.dynamic.document import (
    PUBLISHES,
    RECEIVES,
    SUBSCRIBES_LITERAL,
    SUBSCRIBES_PATTERN,
    UNSUBSCRIBES_LITERAL,
    UNSUBSCRIBES_PATTERN,
    DefaultAccess,
    RoleAcl,
    SecurityDocument,
    SecurityRole,
)
from holdfast.security.dynamic.file import DynamicSecurityFile
from holdfast.security.passwords import PasswordFile, PasswordHash

CONTROL: Final = "$CONTROL"
"""The beginning of the topics that no default covers."""


class RankedAcl:
    """A rule of a role with its place in the order."""

    def __init__(self, rank: int, acl: RoleAcl) -> None:
        self.rank = rank
        self.acl = acl


class AclIndex:
    """The rules of one kind in one role, found by topic or filter."""

    def __init__(self) -> None:
        self._trie = SubscriptionTrie()
        self._literals: dict[str, RankedAcl] = {}
        # Rules with %u or %c, which each client reads in its own way.
        self._named: list[RankedAcl] = []
        self._count = 0

    def add(self, acl: RoleAcl) -> None:
        """Adds a rule behind the ones so far."""
        ranked = RankedAcl(self._count, acl)
        self._count += 1
        if "%u" in acl.topic or "%c" in acl.topic:
            self._named.append(ranked)
        else:
            self._trie.add(acl.topic, ranked.rank, ranked)
            self._literals.setdefault(acl.topic, ranked)

    def about(self, topic: str, names: tuple[str, str]) -> list[tuple[RankedAcl, str]]:
        """The rules whose filter matches a topic, with these filters, in their order. A filter as
        `topic` may also find rules that do not cover it."""
        found: list[tuple[RankedAcl, str]] = []
        for value in self._trie.match(topic):
            assert isinstance(value, RankedAcl)
            found.append((value, value.acl.topic))
        for each in self._named:
            filter = _named_filter(each.acl.topic, names)
            if filter and matches(filter, topic):
                found.append((each, filter))
        return sorted(found, key=lambda each: each[0].rank)

    def in_order(self, names: tuple[str, str]) -> list[tuple[RankedAcl, str]]:
        """All rules with the filters that they have for a client, in their order."""
        found: list[tuple[RankedAcl, str]] = []
        for filter in self._trie.filters():
            for value in self._trie.subscribers(filter).values():
                assert isinstance(value, RankedAcl)
                found.append((value, filter))
        named = ((each, _named_filter(each.acl.topic, names)) for each in self._named)
        found.extend((each, filter) for each, filter in named if filter)
        return sorted(found, key=lambda each: each[0].rank)

    def exactly(self, filter: str, names: tuple[str, str]) -> RankedAcl | None:
        """The first rule whose topic is this filter."""
        found = self._literals.get(filter)
        for each in self._named:
            if _named_filter(each.acl.topic, names) == filter and (
                found is None or each.rank < found.rank
            ):
                found = each
        return found


def _named_filter(pattern: str, names: tuple[str, str]) -> str:
    """The filter with the user name and client id. "": a name has a wildcard, and would match the
    topics of others."""
    if any("+" in name or "#" in name for name in names):
        return ""
    return substitute(pattern, *names)


class RoleIndex:
    """The rules of one role by kind."""

    def __init__(self, role: SecurityRole) -> None:
        self.role = role
        self._by_kind: dict[str, AclIndex] = {}
        for acl in role.acls:
            self._by_kind.setdefault(acl.acltype, AclIndex()).add(acl)

    def of_kind(self, kind: str) -> AclIndex | None:
        """The rules of one kind; None: there are none."""
        return self._by_kind.get(kind)


class DynamicClientRules(ClientRules):
    """The rights of one client. They do not change: a change of the document makes others."""

    def __init__(
        self,
        roles: tuple[RoleIndex, ...],
        defaults: DefaultAccess,
        names: tuple[str, str],
        fallback: ClientRules | None,
    ) -> None:
        """`names`: the user name and the client id. `fallback`: the rights by the ACL file."""
        self._roles = roles
        self._defaults = defaults
        self._names = names
        self._fallback = fallback

    def verdict_on(self, topic: str, wanted: int) -> AccessVerdict:
        found: AccessVerdict | None = None
        if wanted == WRITE:
            found = self._on_topic(topic, PUBLISHES, self._defaults.publishClientSend, WRITE)
        elif wanted == READ:
            found = self._on_receiving(topic)
        # Mosquitto has no right to the past, so only the ACL file can give it.
        if found is not None:
            return found
        if self._fallback is not None:
            return self._fallback.verdict_on(topic, wanted)
        return AccessVerdict(False)

    def subscription_verdict(self, filter: str) -> AccessVerdict:
        found = self._on_filter(
            filter, SUBSCRIBES_LITERAL, SUBSCRIBES_PATTERN, self._defaults.subscribe
        )
        # By an ACL file a client may subscribe to anything, and receives what it may read.
        return AccessVerdict(self._fallback is not None) if found is None else found

    def in_order(self, wanted: int, filter: str) -> Iterator[OrderedRule]:
        """`ClientRules.in_order`. A client that may subscribe to the filter receives what the rules
        about receiving allow."""
        kind, default = "", False
        if wanted == WRITE:
            kind, default = PUBLISHES, self._defaults.publishClientSend
        elif wanted == READ:
            kind, default = RECEIVES, self._defaults.publishClientReceive
        for role in self._roles:
            index = role.of_kind(kind)
            for ranked, about in () if index is None else index.in_order(self._names):
                rule = _verdict(role, ranked.acl, about, wanted).rule
                assert rule is not None
                yield about, rule
        by_default = _default_verdict(filter, kind, default, wanted)
        if by_default is not None and by_default.rule is not None:
            yield filter, by_default.rule
        if self._fallback is not None:
            yield from self._fallback.in_order(wanted, filter)

    def can_unsubscribe(self, filter: str) -> bool:
        found = self._on_filter(
            filter, UNSUBSCRIBES_LITERAL, UNSUBSCRIBES_PATTERN, self._defaults.unsubscribe
        )
        return self._fallback is not None if found is None else found.is_allowed

    def _on_topic(self, topic: str, kind: str, default: bool, access: int) -> AccessVerdict | None:
        """The verdict of the first rule about a topic, or of the default; None: neither allows."""
        for role in self._roles:
            index = role.of_kind(kind)
            about = () if index is None else index.about(topic, self._names)
            for ranked, filter in about:
                return _verdict(role, ranked.acl, filter, access)
        return _default_verdict(topic, kind, default, access)

    def _on_receiving(self, topic: str) -> AccessVerdict | None:
        """The verdict on receiving a topic: both the message and some subscription to it must be
        allowed."""
        received = self._on_topic(topic, RECEIVES, self._defaults.publishClientReceive, READ)
        if received is not None and not received.is_allowed:
            return received
        subscribed: AccessVerdict | None = None
        for filter in self._possible_filters(topic):
            found = self._on_filter(
                filter, SUBSCRIBES_LITERAL, SUBSCRIBES_PATTERN, self._defaults.subscribe
            )
            if found is not None and found.is_allowed:
                return None if received is None else found
            subscribed = subscribed or found
        return subscribed

    def _possible_filters(self, topic: str) -> list[str]:
        """The filters with which the client could receive a topic: the topic, the filters of the
        rules that match it, and `#`, which stands for the default. One role may allow the filter
        that another denies, so those of denying rules are among them."""
        found = {topic: None}
        for role in self._roles:
            for kind in (SUBSCRIBES_LITERAL, SUBSCRIBES_PATTERN):
                index = role.of_kind(kind)
                about = () if index is None else index.about(topic, self._names)
                found.update((filter, None) for _, filter in about)
        if self._defaults.subscribe and not topic.startswith("$"):
            found["#"] = None
        return list(found)

    def _on_filter(
        self, filter: str, literal: str, pattern: str, default: bool
    ) -> AccessVerdict | None:
        """The verdict of the first role about a filter, by its literal rules first, or of the
        default; None: neither allows."""
        plain = split_shared(filter)[1] if is_shared(filter) else filter
        for role in self._roles:
            index = role.of_kind(literal)
            if index is not None:
                for each in dict.fromkeys((filter, plain)):
                    exact = index.exactly(each, self._names)
                    if exact is not None:
                        return _verdict(role, exact.acl, each, READ)
            index = role.of_kind(pattern)
            about = () if index is None else index.about(plain, self._names)
            for ranked, covering in about:
                if covers(covering, plain):
                    return _verdict(role, ranked.acl, covering, READ)
        return _default_verdict(plain, "subscribe", default, READ)


def _verdict(role: RoleIndex, acl: RoleAcl, filter: str, access: int) -> AccessVerdict:
    access = access if acl.allow else DENY
    rule = AccessRule(access, filter, f"role {role.role.rolename}", 0, acl.acltype)
    return AccessVerdict(acl.allow, rule)


def _default_verdict(topic: str, kind: str, default: bool, access: int) -> AccessVerdict | None:
    if not default or topic.startswith(CONTROL):
        return None
    return AccessVerdict(True, AccessRule(access, "#", "defaultACLAccess", 0, kind))


class DynamicRules(RuleSource):
    """The rights of all clients by one document."""

    def __init__(
        self,
        document: SecurityDocument,
        fallback: RuleSource | None = None,
        before: "DynamicRules | None" = None,
    ) -> None:
        """`fallback`: the ACL file. `before`: the rights so far, whose indexes of equal roles are
        used again."""
        self._document = document
        self._fallback = fallback
        self._indexes: dict[str, RoleIndex] = {}
        known: Callable[[str], RoleIndex | None] = (
            (lambda name: None) if before is None else before._indexes.get
        )
        for name, role in document.roles.items():
            index = known(name)
            is_same = index is not None and index.role is role
            self._indexes[name] = index if index is not None and is_same else RoleIndex(role)

    def for_client(self, username: str | None, client_id: str) -> ClientRules:
        document = self._document
        roles = tuple(self._indexes[each.rolename] for each in document.grants_of(username))
        fallback = self._fallback
        by_file = None if fallback is None else fallback.for_client(username, client_id)
        return DynamicClientRules(roles, document.defaults, (username or "", client_id), by_file)


class DynamicUsers(Struct, frozen=True):
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
