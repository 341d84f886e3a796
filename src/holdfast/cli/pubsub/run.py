"""Code that `holdfast pub` and `holdfast sub` share: the client, TLS, exit codes and errors."""

import argparse
import os
import re
import socket
import ssl
import sys
from collections.abc import Callable
from typing import Final

from holdfast.cli.pubsub.options import EXIT_FAILED, connect_options, servers
from holdfast.client.client import Client
from holdfast.client.errors import ClientError, ConnectionLost, ConnectionRefused, reason_text
from holdfast.client.options import LEVEL_5
from holdfast.client.protocol.effects import Message
from holdfast.client.reconnect import ONCE, Reconnect
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt.reasons import connack_return_code

# The exit codes of mosquitto's clients. A refused connection exits with the CONNACK code.
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
_TLS_VERSIONS: Final = {
    "tlsv1.1": ssl.TLSVersion.TLSv1_1,
    "tlsv1.2": ssl.TLSVersion.TLSv1_2,
    "tlsv1.3": ssl.TLSVersion.TLSv1_3,
}


def new_client(
    args: argparse.Namespace,
    reconnect: Reconnect,
    on_message: Callable[[Message], None] | None = None,
) -> Client:
    """Makes the client. Raises `ValueError` if the options cannot be used."""
    return Client(
        servers=servers(args),
        reconnect=reconnect,
        options=connect_options(args),
        tls=_tls_context(args),
        local_address=(args.bind, 0) if args.bind else None,
        on_message=on_message,
        on_trace=_print_packet if args.debug else None,
    )


def first_policy(client: Client) -> Reconnect:
    """Returns the policy of the first connection: a choice of servers is worth retries."""
    return AGAIN_BOUNDED if len(client.servers) > 1 else ONCE


def _tls_context(args: argparse.Namespace) -> ssl.SSLContext | None:
    if not args.use_tls and not any(one.is_secure for one in servers(args)):
        return None
    try:
        context = ssl.create_default_context(cafile=args.cafile, capath=args.capath)
        context.check_hostname = not args.insecure
        context.minimum_version = _TLS_VERSIONS[args.tls_version]
        if args.cert is not None:
            # Without a function OpenSSL asks for a passphrase on the terminal.
            context.load_cert_chain(args.cert, args.key, lambda: "")
        if args.ciphers is not None:
            context.set_ciphers(args.ciphers)
        if args.tls_alpn is not None:
            context.set_alpn_protocols([args.tls_alpn])
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"Problem setting TLS options: {text}.") from None
    return context


def failed(error: ClientError, args: argparse.Namespace) -> int:
    """Prints an error, and returns mosquitto's exit code: the CONNACK code of a refusal, too."""
    cause = error.__cause__
    # A server without TLS resets the connection.
    is_tls = isinstance(cause, ssl.SSLError) or (
        args.use_tls and isinstance(cause, ConnectionResetError)
    )
    complain(args, f"Error: {cause if is_tls else _text(error, args)}")
    if isinstance(error, ConnectionRefused):
        return error.reason if args.level == LEVEL_5 else connack_return_code(error.reason)
    if is_tls:
        return EXIT_TLS
    if isinstance(error, ConnectionLost) and cause is None:
        return error.reason if error.reason > 0 else EXIT_LOST
    return EXIT_FAILED


def _text(error: ClientError, args: argparse.Namespace) -> str:
    cause = error.__cause__
    if isinstance(error, ConnectionRefused) and args.level == LEVEL_5 and error.detail:
        return f"connection refused: {reason_text(error.reason)} ({error.detail})"
    if isinstance(cause, OSError) and not isinstance(cause, socket.gaierror):
        # asyncio joins the errors of several addresses and adds words of its own.
        numbers = [cause.errno] if cause.errno else re.findall(r"\[Errno (\d+)\]", str(cause))
        if numbers:
            return os.strerror(int(numbers[0]))
    return str(error)


def complain(args: argparse.Namespace, line: str) -> None:
    """Prints a line on standard error, unless --quiet is given."""
    if not args.quiet:
        print(line, file=sys.stderr)


def _print_packet(sent: bool, packet: pk.Packet) -> None:
    """Prints a packet (option -d), without the password of a CONNECT or a payload."""
    verb = "sending" if sent else "received"
    match packet:
        case pk.Connect():
            text = f"CONNECT ({packet.client_id!r}, keep alive {packet.keep_alive_s} s)"
        case pk.Publish():
            text = (
                f"PUBLISH (d{packet.dup:d}, q{packet.qos}, r{packet.retain:d},"
                f" m{packet.packet_id}, {packet.topic!r}, {len(packet.payload)} bytes)"
            )
        case pk.Ack():
            text = f"{pk.TYPE_NAMES[packet.kind]} (m{packet.packet_id}, {packet.reason})"
        case _:
            text = f"{packet}"
    print(f"Client {verb} {text}")
    if isinstance(packet, pk.Suback):
        print(f"Subscribed: {', '.join(str(reason) for reason in packet.reasons)}")
    sys.stdout.flush()
