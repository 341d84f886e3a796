"""Times and bounds of replication."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicationConfig:
    incarnation: str = ""
    """Of this node's data directory. A node leads only while the metadata knows it by this one."""
    holds_restarted: bool = False
    """After Restarted, or `hold`, a partition is not followed before `resume`."""
    silent_s: float = 1.0
    """A replica that is behind and acknowledges nothing for so long leaves the in-sync set."""
    lag_s: float = 0.2
    """If a timer of ours comes later than this, we were held up ourselves: nobody is silent."""
    ask_again_s: float = 1.0
    """After a FOLLOW without an answer."""
    propose_again_s: float = 1.0
    """After a proposal of which the metadata shows nothing."""
    catch_up_bytes_per_s: int = 64 << 20
    """Read from the disk for followers that nobody waits for, all of them together."""
    read_bytes: int = 1 << 20
    """One read for a follower that catches up."""
    reads_max: int = 2
    """At a time for one follower."""
    catch_up_window_bytes: int = 8 << 20
    """Sent to one node and not acknowledged by it, when it gets no more of what it has missed."""
    push_window_bytes: int = 32 << 20
    """The same for what was just appended: beyond it, the node has to catch up. Below what may wait
    unsent on a link (drivers.peers)."""
    frame_bytes: int = 16 << 20
    """A frame with more than one batch in it is not larger."""
    recent_bytes_max: int = 32 << 20
    """Batches of all partitions kept in memory for followers that are slightly behind."""
