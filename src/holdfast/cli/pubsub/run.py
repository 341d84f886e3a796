"""Code that `holdfast pub` and `holdfast sub` share: TLS, exit codes, errors and traces."""

import errno
import socket
import ssl
import sys
from collections.abc import Callable
from typing import Final

from holdfast.cli.pubsub.options import ClientOptions, HelpWanted, UsageError, VersionWanted
from holdfast.client.client import Client
from holdfast.client.errors import ClientError, ConnectionLost, ConnectionRefused, reason_text
from holdfast.client.options import LEVEL_5
from holdfast.client.protocol.effects import Message
from holdfast.client.reconnect import ONCE, Reconnect
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Packet
from holdfast.protocol.mqtt.reasons import connack_return_code

# The exit codes of mosquitto's clients. A refused connection exits with the CONNACK code.
EXIT_FAILED: Final = 1
EXIT_LOST: Final = 7
EXIT_TLS: Final = 8
EXIT_TIMED_OUT: Final = 27

FIRST_S: Final = 10.0
"""The time in seconds to try the first connection with several servers.

A single server is tried once, the same as by mosquitto's clients.
"""
AGAIN: Final = Reconnect(delay_max_s=1.0)
"""The policy after a lost connection: retry without end."""
AGAIN_BOUNDED: Final = Reconnect(delay_max_s=1.0, give_up_after_s=FIRST_S)

_RETURN_CODES: Final = {
    1: "unacceptable protocol version",
    2: "identifier rejected",
    3: "broker unavailable",
    4: "bad user name or password",
    5: "not authorised",
}


class TlsProblem(Exception):
    """The TLS options cannot be used. The text says why."""


def parse(options: ClientOptions, arguments: list[str], command: str, usage: str) -> int | None:
    """Parses the arguments of a command. Returns the exit code if it is to do nothing."""
    try:
        options.parse(arguments)
    except HelpWanted:
        print(usage)
        return 0
    except VersionWanted:
        from holdfast.cli.main import version_text

        print(version_text())
        return 0
    except UsageError as error:
        print(f"Error: {error}\n\nUse 'holdfast {command} --help' to see usage.", file=sys.stderr)
        return EXIT_FAILED
    return None


def new_client(
    options: ClientOptions,
    reconnect: Reconnect,
    on_message: Callable[[Message], None] | None = None,
) -> Client:
    """Makes the client. Raises `TlsProblem` or `ValueError` if the options cannot be used."""
    return Client(
        servers=options.servers(),
        reconnect=reconnect,
        options=options.connect_options(),
        tls=_tls_context(options),
        local_address=(options.bind, 0) if options.bind else None,
        on_message=on_message,
        on_trace=Tracer(options).show if options.debug else None,
    )


def first_policy(client: Client) -> Reconnect:
    """Returns the policy of the first connection: a choice of servers is worth retries."""
    return AGAIN_BOUNDED if len(client.servers) > 1 else ONCE


def _tls_context(options: ClientOptions) -> ssl.SSLContext | None:
    if not options.use_tls and not any(one.is_secure for one in options.servers()):
        return None
    tls = options.tls
    try:
        context = ssl.create_default_context(cafile=tls.get("cafile"), capath=tls.get("capath"))
        context.check_hostname = not options.insecure
        versions = {
            "tlsv1.1": ssl.TLSVersion.TLSv1_1,
            "tlsv1.2": ssl.TLSVersion.TLSv1_2,
            "tlsv1.3": ssl.TLSVersion.TLSv1_3,
        }
        context.minimum_version = versions[tls.get("tls-version", "tlsv1.2")]
        if "cert" in tls:
            # Without a function OpenSSL asks for a passphrase on the terminal.
            context.load_cert_chain(tls["cert"], tls["key"], lambda: "")
        if "ciphers" in tls:
            context.set_ciphers(tls["ciphers"])
        if "tls-alpn" in tls:
            context.set_alpn_protocols([tls["tls-alpn"]])
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TlsProblem(f"Problem setting TLS options: {text}.") from None
    return context


def exit_code(error: ClientError, options: ClientOptions) -> int:
    """Returns mosquitto's exit code for an error. The CONNACK code of a refusal is one, too."""
    if isinstance(error, ConnectionRefused):
        return error.reason if options.level == LEVEL_5 else connack_return_code(error.reason)
    cause = error.__cause__
    if _is_tls_failure(cause, options):
        return EXIT_TLS
    if isinstance(error, ConnectionLost) and cause is None:
        return error.reason if error.reason > 0 else EXIT_LOST
    return EXIT_FAILED


def _is_tls_failure(cause: BaseException | None, options: ClientOptions) -> bool:
    """Returns whether TLS failed. A server without TLS resets the connection."""
    return isinstance(cause, ssl.SSLError) or (
        options.use_tls and isinstance(cause, ConnectionResetError)
    )


