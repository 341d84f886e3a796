"""Parses the options of `df.write.format("holdfast")` and `df.writeStream.format("holdfast")`.

Names are case-insensitive, as everywhere in Spark.

================== ================================================================================
mqttServers        the servers to publish to: `host:port` or `mqtts://host:port`, several
                   separated by commas: nodes of one cluster, or of a pair (`servers`, the admin
                   ports, are for reading)
topic              the topic of all rows, in place of the column `topic`
qos                the QoS of rows without a column `qos`: 0, 1 (default) or 2
retain             the flag of rows without a column `retain`: `true` or `false` (default)
exactlyOnce        `prefer` (default): number the messages, and warn if the broker does not use the
                   numbers; `require`: fail in that case; `off`: do not number
writeId            batch writes only: a second write of the same rows with the same writeId writes
                   nothing new. Without it each write is another one
writeVersion       with writeId, for consecutive writes: a number that grows, such as the batch id
                   in foreachBatch (default 0)
orderBy            columns, separated by commas, that order the rows of each task
failOnRefused      `true` (default): a row that cannot be published is an error; `false`: it is
                   left out, counted and logged
username, password credentials
tlsCaFile          the CA certificates for the server's certificate, PEM (default: the system's)
tlsCertFile        the client's certificate, PEM
tlsKeyFile         its key
tlsServerName      the name the server's certificate must have (default: the host)
clientIdPrefix     the beginning of the client ids (default `spark`)
protocolVersion    `5` (default) or `3.1.1`, which has no properties and no exactly once
inflight           the most unacknowledged messages per task (default 4096). The server's receive
                   maximum also applies
retryTimeout       the seconds without progress after which a task fails (default 120)
================== ================================================================================

The tasks read the files on their own hosts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.client.options import LEVEL_5, LEVEL_311
from holdfast.client.servers import Server, parse_server
from holdfast.numbers import whole_number
from holdfast_lake.source.options import OptionError, option_flag

PREFER: Final = "prefer"
REQUIRE: Final = "require"
OFF: Final = "off"
PROTOCOLS: Final = {"5": LEVEL_5, "5.0": LEVEL_5, "3.1.1": LEVEL_311}
NAMES: Final = (
    "mqttServers",
    "topic",
    "qos",
    "retain",
    "exactlyOnce",
    "writeId",
    "writeVersion",
    "orderBy",
    "failOnRefused",
    "username",
    "password",
    "tlsCaFile",
    "tlsCertFile",
    "tlsKeyFile",
    "tlsServerName",
    "clientIdPrefix",
    "protocolVersion",
    "inflight",
    "retryTimeout",
)
OF_SPARK: Final = ("path", "checkpointLocation")
"""The options of Spark itself, which arrive together with those of the sink."""
WRITE_ID_CHARACTERS_MAX: Final = 1024
WRITE_VERSION_MAX: Final = (1 << 31) - 1
CLIENT_ID_PREFIX_BYTES_MAX: Final = 64
INFLIGHT_DEFAULT: Final = 4096
INFLIGHT_MAX: Final = 65_535
RETRY_TIMEOUT_DEFAULT_S: Final = 120
RETRY_TIMEOUT_MAX_S: Final = 86_400


@dataclass(frozen=True)
class SinkOptions:
    """The checked options of one write."""

    servers: tuple[Server, ...]
    topic: str | None
    """The topic of all rows. None: the rows have a column."""
    qos: int
    retain: bool
    exactly_once: str
    """One of PREFER, REQUIRE and OFF."""
    write_id: str | None
    write_version: int
    order_by: tuple[str, ...]
    fail_on_refused: bool
    username: str | None
    password: str | None = field(repr=False)
    ca_file: str | None
    certificate_file: str | None
    key_file: str | None
    server_name: str | None
    client_id_prefix: str
    level: int
    """The protocol level: 4 is MQTT 3.1.1, 5 is MQTT 5.0."""
    inflight_max: int
    retry_timeout_s: int


def parse(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Checks the options of a write. Raises OptionError."""
    given = {name.lower(): value for name, value in options.items()}
    _check_names(given)
    level = PROTOCOLS.get(given.get("protocolversion", "5").strip())
    if level is None:
        raise OptionError(
            f"protocolVersion is {given['protocolversion']!r}; allowed: {', '.join(PROTOCOLS)}"
        )
    result = SinkOptions(
        servers=_servers(given["mqttservers"]),
        topic=given.get("topic"),
        qos=_qos(given.get("qos", "1")),
        retain=option_flag(given, "retain", default=False),
        exactly_once=_exactly_once(given.get("exactlyonce")),
        write_id=given.get("writeid"),
        write_version=_option_number(given, "writeVersion", 0, WRITE_VERSION_MAX, least=0),
        order_by=_columns(given.get("orderby")),
        fail_on_refused=option_flag(given, "failOnRefused", default=True),
        username=given.get("username"),
        password=given.get("password"),
        ca_file=given.get("tlscafile"),
        certificate_file=given.get("tlscertfile"),
        key_file=given.get("tlskeyfile"),
        server_name=given.get("tlsservername"),
        client_id_prefix=given.get("clientidprefix", "spark"),
        level=level,
        inflight_max=_option_number(given, "inflight", INFLIGHT_DEFAULT, INFLIGHT_MAX),
        retry_timeout_s=_option_number(
            given, "retryTimeout", RETRY_TIMEOUT_DEFAULT_S, RETRY_TIMEOUT_MAX_S
        ),
    )
    _check_combinations(result, streaming=streaming)
    return result


