"""Access control lists in Mosquitto's file format, with Mosquitto's meaning.

::

    # rules on top, before any `user`: for clients without a user name
    topic read $SYS/#
    user roger
    topic readwrite home/roger/#
    topic deny home/roger/private/#
    pattern write devices/%c/#

`topic` and `pattern` take `read`, `write`, `readwrite` (the default) or `deny`, then a filter.
Patterns are for every client; %u stands for its user name, %c for its client id. What no rule
allows is denied. A client's own rules come before the patterns; within each, `deny` comes before
the rest, whatever the order of the lines.
"""

from pathlib import Path
from typing import Final

from holdfast.protocol.topics.names import InvalidFilter, check_filter, is_shared, matches

_DENY: Final = 0
_READ: Final = 1
_WRITE: Final = 2
_ACCESS: Final = {"read": _READ, "write": _WRITE, "readwrite": _READ | _WRITE, "deny": _DENY}


class AclError(ValueError):
    """An ACL file that cannot be used. The text has the file, the line and the allowed form."""


class Filters:
    """A set of topic filters. Exact ones cost one look-up together, those with wildcards one match
    each."""

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._wildcards: dict[str, None] = {}

    def add(self, filter: str) -> None:
        """Add a filter."""
        if "+" in filter or "#" in filter:
            self._wildcards[filter] = None
        else:
            self._exact.add(filter)

    def match(self, topic: str) -> bool:
        """Whether a filter of the set matches the topic."""
        if topic in self._exact:
            return True
        return any(matches(filter, topic) for filter in self._wildcards)


class Rules:
    """The rules of one user, shared by all its clients."""

    def __init__(self) -> None:
        self.deny = Filters()
        self.read = Filters()
        self.write = Filters()

    def add(self, access: int, filter: str) -> None:
        """Add a rule."""
        if access == _DENY:
            self.deny.add(filter)
        if access & _READ:
            self.read.add(filter)
        if access & _WRITE:
            self.write.add(filter)


class ClientAcl:
    """The rights of one client. A check costs a walk over the client's wildcard rules."""

    def __init__(self, own: Rules | None, patterns: list[tuple[int, str]]) -> None:
        self._own = own
        # (access, filter) with this client's names, those that deny first.
        self._patterns = patterns

    def can_read(self, topic: str) -> bool:
        """Whether the client may receive a message of this topic. (Subscribing is always
        allowed.)"""
        own = self._own
        if own is not None:
            if own.deny.match(topic):
                return False
            if own.read.match(topic):
                return True
        return self._pattern_allows(_READ, topic)

    def can_write(self, topic: str) -> bool:
        """Whether the client may publish to this topic."""
        own = self._own
        if own is not None:
            if own.deny.match(topic):
                return False
            if own.write.match(topic):
                return True
        return self._pattern_allows(_WRITE, topic)

    def _pattern_allows(self, wanted: int, topic: str) -> bool:
        for access, filter in self._patterns:
            if (access == _DENY or access & wanted) and matches(filter, topic):
                return access != _DENY
        return False


class AclFile:
    """The rules of one file."""

    def __init__(self) -> None:
        self._anonymous = Rules()
        self._users: dict[str, Rules] = {}
        # (access, filter with %u and %c), those that deny first.
        self._patterns: list[tuple[int, str]] = []

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
                rules = acl._users.setdefault(rest, Rules())
            elif keyword == "topic":
                access, filter = _access_and_filter(keyword, rest, where)
                rules.add(access, filter)
            elif keyword == "pattern":
                acl._patterns.append(_access_and_filter(keyword, rest, where))
            else:
                raise AclError(
                    f"{where}a line begins with 'user', 'topic', 'pattern' or '#', "
                    f"found {keyword!r}"
                )
        acl._patterns.sort(key=lambda pattern: pattern[0] != _DENY)
        return acl

    def names_users(self) -> bool:
        """Whether some rules apply only to clients with a user name."""
        return bool(self._users) or any("%u" in pattern for _, pattern in self._patterns)

    def for_client(self, username: str | None, client_id: str) -> ClientAcl:
        """The rules for one client. Called once per connection."""
        own = self._anonymous if username is None else self._users.get(username)
        return ClientAcl(own, self._expand(username, client_id))

    def _expand(self, username: str | None, client_id: str) -> list[tuple[int, str]]:
        # A name with a wildcard would match the topics of others: the user name "+" turns home/%u/#
        # into home/+/#.
        for name in (username or "", client_id):
            if "+" in name or "#" in name:
                return []
        return [
            (access, _substitute(pattern, username or "", client_id))
            for access, pattern in self._patterns
            if username is not None or "%u" not in pattern
        ]


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
    try:
        check_filter(filter)
    except InvalidFilter as error:
        raise AclError(where + str(error)) from None
    if is_shared(filter):
        raise AclError(where + "rules are about topics: write the filter without '$share/group/'")
    return _ACCESS[access], filter


def _substitute(pattern: str, username: str, client_id: str) -> str:
    """The pattern with the names, in one pass: a user name that contains "%c" stays as it is."""
    parts = pattern.split("%")
    result = [parts[0]]
    for part in parts[1:]:
        if part.startswith("u"):
            result += [username, part[1:]]
        elif part.startswith("c"):
            result += [client_id, part[1:]]
        else:
            result += ["%", part]
    return "".join(result)
