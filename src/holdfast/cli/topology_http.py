"""The topology manager, asked from the command line."""

import json
import ssl
import urllib.error
import urllib.request
from typing import Any, Final
from urllib.parse import urlsplit

TIMEOUT_S: Final = 30.0


class ManagerError(Exception):
    """The manager refuses or cannot be asked; the text says why."""


class ManagerPort:
    def __init__(self, url: str, token: str = "", ca_file: str | None = None) -> None:
        """Raises ManagerError: that is no URL, or no certificate."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ManagerError(f"{url!r} is no URL of a manager: write http://host:8080")
        self.url = url.rstrip("/")
        self._token = token
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ManagerError(f"{ca_file}: {error}") from error

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """The data of the answer. Raises ManagerError."""
        text = self._request(method, path, None if body is None else json.dumps(body).encode())
        try:
            return json.loads(text)["data"]
        except (ValueError, KeyError, TypeError):
            raise ManagerError(f"{self.url} is no topology manager") from None

    def text(self, path: str) -> str:
        """Raises ManagerError."""
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
            reason = getattr(error, "reason", error)
            raise ManagerError(f"{self.url} cannot be asked: {reason}") from error


def _description(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["description"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP {error.code}: is that a topology manager?"
