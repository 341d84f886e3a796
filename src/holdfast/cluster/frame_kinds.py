"""Kinds of frames between the nodes of a cluster. A frame is (kind, payload); each module encodes
and decodes the payloads of its own kinds."""

from typing import Final

HEARTBEAT: Final = 10
"""Both ways, from inside the event loop (detector)."""
RAFT: Final = 11
"""Metadata consensus (raft_wire)."""
PROPOSAL: Final = 12
"""A change of the metadata, on its way to the Raft leader."""
PROPOSAL_RESULT: Final = 13
POSITION: Final = 14
"""With each heartbeat, to nodes that name the feature: the sender's wall clock and how far its disk
has got (disk_position)."""

REPLICATE: Final = 20
"""Leader to follower: batches."""
REPLICATE_ACK: Final = 21
"""Follower to leader: how far it is durable."""
FOLLOW: Final = 22
"""Follower to leader: where its log ends, with which epoch."""
FOLLOW_FROM: Final = 23
"""Leader to follower: go on from here, or cut there and ask again."""
COMMIT: Final = 24
"""Leader to follower: high watermarks."""

FORWARD: Final = 30
"""Records for a partition that the receiver leads."""
FORWARD_RESULT: Final = 31
SESSION_OPEN: Final = 32
"""To the leader of a session's home partition: who asks wants to own the session."""
SESSION_OPENED: Final = 33
SESSION_CLOSE: Final = 34
"""To the owner: another node takes the session."""
SESSION_CLOSED: Final = 35
SESSION_OWNED: Final = 36
"""To a new home leader: sessions that live here and that the log does not know."""
BARRIER: Final = 37
"""To leaders: where do the partitions that you lead end?"""
BARRIER_RESULT: Final = 38
INTEREST: Final = 40
"""Filters of the sender's live subscriptions: added, removed."""
INTEREST_ACK: Final = 41
QOS0: Final = 42
"""Messages that are not in the log."""
GROUP: Final = 43
"""Shared subscriptions across nodes."""
IMAGE_REQUEST: Final = 44
"""From a node that lacks what was derived from records that are gone: the next piece of it."""
IMAGE: Final = 45


class BadFrame(Exception):
    """A payload that is none of its kind; the text says what is wrong with it."""
