"""The context that all parts of a cluster node share: metadata, leaderships, links and outgoing
frames."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Final

from holdfast.cluster.frame_kinds import BadFrame
from holdfast.cluster.metadata.model import ClusterMetadata, NodePhase
from holdfast.storage.journal.journal import Journal

_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


class ClusterContext:
    """The state that all parts of a cluster node read.

    Invariant: `leading[p]` is not 0 only while this node may append to partition p in that epoch.
    `metadata` alone does not permit it. Counter-example: after a restart it is out of date, and
    names this node for an epoch that has ended.
    """

    def __init__(self, node_id: str, journal: Journal) -> None:
        self.node_id = node_id
        self.journal = journal
        self.metadata: ClusterMetadata | None = None
        self.connected: set[str] = set()
        # (node, kind, payload) in order. The driver sends them.
        self.outgoing: list[tuple[str, int, bytes | list[bytes]]] = []
        # Per partition: the epoch in which this node may append. 0: it does not lead.
        self.leading: list[int] = [0] * journal.partitions
        # Whether this node is in contact with a majority of the voters at a time, directly or
        # through their leader. Parts sets it.
        self.reaches_majority: Callable[[float], bool] = lambda now: False
        # The last time at which a check found a majority.
        self.majority_at = 0.0
        # Whether this node has the replicated state of all partitions.
        self.is_whole = True

    def has_majority(self, now: float) -> bool:
        """True if this node is in contact with a majority of the voters."""
        is_reached = self.reaches_majority(now)
        if is_reached:
            self.majority_at = now
        return is_reached

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

    def send_fields(self, node: str, kind: int, fields: Mapping[str, object]) -> None:
        """Queues a frame with a JSON object as payload."""
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        self.send(node, kind, text.encode())

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


def fields_of(payload: bytes, *names: str) -> dict[str, object]:
    """Decodes a JSON object with at least these fields. Raises BadFrame when it is malformed."""
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadFrame("no JSON object")
    for name in names:
        if name not in fields:
            raise BadFrame(f"{name} is missing")
    return fields


def text_of(fields: Mapping[str, object], name: str) -> str:
    """Returns a field that must be text. Raises BadFrame when it is not."""
    value = fields[name]
    # JSON can name half of a surrogate pair, which no bytes stand for.
    if not isinstance(value, str) or (not value.isascii() and _SURROGATE.search(value)):
        raise BadFrame(f"{name} is no text")
    return value


def number_of(fields: Mapping[str, object], name: str) -> int:
    """Returns a field that must be an integer. Raises BadFrame when it is not."""
    value = fields[name]
    if not isinstance(value, int):
        raise BadFrame(f"{name} is no number")
    return value
