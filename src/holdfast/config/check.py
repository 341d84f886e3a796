"""Finds problems of a broker's configuration that types and ranges do not show.

`contradictions` checks settings that do not go together. `warnings` lists settings that are allowed
but probably a mistake.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from re import fullmatch
from typing import Final

from holdfast.addresses import address_problem, is_any, is_loopback, overlap, split_address
from holdfast.config.check_identity import identity_problems
from holdfast.config.check_listener import is_network, listener_problems, listener_warnings
from holdfast.config.federation import Federation, federation_problems
from holdfast.config.problem import Problem, shown
from holdfast.config.schema import Admin, Cluster, Config
from holdfast.protocol.topics.names import InvalidFilter, check_filter

NODE_ID = r"[A-Za-z0-9_-]{1,32}"


def cluster_problems(config: Config) -> Iterator[Problem]:
    """The settings of [cluster] that contradict each other or the rest."""
    cluster = config.cluster
    yield from _number_problems(cluster)
    yield from _certificate_problems(cluster)
    yield from _port_problems(cluster)
    if not cluster.peer_bind:
        yield from _join_problems(config)
        for name in ("witness", "peer_advertise"):
            value = getattr(cluster, name)
            if value:
                yield (
                    f"cluster.{name}",
                    f" = {shown(value)}: needs cluster.peer_bind, the address on which other nodes"
                    " reach this one",
                )
        return
    yield from _peer_problems(cluster)
    yield from _member_problems(config)


def _number_problems(cluster: Cluster) -> Iterator[Problem]:
    if cluster.min_insync > cluster.replication_factor:
        yield (
            "cluster.min_insync",
            f" = {cluster.min_insync}: must be at most cluster.replication_factor"
            f" = {cluster.replication_factor}",
        )
    if cluster.suspect_s < 3 * cluster.heartbeat_s:
        yield (
            "cluster.suspect_s",
            f" = {cluster.suspect_s}: must be at least three times cluster.heartbeat_s"
            f" = {cluster.heartbeat_s}",
        )
    if cluster.replace_after_s < cluster.suspect_s:
        yield (
            "cluster.replace_after_s",
            f" = {cluster.replace_after_s}: must be at least cluster.suspect_s"
            f" = {cluster.suspect_s}",
        )


def _certificate_problems(cluster: Cluster) -> Iterator[Problem]:
    names = ("certificate", "key", "ca")
    missing = [name for name in names if not getattr(cluster, name)]
    if missing and len(missing) < len(names):
        given = next(name for name in names if getattr(cluster, name))
        yield (
            f"cluster.{given}",
            f" = {shown(getattr(cluster, given))}: needs cluster.{' and cluster.'.join(missing)}"
            " too: both ends of a link show a certificate and check the other's",
        )


def _port_problems(cluster: Cluster) -> Iterator[Problem]:
    addresses = [(f"join[{index}]", one) for index, one in enumerate(cluster.join)]
    for name, address in [*addresses, ("peer_advertise", cluster.peer_advertise)]:
        if address and not 1 <= split_address(address)[1] <= 65535:
            yield f"cluster.{name}", f" = {shown(address)}: the port must be from 1 to 65535"


def _join_problems(config: Config) -> Iterator[Problem]:
    """The problems of a node that finds its own address by those that it joins."""
    cluster = config.cluster
    if not cluster.join:
        return
    is_near = all(is_loopback(split_address(each)[0]) for each in cluster.join)
    if not is_near and not cluster.secret_file and not cluster.ca:
        yield (
            "cluster.join",
            f" = {shown(cluster.join)}: other machines reach this node: set cluster.secret_file, or"
            " cluster.certificate, key and ca",
        )
    yield from _member_problems(config)


def _peer_problems(cluster: Cluster) -> Iterator[Problem]:
    bind = cluster.peer_bind
    text = address_problem(bind)
    if text:
        yield "cluster.peer_bind", f" = {shown(bind)}: {text}"
    if is_any(bind) and not cluster.peer_advertise:
        yield (
            "cluster.peer_bind",
            f" = {shown(bind)}: stands for all addresses: set cluster.peer_advertise to the"
            " host:port at which the other nodes reach this one",
        )
    if not is_loopback(bind) and not cluster.secret_file and not cluster.ca:
        yield (
            "cluster.peer_bind",
            f" = {shown(bind)}: other machines reach it: set cluster.secret_file, or"
            " cluster.certificate, key and ca",
        )


def _member_problems(config: Config) -> Iterator[Problem]:
    cluster = config.cluster
    if not fullmatch(NODE_ID, config.node.id):
        yield (
            "node.id",
            f" = {shown(config.node.id)}: in a cluster (cluster.peer_bind) it must be 1 to 32 of"
            " A-Z a-z 0-9 _ -",
        )
    if config.node.standby:
        yield (
            "node.standby",
            " = true: the nodes of a cluster (cluster.peer_bind, join) share no data directory:"
            " choose one of the two",
        )
    others = [address for address in cluster.join if address != cluster.peer_address()]
    if cluster.witness and not others:
        yield "cluster.witness", " = true: needs cluster.join, the nodes it votes with"
    elif cluster.role != "data" and not others:
        yield "cluster.role", f" = {shown(cluster.role)}: needs cluster.join, the other nodes"
    if cluster.witness and cluster.role == "gateway":
        yield "cluster.witness", " = true: a gateway votes on nothing: choose one of the two"


def federation_contradictions(config: Config) -> Iterator[Problem]:
    """The settings of [federation] that contradict each other or the broker's."""
    federation = config.federation
    if federation is None:
        return
    yield from federation_problems(federation)
    if federation.data != Federation().data:
        yield (
            "federation.data",
            f" = {shown(federation.data)}: a broker keeps what belongs to the federation in its"
            " data directory (node.data): leave it out",
        )


