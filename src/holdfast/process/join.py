"""A node that is started with `--join` alone: its address, its name and its number of partitions.

The cluster exists, so the node asks it for the number of partitions before it creates a data
directory. A start that cannot succeed leaves nothing behind.
"""

import asyncio
import logging
import socket
from hashlib import blake2b
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from holdfast.addresses import is_loopback, split_address
from holdfast.config.schema import Cluster, Config, Node
from holdfast.io.disk.storage import StorageError
from holdfast.io.peers.authentication import PeerAuth
from holdfast.io.peers.inquiry import ask_identity
from holdfast.process.place import manifest_of
from holdfast.security.peer_identity import PeerIdentity, Refusal

logger = logging.getLogger("holdfast")

ASK_AGAIN_S: Final = 0.5
"""The pause in seconds between two rounds of questions."""
PORTS_TRIED: Final = 32
"""The ports that are tried on a machine that has more than one node, from the default on."""
FINAL: Final = frozenset({"secret", "secret_there", "tls", "magic", "version"})
"""The refusals that no later attempt can change."""


def joins(config: Config) -> bool:
    """Whether the node is to join a cluster without further settings."""
    return bool(config.cluster.join) and not config.cluster.peer_bind


async def with_cluster(config: Config) -> Config:
    """The configuration of a node that joins, with everything that it was not told. It waits until
    a node of the cluster replies. Raises `StorageError` if the node cannot join."""
    data, cluster = Path(config.node.data), config.cluster
    manifest = manifest_of(data)
    node_id = config.node.id
    if manifest is None and node_id == Node().id:
        node_id = _new_name(data)
    try:
        auth = PeerAuth.load(cluster)
    except (ValueError, OSError) as error:
        raise StorageError(str(error)) from error
    own = PeerIdentity(node_id, "0", "" if manifest is None else manifest.cluster_id)
    partitions = cluster.partitions
    if manifest is None or not manifest.cluster_id:
        peer = await _first_of_cluster(cluster, own, auth)
        if peer.partitions:
            if partitions not in (int(peer.partitions), Cluster().partitions):
                raise StorageError(
                    f"cluster.partitions = {partitions}: the cluster has {peer.partitions}"
                )
            partitions = int(peer.partitions)
        if manifest is not None and manifest.partitions != partitions:
            raise StorageError(
                f"{data} has {manifest.partitions} partitions, and the cluster {partitions}: give"
                " an empty or new data directory"
            )
    else:
        await _check_cluster(cluster, own, auth, data)
    host, port = await asyncio.to_thread(_own_address, cluster)
    logger.info("joining node=%s peer_bind=%s:%d partitions=%d", node_id, host, port, partitions)
    return replace(
        config,
        node=replace(config.node, id=node_id),
        cluster=replace(cluster, peer_bind=host, peer_port=port, partitions=partitions),
    )


async def _first_of_cluster(cluster: Cluster, own: PeerIdentity, auth: PeerAuth) -> PeerIdentity:
    """The identity of the first node of a cluster that replies."""
    shown: list[str] = []
    while True:
        problems = []
        for address in cluster.join:
            try:
                peer = await ask_identity(address, own, auth)
            except Refusal as refusal:
                text = f"{address} {refusal.text}"
                if refusal.reason in FINAL:
                    raise StorageError(f"cluster.join: {text}") from None
                problems.append(text)
                continue
            _check_name(peer, own, address)
            if peer.cluster_id:
                return peer
            problems.append(f"{address} belongs to no cluster yet")
        if problems != shown:
            logger.info("joining_waits text=%r", "; ".join(problems))
            shown = problems
        await asyncio.sleep(ASK_AGAIN_S)


async def _check_cluster(cluster: Cluster, own: PeerIdentity, auth: PeerAuth, data: Path) -> None:
    """Checks that the data directory is not of another cluster. A node that does not reply says
    nothing about that."""
    for address in cluster.join:
        try:
            peer = await ask_identity(address, own, auth)
        except Refusal:
            continue
        _check_name(peer, own, address)
        if peer.cluster_id and peer.cluster_id != own.cluster_id:
            raise StorageError(
                f"{data} belongs to the cluster {own.cluster_id}, and {address} to"
                f" {peer.cluster_id}: give an empty or new data directory"
            )


def _check_name(peer: PeerIdentity, own: PeerIdentity, address: str) -> None:
    if peer.node_id == own.node_id:
        raise StorageError(f"the node at {address} is {peer.node_id}, too: set node.id (--node-id)")


def _own_address(cluster: Cluster) -> tuple[str, int]:
    """The address of this machine at which the nodes of `join` reach it. Raises `StorageError`."""
    problem = ""
    for address in cluster.join:
        host, port = split_address(address)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            with socket.socket(found[0][0], socket.SOCK_DGRAM) as one:
                # Nothing is sent: the system only chooses the route.
                one.connect(found[0][4])
                own = str(one.getsockname()[0])
        except OSError as error:
            problem = f"{address}: {error.strerror or error}"
            continue
        if cluster.peer_port == Cluster().peer_port and is_loopback(own):
            return own, _free_port(own, cluster.peer_port)
        return own, cluster.peer_port
    raise StorageError(f"cluster.join: {problem}: set cluster.peer_bind (--peer-bind)")


def _free_port(host: str, first: int) -> int:
    """The first free port. Several nodes of one machine have one each."""
    for port in range(first, first + PORTS_TRIED):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind((host, port))
            except OSError:
                continue
            return port
    raise StorageError(f"no port from {first} on is free: set cluster.peer_bind (--peer-bind)")


def _new_name(data: Path) -> str:
    """A name that no other node has: that of the first node is the default."""
    place = f"{socket.gethostname()} {data.absolute()}".encode()
    return "n-" + blake2b(place, digest_size=3).hexdigest()
