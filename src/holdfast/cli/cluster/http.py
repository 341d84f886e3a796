"""Requests of the command line to the admin port of a broker."""

import json
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from holdfast.addresses import split_address
from holdfast.cli.cluster.status import ClusterStatus
from holdfast.client.admin_connection import AdminConnection, AdminError, NoHttp, Unanswered

DEFAULT_ADMIN: Final = "127.0.0.1:18083"
TIMEOUT_S: Final = 10.0
"""The time in seconds for one request. A change waits for a majority to agree."""


class AdminRefused(AdminError):
    """The cluster refused the request. The text is its reason."""


class AdminPort:
    """Sends requests to one admin port."""

    def __init__(self, address: str, timeout_s: float = TIMEOUT_S) -> None:
        """Parse the address. Raises `AdminError` if it is malformed."""
        try:
            host, port = split_address(address)
        except ValueError:
            host, port = "", 0
        if not 0 < port < 65536:
            raise AdminError(f"--admin {address!r}: give ADDR:PORT, as {DEFAULT_ADMIN}")
        self.address = address
        self._connection = AdminConnection((host, port), timeout_s)

    def request(self, method: str, path: str) -> tuple[int, bytes]:
        """Send a request and return status and body. Raises `AdminError` without a response."""
        connection = self._connection
        try:
            connection.send_request(method, path)
            answer = connection.receive_response()
            return answer.status, connection.text_of(answer)
        except NoHttp as error:
            # Another program listens there, so a later request will not succeed.
            raise AdminError(str(error)) from error
        finally:
            connection.close()

    def is_ready(self) -> bool:
        """Return whether the node is ready. Raises `AdminError` without a response."""
        return self.request("GET", "/readyz")[0] == 200

    def status(self) -> ClusterStatus:
        """Return the status of the cluster. Raises `AdminError` without a usable response."""
        return self.status_as_sent()[0]

    def status_as_sent(self) -> tuple[ClusterStatus, dict[str, object]]:
        """Return the status, and also the raw values with fields unknown to this version.

        Raises `AdminError` without a usable response.
        """
        body = self._ask("GET", "/cluster")
        try:
            values = msgspec.json.decode(body, type=dict[str, object])
            return msgspec.convert(values, ClusterStatus), values
        except msgspec.MsgspecError as error:
            raise AdminError(
                f"{self.address} answers what this version does not understand: {error}"
            ) from None

    def change(self, action: str, node: str = "", **more: str) -> None:
        """Request a change; `more`: further parameters. Raises `AdminError` if it is refused."""
        given = {"node": node, **more} if node else more
        query = urlencode(given, quote_via=quote)
        try:
            self._ask("POST", f"/cluster/{action}" + (f"?{query}" if query else ""))
        except Unanswered as error:
            raise Unanswered(f"{error}: look at the status whether it was done") from None

    def get_json(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path. Raises `AdminError` without a usable response."""
        body = self._ask("GET", path)
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise AdminError(f"{self.address} answers no JSON: {error}") from None

    def _ask(self, method: str, path: str) -> bytes:
        code, body = self.request(method, path)
        if code == 200:
            return body
        try:
            text = str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            text = f"HTTP {code}: is that the admin port of a holdfast node?"
        kind = AdminRefused if code == 409 else AdminError
        raise kind(text if code == 409 else f"{self.address}: {text}")
