"""Addresses, host:port, and the meaning of those to listen on.

A node announces its client addresses as one text: the address of its first listener, then
`kind=address` for one listener of each kind, separated by blanks. `kind=` alone is a listener that
other nodes' clients may not be sent to. A node of a version before the kinds announces only the
former, for all clients. The texts of several nodes are separated by commas.
"""

from ipaddress import IPv6Address, ip_address
from typing import Final

ADDRESS: Final = r"^([^\s:\[\]/@,]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$"
"""The pattern of host:port; an IPv6 address is in brackets."""

UNIX: Final = "unix:"
"""The beginning of the address of a process of this machine: `unix:` and its number. Its socket has
that name in a directory which only the processes of one data directory use, so the address stays
when the directory is moved, and a copy of the directory never reaches the original."""

BEHIND_PROXY: Final = "+proxy"
"""The part of a listener's kind that a proxy in front adds."""


def without_query(text: str) -> str:
    """The text, but for a URL `***` in place of its query, which may contain a key."""
    is_url = text.startswith(("http://", "https://"))
    before, found, _ = text.partition("?")
    return f"{before}?***" if is_url and found else text


def split_address(text: str) -> tuple[str, int]:
    """The host, without the brackets of IPv6, and the port of host:port. Raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdecimal()):
        raise ValueError(f"{text!r} is no host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets. The host may have them already."""
    host = host.removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_problem(bind: str) -> str:
    """The problem of an address to listen on, or ""."""
    try:
        ip_address(bind.strip("[]"))
    except ValueError:
        if ":" in bind or "/" in bind:
            return "must be an IP address or a host name; the port has a key of its own"
    return ""


def overlap(one: str, other: str) -> bool:
    """Whether two listeners on these addresses would need the same port."""
    if one == other:
        return True
    return (_is_any_ipv4(one) and ":" not in other) or (_is_any_ipv4(other) and ":" not in one)


def is_any(bind: str) -> bool:
    """Whether it stands for all addresses of the machine, so that no other machine can dial it."""
    try:
        return ip_address(bind.strip("[]")).is_unspecified
    except ValueError:
        return False


def _is_any_ipv4(bind: str) -> bool:
    # A listener on the IPv6 one does not use the IPv4 port.
    return is_any(bind) and not isinstance(ip_address(bind.strip("[]")), IPv6Address)


def is_loopback(bind: str) -> bool:
    """Whether an address can be reached from this machine only. Names other than `localhost` count
    as reachable, because they may resolve to another address later."""
    if bind == "localhost":
        return True
    try:
        return ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        return False


def server_reference(nodes: str, kind: str) -> str:
    """The Server Reference for a client of a listener of this kind: host:port, separated by blanks,
    or "" if there is no such listener. The address of a load balancer, which several nodes
    announce, is there once. [MQTT-3.2.2-19]"""
    found: dict[str, None] = {}
    for node in nodes.split(","):
        words = node.split()
        tagged = [word.partition("=") for word in words if "=" in word]
        if tagged and kind:
            found.update((address, None) for name, _, address in tagged if name == kind and address)
        elif BEHIND_PROXY not in kind:
            found.update((word, None) for word in words if "=" not in word)
    return " ".join(found)


def plain_address(node: str) -> str:
    """The address of a node's first listener, or "" if it announces none."""
    return node.partition(" ")[0]
