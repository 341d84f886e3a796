"""Times and bounds of replication."""

from msgspec import Struct


class ReplicationConfig(Struct, frozen=True):
    """The settings of replication on one node."""

    incarnation: str = ""
    """The name of the life of this node's disk. A node leads only while the metadata has the same
    name for it."""
    is_incomplete: bool = False
    """True: a power cut may have taken acknowledged records from this disk, see `incomplete`."""
    suspends_restarted: bool = False
    """True: after Restarted, or `suspend`, the node suspends the partition until `resume`."""
    silent_s: float = 1.0
    """The seconds after which a replica that is behind and acknowledges nothing leaves the in-sync
    set."""
    lag_s: float = 0.2
    """The delay of our own timer, in seconds, above which this node itself was stalled. It then
    counts no other node as silent."""
    follow_retry_s: float = 1.0
    """The seconds after which an unanswered FOLLOW is sent again."""
    proposal_retry_s: float = 1.0
    """The seconds after which a proposal is made again if the metadata shows no effect of it."""
    catch_up_bytes_per_s: int = 64 << 20
    """The most bytes per second read from the disk for all followers together that no commit waits
    for."""
    read_bytes: int = 1 << 20
    """The size in bytes of one read for a follower that catches up."""
    reads_max: int = 2
    """The most reads at a time for one follower."""
    catch_up_window_bytes: int = 8 << 20
    """The most unacknowledged bytes on the link to one node while it catches up."""
    push_window_bytes: int = 32 << 20
    """The most unacknowledged bytes on the link to one node for new batches. Beyond it, the node
    has to catch up. It is below the limit of unsent bytes on a link (`io.peers`)."""
    frame_bytes: int = 16 << 20
    """The most bytes of a frame with more than one batch."""
    recent_bytes_max: int = 32 << 20
    """The most bytes of batches of all partitions in memory, for followers that are slightly
    behind."""