def _check_names(given: Mapping[str, str]) -> None:
    if "servers" in given:
        raise OptionError(
            "servers are admin ports, and for reading; to publish, give "
            'option("mqttServers", "host:1883")'
        )
    known = {name.lower() for name in (*NAMES, *OF_SPARK)}
    for name in given:
        if name not in known:
            raise OptionError(f"unknown option {name!r}; for writing there are {', '.join(NAMES)}")
    if "path" in given:
        raise OptionError(
            "messages are published to a server, not written to a path: leave it out, and give "
            'option("mqttServers", "host:1883")'
        )
    if "mqttservers" not in given:
        raise OptionError('give option("mqttServers", "host:1883"), where to publish')


def _check_combinations(options: SinkOptions, *, streaming: bool) -> None:
    if options.write_id is not None:
        if streaming:
            raise OptionError("writeId is for batch writes; a stream has its checkpoint")
        if not 0 < len(options.write_id) <= WRITE_ID_CHARACTERS_MAX:
            raise OptionError(f"writeId must have 1 to {WRITE_ID_CHARACTERS_MAX} characters")
    elif options.write_version:
        raise OptionError("writeVersion without writeId")
    if options.exactly_once == REQUIRE:
        if options.qos != 1:
            raise OptionError(f"exactlyOnce=require needs QoS 1; qos is {options.qos}")
        if options.level < LEVEL_5:
            raise OptionError("exactlyOnce=require needs MQTT 5; protocolVersion is 3.1.1")
    if options.password is not None and options.username is None:
        raise OptionError("password without username")
    if (options.certificate_file is None) != (options.key_file is None):
        raise OptionError("give tlsCertFile and tlsKeyFile together")
    files = (options.ca_file, options.certificate_file, options.server_name)
    if any(files) and not all(server.is_secure for server in options.servers):
        raise OptionError(
            "TLS options are for servers reached by TLS: write mqtts://host:8883 in mqttServers"
        )
    if len(options.client_id_prefix.encode()) > CLIENT_ID_PREFIX_BYTES_MAX:
        raise OptionError(f"clientIdPrefix is longer than {CLIENT_ID_PREFIX_BYTES_MAX} bytes")


def _servers(text: str) -> tuple[Server, ...]:
    result: list[Server] = []
    for item in text.split(","):
        try:
            server = parse_server(item)
        except ValueError as error:
            raise OptionError(f"mqttServers: {error}") from None
        if server.is_websocket:
            raise OptionError(
                f"mqttServers has {item.strip()!r}: the sink speaks MQTT over TCP and TLS; "
                "write mqtt://host:1883 or mqtts://host:8883"
            )
        if server not in result:
            result.append(server)
    return tuple(result)


def _qos(text: str) -> int:
    if text.strip() not in ("0", "1", "2"):
        raise OptionError(f"qos is {text!r}; allowed: 0, 1, 2")
    return int(text)


def _exactly_once(text: str | None) -> str:
    value = PREFER if text is None else text.strip().lower()
    if value not in (PREFER, REQUIRE, OFF):
        raise OptionError(f"exactlyOnce is {text!r}; allowed: {PREFER}, {REQUIRE}, {OFF}")
    return value


def _columns(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) != len(names):
        raise OptionError(f"orderBy is {text!r}: names of columns, each at most once")
    return names


def _option_number(
    given: Mapping[str, str], option: str, default: int, largest: int, least: int = 1
) -> int:
    text = given.get(option.lower(), str(default)).strip()
    number = whole_number(text, largest, least)
    if number is None:
        raise OptionError(f"{option} is {text!r}; allowed: a number from {least} to {largest}")
    return number
