"""Declares and checks the options that `holdfast pub` and `sub` share, with mosquitto's letters."""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from holdfast.client.options import LEVEL_5, LEVEL_31, Options
from holdfast.client.servers import Server, parse_server, servers_of
from holdfast.numbers import whole_number
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.packets import Properties, PropertyValue, Will
from holdfast.protocol.topics.names import InvalidTopic, decode_topic

EXIT_FAILED: Final = 1
EXPIRY_NEVER: Final = 0xFFFFFFFF
RESPONSE_TIMEOUT_S: Final = 2.0
_LEVELS: Final = {
    "5": LEVEL_5, "311": 4, "31": LEVEL_31, "mqttv5": LEVEL_5, "mqttv311": 4, "mqttv31": LEVEL_31,
}  # fmt: skip
_PROPERTY_COMMANDS: Final = {
    **{name.lower(): kind for kind, name in pk.TYPE_NAMES.items()}, "will": pr.WILL,
}  # fmt: skip
_PROPERTIES: Final = {info.name: identifier for identifier, info in pr.TABLE.items()}
_PROPERTY_MOST: Final = {
    pr.BYTE: 0xFF,
    pr.TWO_BYTES: 0xFFFF,
    pr.FOUR_BYTES: 0xFFFFFFFF,
    pr.VARIABLE: 268_435_455,
}
_ABOVE_ZERO: Final = frozenset(
    {pr.TOPIC_ALIAS, pr.RECEIVE_MAXIMUM, pr.MAXIMUM_PACKET_SIZE, pr.SUBSCRIPTION_IDENTIFIER}
)


Option = tuple[tuple[str, ...], dict[str, Any]]
"""The names of an option, and the other parameters of `add_argument`."""


def option(*names: str, **given: Any) -> Option:
    return names, given


class ClientUrl(NamedTuple):
    """The parts of the URL of -L; None for those that it leaves out."""

    host: str
    port: int | None
    username: str | None
    password: str | None
    topic: str
    is_tls: bool


