"""Server addresses: what is understood, what is refused and how it is said."""

import pytest

from holdfast.client.servers import Server, parse_references, parse_server, servers_of

UNDERSTOOD = [
    ("a", Server("mqtt", "a", 1883)),
    ("a:1884", Server("mqtt", "a", 1884)),
    (" mqtt://a ", Server("mqtt", "a", 1883)),
    ("MQTTS://Box.example.", Server("mqtts", "Box.example.", 8883)),
    ("tcp://a:1", Server("mqtt", "a", 1)),
    ("ssl://a", Server("mqtts", "a", 8883)),
    ("ws://c", Server("ws", "c", 80, "/mqtt")),
    ("ws://c/", Server("ws", "c", 80, "/mqtt")),
    ("ws://c:8080/deep/path?x=1", Server("ws", "c", 8080, "/deep/path?x=1")),
    ("wss://d/mqtt", Server("wss", "d", 443, "/mqtt")),
    ("[::1]:1883", Server("mqtt", "::1", 1883)),
    ("mqtts://[fe80::1]", Server("mqtts", "fe80::1", 8883)),
    ("mqtt://127.0.0.1:65535/", Server("mqtt", "127.0.0.1", 65535)),
    ("bücher.example", Server("mqtt", "bücher.example", 1883)),
]


@pytest.mark.parametrize(("text", "server"), UNDERSTOOD, ids=str)
def test_understood(text: str, server: Server) -> None:
    assert parse_server(text) == server
    assert parse_server(str(server)) == server


WRONG = [
    ("", "host is missing"),
    ("mqtt://", "host is missing"),
    (":1883", "host is missing"),
    ("http://a", "unknown scheme 'http'"),
    ("a:", "the port '' is no number"),
    ("a:0", "from 1 to 65535"),
    ("a:65536", "from 1 to 65535"),
    ("a:٣", "is no number"),
    ("a:+1", "is no number"),
    ("::1", r"written \[::1\]:1883"),
    ("[::1", r"written \[::1\]:1883"),
    ("[a]:1", r"written \[::1\]:1883"),
    ("[::1]x", r"written \[::1\]:1883"),
    ("mqtt://a/topic", "a path is for ws and wss"),
    ("a b", "is no host name"),
    ("a..b", "is no host name"),
    ("a" * 64, "is no host name"),
    (".".join(["abc"] * 64), "is no host name"),
    ("a\n", None),
    ("a\x00", "is no host name"),
    ("ws://a/ü", "printable ASCII"),
    ("ws://a/b c", "printable ASCII"),
    ("wss://a/b#c", "printable ASCII"),
    ("mqtt://user:secret@a", "set them in the options"),
]


@pytest.mark.parametrize(("text", "complaint"), WRONG, ids=repr)
def test_wrong(text: str, complaint: str | None) -> None:
    if complaint is None:
        assert parse_server(text) == Server("mqtt", "a", 1883)
        return
    with pytest.raises(ValueError, match=complaint) as caught:
        parse_server(text)
    assert "secret" not in str(caught.value)


def test_host_or_list() -> None:
    assert servers_of("a", None, [], False) == [Server("mqtt", "a", 1883)]
    assert servers_of("a", None, [], True) == [Server("mqtts", "a", 8883)]
    assert servers_of("::1", 99, (), False) == [Server("mqtt", "::1", 99)]
    plain, secure = Server("mqtt", "a", 1883), Server("mqtts", "b", 8883)
    assert servers_of(None, None, ["a", plain, "mqtts://b", "a:1883"], False) == [plain, secure]
    assert servers_of(None, None, ["b"], True) == [secure]
    for host, port, servers in (
        (None, None, []),
        ("a", None, ["b"]),
        (None, 1883, ["b"]),
        ("a", 0, []),
        ("", None, []),
        (None, None, "a:1883"),
    ):
        with pytest.raises(ValueError):
            servers_of(host, port, servers, False)


def test_references_are_reached_as_their_origin_and_never_less_safely() -> None:
    plain = Server("mqtt", "a", 1883)
    secure = Server("mqtts", "a", 8883)
    web = Server("ws", "a", 80, "/chat")
    assert parse_references("b:99 [::1]:1", plain) == [
        Server("mqtt", "b", 99),
        Server("mqtt", "::1", 1),
    ]
    assert parse_references("b", secure) == [Server("mqtts", "b", 8883)]
    assert parse_references("mqtt://b tcp://b ws://b wss://b mqtts://c", secure) == [
        Server("wss", "b", 443, "/mqtt"),
        Server("mqtts", "c", 8883),
    ]
    assert parse_references("mqtts://b", plain) == [Server("mqtts", "b", 8883)]
    assert parse_references("b:81", web) == [Server("ws", "b", 81, "/chat")]
    assert parse_references("http://b  b:x  :: ", plain) == []
    assert parse_references("", plain) == []
