"""`holdfast serve`: run a broker until SIGTERM or SIGINT."""

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.addresses import split_address
from holdfast.config.explain import Setting, settings_of
from holdfast.config.load import load
from holdfast.config.problem import ConfigError
from holdfast.config.schema import Config

if TYPE_CHECKING:
    from holdfast.process.place import ProcessPlace

LOADED = ("holdfast.process.server", "holdfast.cli.logs", "holdfast.io.event_loop.loop")
"""The modules that a supervisor loads for its processes: most of the time of a start."""
EXIT_CONFIG = 2
EXIT_FAILED = 1


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run a broker",
        description="Run a broker. Without configuration it listens on loopback only.",
    )
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="TOML configuration")
    parser.add_argument("-p", "--port", type=int, help="MQTT port (default 1883)")
    parser.add_argument("--bind", metavar="ADDR", help="address to listen on (default 127.0.0.1)")
    parser.add_argument(
        "--admin", metavar="ADDR:PORT", help="admin address (default 127.0.0.1:18083), or off"
    )
    parser.add_argument("--data", metavar="DIR", help="data directory (default ./holdfast-data)")
    parser.add_argument(
        "--node-id", "--id", dest="id", metavar="NAME", help="name of this node (default n1)"
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="share the data directory with other nodes and serve while holding its lease",
    )
    _add_cluster_options(parser)
    parser.add_argument(
        "--durability",
        choices=("fsync", "memory"),
        help="what an acknowledgement waits for (default fsync)",
    )
    text = "store messages of QoS 0 on these topics, too (log.qos0); may be given again"
    parser.add_argument("--log-qos0", action="append", metavar="FILTER", help=text)
    parser.add_argument(
        "--processes",
        metavar="N",
        help="nodes of this machine, or auto for as many as it has cores (default 1)",
    )
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="check the configuration with all its files, and exit",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log at debug level")
    parser.set_defaults(run=run)


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer-bind",
        metavar="ADDR:PORT",
        help="be a node of a cluster, with this address for the other nodes",
    )
    parser.add_argument(
        "--join",
        metavar="ADDR:PORT,...",
        help="other nodes of the cluster; this one may be among them",
    )
    parser.add_argument(
        "--role",
        choices=("data", "witness", "gateway"),
        help="store messages (data), vote only (witness), or serve clients only (gateway)",
    )
    parser.add_argument(
        "--zone", help="what fails together with this node; replicas are in different zones"
    )
    parser.add_argument(
        "--witness", action="store_const", dest="role", const="witness", help="--role witness"
    )
    parser.add_argument(
        "--cluster-secret-file",
        metavar="FILE",
        help="secret of 32 characters or more that all nodes of the cluster share",
    )


def _overrides(args: argparse.Namespace) -> dict[str, object]:
    overrides: dict[str, object] = {}
    if args.port is not None:
        overrides["listeners.0.port"] = args.port
    if args.bind is not None:
        overrides["listeners.0.bind"] = args.bind
    if args.data is not None:
        overrides["node.data"] = args.data
    if args.id is not None:
        overrides["node.id"] = args.id
    if args.standby:
        overrides["node.standby"] = True
    if args.durability is not None:
        overrides["log.durability"] = args.durability
    if args.log_qos0 is not None:
        overrides["log.qos0"] = args.log_qos0
    if args.processes is not None:
        overrides["server.processes"] = _number_or_auto("--processes", args.processes)
    if args.verbose:
        overrides["logging.level"] = "debug"
    if args.admin == "off":
        overrides["admin.enabled"] = False
    elif args.admin is not None:
        bind, port = _address("--admin", args.admin, "ADDR:PORT, or off")
        overrides["admin.bind"] = bind
        overrides["admin.port"] = port
    return overrides | _cluster_overrides(args)


def _cluster_overrides(args: argparse.Namespace) -> dict[str, object]:
    overrides: dict[str, object] = {}
    if args.peer_bind is not None:
        bind, port = _address("--peer-bind", args.peer_bind, "ADDR:PORT")
        overrides["cluster.peer_bind"] = bind
        overrides["cluster.peer_port"] = port
    if args.join is not None:
        addresses = [address.strip() for address in args.join.split(",")]
        overrides["cluster.join"] = [address for address in addresses if address]
    if args.role is not None:
        overrides["cluster.role"] = args.role
    if args.zone is not None:
        overrides["cluster.zone"] = args.zone
    if args.cluster_secret_file is not None:
        overrides["cluster.secret_file"] = args.cluster_secret_file
    return overrides


def _number_or_auto(option: str, text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r}: give a number, or auto") from None


def _address(option: str, text: str, form: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r}: give {form}") from None


