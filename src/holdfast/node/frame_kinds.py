"""Kinds of frames between the nodes of a cluster.

A frame is (kind, payload). Each module encodes and decodes the payloads of its own kinds.
"""

from typing import Final, TypeVar

from msgspec import MsgspecError
from msgspec.json import Decoder

T = TypeVar("T")

HEARTBEAT: Final = 10
"""Heartbeat, both ways, from inside the event loop (`failure.detector`)."""
RAFT: Final = 11
"""A message of Raft for the metadata (`raft.codec`)."""
PROPOSAL: Final = 12
"""A command for the metadata, to the Raft leader."""
PROPOSAL_RESULT: Final = 13
"""The outcome of a PROPOSAL, from the Raft leader."""
POSITION: Final = 14
"""The sender's wall clock and the position of its disk, with each heartbeat
(`partitions.disk_position`). Only nodes that announce the feature receive it."""
LOG_END: Final = 15
"""The sender's Raft term, the end of its metadata log and its members, once a link. Only nodes that
announce the feature receive it (`attendance`)."""

REPLICATE: Final = 20
"""Batches, from the leader of a partition to a follower."""
REPLICATE_ACK: Final = 21
"""The durable offset of a follower, to the leader."""
FOLLOW: Final = 22
"""The end of a follower's log and its epoch, to the leader."""
FOLLOW_FROM: Final = 23
"""The offset from which a follower continues, or at which it truncates its log and sends FOLLOW
again."""
COMMIT: Final = 24
"""High watermarks, from the leader to a follower."""

FORWARD: Final = 30
"""Records for partitions that the receiver leads."""
FORWARD_RESULT: Final = 31
"""Records of a FORWARD that the leader refused, or had stored already."""
SESSION_OPEN: Final = 32
"""The request of a node to own a session, to the coordinator of the session."""
SESSION_OPENED: Final = 33
"""The coordinator's reply to SESSION_OPEN."""
SESSION_CLOSE: Final = 34
"""The order to release a session that another node takes, to its owner."""
SESSION_CLOSED: Final = 35
"""The owner's statement that it has released a session, to the coordinator."""
SESSION_OWNED: Final = 36
"""A node's report of its sessions to their coordinator, or the coordinator's request for it."""
BARRIER: Final = 37
"""The request for the log ends of the partitions that the receiver leads."""
BARRIER_RESULT: Final = 38
"""The log ends of the partitions that the sender leads, in reply to BARRIER."""
INTEREST: Final = 40
"""Filters of the sender's connected subscribers: added and removed ones."""
INTEREST_ACK: Final = 41
"""The number of the last INTEREST that the sender has applied."""
QOS0: Final = 42
"""Messages of QoS 0, which are not in the log."""
GROUP: Final = 43
"""Messages of shared groups between nodes and coordinators."""
IMAGE_REQUEST: Final = 44
"""The request for the next piece of replicated state, from a node whose log lacks the records for
it."""
IMAGE: Final = 45
"""A piece of replicated state, in reply to IMAGE_REQUEST."""
QUESTION: Final = 46
"""A question of the sender's admin port (`io.peers.questions`). Only nodes that announce the
feature receive it."""
ANSWER: Final = 47
"""The answer to a QUESTION, or the reason why there is none."""
FETCH: Final = 52
"""A read of the log for the sender, which does not store the partitions (`reads.fetch_frames`)."""
FETCHED: Final = 53
"""Records that were read for a FETCH, or the reason why there are none."""

FEED_FROM: Final = 48
"""The request for feeds of partitions that the receiver leads, from a node that does not store
them."""
FEED: Final = 49
"""Committed records and marks of partitions that the sender leads (`feeds.frames`)."""
FEED_ACK: Final = 50
"""The bytes of feeds that the sender has applied."""

RELAYED: Final = 56
"""A frame for a third node, or from one (`runtime.relayed_links`). Only nodes that announce the
feature receive it."""

USAGE: Final = 57
"""Failed authentications, and what clients have taken from their allowances, to the other processes
of the machine (`admission.usage`). Only nodes that announce the feature receive it."""


class BadFrame(Exception):
    """The error of a payload that does not fit its kind. Its text says what is wrong. The link is
    closed."""


def decode_json(decoder: Decoder[T], data: bytes, what: str) -> T:
    """Decodes JSON of another node. Raises `BadFrame` when it is malformed."""
    try:
        return decoder.decode(data)
    except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"{what} that cannot be read: {error}") from None
