"""The payload of the frame SESSION_OWNED, as a JSON object."""

from typing import Final

from msgspec import Struct, json


class OwnedSessions(Struct, kw_only=True, omit_defaults=True):
    """A node's report of its sessions with these home partitions. With `ask` the sender, which
    leads them, requests the report.

    `asking` lists the clients that wait for a session at the node. `users` names the user of each
    session that belongs to one. `epochs`: those in which the sender leads the partitions. Older
    versions send neither.
    """

    ask: bool = False
    partitions: list[int]
    epochs: list[int] | None = None
    owned: list[tuple[str, int]]
    asking: list[str]
    users: dict[str, str | None] = {}


OWNED_DECODER: Final = json.Decoder(OwnedSessions)