PROCESSES_MAX: Final = 64
ID_CHARACTERS_MAX: Final = 29
"""The most characters of the name of a node whose other processes have it with their number."""
PORT_KEYS: Final = {"cluster": "cluster.peer_port", "federation": "federation.listen"}
"""The keys of addresses whose port is not in `port`, by owner."""


def contradictions(config: Config) -> Iterator[Problem]:
    """Settings that are valid on their own but not together."""
    if not config.listeners:
        yield "listeners", " = []: must have at least one listener"
    for index, listener in enumerate(config.listeners):
        for name, text in listener_problems(listener, config):
            yield f"listeners[{index}].{name}", text
    yield from _address_problems(config)
    for index, filter in enumerate(config.log.qos0):
        text = _filter_problem(filter)
        if text:
            yield f"log.qos0[{index}]", f" = {shown(filter)}: {text}"
    retained = config.log.retention.bytes
    if 0 < retained < config.log.segment_bytes:
        yield (
            "log.retention.bytes",
            f" = {retained}: must be 0 (no limit) or at least log.segment_bytes"
            f" = {config.log.segment_bytes}, for only whole segments are deleted",
        )
    store = ["obstore"] if "://" in config.log.lake else []
    if config.log.lake and not _has("numpy", "pyarrow", *store):
        yield (
            "log.lake",
            f" = {shown(config.log.lake)}: needs packages that read a lake:"
            " pip install 'holdfast[spark]'",
        )
    if config.tracing.enabled and not has_otel():
        yield "tracing.enabled", " = true: needs OpenTelemetry: pip install 'holdfast[otel]'"
    yield from identity_problems(config.security)
    yield from _lease_problems(config)
    yield from _process_problems(config)
    yield from cluster_problems(config)
    yield from federation_contradictions(config)


