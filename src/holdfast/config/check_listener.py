"""Finds settings of a listener that contradict each other or the rest."""

import ssl
from collections.abc import Iterator
from ipaddress import ip_network
from re import fullmatch
from typing import Final

from holdfast.addresses import address_problem
from holdfast.config.check_identity import has_sources
from holdfast.config.listener import ANY_ORIGIN, LOOPBACK_ORIGINS, WEBSOCKET_PATH, Listener
from holdfast.config.problem import Problem, shown
from holdfast.config.schema import Config

PACKET_BYTES_MIN: Final = 128
SOCKET_PATH_BYTES_MAX: Final = 96
"""The most bytes of the path of a Unix socket. Linux allows 107, and it is bound at a longer name
first."""


def listener_problems(listener: Listener, config: Config) -> Iterator[Problem]:
    """The settings of a listener that contradict each other or the rest. Keys are without the
    listener's own."""
    yield from _address_problems(listener)
    text = address_problem(listener.bind)
    if text:
        yield "bind", f" = {shown(listener.bind)}: {text}"
    if listener.key and not listener.certificate:
        yield "key", f" = {shown(listener.key)}: needs a certificate beside it"
    if listener.certificate and not listener.key:
        yield "certificate", f" = {shown(listener.certificate)}: needs a key beside it"
    if listener.client_ca and not listener.certificate:
        yield "client_ca", f" = {shown(listener.client_ca)}: needs TLS: set certificate and key"
    if listener.require_certificate and not listener.client_ca:
        yield "require_certificate", " = true: needs client_ca, the CA that signed the clients"
    if listener.transport != "websocket":
        needs = 'needs transport = "websocket"'
        if listener.path != WEBSOCKET_PATH:
            yield "path", f" = {shown(listener.path)}: {needs}"
        if listener.allowed_origins:
            yield "allowed_origins", f" = {shown(listener.allowed_origins)}: {needs}"
    for index, origin in enumerate(listener.allowed_origins):
        if origin not in (ANY_ORIGIN, LOOPBACK_ORIGINS) and not fullmatch(
            r"[a-z][a-z0-9+.-]*://[^/A-Z\s]+", origin
        ):
            yield (
                f"allowed_origins[{index}]",
                f" = {shown(origin)}: must be as browsers send it: https://host or"
                " https://host:port, in lower case and without a path;"
                f' or "{LOOPBACK_ORIGINS}", or "{ANY_ORIGIN}"',
            )
    for name, default in (("tls_minimum", "1.2"), ("tls_ciphers", ""), ("crl", "")):
        value = getattr(listener, name)
        needed = "client_ca" if name == "crl" else "certificate"
        has_psk = name != "crl" and listener.psk_file
        if value != default and not (getattr(listener, needed) or has_psk):
            yield name, f" = {shown(value)}: needs {needed}"
    if listener.certificate_user != "cn" and not (listener.client_ca or listener.psk_file):
        text = f" = {shown(listener.certificate_user)}: needs client_ca, the CA of the clients"
        yield "certificate_user", text
    if 0 < listener.packet_bytes < PACKET_BYTES_MIN:
        yield "packet_bytes", f" = {listener.packet_bytes}: must be 0 or at least 128"
    if listener.packet_bytes > config.limits.packet_bytes:
        yield (
            "packet_bytes",
            f" = {listener.packet_bytes}: must be at most limits.packet_bytes"
            f" = {config.limits.packet_bytes}",
        )
    yield from _psk_problems(listener)
    yield from _authentication_problems(listener, config)


def _psk_problems(listener: Listener) -> Iterator[Problem]:
    if not listener.psk_file:
        if listener.psk_hint:
            yield "psk_hint", f" = {shown(listener.psk_hint)}: needs psk_file"
        return
    value = f" = {shown(listener.psk_file)}"
    if listener.certificate:
        yield "psk_file", f"{value}: is in place of a certificate: leave one of them out"
    if listener.transport == "websocket" or listener.socket:
        yield "psk_file", f"{value}: is for TCP only: not for WebSocket or a Unix socket"
    if not hasattr(ssl.SSLContext, "set_psk_server_callback"):
        yield "psk_file", f"{value}: needs Python 3.13 or later"


