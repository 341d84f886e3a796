"""Decides which brokers the manager connects to, and at which of them it logs in.

A join names an address. A join token proves the caller, not the address. So an address counts
as a member's broker when the operator vouches for it: he joins the member himself, or names the
address in `brokers`. Only there does the manager say its name and password. Of anybody else it
takes the caller's own address alone, so no stranger makes it connect to third machines, and only
while it has no password to give away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit


@dataclass(frozen=True)
class BrokerPattern:
    """A pattern of addresses: a host, `*.domain`, an address or a network, each with or without a
    port."""

    host: str
    network: IPv4Network | IPv6Network | None
    port: int | None

    def matches(self, host: str, port: int | None) -> bool:
        if self.port is not None and port != self.port:
            return False
        if self.network is not None:
            # A name may lead anywhere tomorrow: networks are for addresses.
            try:
                return ip_address(host) in self.network
            except ValueError:
                return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return host == self.host


def broker_pattern(text: str) -> BrokerPattern:
    """Parses a pattern. Raises ValueError when the text is none."""
    host, port = _split(text.strip().lower())
    if not host or (port is not None and not 1 <= port <= 65535):
        raise ValueError(f"{text!r}: write host, host:port, *.domain, 10.1.0.0/16 or [fd00::]/8")
    if "*" in host.removeprefix("*."):
        raise ValueError(f"{text!r}: * stands for the first part of a name alone, as *.example.org")
    try:
        return BrokerPattern(host, ip_network(host), port)
    except ValueError:
        if "/" in host:
            raise ValueError(f"{text!r} is no network: write 10.1.0.0/16") from None
        return BrokerPattern(host, None, port)


def _split(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        bits, _, port = rest.partition(":")
        return host + bits, int(port) if port else None
    host, colon, port = text.partition(":")
    if colon and ":" not in port:
        return host, int(port)
    return text, None


def is_named(ip: str, patterns: Sequence[str]) -> bool:
    """Returns whether a pattern of the operator matches. `ip`: the broker's URL as members receive
    it."""
    parts = urlsplit(ip)
    host = (parts.hostname or "").lower()
    return any(broker_pattern(each).matches(host, parts.port) for each in patterns)