class ClientParser(argparse.ArgumentParser):
    """A parser with the options of a command and those of its connection.

    Wrong use exits with 1, as in mosquitto.
    """

    def __init__(
        self, command: str, description: str, options: tuple[Option, ...], epilog: str = ""
    ) -> None:
        super().__init__(
            prog=f"holdfast {command}",
            description=description,
            epilog=epilog,
            add_help=False,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for title, group in (("message", options), ("connection", _CONNECTION), (_TLS_TITLE, _TLS)):
            add = self.add_argument_group(title).add_argument
            for names, given in group:
                add(*names, **given)

    def error(self, message: str) -> Any:
        self.exit(EXIT_FAILED, f"Error: {message}\n\nUse '{self.prog} --help' to see usage.\n")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses and checks the arguments. Exits for --help, --version and wrong use."""
        joined: list[str] = []
        rest = iter(arguments)
        for each in rest:
            joined.append(each)
            action = self._option_string_actions.get(each)
            if action is None or action.nargs is not None:
                continue
            # argparse takes a value that begins with "-" for an option, unless they are joined.
            value = next(rest, None)
            if value is not None and value.startswith("-"):
                joined[-1] += f"={value}" if each.startswith("--") else value
            elif value is not None:
                joined.append(value)
        args = self.parse_args(joined)
        if args.version:
            from holdfast.cli.main import version_text

            print(version_text())
            self.exit()
        self._complete(args)
        for is_wrong, text in _wrong(args):
            if is_wrong:
                self.error(text)
        return args

    def _complete(self, args: argparse.Namespace) -> None:
        """Adds what follows from the options: the level, the id, the parts of the URL."""
        args.level = LEVEL_5 if args.properties else _LEVELS[args.protocol_version]
        args.inflight_max = min(args.inflight_max, 65535)
        args.use_tls = bool(args.use_tls or args.cafile or args.capath)
        args.topics = list(getattr(args, "topic", None) or ())
        if args.url is not None:
            args.host, args.port = args.url.host, args.url.port or args.port
            args.username = args.url.username or args.username
            args.pw = args.url.password if args.url.password is not None else args.pw
            args.use_tls = args.use_tls or args.url.is_tls
            args.topics.append(args.url.topic)
        args.client_id = f"{args.id_prefix}{os.getpid()}" if args.id_prefix else args.id


def _wrong(args: argparse.Namespace) -> list[tuple[bool, str]]:
    has_id = args.client_id is not None
    needs_will = args.will_payload is not None or args.will_retain or args.will_qos > 0
    return [
        (bool(args.id_prefix) and args.id is not None, "-i and -I cannot be used together."),
        (args.client_id == "", "Invalid id."),
        (not has_id and args.keep, "-c needs a client id (-i)."),
        (not has_id and args.expiry_s == EXPIRY_NEVER, "-x -1 needs a client id (-i)."),
        (
            args.pw is not None and args.username is None and args.level < LEVEL_5,
            "-P needs a user name (-u) with MQTT v3.1 and v3.1.1.",
        ),
        (needs_will and args.will_topic is None, "a will needs --will-topic."),
        ((args.cert is None) != (args.key is None), "--cert and --key go together."),
    ]


def servers(args: argparse.Namespace) -> list[Server]:
    """Returns all servers to choose from. That of -h and -p comes first, if it is given or the
    only one. Raises `ValueError` for a bad URL."""
    found: list[Server] = []
    if args.host is not None or args.port is not None or not args.server:
        found += servers_of(args.host or "localhost", args.port, [], args.use_tls)
    if args.server:
        found += servers_of(None, None, args.server, args.use_tls)
    return list(dict.fromkeys(found))


def connect_options(args: argparse.Namespace) -> Options:
    """Returns the client's options. A longer list of servers shortens its timeouts."""
    expiry_s = args.expiry_s
    if expiry_s is None:
        expiry_s = EXPIRY_NEVER if args.keep else 0
    will = None
    if args.will_topic is not None:
        properties = args.properties.get("will", {})
        payload = args.will_payload or b""
        will = Will(args.will_topic, payload, args.will_qos, args.will_retain, properties)
    extra: Properties = args.properties.get("connect", {})
    # With other servers to choose from, a silent one is left soon.
    has_choice = len(servers(args)) > 1
    return Options(
        level=args.level,
        client_id=args.client_id or "",
        clean_start=not args.keep,
        session_expiry_s=expiry_s,
        keep_alive_s=args.keepalive,
        username=args.username,
        password=args.pw.encode() if args.pw is not None else None,
        will=will,
        inflight_max=args.inflight_max,
        response_timeout_s=RESPONSE_TIMEOUT_S if has_choice else Options.response_timeout_s,
        ping_interval_s=RESPONSE_TIMEOUT_S if has_choice else 0.0,
        topic_alias_max=pr.number_of(extra, pr.TOPIC_ALIAS_MAXIMUM, 0),
        receive_maximum=pr.number_of(extra, pr.RECEIVE_MAXIMUM, 65535),
        packet_bytes_max=pr.number_of(extra, pr.MAXIMUM_PACKET_SIZE, 268_435_460),
        properties=extra,
    )


# Values


def number(low: int, high: int) -> Callable[[str], int]:
    """Makes a parser of whole numbers in a range, for argparse."""

    def parsed(text: str) -> int:
        found = whole_number(text, high, low)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, {low} to {high}")
        return found

    return parsed


def topic(text: str) -> str:
    """Checks a topic to publish to, for argparse."""
    try:
        decode_topic(text.encode())
    except (InvalidTopic, UnicodeEncodeError):
        raise argparse.ArgumentTypeError(f"invalid topic {text!r}: has it a '+' or '#'?") from None
    return text


def _expiry(text: str) -> int:
    return EXPIRY_NEVER if text in ("-1", "∞") else number(0, EXPIRY_NEVER)(text)


def _server(text: str) -> str:
    try:
        parse_server(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}.") from None
    return text


def _url(text: str) -> ClientUrl:
    """Parses mqtt(s)://[user[:password]@]host[:port]/topic. In one of ws or wss the path of the
    WebSocket and the topic could not be distinguished."""
    scheme, _, rest = text.partition("://")
    authority, _, name = rest.partition("/")
    if scheme in ("ws", "wss"):
        text = f"-L takes mqtt or mqtts: use --server {scheme}://HOST[:PORT][/PATH] -t"
        raise argparse.ArgumentTypeError(text)
    if scheme not in ("mqtt", "mqtts") or not name:
        raise argparse.ArgumentTypeError("give mqtt(s)://HOST[:PORT]/TOPIC")
    user, at, address = authority.rpartition("@")
    username, colon, password = user.partition(":")
    host, found, port = address.rpartition(":")
    if not found or port.endswith("]"):
        host, port = address, ""
    return ClientUrl(
        host.strip("[]"),
        number(1, 65535)(port) if port else None,
        unquote(username) if at else None,
        unquote(password) if at and colon else None,
        name,
        scheme == "mqtts",
    )


class _AddProperty(argparse.Action):
    """Adds the property of one -D: COMMAND NAME VALUE, or COMMAND user-property NAME VALUE."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        command, name, *rest = [values[0].lower(), *values[1:], "", ""][: max(3, len(values))]
        identifier = _PROPERTIES.get(name)
        if command not in _PROPERTY_COMMANDS or identifier is None:
            raise argparse.ArgumentError(self, "give COMMAND NAME VALUE: -D publish content-type a")
        info = pr.TABLE[identifier]
        if _PROPERTY_COMMANDS[command] not in info.packet_types:
            raise argparse.ArgumentError(self, f"{name} is no property of {command}")
        is_pair = info.encoding == pr.STRING_PAIR
        if len(values) != (4 if is_pair else 3):
            wanted = "a name and a value" if is_pair else "one value"
            raise argparse.ArgumentError(self, f"{name} takes {wanted}")
        # The default is shared by all parsers.
        found = {**(getattr(namespace, self.dest) or {})}
        properties: Properties = dict(found.get(command, {}))
        if is_pair:
            properties[identifier] = [*properties.get(identifier, []), (rest[0], rest[1])]  # type: ignore[misc]
        else:
            properties[identifier] = self._value(identifier, info.encoding, rest[0])
        setattr(namespace, self.dest, {**found, command: properties})

    def _value(self, identifier: int, encoding: int, text: str) -> PropertyValue:
        try:
            if encoding == pr.BINARY:
                return os.fsencode(text)
            if encoding == pr.STRING:
                return topic(text) if identifier == pr.RESPONSE_TOPIC else text
            found = number(int(identifier in _ABOVE_ZERO), _PROPERTY_MOST[encoding])(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        return [found] if encoding == pr.VARIABLE else found


_TLS_TITLE: Final = (
    "TLS (--cafile, --capath, --tls-use-os-certs, an mqtts URL, or --server wss://... switch it on)"
)
_CONNECTION: Final = (
    option("-h", "--host", metavar="HOST", help="server (default localhost)"),
    option("-p", "--port", type=number(1, 65535), metavar="PORT",
           help="port (default 1883, with TLS 8883)"),
    option("-L", "--url", type=_url, metavar="URL",
           help="mqtt(s)://[username[:password]@]host[:port]/topic"),
    option("--server", action="append", default=[], type=_server, metavar="URL",
           help="a server to choose from, beside that of -h and -p; may be repeated: HOST[:PORT],"
           " mqtt(s)://HOST[:PORT], ws(s)://HOST[:PORT][/PATH]"),
    option("-A", dest="bind", metavar="ADDRESS", help="local address to connect from"),
    option("-i", "--id", metavar="ID", help="client id (default: the server assigns one)"),
    option("-I", "--id-prefix", metavar="PREFIX",
           help="client id of this prefix and the process id"),
    option("-u", "--username", metavar="NAME", help="user name"),
    option("-P", "--pw", metavar="PASSWORD", help="password"),
    option("-V", "--protocol-version", choices=_LEVELS, default="311", metavar="V",
           help="5, 311 (default) or 31; also mqttv5, mqttv311, mqttv31"),
    option("-k", "--keepalive", type=number(5, 65535), default=60, metavar="SECONDS",
           help="5 to 65535 (default 60)"),
    option("-c", "--disable-clean-session", dest="keep", action="store_true",
           help="keep the session on the server"),
    option("-x", dest="expiry_s", type=_expiry, metavar="SECONDS",
           help="session expiry (MQTT 5); -1 or ∞: never"),
    option("-q", "--qos", type=number(0, 2), default=0, metavar="QOS", help="0 (default), 1 or 2"),
    option("-M", dest="inflight_max", type=number(1, 1 << 31), default=20, metavar="COUNT",
           help="messages without acknowledgement at a time (default 20)"),
    option("-D", "--property", dest="properties", action=_AddProperty, nargs="+", default={},
           metavar=("COMMAND", "NAME VALUE"),
           help="an MQTT 5 property, e.g. -D publish content-type text/plain"),
    option("--will-topic", type=topic, metavar="TOPIC"),
    option("--will-payload", type=os.fsencode, metavar="TEXT"),
    option("--will-qos", type=number(0, 2), default=0, metavar="QOS"),
    option("--will-retain", action="store_true"),
    option("-d", "--debug", action="store_true", help="print every packet"),
    option("--quiet", action="store_true", help="no error messages while running"),
    option("--nodelay", action="store_true", help=argparse.SUPPRESS),
    option("--version", action="store_true", help="print the version and exit"),
    option("--help", action="help", help="print this help and exit"),
)  # fmt: skip
_TLS: Final = (
    option("--cafile", metavar="FILE", help="CA certificates"),
    option("--capath", metavar="DIR", help="CA certificates"),
    option("--tls-use-os-certs", dest="use_tls", action="store_true", help="CA certificates"),
    option("--cert", metavar="FILE", help="client certificate"),
    option("--key", metavar="FILE", help="its key"),
    option("--insecure", action="store_true", help="do not check the name in the certificate"),
    option("--tls-version", choices=("tlsv1.1", "tlsv1.2", "tlsv1.3"), default="tlsv1.2",
           help="at least this (default tlsv1.2)"),
    option("--ciphers", metavar="LIST", help="of OpenSSL"),
    option("--tls-alpn", metavar="PROTOCOL", help="of ALPN"),
)  # fmt: skip
