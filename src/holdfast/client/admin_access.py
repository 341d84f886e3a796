"""Reads the address, token and CA file of an admin port, and checks its certificate."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.addresses import split_address
from holdfast.security.tls import TlsError, client_context

VARIABLE: Final = "HOLDFAST_TOKEN"
"""The environment variable with the token, for programs without a token file."""
TOKEN_BYTES_MAX: Final = 4096


class AdminAccessError(ValueError):
    """The address, the token file or the CA file cannot be used. The text contains no secret."""


@dataclass(frozen=True)
class AdminAccess:
    """The credentials and the transport of requests to admin ports."""

    token: str = field(default="", repr=False)
    is_https: bool = False
    ca_file: str = ""
    """The PEM file of the signers of the ports' certificates; empty: those the system trusts."""

    def headers(self) -> dict[str, str]:
        """The headers of each request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def context(self) -> ssl.SSLContext | None:
        """The TLS context, or None for plain HTTP. Raises `AdminAccessError`."""
        if not self.is_https:
            return None
        try:
            return client_context(self.ca_file)
        except TlsError as error:
            raise AdminAccessError(str(error)) from None


NO_ACCESS: Final = AdminAccess()
"""Plain HTTP without a token."""


def admin_address(text: str) -> tuple[str, int, bool]:
    """Host, port and whether it is HTTPS, of `HOST:PORT`, `http://HOST:PORT` or
    `https://HOST:PORT`. Raises `AdminAccessError`."""
    scheme, found, rest = text.strip().partition("://")
    address = rest.rstrip("/") if found else text.strip()
    try:
        if found and scheme not in ("http", "https"):
            raise ValueError
        host, port = split_address(address)
    except ValueError:
        host, port = "", 0
    if not host or not 0 < port < 65536:
        raise AdminAccessError(f"{text!r}: give HOST:PORT, or https://HOST:PORT")
    return host, port, scheme == "https" and bool(found)


def load_access(
    token_file: str, ca_file: str, *, is_https: bool, environ: Mapping[str, str] = os.environ
) -> AdminAccess:
    """The access with the token of a file or, without one, of HOLDFAST_TOKEN. Raises
    `AdminAccessError`."""
    if ca_file and not is_https:
        raise AdminAccessError(f"a CA file ({ca_file}) needs an https:// address")
    token = environ.get(VARIABLE, "").strip()
    where = VARIABLE
    if token_file:
        where = token_file
        try:
            with Path(token_file).open("rb") as file:
                token = file.read(TOKEN_BYTES_MAX + 1).decode("ascii").strip()
        except OSError as error:
            raise AdminAccessError(f"{token_file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise AdminAccessError(f"{token_file} contains no token") from None
        if not token:
            raise AdminAccessError(f"{token_file} is empty: write a token into it")
    if len(token) > TOKEN_BYTES_MAX or any(not "!" <= char <= "~" for char in token):
        raise AdminAccessError(f"{where} contains no token: one line of printable ASCII")
    return AdminAccess(token, is_https, ca_file)
