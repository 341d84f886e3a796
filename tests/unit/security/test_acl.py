"""ACL files. tests/interop/test_acl_against_mosquitto.py holds the same rules against Mosquitto."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.topics.names import matches
from holdfast.security.acl import READ, WRITE, AclError, AclFile, given_rules, substitute

TEXT = """\
# a comment
topic read $SYS/#
topic public

user roger
topic readwrite home/roger/#
topic deny home/roger/private/#
topic read with space/a b
topic write log

user  ann lee
topic #
user roger
topic read late

pattern read devices/%c/#
pattern write users/%u/out
pattern users/%u/+
pattern deny users/%u/secret
pattern all/%u/%c/%d
"""
ACL = AclFile.parse(TEXT, "acl")


def access(username: str | None, topic: str, client_id: str = "c1") -> str:
    client = ACL.for_client(username, client_id)
    return ("r" if client.can_read(topic) else "") + ("w" if client.can_write(topic) else "")


@pytest.mark.parametrize(
    ("username", "topic", "expected"),
    [
        (None, "$SYS/broker/uptime", "r"),
        (None, "public", "rw"),
        (None, "home/roger/x", ""),
        ("roger", "public", ""),
        ("roger", "home/roger/x", "rw"),
        ("roger", "home/roger", "rw"),
        ("roger", "home/roger/private/x", ""),
        ("roger", "home/roger/private", ""),
        ("roger", "with space/a b", "r"),
        ("roger", "log", "w"),
        ("roger", "late", "r"),
        ("ann lee", "anything/at/all", "rw"),
        ("ann lee", "$SYS/x", ""),
        # A client's own rules come first: what they allow, no pattern denies.
        ("ann lee", "users/ann lee/secret", "rw"),
        ("bob", "users/bob/secret", ""),
        ("bob", "users/bob/out", "rw"),
        ("bob", "users/roger/out", ""),
        ("bob", "devices/c1/x", "r"),
        ("bob", "devices/c2/x", ""),
        ("bob", "all/bob/c1/%d", "rw"),
        (None, "devices/c1/x", "r"),
        (None, "users//out", ""),
        ("nobody", "public", ""),
    ],
)
def test_access(username: str | None, topic: str, expected: str) -> None:
    assert access(username, topic) == expected


def test_names_with_wildcards_match_no_pattern() -> None:
    assert access("+", "users/bob/out") == ""
    assert access("#", "users/#/out") == ""
    assert access("bob", "devices/c1/x", client_id="+") == ""
    assert access("bob", "devices/x", client_id="#") == ""


def test_a_name_is_substituted_once() -> None:
    assert access("%c", "users/c1/out") == ""
    assert access("%c", "users/%c/out") == "rw"


@pytest.mark.parametrize("pattern", ["%c/#", "%u/#", "%c%u/+", "$%c/#", "%c"])
@pytest.mark.parametrize("name", ["$CONTROL", "CONTROL", "$SYS", "$SYS/x", "$"])
def test_names_give_no_topics_of_the_broker(pattern: str, name: str) -> None:
    client = AclFile.parse(f"pattern {pattern}\n", "acl").for_client(name, name)
    for topic in ("$CONTROL", "$CONTROL/dynamic-security/v1", "$SYS", "$SYS/x", "$SYS/x/y", "$/a"):
        assert not client.can_read(topic)
        assert not client.can_write(topic)
    assert not [filter for filter, _ in client.in_order(WRITE, "#") if filter.startswith("$")]


def test_given_names_give_no_topics_of_the_broker() -> None:
    for filters in (["%c/#"], ["%u/#"], ["a", "%c%u"]):
        with pytest.raises(AclError, match="does not begin with"):
            given_rules("token", filters, [], "$CONTROL", "$CONTROL")
    assert given_rules("token", ["$CONTROL/#"], [], "u", "$c").can_write("$CONTROL/x")


def test_what_no_rule_allows_is_denied() -> None:
    client = AclFile.parse("# nothing\n", "acl").for_client("bob", "c1")
    assert not client.can_read("a")
    assert not client.can_write("a")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("user", "needs a user name"),
        ("topics a", "'topics'"),
        ("topic reed a", "read, write, readwrite, history, deny, found 'reed'"),
        ("topic a b", "found 'a'"),
        ("topic read a/#/b", "'#' must be the last"),
        ("pattern a+", "'\\+' must be a level"),
        ("topic", "at least one character"),
        ("topic read $share/g/a", r"without '\$share/group/'"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "acl"
    path.write_text(f"topic read a\n# b\n{line}\n")
    with pytest.raises(AclError, match=text) as caught:
        AclFile.load(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(AclError, match="No such file"):
        AclFile.load(tmp_path / "missing")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(AclError, match="not UTF-8"):
        AclFile.load(tmp_path / "latin")


LEVELS = st.sampled_from(["a", "b", "$x", "", "u", "c/d"])
NAMES = st.sampled_from(["u", "c", "c/d", "$x", "a/b", "+", "x#"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)
FILTERS = (
    st.lists(st.sampled_from(["a", "b", "+", "%u", "%c", "x%u", "$x"]), min_size=1, max_size=4)
    .map("/".join)
    .flatmap(lambda head: st.sampled_from([head, f"{head}/#"]))
)
LINES = st.tuples(
    st.sampled_from(["topic", "pattern"]),
    st.sampled_from(["read", "write", "readwrite", "deny"]),
    FILTERS,
)


def plainly(lines: list[tuple[str, str, str]], user: str, client: str, topic: str) -> str:
    """What Mosquitto's rules say, one after the other."""
    found = ""
    for letter, access in (("r", "read"), ("w", "write")):
        for keyword in ("topic", "pattern"):
            if keyword == "pattern" and any("+" in one or "#" in one for one in (user, client)):
                continue
            matching = {
                rule
                for word, rule, filter in lines
                if word == keyword
                and matches(
                    substitute(filter, user, client) if word == "pattern" else filter, topic
                )
            }
            if "deny" in matching:
                break
            if matching & {access, "readwrite"}:
                found += letter
                break
    return found


