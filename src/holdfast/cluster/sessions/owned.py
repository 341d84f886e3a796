"""The payload of the frame SESSION_OWNED, as a JSON object."""

from typing import Final

from msgspec import Struct, json


class OwnedSessions(Struct):
    """A node's report of its sessions with these home partitions. With `ask` the sender, which
    leads them, requests the report.

    `asking` lists the clients that wait for a session at the node. `users` names the user of each
    session that belongs to one. `epochs`: those in which the sender leads the partitions. Older
    versions send neither.
    """

    partitions: list[int]
    owned: list[tuple[str, int]]
    asking: list[str]
    users: dict[str, str | None] = {}
    ask: bool = False
    epochs: list[int] | None = None


OWNED_DECODER: Final = json.Decoder(OwnedSessions)
