"""Reads the header of the PROXY protocol from an accepted socket, before TLS or MQTT begins."""

import asyncio
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final

from holdfast.protocol.proxy.header import ProxyError, ProxyHeader

UNIX: Final = "unix"
"""The name of all peers of a Unix socket."""


class SilentPeer(Exception):
    """A connection that ends before its first byte: a port scan, or a health check."""


_CREDENTIALS: Final = struct.Struct("3i")


class Proxies:
    """The proxies of a listener: addresses, networks, or any peer of a Unix socket."""

    def __init__(self, names: Sequence[str]) -> None:
        self._has_unix = UNIX in names
        self._networks: list[IPv4Network | IPv6Network] = [
            ip_network(name, strict=False) for name in names if name != UNIX
        ]

    def __contains__(self, remote: str) -> bool:
        """Whether host:port is that of a proxy."""
        host = remote.rpartition(":")[0]
        if host == UNIX:
            return self._has_unix
        address = ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)


def remote_of(accepted: socket.socket, address: object) -> str:
    """The peer of an accepted socket as host:port, or unix:PID."""
    if isinstance(address, tuple):
        return f"{address[0]}:{address[1]}"
    process = 0
    with suppress(OSError, AttributeError):
        size = _CREDENTIALS.size
        data = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        process = _CREDENTIALS.unpack(data)[0]
    return f"{UNIX}:{process}"


async def read_proxy_header(accepted: socket.socket, timeout_s: float) -> str:
    """The client's host:port, or "" if the proxy passes none on. Takes nothing behind the header.

    Raises `ProxyError`, also after `timeout_s`, `SilentPeer` and `OSError`.
    """
    header = ProxyHeader()
    try:
        async with asyncio.timeout(timeout_s):
            while not header.is_complete:
                try:
                    offered = await _peek(accepted, header.wanted_bytes)
                except ConnectionResetError:
                    offered = b""
                if not offered and not header.has_begun:
                    raise SilentPeer
                if not offered:
                    raise ProxyError("the connection ended within the header")
                accepted.recv(header.take(offered))
    except TimeoutError:
        raise ProxyError(f"the header was not complete after {timeout_s:g} s") from None
    return header.client


async def _peek(accepted: socket.socket, size_bytes: int) -> bytes:
    """The bytes that have arrived, at least one unless the peer has closed; they stay unread."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return accepted.recv(size_bytes, socket.MSG_PEEK)
        except BlockingIOError:
            pass
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(accepted, _arrived, readable)
        try:
            await readable
        finally:
            loop.remove_reader(accepted)


def _arrived(readable: "asyncio.Future[None]") -> None:
    if not readable.done():
        readable.set_result(None)