def run(args: argparse.Namespace) -> int:
    if not __debug__:
        print("holdfast: python -O removes the checks of invariants: omit -O", file=sys.stderr)
        return EXIT_CONFIG

    from holdfast.io.sockets.bound_sockets import INHERITED
    from holdfast.process.place import is_supervised

    def read() -> Config:
        config = load(args.config, os.environ, _overrides(args))
        return config if place is None else place.applied(config)

    place: ProcessPlace | None = None
    config = _checked(read)
    if config is None:
        return EXIT_CONFIG
    if args.check_config:
        from holdfast.cli.config import check_files

        return check_files(config)
    if is_supervised(config):
        found = _supervise(config)
        if isinstance(found, int):
            return found
        place = found
        INHERITED.update(place.unix)
        config = _checked(read)
        if config is None:
            return EXIT_CONFIG
    explain = partial(settings_of, args.config, os.environ, _overrides(args))
    return serve(config, read, explain, place)


def _checked(read: Callable[[], Config]) -> Config | None:
    """The configuration. None: it was reported to be wrong."""
    try:
        return read()
    except ConfigError as error:
        for problem in error.problems:
            print(f"holdfast: {problem}", file=sys.stderr)
        return None


def _supervise(config: Config) -> "int | ProcessPlace":
    """Runs as a supervisor. Returns its exit code, or in each of its processes the place."""
    from holdfast.cli.logs import set_up_logging
    from holdfast.process.supervisor import Supervisor, SupervisorError

    set_up_logging(config.logging.level, config.logging.format, config.node.id)
    for name in LOADED:
        import_module(name)
    with suppress(ImportError):
        import_module("uvloop")
    gc.collect()
    # The collector of a process would write to the pages that it shares with the others.
    gc.freeze()
    try:
        return Supervisor(config).run()
    except SupervisorError as error:
        text = str(error)
    except OSError as error:
        text = error.strerror or str(error)
        if error.filename is not None:
            text = f"{error.filename}: {text}"
    logging.getLogger("holdfast").critical("start_failed error=%r", text)
    return EXIT_FAILED


def serve(
    config: Config,
    read: Callable[[], Config],
    explain: Callable[[], list[Setting]] | None = None,
    place: "ProcessPlace | None" = None,
) -> int:
    """Serves with a loaded configuration, and returns the exit code.

    `read` loads it again, for a reload; `explain` has its settings with their origin. `place`: that
    of one of several processes. A node that
    lost or handed over the lease starts again in this process, as a standby.
    """
    from holdfast.cli.logs import set_up_logging
    from holdfast.io.event_loop.loop import new_event_loop
    from holdfast.log.files.layout import MANIFEST
    from holdfast.process.place import EXIT_AGAIN
    from holdfast.process.server import STAND_BY_AGAIN, START_ANEW

    process = "" if place is None else str(place.index)
    set_up_logging(config.logging.level, config.logging.format, config.node.id, process)
    _claim_descriptors(config)
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        code = loop.run_until_complete(_serve(config, read, explain, place))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    if code == STAND_BY_AGAIN and not (Path(config.node.data) / MANIFEST).exists():
        # A new process would create an empty directory and serve it.
        text = "data_directory_gone directory=%r text='the data directory is gone: is it mounted?'"
        logging.getLogger("holdfast").critical(text, config.node.data)
        return EXIT_FAILED
    if code == START_ANEW and place is not None:
        return EXIT_AGAIN
    if code in (STAND_BY_AGAIN, START_ANEW):
        # execv keeps the process id and replaces everything else: threads that wait for the disk
        # and the sockets of clients end with the old image.
        logging.shutdown()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return code


def _claim_descriptors(config: Config) -> None:
    from holdfast.io.event_loop import descriptors

    descriptors.watch_files()
    limit = descriptors.raise_limit()
    clients = descriptors.for_clients()
    logger = logging.getLogger("holdfast")
    wanted = config.limits.connections
    logger.info("descriptors limit=%d clients=%d", limit, min(clients, wanted or clients))
    if wanted > clients:
        logger.warning(
            "descriptors_too_few connections=%d limit=%d clients=%d text='limits.connections is"
            " larger: raise the hard limit (ulimit -Hn, LimitNOFILE)'",
            config.limits.connections,
            limit,
            clients,
        )


async def _serve(
    config: Config,
    read: Callable[[], Config],
    explain: Callable[[], list[Setting]] | None,
    place: "ProcessPlace | None",
) -> int:
    from holdfast.config.check import warnings
    from holdfast.io.event_loop.loop import COLLECTOR, handle_signals
    from holdfast.process.place import IGNORED, RELOAD, STOP
    from holdfast.process.server import Server, StartError

    for warning in warnings(config):
        logging.getLogger("holdfast").warning("configuration text=%r", warning)
    server = Server(config, read, place)
    server.explain = explain
    loop = asyncio.get_running_loop()
    if place is None:
        handle_signals(loop, server.request_stop, server.request_reload)
    else:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        loop.add_signal_handler(STOP, server.request_stop)
        loop.add_signal_handler(RELOAD, server.request_reload)
    try:
        await server.start()
        COLLECTOR.start()
        return await server.run()
    except StartError as error:
        logging.getLogger("holdfast").critical("start_failed error=%r", str(error))
        await server.stop()
        return EXIT_FAILED
