"""State machine of the metadata's Raft: the cluster metadata, and the requests carried out lately.
It is equal on every node after the same entries.

An entry is a request: an id, made by the node that proposes, and a command. A node that received no
outcome sends its request again. So an entry may come twice, and the second one has no effect.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import json

from holdfast.node.frame_kinds import BadFrame, decode_json
from holdfast.node.metadata.codec import decode_command, decode_metadata, encode_metadata
from holdfast.node.metadata.commands import apply
from holdfast.node.metadata.model import ClusterMetadata
from holdfast.node.metadata.requests import Accepted, RequestRefused

RECENT_MAX: Final = 1024
_RECENT: Final = json.Decoder(list[tuple[str, int | str]])
"""The number of remembered requests. A request is repeated for some seconds only, and far fewer
arrive in that time."""
MEMBER_SEPARATOR: Final = "."


def peer_id(node_id: str, incarnation: str) -> str:
    """The Raft peer id of a node with this disk. Another disk is another peer, because the old
    one's votes and entries are lost."""
    return f"{node_id}{MEMBER_SEPARATOR}{incarnation}"


def node_of(member: str) -> str:
    """The node id in a Raft peer id."""
    return member.partition(MEMBER_SEPARATOR)[0]


def encode_request(request_id: str, command: bytes) -> bytes:
    name = request_id.encode()
    return bytes((len(name),)) + name + command


def decode_request(data: bytes) -> tuple[str, bytes]:
    """The request id and the command.

    Raises `BadFrame` if there is no id.
    """
    length = data[0] if data else 0
    name = data[1 : 1 + length]
    if not length or len(name) < length or not name.isascii():
        raise BadFrame("a request without an id")
    return name.decode(), data[1 + length :]


class MetaState:
    """The metadata with the outcomes of recent requests. Both are in the snapshot, or a repeated
    request would run twice on nodes that loaded one."""

    def __init__(self) -> None:
        self.metadata: ClusterMetadata | None = None
        self._recent: dict[str, Accepted | RequestRefused] = {}

    def apply(self, data: bytes) -> str:
        """Applies an entry and returns its request id; `outcome` has the result.

        Raises `BadFrame` if the entry is invalid.
        """
        request_id, encoded = decode_request(data)
        if request_id in self._recent:
            return request_id
        applied = apply(self.metadata, decode_command(encoded))
        if self.metadata is not None:
            assert applied.metadata is not None, "a command removes the metadata"
            assert applied.metadata.version >= self.metadata.version, "the version falls"
        self.metadata = applied.metadata
        if applied.error or applied.metadata is None:
            self._recent[request_id] = RequestRefused(applied.error)
        else:
            self._recent[request_id] = Accepted(applied.metadata.version)
        if len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]
        return request_id

    def outcome(self, request_id: str) -> Accepted | RequestRefused | None:
        """The result of a recent request; None if it was not carried out lately."""
        return self._recent.get(request_id)

    def set_voters(self, voters: Sequence[str]) -> bool:
        """Takes over the voters, given as Raft peer ids. Returns True if the metadata changed."""
        if self.metadata is None:
            return False
        before = self.metadata
        self.metadata = before.with_voters(tuple(sorted({node_of(voter) for voter in voters})))
        return self.metadata is not before

    def encode(self) -> bytes:
        metadata = b"" if self.metadata is None else encode_metadata(self.metadata)
        recent = [
            [request_id, outcome.version if isinstance(outcome, Accepted) else outcome.text]
            for request_id, outcome in self._recent.items()
        ]
        return json.encode(recent) + b"\n" + metadata

    @classmethod
    def decode(cls, data: bytes) -> "MetaState":
        """The state in a snapshot.

        Raises `BadFrame` if the snapshot is invalid.
        """
        state = cls()
        recent, _, metadata = data.partition(b"\n")
        for request_id, result in decode_json(_RECENT, recent, "a list of requests"):
            state._recent[request_id] = (
                Accepted(result) if isinstance(result, int) else RequestRefused(result)
            )
        if metadata:
            state.metadata = decode_metadata(metadata)
        return state


def changed_since(old: ClusterMetadata | None, new: ClusterMetadata) -> tuple[int, ...]:
    """The partitions whose version differs."""
    if old is None or len(old.partitions) != len(new.partitions):
        return tuple(range(len(new.partitions)))
    return tuple(
        number
        for number, (before, after) in enumerate(zip(old.partitions, new.partitions, strict=True))
        if before.version != after.version
    )
