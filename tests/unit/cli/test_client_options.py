"""Options of `holdfast pub` and `sub`: what they come to, and what is refused."""

import argparse

import pytest

from holdfast.cli.pubsub import pub, sub
from holdfast.cli.pubsub.options import ClientParser, connect_options
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr


def parsed(*arguments: str) -> argparse.Namespace:
    return ClientParser("pub", "", (pub.option("-t", "--topic"),)).parse(arguments)


def test_defaults_are_those_of_mosquitto() -> None:
    options = parsed()
    connect = connect_options(options)
    assert (options.host, options.port, options.qos) == (None, None, 0)
    assert (connect.level, connect.client_id, connect.clean_start) == (4, "", True)
    assert (connect.keep_alive_s, connect.inflight_max) == (60, 20)


def test_connection_options() -> None:
    options = parsed(
        *["-h", "box", "-p", "99", "-u", "ann", "-P", "pw", "-i", "me", "-c", "-k", "7"],
        *["-V", "5", "-M", "3", "-A", "10.0.0.1", "--quiet", "-d", "--nodelay"],
        *["--will-topic", "w", "--will-payload", "bye", "--will-qos", "2", "--will-retain"],
        *["-D", "will", "will-delay-interval", "5"],
    )
    connect = connect_options(options)
    assert (options.host, options.port, options.bind) == ("box", 99, "10.0.0.1")
    assert (connect.username, connect.password) == ("ann", b"pw")
    assert (connect.client_id, connect.clean_start, connect.keep_alive_s) == ("me", False, 7)
    assert (connect.level, connect.inflight_max) == (5, 3)
    assert connect.session_expiry_s == 0xFFFFFFFF
    assert connect.will == pk.Will("w", b"bye", 2, True, {pr.WILL_DELAY_INTERVAL: 5})
    assert options.quiet
    assert options.debug


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mqtt://h/a/b", ("h", None, "a/b", None, None, False)),
        ("mqtt://h:81/a", ("h", 81, "a", None, None, False)),
        ("mqtts://ann@h/a", ("h", None, "a", "ann", None, True)),
        ("mqtt://a%40b:p%3Aw@h:5/t", ("h", 5, "t", "a@b", "p:w", False)),
        ("mqtt://u:p@w@h:5/t", ("h", 5, "t", "u", "p@w", False)),
        ("mqtt://[::1]:5/t", ("::1", 5, "t", None, None, False)),
        ("mqtt://[::1]/t", ("::1", None, "t", None, None, False)),
    ],
)
def test_url(url: str, expected: tuple[object, ...]) -> None:
    options = parsed("-L", url)
    assert (
        options.host,
        options.port,
        options.topics[0],
        options.username,
        options.pw,
        options.use_tls,
    ) == expected


@pytest.mark.parametrize(
    ("text", "expiry_s"), [("0", 0), ("70", 70), ("-1", 0xFFFFFFFF), ("∞", 0xFFFFFFFF)]
)
def test_session_expiry(text: str, expiry_s: int) -> None:
    options = parsed("-V", "5", "-i", "me", "-x", text)
    assert connect_options(options).session_expiry_s == expiry_s


def test_properties_select_mqtt_5_and_are_typed() -> None:
    options = parsed(
        *["-D", "CONNECT", "receive-maximum", "9", "-D", "connect", "user-property", "a", "b"],
        *["-D", "publish", "correlation-data", "raw", "-D", "subscribe", "user-property", "c", "d"],
        *["-D", "subscribe", "subscription-identifier", "12"],
    )
    assert options.level == 5
    assert options.properties == {
        "connect": {pr.RECEIVE_MAXIMUM: 9, pr.USER_PROPERTY: [("a", "b")]},
        "publish": {pr.CORRELATION_DATA: b"raw"},
        "subscribe": {pr.USER_PROPERTY: [("c", "d")], pr.SUBSCRIPTION_IDENTIFIER: [12]},
    }
    assert connect_options(options).receive_maximum == 9


