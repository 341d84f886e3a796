"""Parses the options that `holdfast pub` and `sub` share, identical to mosquitto's.

argparse is not used, because `-h` is the host, `-D` takes a varying number of values, and the
messages and exit codes are mosquitto's. An option is one argument, and its values are the next
ones. Options of mosquitto that are not offered are refused by name.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.client.options import LEVEL_5, LEVEL_31, Options
from holdfast.client.servers import Server, parse_server, servers_of
from holdfast.numbers import whole_number
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.packets import Properties, PropertyValue, Will
from holdfast.protocol.mqtt.properties import number_of
from holdfast.protocol.topics.names import InvalidTopic, decode_topic

COMMANDS: Final = {
    "connect": pk.CONNECT,
    "publish": pk.PUBLISH,
    "puback": pk.PUBACK,
    "pubrec": pk.PUBREC,
    "pubrel": pk.PUBREL,
    "pubcomp": pk.PUBCOMP,
    "subscribe": pk.SUBSCRIBE,
    "unsubscribe": pk.UNSUBSCRIBE,
    "disconnect": pk.DISCONNECT,
    "auth": pk.AUTH,
    "will": pr.WILL,
}
_BY_NAME: Final = {info.name: identifier for identifier, info in pr.TABLE.items()}
_LIMITS: Final = {
    pr.BYTE: 0xFF,
    pr.TWO_BYTES: 0xFFFF,
    pr.FOUR_BYTES: 0xFFFFFFFF,
    pr.VARIABLE: 268_435_455,
}


class PropertyError(Exception):
    """The option is wrong. The text says which part."""


def add_property(found: dict[str, Properties], arguments: list[str], position: int) -> int:
    """Reads the values of one -D from arguments[position:] and returns the next position.

    Raises `PropertyError` if they are wrong.
    """
    rest = arguments[position : position + 4]
    if len(rest) < 3:
        raise PropertyError("--property argument given but not enough arguments specified.")
    command, name, value = rest[0].lower(), rest[1], rest[2]
    if command not in COMMANDS:
        raise PropertyError("Invalid command given in --property argument.")
    if name not in _BY_NAME:
        raise PropertyError("Invalid property name given in --property argument.")
    identifier = _BY_NAME[name]
    info = pr.TABLE[identifier]
    if COMMANDS[command] not in info.packet_types:
        raise PropertyError(f"{name} property not allowed for {command} in --property argument.")
    properties = found.setdefault(command, {})
    if info.encoding == pr.STRING_PAIR:
        if len(rest) < 4:
            raise PropertyError("--property argument given but not enough arguments specified.")
        pairs = properties.setdefault(identifier, [])
        assert isinstance(pairs, list)
        pairs.append((value, rest[3]))  # type: ignore[arg-type]
        return position + 4
    properties[identifier] = _value(name, identifier, info.encoding, value)
    return position + 3


def _value(name: str, identifier: int, encoding: int, text: str) -> PropertyValue:
    if encoding == pr.BINARY:
        return os.fsencode(text)
    if encoding == pr.STRING:
        if identifier == pr.RESPONSE_TOPIC:
            try:
                decode_topic(text.encode())
            except (InvalidTopic, UnicodeEncodeError):
                raise PropertyError(f"Invalid response topic '{text}'.") from None
        return text
    if not (text.isascii() and text.isdigit()):
        raise PropertyError(f"Property value ({text}) is not a number for property {name}.")
    number = int(text)
    if number > _LIMITS[encoding] or (number == 0 and identifier in _ABOVE_ZERO):
        raise PropertyError(f"Property value ({text}) out of range for property {name}.")
    return [number] if encoding == pr.VARIABLE else number


_ABOVE_ZERO: Final = frozenset(
    {
        pr.TOPIC_ALIAS,
        pr.RECEIVE_MAXIMUM,
        pr.MAXIMUM_PACKET_SIZE,
        pr.SUBSCRIPTION_IDENTIFIER,
    }
)


EXPIRY_NEVER: Final = 0xFFFFFFFF
RESPONSE_TIMEOUT_S: Final = 2.0

_VERSIONS: Final = {
    "mqttv31": LEVEL_31,
    "31": LEVEL_31,
    "mqttv311": 4,
    "311": 4,
    "mqttv5": LEVEL_5,
    "5": LEVEL_5,
}

_NOT_OFFERED: Final = {
    "--unix": "connect with -h and -p",
    "--psk": "use --cafile, --cert and --key",
    "--psk-identity": "use --cafile, --cert and --key",
    "--proxy": "connect directly",
    "--ws": "name the server with --server ws://HOST/PATH",
    "--tls-engine": "use key files",
    "--tls-engine-kpass-sha1": "use key files",
    "--keyform": "keys are PEM files",
    "-S": "name the host with -h",
}

TLS_OPTIONS: Final = ("cafile", "capath", "cert", "key", "ciphers", "tls-version", "tls-alpn")
"""The names of the TLS options that have a value."""


class UsageError(Exception):
    """The options are wrong. The text is printed after "Error: "."""


class HelpWanted(Exception):
    """The option --help was given."""


class VersionWanted(Exception):
    """The option --version was given."""


Setter = Callable[[str], None]


class ClientOptions:
    """The parsed connection options. A command adds its own options before `parse`."""

    def __init__(self) -> None:
        self.host = "localhost"
        self.port = 0
        self.server_urls: list[str] = []
        self._names_host = False
        self.bind = ""
        self.topics: list[str] = []
        self.qos = 0
        self.level = 4
        self.client_id: str | None = None
        self.id_prefix = ""
        self.keep_alive_s = 60
        self.clean = True
        self.session_expiry_s: int | None = None
        self.username: str | None = None
        self.password: str | None = None
        self.debug = False
        self.quiet = False
        self.inflight_max = 20
        self.will_topic: str | None = None
        self.will_payload: bytes | None = None
        self.will_qos = 0
        self.will_retain = False
        self.tls: dict[str, str] = {}
        self.insecure = False
        self.use_tls = False
        self.properties: dict[str, Properties] = {}
        """The properties by command in lower case, including "will"."""
        self._flags: dict[str, Callable[[], None]] = {}
        self._values: dict[str, tuple[str, Setter]] = {}
        self._add_connection_options()
        self._add_tls_options()

    def _add_connection_options(self) -> None:
        self.add_switch("clean", "-c", "--disable-clean-session", value=False)
        self.add_switch("debug", "-d", "--debug")
        self.add_switch("quiet", "--quiet")
        self.add_flag(lambda: None, "--nodelay")  # asyncio always sets TCP_NODELAY.
        self.add_switch("will_retain", "--will-retain")
        self.add_flag(_want_help, "--help")
        self.add_flag(_want_version, "--version")
        self.add_value("host", self._set_host, "-h", "--host")
        self.add_value("port", self._set_port, "-p", "--port")
        self.add_text("address", "bind", "-A")
        self.add_text("id", "client_id", "-i", "--id")
        self.add_text("id prefix", "id_prefix", "-I", "--id-prefix")
        text = "Invalid keepalive given, it must be between 5 and 65535 inclusive."
        self.add_number("keepalive", "keep_alive_s", (5, 65535), text, "-k", "--keepalive")
        self.add_value("URL", self._set_url, "-L", "--url")
        self.add_value("max_inflight", self._set_inflight, "-M")
        self.add_text("password", "password", "-P", "--pw")
        self.add_text("username", "username", "-u", "--username")
        self.add_number("QoS", "qos", (0, 2), "Invalid QoS given: {}", "-q", "--qos")
        self.add_value("topic", self.topics.append, "-t", "--topic")
        self.add_value("version", self._set_version, "-V", "--protocol-version")
        self.add_value("server URL", self._add_server, "--server")
        self.add_value("session expiry interval", self._set_session_expiry, "-x")
        self.add_value("will payload", self._set_will_payload, "--will-payload")
        self.add_number("will QoS", "will_qos", (0, 2), "Invalid will QoS {}.", "--will-qos")
        self.add_value("will topic", self._set_will_topic, "--will-topic")

    def _add_tls_options(self) -> None:
        self.add_switch("insecure", "--insecure")
        self.add_switch("use_tls", "--tls-use-os-certs")
        for name in TLS_OPTIONS:
            self.add_value(name, partial(self._set_tls, name), f"--{name}")

    def _set_tls(self, name: str, text: str) -> None:
        self.tls[name] = text
        # A client certificate alone does not enable TLS, the same as in mosquitto.
        if name in ("cafile", "capath"):
            self.use_tls = True

    def add_flag(self, setter: Callable[[], None], *names: str) -> None:
        """Adds an option without a value."""
        for name in names:
            self._flags[name] = setter

    def add_value(self, missing: str, setter: Setter, *names: str) -> None:
        """Adds an option with one value. `missing` names the value in the error text."""
        for name in names:
            self._values[name] = (missing, setter)

    def add_switch(self, attribute: str, *names: str, value: bool = True) -> None:
        """Adds an option without a value that sets an attribute."""
        self.add_flag(partial(setattr, self, attribute, value), *names)

    def add_text(self, missing: str, attribute: str, *names: str) -> None:
        """Adds an option whose value is an attribute, unchanged."""
        self.add_value(missing, partial(setattr, self, attribute), *names)

    def add_number(
        self, missing: str, attribute: str, bounds: tuple[int, int], wrong: str, *names: str
    ) -> None:
        """Adds an option with a whole number. `wrong` is the error text, with {} for the value."""

        def take(text: str) -> None:
            setattr(self, attribute, option_number(text, *bounds, wrong.format(text)))

        self.add_value(missing, take, *names)

    def names(self) -> tuple[list[str], dict[str, str]]:
        """The options without a value, and those with one, each with the name of its value."""
        values = {name: missing for name, (missing, _) in self._values.items()}
        # Files are named by their option: --cafile, --cert.
        values |= {name: name[2:] for name in values if name[2:] in TLS_OPTIONS}
        return [*self._flags, "-D", "--property"], values

    # Parsing

    def parse(self, arguments: list[str]) -> None:
        """Parses the arguments. Raises `UsageError`, `HelpWanted` or `VersionWanted`."""
        position = 0
        while position < len(arguments):
            name = arguments[position]
            position += 1
            if name in self._flags:
                self._flags[name]()
            elif name in self._values:
                missing, setter = self._values[name]
                if position == len(arguments):
                    raise UsageError(f"{name} argument given but no {missing} specified.")
                setter(arguments[position])
                position += 1
            elif name in ("-D", "--property"):
                try:
                    position = add_property(self.properties, arguments, position)
                except PropertyError as error:
                    raise UsageError(str(error)) from None
                self.level = LEVEL_5
            elif name in _NOT_OFFERED:
                raise UsageError(f"{name} is not offered here: {_NOT_OFFERED[name]}.")
            else:
                raise UsageError(f"Unknown option '{name}'.")
        self._check()

    def _check(self) -> None:
        if self.client_id is not None and self.id_prefix:
            raise UsageError("-i and -I argument cannot be used together.")
        if self.client_id == "":
            raise UsageError("Invalid id.")
        if self.id_prefix:
            self.client_id = f"{self.id_prefix}{os.getpid()}"
        if self.client_id is None and not self.clean:
            raise UsageError("You must provide a client id if you are using the -c option.")
        if self.client_id is None and self.session_expiry_s == EXPIRY_NEVER:
            raise UsageError(
                "You must provide a client id if you are using an infinite session expiry interval."
            )
        if self.password is not None and self.username is None and self.level < LEVEL_5:
            raise UsageError("-P needs a user name (-u) with MQTT v3.1 and v3.1.1.")
        if self.will_topic is None:
            for given, what in (
                (self.will_payload is not None, "payload"),
                (self.will_retain, "retain"),
                (self.will_qos > 0, "QoS"),
            ):
                if given:
                    raise UsageError(f"Will {what} given, but no will topic given.")
        if ("cert" in self.tls) != ("key" in self.tls):
            raise UsageError("Both certfile and keyfile must be provided if one of them is set.")
        version = self.tls.get("tls-version", "tlsv1.2")
        if version not in ("tlsv1.3", "tlsv1.2", "tlsv1.1"):
            raise UsageError(f"Invalid TLS version '{version}': one of tlsv1.3, tlsv1.2, tlsv1.1.")

    def servers(self) -> list[Server]:
        """Returns all servers to choose from. That of -h and -p comes first, if it is given or the
        only one. Raises `ValueError` for a bad URL."""
        found: list[Server] = []
        if self._names_host or not self.server_urls:
            found += servers_of(self.host, self.port or None, [], self.use_tls)
        if self.server_urls:
            found += servers_of(None, None, self.server_urls, self.use_tls)
        return list(dict.fromkeys(found))

    def connect_options(self) -> Options:
        """Returns the client's options. A longer list of servers shortens its timeouts."""
        expiry_s = self.session_expiry_s
        if expiry_s is None:
            expiry_s = 0 if self.clean else EXPIRY_NEVER
        will = None
        if self.will_topic is not None:
            will = Will(
                self.will_topic,
                self.will_payload or b"",
                self.will_qos,
                self.will_retain,
                self.properties.get("will", {}),
            )
        extra = self.properties.get("connect", {})
        # With other servers to choose from, a silent one is left soon.
        has_choice = len(self.servers()) > 1
        return Options(
            level=self.level,
            client_id=self.client_id or "",
            clean_start=self.clean,
            session_expiry_s=expiry_s,
            keep_alive_s=self.keep_alive_s,
            username=self.username,
            password=self.password.encode() if self.password is not None else None,
            will=will,
            inflight_max=self.inflight_max,
            response_timeout_s=RESPONSE_TIMEOUT_S if has_choice else Options.response_timeout_s,
            ping_interval_s=RESPONSE_TIMEOUT_S if has_choice else 0.0,
            topic_alias_max=number_of(extra, pr.TOPIC_ALIAS_MAXIMUM, 0),
            receive_maximum=number_of(extra, pr.RECEIVE_MAXIMUM, 65535),
            packet_bytes_max=number_of(extra, pr.MAXIMUM_PACKET_SIZE, 268_435_460),
            properties=extra,
        )

    # Setters

    def _set_host(self, text: str) -> None:
        self.host = text
        self._names_host = True

    def _set_port(self, text: str) -> None:
        self.port = option_number(text, 1, 65535, f"Invalid port given: {text}")
        self._names_host = True

    def _add_server(self, text: str) -> None:
        try:
            parse_server(text)
        except ValueError as error:
            raise UsageError(f"Invalid --server: {error}.") from None
        self.server_urls.append(text)

    def _set_inflight(self, text: str) -> None:
        self.inflight_max = option_number(
            text, 1, 1 << 31, "Maximum inflight messages must be greater than 0."
        )
        self.inflight_max = min(self.inflight_max, 65535)

    def _set_version(self, text: str) -> None:
        if text not in _VERSIONS:
            raise UsageError("Invalid protocol version argument given.")
        self.level = _VERSIONS[text]

    def _set_session_expiry(self, text: str) -> None:
        if text in ("-1", "∞"):
            self.session_expiry_s = EXPIRY_NEVER
            return
        if not text.isdecimal():
            raise UsageError("session-expiry-interval not a number.")
        self.session_expiry_s = option_number(
            text, 0, EXPIRY_NEVER, "session-expiry-interval out of range."
        )

    def _set_will_payload(self, text: str) -> None:
        self.will_payload = os.fsencode(text)

    def _set_will_topic(self, text: str) -> None:
        check_topic(text, "will topic")
        self.will_topic = text

    def _set_url(self, text: str) -> None:
        """Takes the URL mqtt(s)://[user[:password]@]host[:port]/topic, as mosquitto_sub does. In
        one of ws or wss the path of the WebSocket and the topic could not be distinguished."""
        from urllib.parse import unquote

        scheme, separator, rest = text.partition("://")
        if separator and scheme in ("ws", "wss"):
            raise UsageError(
                f"-L takes mqtt or mqtts: use --server {scheme}://HOST[:PORT][/PATH] -t"
            )
        if not separator or scheme not in ("mqtt", "mqtts"):
            raise UsageError("unsupported URL scheme.")
        authority, slash, topic = rest.partition("/")
        if not slash or not topic:
            raise UsageError("Invalid URL for -L argument specified - topic missing.")
        user, at, address = authority.rpartition("@")
        if at:
            username, colon, password = user.partition(":")
            self.username = unquote(username)
            if colon:
                self.password = unquote(password)
        host, colon, port = address.rpartition(":")
        if not colon or port.endswith("]"):
            host, port = address, ""
        self._set_host(host.strip("[]"))
        if port:
            self._set_port(port)
        self.topics.append(topic)
        if scheme == "mqtts":
            self.use_tls = True


def option_number(text: str, low: int, high: int, message: str) -> int:
    """The number of an option. Raises `UsageError` with the message."""
    number = whole_number(text, high, low)
    if number is None:
        raise UsageError(message)
    return number


def check_topic(topic: str, what: str) -> None:
    """Checks a topic to publish to."""
    try:
        decode_topic(topic.encode())
    except (InvalidTopic, UnicodeEncodeError):
        raise UsageError(f"Invalid {what} '{topic}', does it contain '+' or '#'?") from None


def _want_help() -> None:
    raise HelpWanted


def _want_version() -> None:
    raise VersionWanted