def error_line(error: ClientError, options: ClientOptions) -> str:
    """Describes an error, in mosquitto's words where mosquitto has them."""
    cause = error.__cause__
    if isinstance(error, ConnectionRefused):
        if options.level < LEVEL_5:
            code = connack_return_code(error.reason)
            text = f"Connection Refused: {_RETURN_CODES.get(code, 'unknown reason')}."
        else:
            text = reason_text(error.reason)
            if error.detail:
                text += f" ({error.detail})"
            if error.reason == reasons.UNSUPPORTED_PROTOCOL_VERSION:
                text += ". Try connecting to an MQTT v5 broker, or use MQTT v3.x mode."
        return f"Connection error: {text}"
    if isinstance(cause, socket.gaierror):
        return "Unable to connect (Lookup error.)."
    if _is_tls_failure(cause, options):
        return f"Error: A TLS error occurred ({getattr(cause, 'reason', None) or cause})."
    if isinstance(cause, OSError):
        return f"Error: {_os_error_text(cause)}"
    if isinstance(error, ConnectionLost) and error.reason < 0:
        return "Error: The connection was lost."
    return f"Error: {error}"


def _os_error_text(error: OSError) -> str:
    """Returns the text of the system's error.

    asyncio joins the errors of several addresses and adds words of its own.
    """
    for number in (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EHOSTUNREACH):
        if error.errno == number or f"[Errno {number}]" in str(error):
            return _CAPITALIZED.get(number, str(error))
    return error.strerror or str(error)


_CAPITALIZED: Final = {
    errno.ECONNREFUSED: "Connection refused",
    errno.EADDRNOTAVAIL: "Cannot assign requested address",
    errno.ENETUNREACH: "Network is unreachable",
    errno.EHOSTUNREACH: "No route to host",
}


def complain(options: ClientOptions, line: str) -> None:
    """Prints a line on standard error, unless --quiet is given."""
    if not options.quiet:
        print(line, file=sys.stderr)


class Tracer:
    """Prints a line per packet, in mosquitto's form (option -d)."""

    def __init__(self, options: ClientOptions) -> None:
        self._name = options.client_id or "(null)"
        self._level = options.level
        self._sent_count = 0

    def show(self, sent: bool, packet: Packet) -> None:
        """Prints a packet. The CONNACK of a server-assigned id changes the name in later lines."""
        if isinstance(packet, pk.Connack):
            assigned = packet.properties.get(pr.ASSIGNED_CLIENT_IDENTIFIER)
            if isinstance(assigned, str):
                self._name = assigned
        for line in self._lines(sent, packet):
            print(f"Client {self._name} {line}")
        if isinstance(packet, pk.Suback):
            granted = ", ".join(str(reason) for reason in packet.reasons)
            print(f"Subscribed (mid: {packet.packet_id}): {granted}")
        sys.stdout.flush()

    def _lines(self, sent: bool, packet: Packet) -> list[str]:
        verb = "sending" if sent else "received"
        match packet:
            case pk.Connack():
                code = packet.reason
                if self._level < LEVEL_5 and code:
                    code = connack_return_code(code)
                return [f"received CONNACK ({code})"]
            case pk.Publish():
                return [f"{verb} PUBLISH ({self._publish_text(sent, packet)})"]
            case pk.Ack():
                return [self._ack_line(sent, packet)]
            case pk.Subscribe():
                return [
                    f"sending SUBSCRIBE (Mid: {packet.packet_id}, Topic: {one.filter}, "
                    f"QoS: {one.qos}, Options: 0x{_subscription_options(one):02x})"
                    for one in packet.subscriptions
                ]
            case pk.Unsubscribe():
                return [
                    f"sending UNSUBSCRIBE (Mid: {packet.packet_id}, Topic: {filter})"
                    for filter in packet.filters
                ]
            case pk.Disconnect() if not sent:
                return [f"received DISCONNECT ({packet.reason})"]
        return [f"{verb} {type(packet).__name__.upper()}"]

    def _publish_text(self, sent: bool, packet: pk.Publish) -> str:
        packet_id = packet.packet_id
        if sent:
            # mosquitto numbers messages of every QoS.
            self._sent_count += 1
            packet_id = packet_id or self._sent_count
        topic = packet.topic.decode("utf-8", "replace") or "(null)"
        return (
            f"d{packet.dup:d}, q{packet.qos}, r{packet.retain:d}, m{packet_id}, "
            f"'{topic}', ... ({len(packet.payload)} bytes)"
        )

    def _ack_line(self, sent: bool, packet: pk.Ack) -> str:
        name = pk.TYPE_NAMES[packet.kind]
        if sent:
            code = f", rc{packet.reason}" if packet.kind in (pk.PUBACK, pk.PUBREC) else ""
            return f"sending {name} (m{packet.packet_id}{code})"
        code = f", RC:{packet.reason}" if packet.kind in (pk.PUBACK, pk.PUBCOMP) else ""
        return f"received {name} (Mid: {packet.packet_id}{code})"


def _subscription_options(request: pk.SubscriptionRequest) -> int:
    """Returns the options byte of a subscription without the QoS."""
    return request.no_local << 2 | request.retain_as_published << 3 | request.retain_handling << 4