def _address_problems(listener: Listener) -> Iterator[Problem]:
    path = listener.socket
    if len(path.encode()) > SOCKET_PATH_BYTES_MAX:
        yield (
            "socket",
            f" = {shown(path)}: the system allows {SOCKET_PATH_BYTES_MAX} bytes for the path of a"
            " Unix socket",
        )
    if path and listener.certificate:
        yield "socket", f" = {shown(path)}: a Unix socket has no TLS: leave certificate out"
    for index, name in enumerate(listener.proxies):
        key = f"proxies[{index}]"
        if (name == "unix") != bool(path):
            must = '"unix"' if path else "an address or a network, as 10.0.0.1 or 10.0.0.0/8"
            yield key, f" = {shown(name)}: must be {must}"
        elif not path and not is_network(name):
            yield key, f" = {shown(name)}: must be an address or a network, as 10.0.0.0/8"


def is_network(name: str) -> bool:
    """Whether the text is an address or a network."""
    try:
        ip_network(name, strict=False)
    except ValueError:
        return False
    return True


def _authentication_problems(listener: Listener, config: Config) -> Iterator[Problem]:
    security = config.security
    needed = {
        "password": (
            "password_file here or of security, or security.dynamic_security_file",
            listener.password_file or security.password_file or security.dynamic_security_file,
        ),
        "scram": ("security.scram_file", security.scram_file),
        "certificate": ("client_ca or psk_file", listener.client_ca or listener.psk_file),
        "token": ("security.jwt.jwks", security.jwt.jwks),
        "http": ("security.http.url", security.http.url),
        "hook": ("hooks.enabled", config.hooks.enabled),
    }
    for index, method in enumerate(listener.authentication):
        key, value = needed[method]
        if not value:
            yield f"authentication[{index}]", f" = {shown(method)}: needs {key}"
    proves = (listener.client_ca or listener.psk_file) and listener.certificate_user != "none"
    if proves and listener.authentication and "certificate" not in listener.authentication:
        yield (
            "authentication",
            f" = {shown(listener.authentication)}: without certificate, a client certificate"
            ' proves no user name here: set certificate_user = "none"',
        )


def listener_warnings(config: Config) -> list[str]:
    """Listeners that nobody can use, or anybody."""
    found: list[str] = []
    security = config.security
    open_by: dict[str, list[str]] = {}
    has_users = bool(
        security.password_file
        or security.scram_file
        or security.dynamic_security_file
        or has_sources(security)
        or config.hooks.enabled
    )
    for index, listener in enumerate(config.listeners):
        key = f"listeners[{index}]"
        if not admits_anonymous(listener, config):
            if not (has_users or listener.password_file or listener.client_ca or listener.psk_file):
                found.append(
                    f"{key}: anonymous clients are refused and there is no password_file,"
                    " scram_file or client_ca: no client can connect"
                )
        elif not listener.is_loopback() and not listener.require_certificate:
            own = "security" if listener.allow_anonymous is None else key
            open_by.setdefault(own, []).append(listener.bind)
        if listener.is_open_to_pages() and admits_anonymous(listener, config):
            found.append(
                f"{key}.allowed_origins = {shown(listener.allowed_origins)}: without a password,"
                f" whatever page a browser that reaches {listener.bind} shows may connect"
            )
        elif listener.is_open_to_pages() and listener.client_ca:
            found.append(
                f"{key}.allowed_origins = {shown(listener.allowed_origins)}: a browser with a"
                " client certificate may use it for whatever page it shows"
            )
    for own, binds in open_by.items():
        found.append(
            f"{own}.allow_anonymous = true: anybody who reaches"
            f" {' or '.join(dict.fromkeys(binds))} may connect without a password"
        )
    return found


def admits_anonymous(listener: Listener, config: Config) -> bool:
    """Whether clients without credentials may connect to the listener."""
    own = listener.allow_anonymous
    return bool(config.security.allow_anonymous) if own is None else own
