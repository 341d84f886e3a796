"""Finds subscribers by topic: each filter's keys, with one value per pair.

A filter without wildcards is found by one look-up in `_entries`, whatever their number. One with
wildcards is also in the trie: a dict per branching point, from a level to its children. These are
another dict or, if only one filter continues there, its TrieEntry. So a lone `a/+/b/+/c` costs one
slot, not five nodes, and the trie has fewer nodes than filters unless these share long prefixes.

For example, the filters `a/+/b`, `a/+/c` and `d/#` are `{a: {+: {b: entry, c: entry}}, d: entry}`.

Match walks the trie level by level without recursion. Each node is reached by one path only, and
below each are at least two filters whose levels so far match. So the number of such filters bounds
the cost of a match, however many `+` they contain.
"""

from typing import Final

from holdfast.protocol.topics.names import has_wildcard, levels_match

# "/" is in no level, so this is the key of the filter that ends at a node.
_END: Final = "/"


class TrieEntry:
    """One filter with its subscribers. A single one is in `key` and `value`; several are in
    `many`."""

    def __init__(self, filter: str, key: object, value: object) -> None:
        self.filter = filter
        self.key = key
        self.value = value
        self.many: dict[object, object] | None = None


class SubscriptionTrie:
    """The values of (filter, key) pairs, found by topic. The caller has checked the filters: they
    are valid and plain (not shared)."""

    def __init__(self) -> None:
        # Incremented by every change; matches of another version are out of date.
        self.version = 0
        self._pairs = 0
        self._entries: dict[str, TrieEntry] = {}
        # Values are dict[str, object] or TrieEntry. Invariant: below every dict except the root are
        # at least two filters. Without it a removed filter would leave its whole path behind.
        self._root: dict[str, object] = {}

    def __len__(self) -> int:
        """The number of (filter, key) pairs."""
        return self._pairs

    def add(self, filter: str, key: object, value: object) -> object | None:
        """Subscribes `key`. Returns its earlier value under this filter, or None."""
        self.version += 1
        entry = self._entries.get(filter)
        if entry is None:
            entry = TrieEntry(filter, key, value)
            self._entries[filter] = entry
            if has_wildcard(filter):
                self._insert(entry)
            self._pairs += 1
            return None
        many = entry.many
        if many is None:
            if entry.key == key:
                replaced = entry.value
                entry.value = value
                return replaced
            entry.many = {entry.key: entry.value, key: value}
            entry.key = None
            entry.value = None
            self._pairs += 1
            return None
        if key in many:
            replaced = many[key]
            many[key] = value
            return replaced
        many[key] = value
        self._pairs += 1
        return None

    def remove(self, filter: str, key: object) -> object | None:
        """Unsubscribes `key`. Returns its value, or None if it was not subscribed."""
        entry = self._entries.get(filter)
        if entry is None:
            return None
        many = entry.many
        if many is None:
            if entry.key != key:
                return None
            removed = entry.value
            del self._entries[filter]
            if has_wildcard(filter):
                self._cut(filter)
        else:
            if key not in many:
                return None
            removed = many.pop(key)
            # Most filters have one subscriber, which needs no dict.
            if len(many) == 1:
                entry.key, entry.value = many.popitem()
                entry.many = None
        self._pairs -= 1
        self.version += 1
        return removed

    def match(self, topic: str) -> list[object]:
        """The values of all filters that match, one for each (filter, key), in no order."""
        found: list[object] = []
        for entry in self._matching(topic):
            if entry.many is None:
                found.append(entry.value)
            else:
                found.extend(entry.many.values())
        return found

    def match_of(self, topic: str, key: object) -> list[object]:
        """The values of one key. The cost is that of the matching filters, however many others the
        key has, and however many other keys these filters have."""
        found: list[object] = []
        for entry in self._matching(topic):
            many = entry.many
            if many is None:
                if entry.key is key:
                    found.append(entry.value)
            elif key in many:
                found.append(many[key])
        return found

    def _matching(self, topic: str) -> list[TrieEntry]:
        """The entries of all filters that match."""
        found: list[TrieEntry] = []
        entry = self._entries.get(topic)
        if entry is not None:
            found.append(entry)
        if self._root:
            self._match_wildcards(topic, found)
        return found

    def subscribers(self, filter: str) -> dict[object, object]:
        """The values of one filter by key, as a copy."""
        entry = self._entries.get(filter)
        if entry is None:
            return {}
        if entry.many is None:
            return {entry.key: entry.value}
        return dict(entry.many)

    def filters(self) -> list[str]:
        """All filters, as a copy: the trie may change while the caller walks it."""
        return list(self._entries)

    def _match_wildcards(self, topic: str, found: list[TrieEntry]) -> None:
        """Adds the entries of the filters with wildcards that match.

        `nodes` are the nodes whose path matches the levels so far. A single filter leaves the walk
        as soon as it is alone below a node: its remaining levels are compared at once (`_step`).
        """
        levels = topic.split("/")
        nodes: list[dict[str, object]] = []
        root = self._root
        child = root.get(levels[0])
        if child is not None:
            _step(child, levels, 1, nodes, found)
        # [MQTT-4.7.2-1] Wildcards in the first level do not match `$SYS` and the like.
        if not topic.startswith("$"):
            _collect_below(root, "#", found)
            child = root.get("+")
            if child is not None:
                _step(child, levels, 1, nodes, found)
        for depth in range(1, len(levels)):
            if not nodes:
                return
            level = levels[depth]
            below: list[dict[str, object]] = []
            for node in nodes:
                _collect_below(node, "#", found)
                child = node.get(level)
                if child is not None:
                    _step(child, levels, depth + 1, below, found)
                child = node.get("+")
                if child is not None:
                    _step(child, levels, depth + 1, below, found)
            nodes = below
        for node in nodes:
            # `a/#` matches `a` too.
            _collect_below(node, "#", found)
            _collect_below(node, _END, found)

    def _insert(self, entry: TrieEntry) -> None:
        """Adds a filter to the trie. Where it meets a lone filter, both are moved one level down
        until their levels differ."""
        node = self._root
        levels = entry.filter.split("/")
        for depth in range(len(levels)):
            level = levels[depth]
            child = node.get(level)
            if child is None:
                node[level] = entry
                return
            if isinstance(child, TrieEntry):
                # Two filters continue from here, so their common level becomes a node.
                split: dict[str, object] = {_next_key(child.filter, depth): child}
                node[level] = split
                node = split
            else:
                assert isinstance(child, dict)
                node = child
        node[_END] = entry

    def _cut(self, filter: str) -> None:
        """Removes a filter from the trie, with every node that is not needed any more."""
        node = self._root
        path: list[dict[str, object]] = [node]
        keys: list[str] = []
        levels = filter.split("/")
        levels.append(_END)
        for level in levels:
            keys.append(level)
            child = node[level]
            if isinstance(child, TrieEntry):
                break
            assert isinstance(child, dict)
            node = child
            path.append(node)
        del node[keys[-1]]
        # A node with a single filter below becomes that filter's entry (the invariant of `_root`).
        # That may leave the node above with a single filter, too, so the loop goes on upwards.
        for depth in range(len(path) - 1, 0, -1):
            node = path[depth]
            if len(node) > 1:
                return
            for child in node.values():
                if not isinstance(child, TrieEntry):
                    return
                path[depth - 1][keys[depth - 1]] = child


def _next_key(filter: str, depth: int) -> str:
    """The key of a filter in a node below its level `depth`."""
    levels = filter.split("/", depth + 2)
    return levels[depth + 1] if depth + 1 < len(levels) else _END


def _step(
    child: object,
    levels: list[str],
    depth: int,
    nodes: list[dict[str, object]],
    found: list[TrieEntry],
) -> None:
    """Goes on to `child`, whose path matches the levels before `depth`."""
    if isinstance(child, TrieEntry):
        if levels_match(child.filter.split("/"), levels, depth):
            found.append(child)
    else:
        assert isinstance(child, dict)
        nodes.append(child)


def _collect_below(node: dict[str, object], key: str, found: list[TrieEntry]) -> None:
    """Adds the filter that ends here with this key, if there is one."""
    entry = node.get(key)
    if entry is not None:
        assert isinstance(entry, TrieEntry)
        found.append(entry)
