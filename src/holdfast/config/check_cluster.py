"""Finds settings of [cluster] that contradict each other or the rest."""

from collections.abc import Iterator
from re import fullmatch

from holdfast.addresses import address_problem, is_any, is_loopback, split_address
from holdfast.config.problem import Problem, shown
from holdfast.config.schema import Cluster, Config

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
