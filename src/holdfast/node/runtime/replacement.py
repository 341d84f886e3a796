"""Decides when a cluster node's damaged data directory is set aside.

The directory is set aside as soon as the node is in sync nowhere and its vote is not needed, so the
others have everything.
"""

from holdfast.node.metadata.model import ClusterMetadata, NodePhase
from holdfast.node.node_state import NodeState


class Replacement:
    """Decides once whether the damaged directory is set aside."""

    def __init__(self, node_id: str, state: NodeState, aside: str) -> None:
        self._node_id = node_id
        self._state = state
        self.aside = aside
        """The directory that was set aside before and is still needed, or ""."""
        self.kept: list[str] = []
        """The directories with records that the others went on without."""
        # Set when the directory was marked, or when replacement is impossible.
        self._is_decided = False
        self._is_waiting = False

    def note_kept(self, names: list[str]) -> None:
        """Notes the directories that `kept` has now."""
        self.kept = names

    def step(self, metadata: ClusterMetadata | None, is_dispensable: bool) -> bool:
        """Decides about a damaged or diverged directory; returns True once, if it is to be set
        aside. `is_dispensable`: see `ClusterNode`."""
        if self._is_decided:
            return False
        if self.aside:
            self._is_decided = True
            text = (
                f"what was damaged before is in {self.aside}, and this node has not got everything"
                " since: replace the disk, start with an empty directory"
            )
            self._state.note("critical", "disk_damages_again", {"text": text})
            return False
        if not is_dispensable:
            self._note_last_copies(metadata)
            return False
        self._is_decided = True
        return True

    def has_everything(self, metadata: ClusterMetadata | None) -> bool:
        """Whether the node is in sync wherever it is a replica, so that `aside` is not needed."""
        partitions = metadata.partitions if metadata is not None else ()
        held = [info for info in partitions if self._node_id in info.replicas]
        return bool(held) and all(self._node_id in info.in_sync for info in held)

    def _note_last_copies(self, metadata: ClusterMetadata | None) -> None:
        info = metadata.nodes.get(self._node_id) if metadata is not None else None
        if self._is_waiting or metadata is None or info is None or info.state != NodePhase.DOWN:
            return
        partitions = [
            number for number, one in enumerate(metadata.partitions) if self._node_id in one.in_sync
        ]
        if not partitions:
            # The node's vote alone is still needed.
            return
        self._is_waiting = True
        text = (
            "they wait until another node that was in sync is back; to go on without what only this"
            " one has: holdfast cluster unsafe-recover with another node"
        )
        self._state.note("critical", "damaged_last_copy", {"partitions": partitions, "text": text})
