"""What the parts of a member share: who it is, who leads what, who is there, and the frames that
are to leave."""

import json
from collections.abc import Callable, Mapping

from holdfast.cluster.frame_kinds import BadFrame
from holdfast.cluster.metadata.model import ClusterMetadata, NodePhase
from holdfast.storage.journal.journal import Journal


class ClusterContext:
    def __init__(self, node_id: str, journal: Journal) -> None:
        self.node_id = node_id
        self.journal = journal
        self.metadata: ClusterMetadata | None = None
        self.connected: set[str] = set()
        # (node, kind, payload), in order; the driver takes them.
        self.outgoing: list[tuple[str, int, bytes | list[bytes]]] = []
        # Per partition: the epoch under which this node may append; 0: it does not lead.
        self.leading: list[int] = [0] * journal.partitions
        # Does this node hear from a majority of the voters, directly or through their leader? At a
        # time; the member sets it.
        self.reaches_majority: Callable[[float], bool] = lambda now: False
        # When it last did, as far as it was looked at.
        self.majority_at = 0.0
        # Has this node the images of all partitions?
        self.is_whole = True

    def has_majority(self, now: float) -> bool:
        is_reached = self.reaches_majority(now)
        if is_reached:
            self.majority_at = now
        return is_reached

    def send(self, node: str, kind: int, payload: bytes) -> None:
        """Lost if there is no link; whoever needs an answer asks again when there is."""
        if node in self.connected:
            self.outgoing.append((node, kind, payload))

    def drop_frames(self, node: str) -> None:
        """Its link is lost, or replaced. A frame belongs to the link that it was made for: the
        process at the other end of the next link may be another one. Counter-example: the restarted
        process gets a REPLICATE_ACK that counts the bytes of the link before."""
        if self.outgoing:
            self.outgoing = [each for each in self.outgoing if each[0] != node]

    def send_fields(self, node: str, kind: int, fields: Mapping[str, object]) -> None:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        self.send(node, kind, text.encode())

    def leader(self, partition: int) -> str:
        """By the metadata; "" if there is none."""
        metadata = self.metadata
        return "" if metadata is None else metadata.partitions[partition].leader

    def epoch(self, partition: int) -> int:
        metadata = self.metadata
        return 0 if metadata is None else metadata.partitions[partition].epoch

    def leads(self, partition: int) -> bool:
        return self.leading[partition] > 0

    def is_gone(self, node: str) -> bool:
        """By the metadata: down, or no member."""
        metadata = self.metadata
        if metadata is None:
            return False
        info = metadata.nodes.get(node)
        return info is None or info.state == NodePhase.DOWN


def fields_of(payload: bytes, *names: str) -> dict[str, object]:
    """A JSON object with at least these fields. Raises BadFrame."""
    try:
        fields = json.loads(payload)
    except ValueError as error:
        raise BadFrame(f"no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadFrame("no JSON object")
    for name in names:
        if name not in fields:
            raise BadFrame(f"{name} is missing")
    return fields


def text_of(fields: Mapping[str, object], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise BadFrame(f"{name} is no text")
    return value


def number_of(fields: Mapping[str, object], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int):
        raise BadFrame(f"{name} is no number")
    return value
