"""Requests of the command line to the topology manager."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from holdfast.federation.sidecar.manager_client.http import (
    ManagerHttp,
    ManagerRefuses,
    ManagerUnreachable,
)
from holdfast.security.tls import TlsError

T = TypeVar("T")

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
        """Checks URL and certificates. Raises `ManagerError` if one cannot be used."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ManagerError(f"{url!r} is no URL of a manager: write http://host:8080")
        self.url = url.rstrip("/").removesuffix(JOIN_PATH)
        self._token = token
        if parts.scheme != "https" and (certificate or key):
            raise ManagerError("certificates are for https: write the manager's URL so")
        try:
            self._http = ManagerHttp(self.url, ca or "", certificate or "", key or "")
        except TlsError as error:
            raise ManagerError(str(error)) from error

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Sends a request and returns the data of the response. Raises `ManagerError`."""
        return self._run(self._http.request(method, path, body, self._token, TIMEOUT_S))

    def text(self, path: str) -> str:
        """Returns the text at a path. Raises `ManagerError`."""
        return self._run(self._http.text(path, self._token, TIMEOUT_S))

    def _run(self, request: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run(request)
        except (ManagerUnreachable, ManagerRefuses) as error:
            raise ManagerError(str(error)) from error
