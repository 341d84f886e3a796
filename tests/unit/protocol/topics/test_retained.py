"""The retained trie against a dict and the one-off match, page by page, while it changes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol.topics.names import matches
from holdfast.protocol.topics.retained import (
    CHUNK_TOPICS_MAX,
    VISITS_PER_RESULT,
    RetainedScan,
    RetainedTrie,
)

# Levels around "/" in string order ("-" < "." < "/" < "0") are where a sorted sequence goes wrong.
LEVELS = st.sampled_from(["a", "", "a-", "a0", "$", "\U0001f600"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)


@st.composite
def filters(draw: st.DrawFn) -> str:
    levels = draw(st.lists(st.one_of(LEVELS, st.just("+")), max_size=4))
    if draw(st.booleans()) or not levels:
        levels.append("#")
    return "/".join(levels) or "#"


def drain_rest(scan: RetainedScan) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    while not scan.done:
        found += scan.next(1000)
    return found


def drain(retained: RetainedTrie, filter: str, limit: int) -> list[tuple[str, object]]:
    scan = retained.scan(filter)
    found: list[tuple[str, object]] = []
    while not scan.done:
        page = scan.next(limit)
        assert len(page) <= limit
        found += page
    assert scan.next(limit) == []
    return found


@settings(max_examples=200)
@given(st.lists(TOPICS, max_size=40), filters(), st.integers(1, 7))
def test_a_scan_finds_what_matches(topics: list[str], filter: str, limit: int) -> None:
    """[MQTT-4.7.2-1]"""
    retained = RetainedTrie()
    for topic in topics:
        retained.set(topic, topic.upper())
    expected = sorted(topic for topic in set(topics) if matches(filter, topic))
    assert drain(retained, filter, limit) == [(topic, topic.upper()) for topic in expected]


@settings(max_examples=150)
@given(
    st.sets(TOPICS, max_size=30),
    filters(),
    st.lists(st.tuples(st.booleans(), TOPICS), max_size=30),
    st.integers(1, 3),
)
def test_changes_between_pages(
    topics: set[str], filter: str, changes: list[tuple[bool, str]], limit: int
) -> None:
    retained = RetainedTrie()
    for topic in topics:
        retained.set(topic, 0)
    stays = set(topics)
    scan = retained.scan(filter)
    seen: list[str] = []
    while not scan.done:
        for topic, _ in scan.next(limit):
            assert retained.get(topic) is not None
            seen.append(topic)
        if changes:
            is_set, topic = changes.pop()
            if is_set:
                retained.set(topic, 1)
            else:
                retained.remove(topic)
                stays.discard(topic)
    assert len(seen) == len(set(seen))
    assert {topic for topic in stays if matches(filter, topic)} <= set(seen)
    assert all(matches(filter, topic) for topic in seen)


def test_neighbours_in_string_order() -> None:
    retained = RetainedTrie()
    names = ["a", "a-", "a-/x", "a/", "a/x", "a0", "a0/x", "b/a-/x", "b/a/x", "b/a0/x"]
    for names_set in (names, names[1:]):
        retained = RetainedTrie()
        for name in names_set:
            retained.set(name, 0)
        for filter in ["a/#", "a/+", "+/x", "b/a/#", "b/+/x", "+/a/x", "+/a/#"]:
            found = [topic for topic, _ in drain(retained, filter, 2)]
            assert found == [name for name in names_set if matches(filter, name)]


def test_a_chunk_whose_end_is_gone_does_not_end_a_scan() -> None:
    retained = RetainedTrie()
    names = [f"{index:05}" for index in range(3 * CHUNK_TOPICS_MAX)]
    for name in names:
        retained.set(name, 0)
    for start in range(0, len(names), 8):
        scan = retained.scan("#")
        behind = scan.next(start + 1)
        for name in names[start + 1 : start + 8]:
            retained.remove(name)
        rest = drain_rest(scan)
        assert behind[-1][0] == names[start]
        assert [topic for topic, _ in rest] == names[start + 8 :]
        for name in names[start + 1 : start + 8]:
            retained.set(name, 0)


def test_set_get_replace_remove() -> None:
    retained = RetainedTrie()
    assert retained.get("a") is None
    assert retained.remove("a") is None
    retained.set("a", 1)
    retained.set("a", 2)
    assert len(retained) == 1
    assert retained.get("a") == 2
    assert retained.remove("a") == 2
    assert len(retained) == 0
    assert drain(retained, "#", 10) == []


def test_chunks_split_and_join() -> None:
    count = 5 * CHUNK_TOPICS_MAX
    retained = RetainedTrie()
    names = [f"t/{index * 7919 % count:06}" for index in range(count)]
    for name in names:
        retained.set(name, name)
    assert [topic for topic, _ in drain(retained, "t/+", 100)] == sorted(names)
    for name in names[: count - 10]:
        assert retained.remove(name) == name
    assert [topic for topic, _ in drain(retained, "#", 3)] == sorted(names[count - 10 :])
    for name in names[count - 10 :]:
        retained.remove(name)
    assert retained.page("", 10) == []
    retained.set("t", 1)
    assert drain(retained, "t/#", 1) == [("t", 1)]


def test_all_with_dollar_topics() -> None:
    retained = RetainedTrie()
    retained.set("$SYS/a", 1)
    retained.set("b", 2)
    assert drain(retained, "#", 5) == [("b", 2)]
    assert retained.scan_all().next(5) == [("$SYS/a", 1), ("b", 2)]
    assert drain(retained, "$SYS/#", 5) == [("$SYS/a", 1)]


def test_a_page_without_matches_is_bounded() -> None:
    retained = RetainedTrie()
    for index in range(3000):
        retained.set(f"{index}/x", index)
    retained.set("999/y", "there")
    scan = retained.scan("+/y")
    pages = [scan.next(10) for _ in range(3000 // (VISITS_PER_RESULT * 10) + 2)]
    assert scan.done
    assert sum(map(len, pages)) == 1
    assert pages[0] == []


def test_skips_what_lies_below_a_mismatch() -> None:
    """A look-up below a plus costs one visit a branch, however much lies below it."""
    retained = RetainedTrie()
    for device in range(20):
        for metric in range(500):
            retained.set(f"d{device:02}/m{metric:03}/x/y", metric)
    scan = retained.scan("+/m499/#")
    found = scan.next(20)
    assert [topic for topic, _ in found] == [f"d{device:02}/m499/x/y" for device in range(20)]


def test_deep_names() -> None:
    deep = "/".join(["a"] * 200)
    retained = RetainedTrie()
    retained.set(deep, 1)
    assert drain(retained, "/".join(["+"] * 200), 1) == [(deep, 1)]
    assert drain(retained, "/".join(["+"] * 199), 1) == []
    assert drain(retained, "+/#", 1) == [(deep, 1)]
