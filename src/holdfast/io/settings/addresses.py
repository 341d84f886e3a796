"""Addresses of this node, as other nodes announce them to clients and operators."""

import socket
from typing import Final

from holdfast.addresses import UNIX, is_any, join_address, split_address
from holdfast.config.listener import Listener, kind_of
from holdfast.config.schema import Config

ADDRESSES_MAX: Final = 256
"""The most characters of the announced text, by the handshake between nodes."""


def client_addresses(config: Config) -> str:
    """The addresses for clients, in the form of `holdfast.addresses`; "" if the
    configuration does not determine the first one."""
    # A process that is not needed any more has no listeners.
    first = config.listeners and _address(config.listeners[0], config.node.advertise)
    if not first:
        return ""
    found: dict[str, str] = {}
    for index, listener in enumerate(config.listeners):
        advertised = "" if index else config.node.advertise
        kind = kind_of(listener)
        if listener.proxies:
            # The inside address is useless to clients of a proxy. The kind without an address
            # shows that this node knows kinds, so that its first address is not used instead.
            found[kind] = found.get(kind) or listener.advertise or advertised
        elif address := _address(listener, advertised):
            found.setdefault(kind, address)
    text = first
    for kind, address in found.items():
        word = f" {kind}={address}"
        if len(text) + len(word) <= ADDRESSES_MAX:
            text += word
    return text


def admin_address(config: Config) -> str:
    """The address of the admin port for other machines, or "". Never one that stands for all
    addresses: a node that asked there would ask itself."""
    admin = config.admin
    if not admin.enabled or not admin.port:
        return ""
    if admin.advertise:
        return admin.advertise
    host = admin.bind
    if is_any(host):
        peer = config.cluster.peer_address()
        is_near = not config.cluster.peer_bind or peer.startswith(UNIX)
        host = socket.getfqdn() if is_near else split_address(peer)[0]
    return join_address(host, admin.port)


def _address(listener: Listener, advertised: str) -> str:
    if listener.advertise or advertised:
        return listener.advertise or advertised
    if listener.socket or not listener.port:
        return ""
    host = socket.getfqdn() if is_any(listener.bind) else listener.bind
    return join_address(host, listener.port)
