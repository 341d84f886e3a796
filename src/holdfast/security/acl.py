"""Access control lists in Mosquitto's file format, with Mosquitto's meaning.

::

    # rules on top, before any `user`: for clients without a user name
    topic read $SYS/#
    user roger
    topic readwrite home/roger/#
    topic deny home/roger/private/#
    pattern write devices/%c/#

`topic` and `pattern` take `read`, `write`, `readwrite` (the default), `history` or `deny`, then a
filter. `history` is not Mosquitto's: the client may begin in the past with what it may read.
Patterns are for every client; %u stands for its user name, %c for its client id. A pattern with a
name in its first level is never about topics that begin with `$`. What no rule allows is denied. A
client's own rules come before the patterns; within each, `deny` comes before the rest, whatever the
order of the lines.

The cost of a look-up is that of the rules that match, whatever their number: the rules of a user,
and the patterns, are in a trie each.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from holdfast.protocol.topics.names import InvalidFilter, check_filter, is_shared, matches
from holdfast.protocol.topics.trie import SubscriptionTrie

DENY: Final = 0
READ: Final = 1
WRITE: Final = 2
HISTORY: Final = 4
ANY: Final = READ | WRITE | HISTORY
_ACCESS: Final = {
    "read": READ,
    "write": WRITE,
    "readwrite": READ | WRITE,
    "history": HISTORY,
    "deny": DENY,
}
_NAMES: Final = {access: name for name, access in _ACCESS.items()}


class AclError(ValueError):
    """An ACL file that cannot be used. The text has the file, the line and the allowed form."""


class AccessRule(Struct, frozen=True):
    """One rule: `keyword access filter`, with the source and the line where it is written."""

    access: int
    filter: str
    source: str
    line: int = 0
    keyword: str = "topic"

    def text(self) -> str:
        """The rule as one writes it."""
        return f"{self.keyword} {_NAMES.get(self.access, '?')} {self.filter}"

    def place(self) -> str:
        """The source with the line, if it has lines."""
        return f"{self.source}:{self.line}" if self.line else self.source


class AccessVerdict(Struct, frozen=True):
    """Whether a client may read or write a topic, and by which rule."""

    is_allowed: bool
    rule: AccessRule | None = None
    """The rule that decides; None: no rule allows it, or there are no rules."""

    def text(self) -> str:
        """The reason in words."""
        if self.rule is None:
            return "there are no rules" if self.is_allowed else "no rule allows it"
        return f"{self.rule.place()}: {self.rule.text()}"


OrderedRule = tuple[str, AccessRule]
"""A rule with the filter that it has for one client."""


class ClientRules:
    """The rights of one client, from whatever source."""

    def can_read(self, topic: str) -> bool:
        """Whether the client may receive a message of this topic."""
        return self.verdict_on(topic, READ).is_allowed

    def can_write(self, topic: str) -> bool:
        """Whether the client may publish to this topic."""
        return self.verdict_on(topic, WRITE).is_allowed

    def can_leave(self, topic: str) -> bool:
        """Whether the client may leave a will to this topic."""
        return self.can_write(topic)

    def can_replay(self, topic: str) -> bool:
        """Whether the client may receive a message of the past, if it may receive one now."""
        return self.verdict_on(topic, HISTORY).is_allowed

    def can_subscribe(self, filter: str) -> bool:
        """Whether the client may subscribe to a filter. It receives only what it may read."""
        return self.subscription_verdict(filter).is_allowed

    def subscription_verdict(self, filter: str) -> AccessVerdict:
        """`can_subscribe`, and by which rule."""
        return AccessVerdict(True)

    def can_unsubscribe(self, filter: str) -> bool:
        """Whether the client may unsubscribe from a filter."""
        return True

    def verdict_on(self, topic: str, wanted: int) -> AccessVerdict:
        """Whether the client has the right `wanted` (READ, WRITE, HISTORY), and by which rule."""
        raise NotImplementedError

    def in_order(self, wanted: int, filter: str) -> Iterator[OrderedRule]:
        """The rules about a right, of which the first about a topic decides. Those about no topic
        of the filter may be left out. Any thread may call it."""
        raise NotImplementedError


class RuleSource:
    """A source of rules for all clients."""

    def for_client(self, username: str | None, client_id: str) -> ClientRules:
        """The rules for one client. Called once per connection."""
        raise NotImplementedError


class RuleSet:
    """Rules without names of clients in them, found by topic."""

    def __init__(self) -> None:
        self._trie = SubscriptionTrie()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rule: AccessRule) -> None:
        """Adds a rule."""
        self._count += 1
        self._trie.add(rule.filter, self._count, rule)

    def find(self, topic: str, wanted: int) -> AccessRule | None:
        """The rule that decides: one that denies before one that allows, then the first line. None:
        no rule is about this topic and access."""
        found: AccessRule | None = None
        for rule in self._trie.match(topic):
            assert isinstance(rule, AccessRule)
            if (rule.access == DENY or rule.access & wanted) and _is_before(rule, found):
                found = rule
        return found

    def in_order(self, wanted: int) -> Iterator[OrderedRule]:
        """The rules about an access, those that decide first."""
        for rule in _in_order(self._trie, wanted):
            yield rule.filter, rule


def _in_order(trie: SubscriptionTrie, wanted: int) -> list[AccessRule]:
    found: list[AccessRule] = []
    for filter in trie.filters():
        for rule in trie.subscribers(filter).values():
            assert isinstance(rule, AccessRule)
            if rule.access == DENY or rule.access & wanted:
                found.append(rule)
    return sorted(found, key=lambda rule: (rule.access != DENY, rule.line))


def _is_before(rule: AccessRule, other: AccessRule | None) -> bool:
    if other is None:
        return True
    if (rule.access == DENY) != (other.access == DENY):
        return rule.access == DENY
    return rule.line < other.line


class PatternSet:
    """Patterns with %u and %c, found by topic for the names of one client.

    Each pattern is in a trie under a filter that matches at least the topics of the pattern: a
    level with a name in it becomes `+`. A name with a slash in it spans several levels, so a second
    trie has `#` in place of that level and the rest. What the trie finds is compared in full.
    """

    def __init__(self) -> None:
        self._by_level = SubscriptionTrie()
        self._by_start = SubscriptionTrie()
        self._count = 0

    def names_users(self) -> bool:
        """Whether a pattern contains %u."""
        return any("%u" in rule.filter for rule in _in_order(self._by_level, ANY))

    def add(self, rule: AccessRule) -> None:
        """Adds a pattern."""
        self._count += 1
        levels = rule.filter.split("/")
        named = [index for index, level in enumerate(levels) if "%u" in level or "%c" in level]
        by_level = "/".join("+" if i in named else level for i, level in enumerate(levels))
        by_start = "/".join([*levels[: named[0]], "#"]) if named else rule.filter
        self._by_level.add(by_level, self._count, rule)
        self._by_start.add(by_start, self._count, rule)

    def find(
        self, topic: str, wanted: int, username: str | None, client_id: str
    ) -> AccessRule | None:
        """The pattern that decides for the client of these names, as `RuleSet.find`."""
        user = username or ""
        # A name with a wildcard would match the topics of others: the user name "+" turns home/%u/#
        # into home/+/#.
        if not self._count or any("+" in name or "#" in name for name in (user, client_id)):
            return None
        trie = self._by_start if "/" in user or "/" in client_id else self._by_level
        found: AccessRule | None = None
        for rule in trie.match(topic):
            assert isinstance(rule, AccessRule)
            if rule.access != DENY and not rule.access & wanted:
                continue
            if username is None and "%u" in rule.filter:
                continue
            if _is_before(rule, found) and matches(substitute(rule.filter, user, client_id), topic):
                found = rule
        return found

    def in_order(self, wanted: int, username: str | None, client_id: str) -> Iterator[OrderedRule]:
        """The patterns about an access for the client of these names, those that decide first."""
        user = username or ""
        if any("+" in name or "#" in name for name in (user, client_id)):
            return
        for rule in _in_order(self._by_level, wanted):
            filter = substitute(rule.filter, user, client_id)
            if filter and (username is not None or "%u" not in rule.filter):
                yield filter, rule


class ClientAcl(ClientRules):
    """The rights of one client: its own rules, then the patterns of a file."""

    def __init__(
        self, own: RuleSet | None, patterns: PatternSet, username: str | None, client_id: str
    ) -> None:
        self._own = own
        self._patterns = patterns
        self._username = username
        self._client_id = client_id

    def verdict_on(self, topic: str, wanted: int) -> AccessVerdict:
        found = None if self._own is None else self._own.find(topic, wanted)
        if found is None:
            found = self._patterns.find(topic, wanted, self._username, self._client_id)
        return AccessVerdict(found is not None and found.access != DENY, found)

    def in_order(self, wanted: int, filter: str) -> Iterator[OrderedRule]:
        if self._own is not None:
            yield from self._own.in_order(wanted)
        yield from self._patterns.in_order(wanted, self._username, self._client_id)


_NO_PATTERNS: Final = PatternSet()


def given_rules(
    source: str,
    publish: list[str],
    subscribe: list[str],
    username: str | None,
    client_id: str,
) -> ClientRules:
    """The rules that came with a proof of identity, as lists of filters in which %u and %c stand
    for the names. Raises `AclError` for one that is no filter."""
    rules = RuleSet()
    for access, filters in ((WRITE, publish), (READ, subscribe)):
        for filter in filters:
            names = (username or "", client_id)
            if any("+" in name or "#" in name for name in names) and (
                "%u" in filter or "%c" in filter
            ):
                raise AclError(f"{source}: {filter!r} needs a name without '+' and '#'")
            full = substitute(filter, *names)
            if filter and not full:
                raise AclError(f"{source}: {filter!r} needs a name that does not begin with '$'")
            check_rule_filter(full, f"{source}: ")
            rules.add(AccessRule(access, full, source))
    return ClientAcl(rules, _NO_PATTERNS, username, client_id)


class AclFile(RuleSource):
    """The rules of one file."""

    def __init__(self) -> None:
        self._anonymous = RuleSet()
        self._users: dict[str, RuleSet] = {}
        self._patterns = PatternSet()

    @classmethod
    def load(cls, path: Path | str) -> "AclFile":
        """The rules of a file. Raises `AclError` for an unreadable or invalid one."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise AclError(f"{path}: not UTF-8 at byte {error.start}") from None
        except OSError as error:
            raise AclError(f"{path}: cannot read the ACL file: {error.strerror}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> "AclFile":
        """The rules in a text. `name` is the name of the text in errors. Raises `AclError`."""
        acl = cls()
        rules = acl._anonymous
        for number, line in enumerate(text.split("\n"), 1):
            line = line.rstrip()
            if not line or line.startswith("#"):
                continue
            keyword, _, rest = line.strip().partition(" ")
            rest = rest.strip()
            where = f"{name}:{number}: "
            if keyword == "user":
                if not rest:
                    raise AclError(where + "'user' needs a user name")
                rules = acl._users.setdefault(rest, RuleSet())
            elif keyword == "topic":
                access, filter = _access_and_filter(keyword, rest, where)
                rules.add(AccessRule(access, filter, name, number))
            elif keyword == "pattern":
                access, filter = _access_and_filter(keyword, rest, where)
                acl._patterns.add(AccessRule(access, filter, name, number, keyword))
            else:
                raise AclError(
                    f"{where}a line begins with 'user', 'topic', 'pattern' or '#', "
                    f"found {keyword!r}"
                )
        return acl

    def names_users(self) -> bool:
        """Whether some rules apply only to clients with a user name."""
        return bool(self._users) or self._patterns.names_users()

    def for_client(self, username: str | None, client_id: str) -> ClientRules:
        """The rules for one client. Called once per connection."""
        own = self._anonymous if username is None else self._users.get(username)
        return ClientAcl(own, self._patterns, username, client_id)


def _access_and_filter(keyword: str, rest: str, where: str) -> tuple[int, str]:
    first, _, filter = rest.partition(" ")
    filter = filter.strip()
    access = "readwrite"
    if filter:
        access = first
        if access not in _ACCESS:
            raise AclError(
                f"{where}the access of a '{keyword}' is one of {', '.join(_ACCESS)}, "
                f"found {access!r} (to name a filter with a space in it, write the access first)"
            )
    else:
        filter = first
    check_rule_filter(filter, where)
    return _ACCESS[access], filter


def check_rule_filter(filter: str, where: str) -> None:
    """Raises `AclError` unless rules may be about this filter. `where` is the head of the text."""
    try:
        check_filter(filter)
    except InvalidFilter as error:
        raise AclError(where + str(error)) from None
    if is_shared(filter):
        raise AclError(where + "rules are about topics: write the filter without '$share/group/'")


def substitute(pattern: str, username: str, client_id: str) -> str:
    """The pattern with the names, in one pass: a user name that contains "%c" stays as it is. "":
    the first level has a name in it and begins with `$`. Those topics are the broker's: with the
    client id `$CONTROL` the pattern `%c/#` would give the right to change all users."""
    parts = pattern.split("%")
    result = [parts[0]]
    for part in parts[1:]:
        if part.startswith("u"):
            result += [username, part[1:]]
        elif part.startswith("c"):
            result += [client_id, part[1:]]
        else:
            result += ["%", part]
    text = "".join(result)
    level = pattern.partition("/")[0]
    if text.startswith("$") and ("%u" in level or "%c" in level):
        return ""
    return text
