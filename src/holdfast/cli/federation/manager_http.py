"""Requests of the command line to the topology manager."""

import json
import ssl
import urllib.error
import urllib.request
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.security.tls import TlsError, client_context, explained

TIMEOUT_S: Final = 30.0
JOIN_PATH: Final = "/api/v1/join"
"""The path that the published variable for the manager may include."""


class ManagerError(Exception):
    """The manager refuses or is unreachable. The text says why."""


class ManagerPort:
    """Sends requests to one manager."""

    def __init__(
        self,
        url: str,
        token: str = "",
        ca: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
    ) -> None:
        """Check URL and certificates. Raises `ManagerError` if one cannot be used."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ManagerError(f"{url!r} is no URL of a manager: write http://host:8080")
        self.url = url.rstrip("/").removesuffix(JOIN_PATH)
        self._token = token
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._tls = client_context(ca or "", certificate or "", key or "")
            except TlsError as error:
                raise ManagerError(str(error)) from error
        elif certificate or key:
            raise ManagerError("certificates are for https: write the manager's URL so")

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request and return the data of the response. Raises `ManagerError`."""
        text = self._request(method, path, None if body is None else json.dumps(body).encode())
        try:
            return json.loads(text)["data"]
        except (ValueError, KeyError, TypeError):
            raise ManagerError(f"{self.url} is no topology manager") from None

    def text(self, path: str) -> str:
        """Return the text at a path. Raises `ManagerError`."""
        return self._request("GET", path, None)

    def _request(self, method: str, path: str, body: bytes | None) -> str:
        request = urllib.request.Request(self.url + path, body, method=method)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise ManagerError(_description(error)) from None
        except (OSError, ValueError) as error:
            # urllib wraps the cause in `reason`. OpenSSL's errors have a `reason` of their own.
            met = error.reason if isinstance(error, urllib.error.URLError) else error
            text = explained(met) if isinstance(met, OSError) else str(met)
            raise ManagerError(f"{self.url} cannot be asked: {text}") from error


def _description(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["description"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP {error.code}: is that a topology manager?"
