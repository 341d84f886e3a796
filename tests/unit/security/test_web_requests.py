"""Which requests a port without passwords answers."""

import pytest

from holdfast.numbers import whole_number
from holdfast.security.http.requests import (
    ANY_HOST,
    Hosts,
    hosts_of_bind,
    page_refusal,
)

HOSTS = Hosts(["Broker.example.org", "0.0.0.0", "box"], "admin.hosts")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:18083",
        "127.0.0.1",
        "10.1.2.3:18083",
        "[::1]:18083",
        "[fe80::1]",
        "localhost",
        "LOCALHOST:18083",
        "localhost.:18083",
        "broker.example.org:1",
        "box",
    ],
)
def test_known_names(host: str) -> None:
    assert HOSTS.refusal([host]) == ""


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:18083",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "broker.example.org.evil.example",
        "127.0.0.1@evil.example",
        "",
        "[::1",
        "x" * 10_000,
        "*",
    ],
)
def test_other_names(host: str) -> None:
    text = HOSTS.refusal([host])
    if host == "[::1":
        # Whatever follows it, no browser sends it for a name.
        return
    assert "admin.hosts" in text
    assert len(text) < 400


def test_several_are_refused_and_none_is_no_browser() -> None:
    assert HOSTS.refusal(["localhost", "evil.example"])
    assert HOSTS.refusal([]) == ""
    assert Hosts([ANY_HOST]).refusal(["evil.example"]) == ""


def test_a_port_without_a_setting() -> None:
    for bind in ("127.0.0.1", "[::1]", "localhost"):
        hosts = hosts_of_bind(bind)
        assert hosts is not None
        assert hosts.refusal(["evil.example"])
    assert hosts_of_bind("0.0.0.0") is None
    assert hosts_of_bind("manager") is None


def test_pages() -> None:
    assert page_refusal([], []) == ""
    assert page_refusal([], ["none"]) == ""
    assert page_refusal([], ["same-origin"]) == ""
    assert page_refusal(["null"], [])
    assert page_refusal(["http://127.0.0.1:18083"], [])
    assert page_refusal([], ["cross-site"])
    assert page_refusal([], ["same-site"])
    assert page_refusal([], ["none", "cross-site"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("100", 100),
        ("101", None),
        ("-1", None),
        ("+1", None),
        ("1.0", None),
        ("1e2", None),
        ("", None),
        (" 1", None),
        ("\u0661", None),
        ("1" * 5000, None),
        ("0" * 5000, None),
    ],
)
def test_whole_number(text: str, number: int | None) -> None:
    assert whole_number(text, 100) == number