def has_otel() -> bool:
    """Whether the packages of the extra `otel` are installed."""
    return _has("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


def _has(*names: str) -> bool:
    """Whether modules are installed. None of them is imported."""
    try:
        return all(find_spec(name) is not None for name in names)
    except ModuleNotFoundError:
        return False


def _lease_problems(config: Config) -> Iterator[Problem]:
    lease = config.lease
    if lease.heartbeat_s > lease.timeout_s / 4:
        yield (
            "lease.heartbeat_s",
            f" = {lease.heartbeat_s}: must be at most a quarter of lease.timeout_s"
            f" = {lease.timeout_s}",
        )
    if config.node.standby and config.log.durability == "memory":
        yield (
            "log.durability",
            ' = "memory": a shared data directory (node.standby) keeps only what is in its files:'
            ' must be "fsync"',
        )


def _process_problems(config: Config) -> Iterator[Problem]:
    """The settings that several processes of one data directory cannot have."""
    processes = config.server.processes
    if processes == 1:
        return
    others = (
        (config.node.standby, "node.standby: a shared data directory has one process"),
        (config.federation is not None, "[federation]: it needs one process"),
        (
            bool(config.cluster.peer_bind or config.cluster.join),
            "cluster.peer_bind and join: the processes of one machine are a cluster of their own",
        ),
        (
            config.admin.enabled and not 0 < config.admin.port <= 65535 - PROCESSES_MAX,
            "this admin.port: the processes have the ports from there on, one each",
        ),
    )
    for is_set, text in others:
        if is_set:
            yield "server.processes", f" = {shown(processes)}: cannot go with {text}"
    if not fullmatch(NODE_ID, config.node.id) or len(config.node.id) > ID_CHARACTERS_MAX:
        yield (
            "node.id",
            f" = {shown(config.node.id)}: with several processes it must be 1 to"
            f" {ID_CHARACTERS_MAX} of A-Z a-z 0-9 _ -",
        )


def _address_problems(config: Config) -> Iterator[Problem]:
    taken: list[tuple[str, str, int]] = []
    wanted = [
        (f"listeners[{index}]", one.bind, one.port)
        for index, one in enumerate(config.listeners)
        if not one.socket
    ]
    yield from _path_problems(config)
    if config.admin.enabled:
        wanted.append(("admin", config.admin.bind, config.admin.port))
        yield from _admin_problems(config.admin)
        text = address_problem(config.admin.bind)
        if text:
            yield "admin.bind", f" = {shown(config.admin.bind)}: {text}"
    if config.cluster.peer_bind:
        wanted.append(("cluster", config.cluster.peer_bind, config.cluster.peer_port))
    if config.federation is not None and config.federation.listen:
        wanted.append(("federation", *split_address(config.federation.listen)))
    for owner, bind, port in wanted:
        for other, other_bind, other_port in taken:
            if port and port == other_port and overlap(bind, other_bind):
                yield (
                    PORT_KEYS.get(owner, f"{owner}.port"),
                    f" = {port}: {other} already listens there; each needs its own address",
                )
                break
        taken.append((owner, bind, port))


def _path_problems(config: Config) -> Iterator[Problem]:
    taken: dict[str, int] = {}
    for index, listener in enumerate(config.listeners):
        if listener.socket:
            other = taken.setdefault(listener.socket, index)
            if other != index:
                text = f" = {shown(listener.socket)}: listeners[{other}] already listens there"
                yield f"listeners[{index}].socket", text


def _admin_problems(admin: Admin) -> Iterator[Problem]:
    if admin.key and not admin.certificate:
        yield "admin.key", f" = {shown(admin.key)}: needs a certificate beside it"
    if admin.certificate and not admin.key:
        yield "admin.certificate", f" = {shown(admin.certificate)}: needs a key beside it"
    if admin.advertise:
        host, port = split_address(admin.advertise)
        if is_any(host) or not 1 <= port <= 65_535:
            yield (
                "admin.advertise",
                f" = {shown(admin.advertise)}: give the host:port at which other machines reach the"
                " admin port",
            )
    for index, name in enumerate(admin.proxies):
        if not is_network(name):
            text = "must be an address or a network, as 10.0.0.0/8"
            yield f"admin.proxies[{index}]", f" = {shown(name)}: {text}"


def _filter_problem(filter: str) -> str:
    if filter.startswith("$share/"):
        return "must be a plain topic filter, not a shared one"
    try:
        check_filter(filter)
    except InvalidFilter as error:
        return f"not a topic filter: {error}"
    return ""


def warnings(config: Config) -> list[str]:
    """Settings that are allowed, but probably a mistake; for the log at start."""
    found = listener_warnings(config)
    if config.log.memory_flush_ms is not None:
        found.append(
            "log.memory_flush_ms: has no effect any more, records are written at once: remove it"
        )
    cluster = config.cluster
    if cluster.peer_bind and not cluster.secret_file and not cluster.ca:
        found.append(
            "cluster.secret_file: not set, and no certificates either: whatever program on this"
            " machine may take part in the cluster"
        )
    admin = config.admin
    if admin.enabled and not is_loopback(admin.bind):
        key = f"admin.bind = {shown(admin.bind)}"
        if not admin.access_file and not os.path.exists(f"{config.node.data}/access.json"):
            found.append(
                f"{key}: other machines need a token of `holdfast access`, which the port reads"
                " from node.data or admin.access_file"
            )
        if not admin.certificate:
            found.append(f"{key}: without admin.certificate, tokens and passwords travel in clear")
    return found
