"""Shares metadata, leaderships, links and outgoing frames among the parts of a cluster node."""

from collections.abc import Callable, Container, Iterable
from typing import Final

from msgspec import Struct

from holdfast.log.journal.journal import Journal
from holdfast.node.frames import encode_frame
from holdfast.node.metadata.model import DATA, ClusterMetadata, NodePhase
from holdfast.security.peer_identity import features_in

NEVER: Final = float("inf")
"""The time of a timer that is not armed."""
UNAVAILABLE_S: Final = 2.0
"""The time in seconds without a majority after which a node refuses messages of QoS 1 and 2."""


class ClusterContext:
    """The state that all parts of a cluster node read.

    Invariant: `leading[p]` is not 0 only while this node may append to partition p in that epoch.
    `metadata` alone does not permit it. Counter-example: after a restart it is out of date, and
    names this node for an epoch that has ended.
    """

    def __init__(self, node_id: str, journal: Journal, role: str = DATA) -> None:
        self.node_id = node_id
        self.journal = journal
        self.metadata: ClusterMetadata | None = None
        self.connected: set[str] = set()
        # The features of each other node when it was connected last.
        self.features: dict[str, str] = {}
        # (node, kind, payload) in order. The driver sends them.
        self.outgoing: list[tuple[str, int, bytes | list[bytes]]] = []
        # Per partition: the epoch in which this node may append. 0: it does not lead.
        self.leading: list[int] = [0] * journal.partitions
        # Those of the led partitions with a replica in sync that has not followed in this epoch.
        # It may have records that this node lacks, and lead next.
        self.uncompared: set[int] = set()
        # Whether this node is in contact with a majority of the voters at a time, directly or
        # through their leader. Parts sets it.
        self.reaches_majority: Callable[[float], bool] = lambda now: False
        # The last time at which a check found a majority.
        self.majority_at = 0.0
        # Whether this node commits alone, as the only node of its cluster: see `alone`.
        self.is_alone = False
        # Per partition, the end of the log when this process began. An earlier process sent nothing
        # from there on. None: the cluster has had another node since, which may have sent more.
        self.began_at: list[int] | None = list(journal.next_offset)
        # Whether this node has the replicated state of all partitions.
        self.is_whole = True
        # Whether this node may store partitions.
        self.has_data = role == DATA
        # The partitions whose records are fed to this node, those included whose log is copied.
        self.unstored: set[int] = set() if self.has_data else set(range(journal.partitions))
        # Those of them whose log is copied.
        self.copied: Container[int] = ()
        # Those of them whose log is still here: it is forgotten once the leader feeds this node.
        self.leaving: set[int] = set()

    def has_majority(self, now: float) -> bool:
        """True if this node is in contact with a majority of the voters."""
        is_reached = self.reaches_majority(now)
        if is_reached:
            self.majority_at = now
        return is_reached

    def is_available(self, now: float) -> bool:
        """False once this node has been without a majority for UNAVAILABLE_S. An election is
        shorter, and no node has contact with a majority in it."""
        return now <= self.majority_at + UNAVAILABLE_S or self.has_majority(now)

    def is_stored(self, partition: int) -> bool:
        """True if this node's disk has the records of the partition. Otherwise its leader feeds
        this node, and other records are read at a node that has them."""
        return partition not in self.unstored

    def may_follow(self, partition: int) -> bool:
        """True if the log of the partition here grows, or may."""
        if partition in self.unstored:
            return partition in self.copied and partition not in self.leaving
        return True

    @property
    def generation(self) -> int:
        """The generation of the log, as far as this node has received it."""
        agreed = None if self.metadata is None else self.metadata.generation
        return 0 if agreed is None else agreed.number

    def nodes_without(self, feature: str, *, witnesses: bool = False) -> list[str]:
        """The nodes with clients, or all nodes, whose version lacks a feature. One that was not
        connected since this node started is not known."""
        nodes = {} if self.metadata is None else self.metadata.nodes
        return [
            name
            for name, features in sorted(self.features.items())
            if name in nodes
            and (witnesses or nodes[name].has_clients)
            and feature not in features_in(features)
        ]

    def nodes_unknown(self) -> list[str]:
        """The nodes that were not connected since this node started."""
        nodes = {} if self.metadata is None else self.metadata.nodes
        return sorted(nodes.keys() - self.features.keys() - {self.node_id})

    def understands(self, node: str, feature: str) -> bool:
        """True if the version of a node, this one included, has a feature."""
        return node == self.node_id or feature in features_in(self.features.get(node, ""))

    def nodes_ahead(self, partition: int) -> list[str]:
        """Returns the connected replicas in sync if these commit records without this node."""
        if self.metadata is None:
            return []
        in_sync = self.metadata.partitions[partition].in_sync
        if self.node_id in in_sync or len(in_sync) < self.metadata.min_insync:
            return []
        return [node for node in in_sync if node in self.connected]

    def servers(self, nodes: Iterable[str]) -> str:
        """Returns the client addresses of the other nodes among these that are up, in
        the form of `holdfast.addresses` and in the given order."""
        known = {} if self.metadata is None else self.metadata.nodes
        infos = [known[node] for node in nodes if node in known and node != self.node_id]
        return ",".join(
            info.client_address
            for info in infos
            if info.state == NodePhase.UP and info.has_clients and info.client_address
        )

    def send(self, node: str, kind: int, payload: bytes) -> None:
        """Queues a frame, or drops it if there is no link. A sender that needs a reply repeats its
        request."""
        if node in self.connected:
            self.outgoing.append((node, kind, payload))

    def drop_frames(self, node: str) -> None:
        """Drops the frames for a node whose link is lost or replaced.

        A frame belongs to the link that it was made for, because another process may be at the
        other end of the next link. Counter-example: the restarted process receives a REPLICATE_ACK
        that counts the bytes of the previous link.
        """
        if self.outgoing:
            self.outgoing = [each for each in self.outgoing if each[0] != node]

    def send_frame(self, node: str, kind: int, frame: Struct) -> None:
        """Queues a frame of `frames`."""
        self.send(node, kind, encode_frame(frame))

    def leader(self, partition: int) -> str:
        """Returns the partition's leader by the metadata, or "" if it has none."""
        metadata = self.metadata
        return "" if metadata is None else metadata.partitions[partition].leader

    def epoch(self, partition: int) -> int:
        """Returns the epoch of the partition's leader by the metadata."""
        metadata = self.metadata
        return 0 if metadata is None else metadata.partitions[partition].epoch

    def leads(self, partition: int) -> bool:
        """True if this node may append to the partition."""
        return self.leading[partition] > 0

    def is_gone(self, node: str) -> bool:
        """True if the metadata has the node as down, or does not contain it."""
        metadata = self.metadata
        if metadata is None:
            return False
        info = metadata.nodes.get(node)
        return info is None or info.state == NodePhase.DOWN
