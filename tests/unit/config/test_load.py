"""Configuration: sources and their order, errors that name key, value and what is allowed."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect
from msgspec.inspect import type_info

from holdfast.addresses import is_loopback
from holdfast.config import check
from holdfast.config.check import warnings
from holdfast.config.explain import settings_of
from holdfast.config.load import load
from holdfast.config.mosquitto import import_configuration
from holdfast.config.problem import ConfigError
from holdfast.config.schema import Config
from holdfast.config.values import all_keys

EXAMPLE = Path(__file__).parents[3] / "examples" / "holdfast.toml"


def write(directory: Path, text: str) -> Path:
    path = directory / "holdfast.toml"
    path.write_text(text, "utf-8")
    return path


def complaint(path: Path | None, environ: dict[str, str], overrides: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, environ, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults_listen_on_loopback_only() -> None:
    config = load(None)
    assert [(one.bind, one.port) for one in config.listeners] == [("127.0.0.1", 1883)]
    assert config.admin.bind == "127.0.0.1"
    assert config.security.allow_anonymous is True
    assert config.log.durability == "fsync"
    assert warnings(config) == []


def test_example_changes_nothing_and_shows_every_key() -> None:
    assert load(EXAMPLE) == load(None)
    shown = tomllib.loads(EXAMPLE.read_text("utf-8"))
    defaults = msgspec.to_builtins(Config())
    del defaults["security"]["allow_anonymous"], defaults["listeners"][0]["allow_anonymous"]
    assert defaults["log"].pop("commit_gather_ms") is None
    assert defaults["log"].pop("memory_flush_ms") is None
    assert defaults.pop("federation") is None
    assert shown == defaults


def test_example_mentions_keys_it_cannot_set() -> None:
    text = EXAMPLE.read_text("utf-8")
    missing = [
        key
        for key in all_keys(type_info(Config))
        if not re.search(rf"\b{key.split('.')[-1]}\b", text)
    ]
    # What has no effect any more is not shown.
    assert missing == ["log.memory_flush_ms"]


def test_environment_wins_over_file_and_command_line_over_both(tmp_path: Path) -> None:
    path = write(tmp_path, "[limits]\nqos_max = 0\ninflight_max = 5\nreceive_maximum = 6\n")
    environ = {"HOLDFAST_LIMITS__QOS_MAX": "1", "HOLDFAST_LIMITS__INFLIGHT_MAX": "7"}
    limits = load(path, environ, {"limits.qos_max": 2}).limits
    assert (limits.qos_max, limits.inflight_max, limits.receive_maximum) == (2, 7, 6)


def test_environment_takes_text_as_it_is_and_the_rest_as_toml() -> None:
    config = load(
        None,
        {
            "HOLDFAST_NODE__ID": "7",
            "HOLDFAST_NODE__DATA": "true",
            "HOLDFAST_LOG__DURABILITY": "memory",
            "HOLDFAST_LOG__QOS0": '["a/#", "b"]',
            "HOLDFAST_LOG__RETENTION__AGE_S": "3_600",
            "HOLDFAST_SECURITY__ALLOW_ANONYMOUS": "false",
            "HOLDFAST_SYS__INTERVAL_S": "0.5",
            "HOLDFAST_LISTENERS__0__PORT": "1884",
            "HOLDFAST_LISTENERS__1__BIND": "::1",
            "HOLDFAST_INTERPRETED": "1",
            "PATH": "/bin",
        },
    )
    assert config.node.id == "7"
    assert config.node.data == "true"
    assert config.log.durability == "memory"
    assert config.log.qos0 == ["a/#", "b"]
    assert config.log.retention.age_s == 3600
    assert config.security.allow_anonymous is False
    assert config.sys.interval_s == 0.5
    assert [(one.bind, one.port) for one in config.listeners] == [
        ("127.0.0.1", 1884),
        ("::1", 1883),
    ]


def test_override_changes_the_first_listener_and_keeps_the_others(tmp_path: Path) -> None:
    path = write(tmp_path, '[[listeners]]\nport = 1\n[[listeners]]\nport = 2\nbind = "::1"\n')
    config = load(path, {}, {"listeners.0.port": 9})
    assert [one.port for one in config.listeners] == [9, 2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[limits]\nqosmax = 1",
            "limits.qosmax: there is no such key; did you mean limits.qos",
        ),
        ("port = 1", "port: there is no such key; did you mean listeners.port?"),
        ("[zzz]\na = 1", "known here: node, server, listeners, admin,"),
        ("[limits]\nqos_max = 3", "limits.qos_max = 3: must be a whole number from 0 to 2"),
        ("[limits]\nqos_max = true", "limits.qos_max = true: must be a whole number"),
        ("[limits]\nqos_max = 1.0", "limits.qos_max = 1.0: must be a whole number"),
        ("[limits]\nconnect_timeout_s = nan", "= nan: must be a number above 0 up to 3600"),
        (
            "[limits]\nsubscriptions_per_session = 0",
            "limits.subscriptions_per_session = 0: must be a whole number, 1 or more",
        ),
        ('[log]\ndurability = "sync"', 'log.durability = "sync": must be one of "fsync", "memory"'),
        ("[log]\nqos0 = [3]", "log.qos0[0] = 3: must be text"),
        ('[log]\nqos0 = ["a#"]', 'log.qos0[0] = "a#": not a topic filter'),
        ('[log]\nqos0 = ["$share/g/a"]', "must be a plain topic filter, not a shared one"),
        ("[log]\nretention = 3", "log.retention = 3: must be a table"),
        ("[log.retention]\nbytes = 5", "must be 0 (no limit) or at least log.segment_bytes"),
        ("listeners = 3", "listeners = 3: must be an array of tables"),
        ("listeners = []", "listeners = []: must have at least one listener"),
        ("[[listeners]]\nport = 65536", "listeners[0].port = 65536: must be a whole number from 0"),
        ('[[listeners]]\ntransport = "quic"', '= "quic": must be one of "tcp", "websocket"'),
        ('[[listeners]]\npath = "/a"', 'listeners[0].path = "/a": needs transport = "websocket"'),
        (
            '[[listeners]]\nallowed_origins = ["https://a"]',
            "].allowed_origins = ['https://a']: nee",
        ),
        ('[[listeners]]\ntransport = "websocket"\npath = "a"', "that begins with a slash"),
        ('[[listeners]]\ntransport = "websocket"\npath = "/?a"', "that begins with a slash"),
        (
            '[[listeners]]\ntransport = "websocket"\nallowed_origins = ["https://a.b/"]',
            'listeners[0].allowed_origins[0] = "https://a.b/": must be as browsers send it',
        ),
        ('[[listeners]]\nbind = "127.0.0.1:1883"', "the port has a key of its own"),
        ('[[listeners]]\nbind = ""', "must be text that is not empty"),
        ('[[listeners]]\ncertificate = "x"', 'listeners[0].certificate = "x": needs a key'),
        ('[[listeners]]\nkey = "x"', 'listeners[0].key = "x": needs a certificate'),
        ('[[listeners]]\nclient_ca = "x"', 'listeners[0].client_ca = "x": needs TLS'),
        ("[[listeners]]\nrequire_certificate = true", "needs client_ca"),
        ("[[listeners]]\n[[listeners]]", "listeners[1].port = 1883: listeners[0] already"),
        (
            '[[listeners]]\nbind = "0.0.0.0"\nport = 18083',
            "admin.port = 18083: listeners[0] already",
        ),
        ('[admin]\nbind = "a:1"', "the port has a key of its own"),
        ('[node]\nid = "a b"', 'node.id = "a b": must be 1 to 64 of'),
        ('[node]\ndata = "a\\u0000b"', "must be text that is not empty"),
        ('[security]\nallow_anonymous = "yes"', 'allow_anonymous = "yes": must be true or false'),
        ("x =", "not valid TOML"),
        ('[[listeners]]\ntls_minimum = "1.1"', 'tls_minimum = "1.1": must be one of "1.2", "1.3"'),
        ('[[listeners]]\ntls_minimum = "1.3"', 'tls_minimum = "1.3": needs certificate'),
        ('[[listeners]]\ncrl = "c"', 'crl = "c": needs client_ca'),
        ('[[listeners]]\nproxies = ["a.b"]', 'proxies[0] = "a.b": must be an address or a network'),
        ('[[listeners]]\nproxies = ["unix"]', 'proxies[0] = "unix": must be an address or a'),
        ('[[listeners]]\nsocket = "s"\nproxies = ["10.0.0.1"]', 'must be "unix"'),
        (f'[[listeners]]\nsocket = "{"s" * 97}"', "the system allows 96 bytes"),
        ('[[listeners]]\nsocket_mode = "rw"', 'socket_mode = "rw": must be an octal mode'),
        (
            '[[listeners]]\nsocket = "s"\n[[listeners]]\nsocket = "s"',
            'listeners[1].socket = "s": listeners[0] already listens there',
        ),
        ('[[listeners]]\nmount = "a"', 'listeners[0].mount = "a": must be a prefix of topics'),
        ('[[listeners]]\nmount = "$SYS/"', "must be a prefix of topics that ends with a slash"),
        ('[[listeners]]\nmount = "a/+/"', "without +, # and blanks"),
        ("[[listeners]]\npacket_bytes = 5", "packet_bytes = 5: must be 0 or at least 128"),
        (
            "[[listeners]]\npacket_bytes = 99_999_999",
            "at most limits.packet_bytes = 2097152",
        ),
        (
            '[[listeners]]\nauthentication = ["scram"]',
            '[0] = "scram": needs security.scram_file',
        ),
        (
            '[[listeners]]\nauthentication = ["voodoo"]',
            'authentication[0] = "voodoo": must be one of "certificate", "hook"',
        ),
        ('[[listeners]]\ncertificate_user = "san"', 'certificate_user = "san": needs client_ca'),
        (
            '[security]\npassword_file = "p"\n[[listeners]]\ncertificate = "c"\nkey = "k"\n'
            'client_ca = "a"\nauthentication = ["password"]',
            "authentication = ['password']: without certificate",
        ),
    ],
)
def test_wrong_file(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    message = complaint(path, {}, {})
    assert message.startswith(f"{path}: ")
    assert expected in message


def test_two_listeners_on_port_0_do_not_clash(tmp_path: Path) -> None:
    path = write(tmp_path, "[[listeners]]\nport = 0\n[[listeners]]\nport = 0\n")
    assert len(load(path).listeners) == 2


def test_a_file_without_an_end_is_refused() -> None:
    zero = Path("/dev/zero")
    assert "more than 16777216 bytes" in complaint(zero, {}, {})
    with pytest.raises(OSError, match="more than 16777216 bytes"):
        import_configuration(zero)


def test_the_query_of_a_url_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text('[security.http]\nurl = "https://id.example/login?apikey=hidden7"\n')
    values = {each.key: each.value for each in settings_of(path, {}, {})}
    assert values["security.http.url"] == "https://id.example/login?***"
    assert "hidden7" not in repr(settings_of(path, {}, {}))
    config = load(path, {}, {})
    assert config.security.http.url.endswith("?apikey=hidden7")


def test_unreadable_files(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in complaint(tmp_path / "none.toml", {}, {})
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[node]\nid = "\xe9"\n')
    assert "not UTF-8 text" in complaint(path, {}, {})


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    path = tmp_path / "windows.toml"
    path.write_bytes(b'\xef\xbb\xbf[node]\r\nid = "n9"\r\n')
    assert load(path, {}, {}).node.id == "n9"


def test_a_wrong_value_names_the_source_that_set_it(tmp_path: Path) -> None:
    path = write(tmp_path, "[limits]\nqos_max = 2\n")
    environ = {"HOLDFAST_LIMITS__QOS_MAX": "many"}
    assert complaint(path, environ, {}).startswith("environment HOLDFAST_LIMITS__QOS_MAX: limits.")
    assert complaint(path, {}, {"limits.qos_max": 9}).startswith("command line: limits.qos_max = 9")
    unknown = complaint(path, {"HOLDFAST_FOO__BAR": "1"}, {})
    assert unknown.startswith("environment HOLDFAST_FOO__BAR: foo: there is no such key")


def test_environment_cannot_skip_list_entries_or_enter_plain_values(tmp_path: Path) -> None:
    gap = complaint(None, {"HOLDFAST_LISTENERS__1__PORT": "1"}, {})
    assert "listeners[1] cannot be set: listeners has 0 entries" in gap
    path = write(tmp_path, "node = 3")
    assert "node = 3: must be a table" in complaint(path, {"HOLDFAST_NODE__ID": "x"}, {})


def test_long_values_are_cut() -> None:
    message = complaint(None, {}, {"log.durability": "x" * 5000})
    assert len(message) < 200


def test_an_error_lists_every_problem(tmp_path: Path) -> None:
    path = write(tmp_path, "[limits]\nqos_max = 3\n[log]\npartitions = 0\n")
    with pytest.raises(ConfigError) as refused:
        load(path)
    found = refused.value.problems
    assert len(found) == 2
    assert "log.partitions = 0" in " ".join(found)
    assert complaint(path, {}, {}).endswith("(and 1 more)")
    load(EXAMPLE)


@pytest.mark.parametrize(
    ("text", "anonymous", "warned"),
    [
        ('[[listeners]]\nbind = "::1"', True, ""),
        ('[[listeners]]\nbind = "0.0.0.0"', False, "no client can connect"),
        ('[[listeners]]\nbind = "0.0.0.0"\n[security]\npassword_file = "p"', False, ""),
        ('[security]\npassword_file = "p"', False, ""),
        ('[security]\nscram_file = "p"', False, ""),
        ('[security]\npassword_file = "p"\nallow_anonymous = true', True, ""),
        ('[[listeners]]\nbind = "::"\n[security]\nallow_anonymous = true', True, "anybody who"),
        ('[admin]\nbind = "0.0.0.0"', True, "admin.bind"),
        (
            '[[listeners]]\nbind = "0.0.0.0"\nallow_anonymous = true\n[security]\n'
            'allow_anonymous = false\npassword_file = "p"',
            False,
            "listeners[0].allow_anonymous = true: anybody who",
        ),
        (
            '[security]\nallow_anonymous = true\n[[listeners]]\nbind = "10.0.0.1"\n'
            '[[listeners]]\nbind = "10.0.0.2"\nport = 1884\n[[listeners]]\nbind = "10.0.0.1"\n'
            "port = 1885",
            True,
            "anybody who reaches 10.0.0.1 or 10.0.0.2 may connect without a password",
        ),
        (
            "[[listeners]]\nallow_anonymous = false\n[[listeners]]\nport = 1884",
            True,
            "listeners[0]: anonymous clients are refused",
        ),
        ('[[listeners]]\ntransport = "websocket"', True, ""),
        (
            '[[listeners]]\ntransport = "websocket"\nallowed_origins = ["*"]',
            True,
            "listeners[0].allowed_origins = ['*']: without a password, whatever page a browser",
        ),
        (
            '[[listeners]]\ntransport = "websocket"\ncertificate = "c"\nkey = "k"\n'
            'client_ca = "ca"\n[security]\nallow_anonymous = false',
            False,
            "a browser with a client certificate may use it for whatever page",
        ),
        (
            '[[listeners]]\ntransport = "websocket"\nallowed_origins = ["https://a.b:1"]',
            True,
            "",
        ),
    ],
)
def test_anonymous_needs_a_word_beyond_loopback(
    tmp_path: Path, text: str, anonymous: bool, warned: str
) -> None:
    config = load(write(tmp_path, text))
    assert config.security.allow_anonymous is anonymous
    found = warnings(config)
    assert warned in " ".join(found) if warned else found == []
    assert " ".join(found).count("allow_anonymous") <= 1


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", ["loopback"]),
        ("allowed_origins = []", ["loopback"]),
        ('bind = "::1"', ["loopback"]),
        ("allow_anonymous = true", ["loopback"]),
        ('allowed_origins = ["*"]', ["*"]),
        ('allowed_origins = ["https://a.b"]', ["https://a.b"]),
        ("allow_anonymous = false", []),
        ('bind = "10.0.0.1"\nallow_anonymous = true', []),
        ('socket = "/s"', []),
        ('proxies = ["127.0.0.1"]', []),
        ('certificate = "c"\nkey = "k"\nclient_ca = "ca"\nrequire_certificate = true', []),
    ],
)
def test_pages_of_this_machine(tmp_path: Path, text: str, origins: list[str]) -> None:
    """Only they reach a listener of this machine without a password, unless a setting says so."""
    path = write(tmp_path, f'[[listeners]]\ntransport = "websocket"\n{text}\n')
    (listener,) = load(path).listeners
    assert listener.allowed_origins == origins
    (shown,) = [each for each in settings_of(path, {}, {}) if each.key.endswith("origins")]
    assert (shown.origin == "resolved from other settings") is (origins == ["loopback"])
    assert load(write(tmp_path, "")).listeners[0].allowed_origins == []


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "myhost", "127.0.0.1.evil")))


def test_included_files(tmp_path: Path) -> None:
    """Later files win, listeners add up, and each value has its file."""
    folder = tmp_path / "listeners.d"
    folder.mkdir()
    main = write(
        tmp_path,
        'include = ["site.toml", "listeners.d/*.toml", "none.d/*.toml"]\n'
        "[limits]\nsessions = 1\nqos_max = 1\n[log]\nqos0 = ['a']\n[[listeners]]\nport = 1\n",
    )
    site, one, two = tmp_path / "site.toml", folder / "1.toml", folder / "2.toml"
    site.write_text('[limits]\nsessions = 2\n[log]\nqos0 = ["b"]\n[sys]\ninterval_s = 3\n')
    one.write_text("[[listeners]]\nport = 2\n")
    two.write_text('include = ["../more.toml"]\n[[listeners]]\nport = 3\n')
    (tmp_path / "more.toml").write_text("[limits]\nqos_max = 0\n")
    environ = {"HOLDFAST_SYS__INTERVAL_S": "4"}
    config = load(main, environ)
    assert (config.limits.sessions, config.limits.qos_max) == (2, 0)
    assert config.log.qos0 == ["b"]
    assert config.sys.interval_s == 4
    assert [listener.port for listener in config.listeners] == [1, 2, 3]
    origins = {each.key: each.origin for each in settings_of(main, environ, {})}
    assert origins["limits.sessions"] == str(site)
    assert origins["limits.qos_max"] == str(folder / "../more.toml")
    assert origins["listeners[0].port"] == str(main)
    assert origins["listeners[2].port"] == str(two)
    assert origins["sys.interval_s"] == "environment HOLDFAST_SYS__INTERVAL_S"
    two.write_text("[[listeners]]\nport = 'x'\n")
    assert complaint(main, {}, {}).startswith(f'{two}: listeners[2].port = "x": must be')


def test_wrong_includes(tmp_path: Path) -> None:
    for text, expected in (
        ('include = "a"', 'include = "a": must be a list'),
        ("include = [1]", "include = [1]: must be a list"),
        ('include = ["gone.toml"]', "gone.toml: cannot be read: No such file"),
        ('include = ["broken.toml"]', "broken.toml: not valid TOML"),
        ('include = ["loop.toml"]', "is included twice: it is the first file"),
        ('include = ["a.toml", "a.toml"]', "a.toml is included twice: "),
        ('include = ["hold*.toml"]', "is included twice: it is the first file"),
        ('[node]\ninclude = ["a.toml"]', "node.include: there is no such key"),
    ):
        main = write(tmp_path, text)
        (tmp_path / "a.toml").write_text("")
        (tmp_path / "broken.toml").write_text("x =")
        (tmp_path / "loop.toml").write_text(f'include = ["{main.name}"]')
        assert expected in complaint(main, {}, {})
    write(tmp_path, 'include = ["0.toml"]')
    for number in range(101):
        (tmp_path / f"{number}.toml").write_text(f'include = ["{number + 1}.toml"]')
    assert "more than 100 files" in complaint(main, {}, {})


def test_a_setting_of_an_earlier_version_is_accepted(tmp_path: Path) -> None:
    (found,) = warnings(load(write(tmp_path, "[log]\nmemory_flush_ms = 5\n")))
    assert found.startswith("log.memory_flush_ms: has no effect any more")


@pytest.mark.parametrize(
    ("missing", "place"),
    [("pyarrow", "lake"), ("obstore", "s3://bucket/lake"), ("obstore", "lake")],
)
def test_a_lake_needs_packages(missing: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == missing else name)
    overrides: dict[str, object] = {"log.lake": place}
    if missing == "obstore" and place == "lake":
        load(None, {}, overrides)
        return
    text = complaint(None, {}, overrides)
    assert f'log.lake = "{place}"' in text
    assert "pip install 'holdfast[spark]'" in text


def test_the_error_of_each_value_with_a_pattern_says_what_is_allowed() -> None:
    """ "must be text" would not help with a text that is refused."""

    def unsaid(kind: inspect.Type, key: str) -> Iterator[str]:
        if isinstance(kind, inspect.StructType):
            for each in kind.fields:
                yield from unsaid(each.type, f"{key}.{each.name}")
        elif isinstance(kind, inspect.UnionType):
            for one in kind.types:
                yield from unsaid(one, key)
        elif isinstance(kind, inspect.ListType):
            yield from unsaid(kind.item_type, f"{key}[]")
        elif isinstance(kind, inspect.StrType) and kind.pattern is not None:
            yield key

    assert list(unsaid(inspect.type_info(Config), "")) == []
