"""The subscription trie: a hypothesis machine against the one-off match, and hostile filters."""

from collections import Counter
from itertools import product

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.protocol.topics.names import matches
from holdfast.protocol.topics.trie import SubscriptionTrie, TrieEntry

LEVELS = st.sampled_from(["a", "b", "", "$a"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=5).map("/".join).filter(bool)
KEYS = st.integers(1, 3)


@st.composite
def filters(draw: st.DrawFn) -> str:
    levels = draw(st.lists(st.one_of(LEVELS, st.just("+")), max_size=5))
    if draw(st.booleans()) or not levels:
        levels.append("#")
    return "/".join(levels) or "+"


class TrieMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.trie = SubscriptionTrie()
        self.model: dict[tuple[str, int], object] = {}
        self.count = 0
        self.version = 0

    @rule(filter=filters(), key=KEYS)
    def add(self, filter: str, key: int) -> None:
        self.count += 1
        assert self.trie.add(filter, key, self.count) == self.model.get((filter, key))
        self.model[filter, key] = self.count
        self.version += 1

    @rule(filter=filters(), key=KEYS)
    def remove(self, filter: str, key: int) -> None:
        expected = self.model.pop((filter, key), None)
        assert self.trie.remove(filter, key) == expected
        self.version += expected is not None

    @rule(data=st.data())
    def remove_known(self, data: st.DataObject) -> None:
        if self.model:
            filter, key = data.draw(st.sampled_from(sorted(self.model)))
            self.remove(filter, key)

    @rule(topic=TOPICS)
    def match(self, topic: str) -> None:
        expected = Counter(v for (filter, _), v in self.model.items() if matches(filter, topic))
        assert Counter(self.trie.match(topic)) == expected

    @invariant()
    def counts(self) -> None:
        assert len(self.trie) == len(self.model)
        assert self.trie.version == self.version
        assert sorted(self.trie.filters()) == sorted({filter for filter, _ in self.model})
        for filter in self.trie.filters():
            expected = {k: v for (f, k), v in self.model.items() if f == filter}
            assert self.trie.subscribers(filter) == expected

    @invariant()
    def nodes_are_needed(self) -> None:
        wildcards = {filter for filter, _ in self.model if "+" in filter or "#" in filter}
        assert leaves(self.trie._root, is_root=True) == len(wildcards)


def leaves(node: dict[str, object], *, is_root: bool) -> int:
    count = 0
    for child in node.values():
        if isinstance(child, TrieEntry):
            count += 1
        else:
            assert isinstance(child, dict)
            count += leaves(child, is_root=False)
    assert is_root or count >= 2
    return count


TestTrie = TrieMachine.TestCase
TestTrie.settings = settings(max_examples=60, stateful_step_count=30)


def test_examples() -> None:
    """[MQTT-4.7.1-1] [MQTT-4.7.1-2] [MQTT-4.7.2-1]"""
    trie = SubscriptionTrie()
    for filter in ["sport/#", "sport/+", "sport", "+", "#", "/+", "+/+", "$SYS/#", "+/SYS/x"]:
        assert trie.add(filter, "k", filter) is None
    assert sorted(map(str, trie.match("sport"))) == ["#", "+", "sport", "sport/#"]
    assert sorted(map(str, trie.match("sport/x"))) == ["#", "+/+", "sport/#", "sport/+"]
    assert sorted(map(str, trie.match("/finance"))) == ["#", "+/+", "/+"]
    assert trie.match("$SYS/x") == ["$SYS/#"]
    assert trie.match("$SYS") == ["$SYS/#"]


def test_a_value_comes_once_for_each_filter() -> None:
    trie = SubscriptionTrie()
    value = object()
    for filter in ["a/+", "a/#", "a/b"]:
        trie.add(filter, "k", value)
    assert trie.match("a/b") == [value] * 3


def test_deep_filters_need_no_recursion() -> None:
    trie = SubscriptionTrie()
    plus = "/".join(["+"] * 200)
    trie.add(plus, 1, "plus")
    trie.add(plus[:-1] + "#", 1, "hash")
    trie.add("/".join(["a"] * 199 + ["#"]), 1, "literal")
    deep = "/".join(["a"] * 200)
    assert sorted(map(str, trie.match(deep))) == ["hash", "literal", "plus"]
    assert trie.remove(plus, 1) == "plus"
    assert trie.remove(plus[:-1] + "#", 1) == "hash"
    assert trie.match(deep) == ["literal"]
    assert trie.remove("/".join(["a"] * 199 + ["#"]), 1) == "literal"
    assert trie._root == {}


def test_a_node_is_visited_once() -> None:
    """Every mix of `a` and `+` in 12 levels matches; each is found exactly once."""
    trie = SubscriptionTrie()
    mixes = ["/".join(levels) for levels in product("a+", repeat=12)]
    for mix in mixes:
        trie.add(mix, 1, mix)
    assert sorted(map(str, trie.match("/".join("a" * 12)))) == sorted(mixes)
    assert trie.match("/".join("a" * 13)) == []


def test_the_work_is_bounded_by_the_filters() -> None:
    """One long filter of plus signs is one leaf, whatever the topic."""
    trie = SubscriptionTrie()
    for length in range(1, 201):
        trie.add("/".join(["+"] * length), 1, length)
    assert trie.match("/".join(["a"] * 200)) == [200]
    depth = 0
    node: object = trie._root
    while isinstance(node, dict):
        assert len(node) <= 2
        node = node.get("+")
        depth += 1
    assert depth == 200


def test_subscribers_is_a_copy() -> None:
    trie = SubscriptionTrie()
    trie.add("a", 1, "x")
    trie.add("a", 2, "y")
    trie.subscribers("a").clear()
    assert trie.subscribers("a") == {1: "x", 2: "y"}
    assert trie.subscribers("b") == {}
    assert trie.remove("a", 3) is None
    assert trie.remove("b", 3) is None