@pytest.mark.parametrize(
    "arguments",
    [
        ["-D", "publish", "topic-alias", "0"],
        ["-D", "publish", "topic-alias", "x"],
        ["-D", "publish", "response-topic", "a/#"],
        ["-D", "connect", "receive-maximum"],
        ["-p", "0"],
        ["-p", "٣"],
        ["--tls-version", "sslv3"],
        ["--cert", "c"],
        ["--proxy", "socks5h://h"],
        ["-L", "mqtt://h:x/t"],
        ["-L", "mqtt://h"],
        ["-D", "publish", "user-property", "a"],
        ["-D", "connect", "content-type", "x"],
        ["-i", "a", "-I", "b"],
        ["--will-retain"],
        ["-c"],
        ["-P", "word"],
        ["-x", "-1"],
    ],
)
def test_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments)
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("Error: ")


def test_a_websocket_url_with_a_topic_names_the_option_to_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parsed("-L", "wss://h/mqtt/t")
    assert "use --server wss://HOST[:PORT][/PATH] -t" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-h", "--topic", "-", "-5", "- a"])
def test_a_value_may_begin_with_a_dash(value: str) -> None:
    assert pub.parse(["-t", "a", "-m", value]).message == value.encode()
    assert pub.parse(["-m", "x", "--topic", value]).topics == [value]
    assert sub.parse(["-t", "a", "--since", "-1h", "--will-topic", value]).will_topic == value


def test_an_empty_message_is_a_message() -> None:
    assert pub.parse(["-t", "a", "-m", ""]).message == b""
    assert pub.parse(["-t", "a", "-n", "-r"]).null_message


def test_id_prefix_gets_the_process_id() -> None:
    name = parsed("-I", "box-").client_id
    assert name is not None
    assert name.removeprefix("box-").isdigit()


def test_pub_reads_files_and_keeps_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("pub") / "payload"
    path.write_bytes(b"\0\xff\n")
    options = pub.parse(
        ["-t", "t", "-f", str(path), "--repeat", "3", "--repeat-delay", "0.5", "-r"]
    )
    assert pub.read_payload(options) == ""
    assert (options.message, options.repeat, options.repeat_delay) == (b"\0\xff\n", 3, 0.5)
    assert options.retain


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-t", "a"],
        ["-m", "x"],
        ["-t", "a", "-m", "x", "-n"],
        ["-t", "a/#", "-m", "x"],
        ["-t", "a", "-m", "x", "--repeat-delay", "nan"],
        ["-t", "a", "-m"],
    ],
    ids=str,
)
def test_pub_refuses(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        pub.parse(arguments)
    assert ended.value.code == 1


def test_sub_options() -> None:
    options = sub.parse(
        [
            *["-t", "a", "-t", "$share/g/b", "-q", "1", "--retain-as-published"],
            *["--retain-handling", "never", "-C", "3", "-W", "4", "-N", "-v"],
        ]
    )
    assert sub.requests(options) == [
        pk.SubscriptionRequest("a", 1, False, True, 2),
        pk.SubscriptionRequest("$share/g/b", 1, False, True, 2),
    ]
    assert (options.count, options.timeout_s, options.no_newline) == (3, 4, True)


def test_sub_begins_in_the_past() -> None:
    [request] = sub.requests(sub.parse(["-t", "a", "--last", "2"]))
    assert request.filter == "$stream/@last:2/a"
    options = sub.parse(["-t", "a", "--until", "now"])
    assert (options.start, options.level) == ("earliest", 5)


@pytest.mark.parametrize(
    "arguments",
    [
        *[["-t", each] for each in ("$share/g", "$share//a", "$share/+/a", "a#", "#/a", "")],
        ["-U", "a"],
        ["-t", "a", "--since", "earliest", "--last", "3"],
        ["-t", "a", "--since", "soon"],
        ["-t", "a", "--until", "earliest"],
        ["-t", "a", "-R", "--retained-only"],
        ["-t", "a", "--random-filter", "0.01"],
        ["-t", "a", "-F", "%z"],
        ["-t", "a", "-C", "0"],
    ],
    ids=str,
)
def test_sub_refuses(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sub.parse(arguments)
    assert ended.value.code == 1
