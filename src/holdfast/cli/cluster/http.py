"""Requests of the command line to the admin port of a broker."""

import argparse
import json
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from holdfast.cli.cluster.status import ClusterStatus
from holdfast.client.admin_access import (
    VARIABLE,
    AdminAccessError,
    admin_address,
    load_access,
)
from holdfast.client.admin_connection import AdminConnection, AdminError, NoHttp, Unanswered

DEFAULT_ADMIN: Final = "127.0.0.1:18083"
TIMEOUT_S: Final = 10.0
"""The time in seconds for one request. A change waits for a majority to agree."""


def add_admin_options(
    parser: argparse.ArgumentParser, text: str = "admin port of any node", *, json: bool = True
) -> None:
    """Adds the options of a command that sends requests to an admin port. `text` describes the
    port; `json`: whether the command has `--json`, too."""
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    text = f"{text} (default {DEFAULT_ADMIN})"
    parser.add_argument("--admin", metavar="ADDR:PORT", default=DEFAULT_ADMIN, help=text)
    add_access_options(parser)


def add_access_options(parser: argparse.ArgumentParser) -> None:
    """Adds the credentials of requests to an admin port."""
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        default="",
        help=f"file of the token for the admin port (default: the variable {VARIABLE})",
    )
    parser.add_argument(
        "--ca-file",
        metavar="FILE",
        default="",
        help="PEM file of the signers of an https:// admin port (default: the system's)",
    )


class AdminRefused(AdminError):
    """The cluster refused the request. The text is its reason."""


class AdminPort:
    """Sends requests to one admin port."""

    def __init__(
        self,
        address: str,
        timeout_s: float = TIMEOUT_S,
        token_file: str = "",
        ca_file: str = "",
    ) -> None:
        """Parses the address, and reads the token. Raises `AdminError` if one cannot be used."""
        try:
            host, port, is_https = admin_address(address)
        except AdminAccessError:
            text = f"--admin {address!r}: give ADDR:PORT, as {DEFAULT_ADMIN}, or https://ADDR:PORT"
            raise AdminError(text) from None
        try:
            access = load_access(token_file, ca_file, is_https=is_https)
        except AdminAccessError as error:
            raise AdminError(str(error)) from None
        self.address = address
        self._token_file, self._ca_file, self._is_https = token_file, ca_file, is_https
        self._connection = AdminConnection((host, port), timeout_s, access)

    def sibling(self, address: str, timeout_s: float = TIMEOUT_S) -> "AdminPort":
        """The port of another node of the same cluster, with the same token and scheme."""
        prefix = "https://" if self._is_https and "://" not in address else ""
        return AdminPort(prefix + address, timeout_s, self._token_file, self._ca_file)

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Sends a request and returns status and body. Raises `AdminError` without a response."""
        connection = self._connection
        try:
            connection.send_request(method, path, body)
            answer = connection.receive_response()
            return answer.status, connection.text_of(answer)
        except NoHttp as error:
            # Another program listens there, so a later request will not succeed.
            raise AdminError(str(error)) from error
        finally:
            connection.close()

    def is_ready(self) -> bool:
        """Returns whether the node is ready. Raises `AdminError` without a response."""
        return self.request("GET", "/readyz")[0] == 200

    def status(self) -> ClusterStatus:
        """Returns the status of the cluster. Raises `AdminError` without a usable response."""
        return self.status_as_sent()[0]

    def status_as_sent(self) -> tuple[ClusterStatus, dict[str, object]]:
        """Returns the status, and also the raw values with fields unknown to this version.

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
        """Requests a change; `more`: further parameters. Raises `AdminError` if it is refused."""
        given = {"node": node, **more} if node else more
        query = urlencode(given, quote_via=quote)
        try:
            self._ask("POST", f"/cluster/{action}" + (f"?{query}" if query else ""))
        except Unanswered as error:
            raise Unanswered(f"{error}: look at the status whether it was done") from None

    def exchange(self, method: str, path: str, body: object = None) -> Any:
        """Sends a JSON value, and returns the JSON of the reply. Raises `AdminError`."""
        encoded = None if body is None else msgspec.json.encode(body)
        reply = self._ask(method, path, encoded)
        try:
            return msgspec.json.decode(reply)
        except msgspec.MsgspecError as error:
            raise AdminError(f"{self.address} answers no JSON: {error}") from None

    def get_json(self, path: str) -> dict[str, Any]:
        """Returns the JSON object at a path. Raises `AdminError` without a usable response."""
        body = self._ask("GET", path)
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise AdminError(f"{self.address} answers no JSON: {error}") from None

    def _ask(self, method: str, path: str, sent: bytes | None = None) -> bytes:
        code, body = self.request(method, path, sent)
        if code == 200:
            return body
        try:
            text = str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError, RecursionError):
            text = f"HTTP {code}: is that the admin port of a holdfast node?"
        if code == 401:
            text += f" (--token-file FILE, or {VARIABLE})"
        kind = AdminRefused if code == 409 else AdminError
        raise kind(text if code == 409 else f"{self.address}: {text}")
