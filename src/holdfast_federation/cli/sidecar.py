"""`holdfast federation sidecar`: a member of a federation beside any MQTT broker.

It runs until SIGTERM or SIGINT. `holdfast federation status --admin 127.0.0.1:7884` shows its
status.

Exit codes: 0 success; 1 it cannot start or continue; 2 wrong usage or configuration.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Final

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2

_OPTIONS: Final = {
    "data_dir": ("federation.data", "DIR", "identity and messages in custody"),
    "name": ("federation.name", "NAME", "of the federation, the same for all members"),
    "listen": ("federation.listen", "HOST:PORT", "for other members (default 127.0.0.1:7883)"),
    "advertise": ("federation.advertise", "HOST:PORT", "where other members reach this one"),
    "secret_file": ("federation.secret_file", "FILE", "secret that all members share"),
    "manager": ("federation.manager", "URL", "of the topology manager"),
    "manager_token_file": ("federation.manager_token_file", "FILE", "token for the manager"),
    "manager_ca": ("federation.manager_ca", "FILE", "PEM file of who signed its certificate"),
    "manager_certificate": ("federation.manager_certificate", "FILE", "PEM file to show it"),
    "manager_key": ("federation.manager_key", "FILE", "PEM file of its key"),
    "protocol": ("edge.protocol", "5|3.1.1", "MQTT version towards the broker (default 5)"),
    "client_id": ("edge.client_id", "ID", "at the broker (default: made at the first start)"),
    "username": ("edge.username", "NAME", "at the broker"),
    "password_file": ("edge.password_file", "FILE", "with the password in its first line"),
    "ca": ("edge.ca", "FILE", "PEM file of who signed the broker's certificate"),
    "admin": ("admin.address", "HOST:PORT", "for status and metrics (default 127.0.0.1:7884)"),
}
_LISTS: Final = {
    "broker": ("edge.broker", "URL", "of the broker (default mqtt://127.0.0.1:1883)"),
    "peer": ("federation.peers", "[ID@]HOST:PORT", "member to be linked with"),
    "export": ("federation.export_filters", "FILTER", "what may leave (default #)"),
    "import": ("federation.import_filters", "FILTER", "what may come in (default #)"),
    "interest": ("edge.interest", "FILTER", "what clients of the broker want, always"),
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "sidecar",
        help="run a member beside any MQTT broker",
        description="A member of a federation beside any MQTT broker: links it with others.",
    )
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="TOML configuration")
    for name, (_, value, text) in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar=value, help=text)
    for name, (_, value, text) in _LISTS.items():
        parser.add_argument(
            f"--{name}", dest=name, metavar=value, action="append", help=f"{text}; repeatable"
        )


def run(args: argparse.Namespace) -> int:
    from holdfast.cli.logs import set_up_plain_logging
    from holdfast.config.problem import ConfigError
    from holdfast.io.event_loop.descriptors import raise_limit
    from holdfast.io.event_loop.loop import new_event_loop
    from holdfast_federation.sidecar.federator import FederatorError
    from holdfast_federation.sidecar.process import run as run_sidecar
    from holdfast_federation.sidecar.sidecar_settings import load

    set_up_plain_logging()
    raise_limit()
    try:
        settings = load(args.config, os.environ, _overrides(args))
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run_sidecar(settings))
    except ConfigError as error:
        for line in error.problems:
            print(f"holdfast: {line}", file=sys.stderr)
        return EXIT_CONFIG
    except FederatorError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _overrides(args: argparse.Namespace) -> dict[str, object]:
    named = {**_OPTIONS, **_LISTS}
    given = {key: getattr(args, name) for name, (key, _, _) in named.items()}
    return {key: value for key, value in given.items() if value is not None}
