"""The links of a process, as `io.peers.links` has them: what leaves, and which handshakes come
to nothing. `network` says what arrives."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.node.replicate.disk_position import Known
from holdfast.node.runtime.relayed_links import DATA, FORWARDED, HEAD_BYTES
from holdfast.security.peer_handshake import OLDER_COPY, OLDER_COPY_WAITS
from holdfast.security.peer_identity import STANDS_APART, PeerIdentity, Refusal

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.process import Process


class SimLinks:
    """A `LinkPort`."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self.pending: dict[str, int] = {}
        """The unsent bytes of links that a test makes busy."""

    def send(self, node_id: str, kind: int, payload: bytes | Sequence[bytes]) -> bool:
        link = self._process.links.get(node_id)
        if link is None:
            return False
        data = payload if isinstance(payload, bytes) else b"".join(payload)
        link.push(node_id, (kind, data))
        return True

    def flush(self) -> None:
        """Everything has left already."""

    def pending_bytes(self, node_id: str) -> int:
        return self.pending.get(node_id, 0)

    def close(self, node_id: str, text: str) -> None:
        if node_id in self._process.links:
            self._process.close(node_id)

    def review(self) -> None:
        hosts = self._process.host.world.hosts
        for other in list(self._process.links):
            if self._objection(hosts[other], {}) is not None:
                self._process.close(other)

    def isolate(self, text: str) -> None:
        for other in list(self._process.links):
            self._process.close(other)

    def shuns(self, other: "Host") -> bool:
        """The handshake with this node comes to nothing; the other one hears why."""
        process = self._process
        peer = other.process
        if peer is None:
            return False
        metadata = process.cluster_node.context.metadata
        if metadata is not None and other.was_removed(metadata):
            other.post(peer.runtime.report_removed)
            return True
        if process.is_isolated:
            return True
        refusal = self._objection(other, process.cluster_node.disk_memory.positions)
        if refusal is None:
            return peer.is_isolated
        process.schedule.note(other.name, f"is refused by {process.host.name}: {refusal}")
        if refusal.reason in (OLDER_COPY, OLDER_COPY_WAITS):
            text, may_begin = refusal.text, refusal.reason == OLDER_COPY
            other.post(lambda: peer.runtime.report_older_copy(text, may_begin))
        return True

    def _objection(self, other: "Host", known: Known) -> Refusal | None:
        peer = other.process
        if peer is None:
            return None
        return self._process.peers.objection(identity_of(other.name, peer), known)


def relayed_kind(data: bytes) -> int:
    """The kind of the frame in a RELAYED of the link's end; 0: it contains none."""
    is_data = data[:1] == bytes([DATA | FORWARDED])
    return data[HEAD_BYTES + data[HEAD_BYTES - 1]] if is_data else 0


def identity_of(name: str, process: "Process") -> PeerIdentity:
    """The description of a node in the handshake."""
    presence = process.presence
    return PeerIdentity(
        name,
        process.cores.incarnation,
        role=process.role,
        peer_address=presence.peer_address,
        client_address=presence.client_address,
        process=str(process.number),
        features=f"{presence.features}{f',{STANDS_APART}' * process.is_isolated}",
        disk=process.peers.own_disk(),
        zone=presence.zone,
    )
