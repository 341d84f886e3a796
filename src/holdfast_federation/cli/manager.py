"""`holdfast federation manager`: the topology manager, and requests to it.

serve       run the manager until SIGTERM or SIGINT; configured by the environment
nodes       the members, their health and their neighbours
links       the links; --pin, --forbid and --free change the rules for them
join-token  make a token that lets one member join
dot         the federation for Graphviz
leave       remove a member; the others get new links

Exit codes: 0 success; 1 the manager refuses or does not answer; 2 wrong usage or configuration.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from holdfast.cli.text import table
from holdfast.client.admin_access import VARIABLE, AdminAccessError, load_access
from holdfast.security.tls import TlsError
from holdfast_federation.sidecar.manager_client.http import (
    ManagerHttp,
    ManagerRefuses,
    ManagerUnreachable,
)

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


EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2
DEFAULT_URL: Final = "http://127.0.0.1:8080"
URL_VARIABLE: Final = "TOPOLOGY_MANAGER_URL"
TOKEN_VARIABLE: Final = "HOLDFAST_TOPOLOGY__TOKEN"

_SERVE_OPTIONS: Final = {
    "bind": "address to listen on (default 127.0.0.1)",
    "port": "HTTP port (default 8080)",
    "db_url": "sqlite:///FILE (default sqlite:///holdfast-topology.db)",
    "token_file": "file with the operator's token; without one everybody may do everything",
    "degree_max": "most neighbours of a member (default 5)",
    "certificate": "PEM file of the server's chain, for HTTPS",
    "key": "PEM file of its key",
    "client_ca": "PEM file of who signs the certificates of operators and members",
    "access": "what they need: token, certificate, either or both",
    "operators": "names of the operators' certificates, separated by commas",
}
_COMMANDS: Final = {
    "nodes": "the members, their health and their neighbours",
    "links": "the links, and the rules for them",
    "join-token": "make a token that lets one member join",
    "dot": "the federation for Graphviz",
    "leave": "remove a member; the links of the others are repaired",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "manager",
        help="run the topology manager of a federation, or request something from it",
        description="The topology manager of a federation.",
    )
    commands = parser.add_subparsers(dest="manager_command", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="run the manager; configured by the environment")
    for name, text in _SERVE_OPTIONS.items():
        serve.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=text)
    serve.set_defaults(run=_serve)
    for name, text in _COMMANDS.items():
        each = commands.add_parser(name, help=text)
        each.add_argument("--url", help=f"of the manager (default ${URL_VARIABLE}, {DEFAULT_URL})")
        each.add_argument(
            "--token-file",
            metavar="FILE",
            default="",
            help=f"file of the operator's token (default: ${TOKEN_VARIABLE}, or ${VARIABLE})",
        )
        each.add_argument(
            "--token", help="the token itself, which other users of this machine can then see"
        )
        each.add_argument("--ca", metavar="FILE", help="PEM file of who signed its certificate")
        each.add_argument("--cert", metavar="FILE", help="PEM file to show; --key goes with it")
        each.add_argument("--key", metavar="FILE", help="PEM file of its key")
        if name != "dot":
            each.add_argument("--json", action="store_true", help="print JSON")
    choices = commands.choices
    for option, text in (
        ("--pin", "have this link"), ("--forbid", "never have it"), ("--free", "no rule for it"),
    ):  # fmt: skip
        choices["links"].add_argument(
            option, metavar="A-B", type=_link, action="append", default=[], help=text
        )
    choices["join-token"].add_argument(
        "--valid-s", type=float, default=86_400.0, metavar="S", help="seconds (default 86400)"
    )
    choices["leave"].add_argument("node", metavar="ID", type=int, help="of the member")


def _link(text: str) -> tuple[int, int]:
    one, dash, other = text.partition("-")
    if not dash or not one.isdecimal() or not other.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write the two ids, as 3-7")
    return int(one), int(other)


def run(args: argparse.Namespace) -> int:
    if args.manager_command == "serve":
        return _serve(args)
    url = args.url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    command = {
        "nodes": _nodes, "links": _links, "join-token": _join_token, "dot": _dot, "leave": _leave,
    }[args.manager_command]  # fmt: skip
    try:
        token = args.token or (not args.token_file and os.environ.get(TOKEN_VARIABLE))
        token = token or load_access(args.token_file, "", is_https=False).token
        command(ManagerPort(url, token, args.ca, args.cert, args.key), args)
    except (ManagerError, AdminAccessError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _serve(args: argparse.Namespace) -> int:
    from holdfast.cli.logs import set_up_plain_logging
    from holdfast.config.problem import ConfigError
    from holdfast.io.event_loop.descriptors import raise_limit
    from holdfast.security.tls import TlsError
    from holdfast_federation.manager.server import serve
    from holdfast_federation.manager.settings import load
    from holdfast_federation.manager.state.store import StateStoreError

    given = {name: getattr(args, name) for name in _SERVE_OPTIONS}
    try:
        settings = load(os.environ, {name: text for name, text in given.items() if text})
    except ConfigError as error:
        for line in error.problems:
            print(f"holdfast: {line}", file=sys.stderr)
        return EXIT_CONFIG
    set_up_plain_logging()
    raise_limit()
    try:
        asyncio.run(serve(settings))
    except TlsError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except StateStoreError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"holdfast: {settings.bind}:{settings.port}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _nodes(port: ManagerPort, args: argparse.Namespace) -> None:
    nodes = port.ask("GET", "/api/v1/nodes")
    rows = [
        [
            str(node["id"]), node["state"], node["ip"],
            "-" if node["latency_ms"] is None else f"{node['latency_ms']:.1f}",
            ",".join(str(each) for each in node["neighbors"]) or "-",
        ]
        for node in nodes
    ]  # fmt: skip
    _print(args, nodes, ["id", "state", "broker", "ms", "neighbours"], rows)


def _links(port: ManagerPort, args: argparse.Namespace) -> None:
    rules = [
        {"a": one, "b": other, "rule": rule}
        for rule, links in (("pin", args.pin), ("forbid", args.forbid), ("none", args.free))
        for one, other in links
    ]
    if rules:
        view = port.ask("PUT", "/api/v1/links", {"links": rules})
    else:
        view = port.ask("GET", "/api/v1/topology")
    words = {True: "up", False: "down", None: "-"}
    rows = [
        [
            f"{link['a']}-{link['b']}", words[link["up"]],
            "-" if link["rtt_ms"] is None else f"{link['rtt_ms']:.1f}",
            "pinned" if link["pinned"] else "-",
        ]
        for link in view["links"]
    ]  # fmt: skip
    rows += [[f"{one}-{other}", "-", "-", "forbidden"] for one, other in view["forbidden"]]
    _print(args, view, ["link", "reported", "ms", "rule"], rows)


def _join_token(port: ManagerPort, args: argparse.Namespace) -> None:
    made = port.ask("POST", "/api/v1/join-tokens", {"valid_s": args.valid_s})
    print(json.dumps(made) if args.json else made["token"])


def _dot(port: ManagerPort, args: argparse.Namespace) -> None:
    print(port.text("/api/v1/topology?format=dot"), end="")


def _leave(port: ManagerPort, args: argparse.Namespace) -> None:
    port.ask("DELETE", f"/api/v1/nodes/{args.node}")
    print(json.dumps({"removed": args.node}) if args.json else f"member {args.node} removed")


def _print(args: argparse.Namespace, value: Any, heading: list[str], rows: list[list[str]]) -> None:
    if args.json:
        print(json.dumps(value, indent=1))
        return
    named = [dict(zip(heading, row, strict=True)) for row in rows]
    print("\n".join(table(named, ())) or "  ".join(heading))