@given(lines=st.lists(LINES, max_size=12), user=NAMES, client=NAMES, topic=TOPICS)
def test_the_trie_decides_as_line_by_line(
    lines: list[tuple[str, str, str]], user: str, client: str, topic: str
) -> None:
    text = "".join(f"{word} {access} {filter}\n" for word, access, filter in lines)
    acl = AclFile.parse(f"user {user}\n{text}", "acl").for_client(user, client)
    decided = ("r" if acl.can_read(topic) else "") + ("w" if acl.can_write(topic) else "")
    assert decided == plainly(lines, user, client, topic)


@pytest.mark.parametrize(
    ("username", "topic", "wanted", "expected"),
    [
        ("roger", "home/roger/x", WRITE, "acl:6: topic readwrite home/roger/#"),
        ("roger", "home/roger/private/x", READ, "acl:7: topic deny home/roger/private/#"),
        ("roger", "devices/c1/x", READ, "acl:16: pattern read devices/%c/#"),
        ("roger", "devices/c1/x", WRITE, "no rule allows it"),
        (None, "public", READ, "acl:3: topic readwrite public"),
    ],
)
def test_a_verdict_has_its_line(
    username: str | None, topic: str, wanted: int, expected: str
) -> None:
    assert ACL.for_client(username, "c1").verdict_on(topic, wanted).text() == expected


def test_ten_thousand_rules_cost_as_few() -> None:
    """Counted in rules looked at: those that match, and no others."""
    lines = [f"pattern write fleet/{number}/%c/#" for number in range(10_000)]
    acl = AclFile.parse("\n".join(lines), "acl")
    assert len(acl._patterns._by_level.match("fleet/17/c1/x")) == 1
    assert acl.for_client(None, "c1").can_write("fleet/17/c1/x")
