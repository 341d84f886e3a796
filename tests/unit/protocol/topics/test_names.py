"""Validity of names and filters, and the one-off match that the tries are tested against."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.topics.names import (
    LEVELS_MAX,
    InvalidFilter,
    InvalidTopic,
    check_filter,
    decode_topic,
    is_shared,
    matches,
    split_shared,
)


@pytest.mark.parametrize(
    "topic",
    ["a", "/", " ", "a/b", "/a", "a/", "a//b", "$SYS/x", "é", "\ufeffa", "\U0001f600", "\x01"],
)
def test_valid_names(topic: str) -> None:
    """[MQTT-1.5.4-3] a byte order mark stays"""
    assert decode_topic(topic.encode()) == topic


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "at least one character"),  # [MQTT-4.7.3-1]
        (b"a/+", "wildcards"),  # [MQTT-4.7.0-1] [MQTT-3.3.2-2]
        (b"a#", "wildcards"),
        (b"a\0b", "U+0000"),  # [MQTT-4.7.3-2] [MQTT-1.5.4-2]
        (b"\xff", "not UTF-8"),  # [MQTT-1.5.4-1]
        (b"\xed\xa0\x80", "not UTF-8"),  # [MQTT-1.5.4-1] a surrogate
        (b"\xc0\xaf", "not UTF-8"),
        (b"x" * 65536, "65536 bytes"),  # [MQTT-4.7.3-3]
        (b"/" * LEVELS_MAX, "201 levels"),
    ],
)
def test_invalid_names(raw: bytes, text: str) -> None:
    with pytest.raises(InvalidTopic, match=text.replace("+", r"\+")):
        decode_topic(raw)


def test_limits_are_inclusive() -> None:
    assert decode_topic(b"x" * 65535)
    assert decode_topic(b"/" * (LEVELS_MAX - 1))
    check_filter("x" * 65535)
    check_filter("/" * (LEVELS_MAX - 1))


@pytest.mark.parametrize(
    "filter",
    ["a", "#", "+", "/", "/#", "a/#", "a/+/b", "+/+", "//", "$SYS/#", "$share", "$shared/x",
     "$share/g/a", "$share/g/#", "$share/g//", "$share/g/$SYS/+"],
)  # fmt: skip
def test_valid_filters(filter: str) -> None:
    check_filter(filter)


@pytest.mark.parametrize(
    ("filter", "text"),
    [
        ("", "at least one character"),
        ("a\0", r"U\+0000"),
        ("a#", "level of its own"),  # [MQTT-4.7.1-1]
        ("#/a", "last character"),
        ("a/#/b", "last character"),
        ("##", "last character"),
        ("a+", "level of its own"),  # [MQTT-4.7.1-2]
        ("+a/b", "level of its own"),
        ("a/++", "level of its own"),
        ("/" * LEVELS_MAX, "201 levels"),
        ("é" * 32768, "65536 bytes"),
        ("$share/g", r"\$share/group/filter"),  # [MQTT-4.8.2-1] [MQTT-4.8.2-2]
        ("$share/", r"\$share/group/filter"),
        ("$share//a", "group name is empty"),
        ("$share/g+/a", "group name"),
        ("$share/#/a", "group name"),
        ("$share/g/", "no filter after"),
        ("$share/g/a#", "level of its own"),
        ("$share/g/" + "/" * LEVELS_MAX, "201 levels"),
    ],
)
def test_invalid_filters(filter: str, text: str) -> None:
    with pytest.raises(InvalidFilter, match=text):
        check_filter(filter)


def test_a_long_filter_is_not_repeated_in_the_error() -> None:
    with pytest.raises(InvalidFilter) as caught:
        check_filter("x" * 60000 + "#")
    assert len(str(caught.value)) < 200


def test_shared() -> None:
    assert is_shared("$share/g/a")
    assert not is_shared("$share")
    assert split_shared("$share/g/a/+/#") == ("g", "a/+/#")
    assert split_shared("$share/g//") == ("g", "/")
    with pytest.raises(InvalidFilter):
        split_shared("a/b/c")


@pytest.mark.parametrize(
    ("filter", "topic", "expected"),
    [
        ("sport/tennis/player1/#", "sport/tennis/player1", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/ranking", True),
        ("sport/tennis/player1/#", "sport/tennis/player10", False),
        ("sport/#", "sport", True),
        ("sport/#", "sports", False),
        ("#", "a/b", True),
        ("#", "/", True),
        ("sport/+", "sport", False),
        ("sport/+", "sport/", True),
        ("sport/+", "sport/a/b", False),
        ("+/+", "/finance", True),
        ("/+", "/finance", True),
        ("+", "/finance", False),
        ("+/#", "a", True),
        ("+/b/#", "a/b", True),
        ("+/b/#", "a", False),
        ("a", "A", False),
        ("a", "a/", False),
        ("#", "$SYS/x", False),  # [MQTT-4.7.2-1]
        ("+/x", "$SYS/x", False),
        ("+", "$", False),
        ("$SYS/#", "$SYS/x", True),
        ("$SYS/+", "$SYS/x", True),
        ("+/$x", "a/$x", True),
        ("é", "e\u0301", False),  # [MQTT-4.7.3-4] no normalisation
    ],
)
def test_matches(filter: str, topic: str, expected: bool) -> None:
    assert matches(filter, topic) is expected


def by_the_letter(filter: list[str], topic: list[str]) -> bool:
    if filter == ["#"]:
        return True
    if not filter or not topic:
        return not filter and not topic
    return filter[0] in ("+", topic[0]) and by_the_letter(filter[1:], topic[1:])


@given(
    st.lists(st.sampled_from(["a", "b", "", "+"]), max_size=5),
    st.booleans(),
    st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=5),
)
def test_matches_is_the_definition(levels: list[str], rest: bool, topic: list[str]) -> None:
    filter = [*levels, "#"] if rest or not levels else levels
    assert matches("/".join(filter), "/".join(topic)) is by_the_letter(filter, topic)
