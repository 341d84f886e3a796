"""Parts of the replicated state as JSON, in snapshots and between nodes."""

from typing import Final

from msgspec import Struct
from msgspec.json import Decoder

ClientEpochs = list[tuple[str, int]]
"""Client ids, each with a session epoch."""


class StoredEpochs(Struct):
    """The ended sessions that a snapshot remembers, and the newest epochs: of all home partitions,
    and of each. Snapshots of older versions have the first alone, and the published wills."""

    fired: ClientEpochs
    ended: ClientEpochs
    newest: int = 0
    newest_of: list[int] = []


class PublishedWills(Struct):
    """Published wills: client id, session epoch and offset of the record."""

    partition: int
    wills: list[tuple[str, int, int]]


class InboundIds(Struct):
    """The QoS 2 packet ids of a client in a snapshot: partition, packet id and session epoch."""

    client: str
    ids: list[tuple[int, int, int]]


class PartitionIds(Struct):
    """The QoS 2 packet ids of a client in one partition: packet id and session epoch."""

    client: str
    ids: list[tuple[int, int]]


class MembersEntry(Struct, omit_defaults=True):
    """Members of one group with the session epochs of their records. Without a group: the home
    partition has its MEMBERS record."""

    home: int
    group: str = ""
    members: list[tuple[str, int]] = []


EPOCHS: Final = Decoder(StoredEpochs)
INBOUND: Final = Decoder(InboundIds)
PACKET_IDS: Final = Decoder(PartitionIds)
WILLS: Final = Decoder(PublishedWills)
MEMBERS: Final = Decoder(MembersEntry)
CLIENT_EPOCHS: Final = Decoder(ClientEpochs)
