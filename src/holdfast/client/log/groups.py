"""Loads and commits a consumer group's offsets at the broker."""

from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import quote

from msgspec import Struct

from holdfast.client.log.reading.offsets import Offsets
from holdfast.client.log.reading.servers import Servers

PATH: Final = "/api/v1/log/group?group="
UNCOMMITTED_MAX: Final = 10_000
"""The most offsets of a partition without messages for the group that stay uncommitted. Retention
would otherwise pass a group whose topics are rare."""


class _Committed(Struct):
    partition: int
    offset: int
    at_us: int


class _GroupAnswer(Struct):
    offsets: list[_Committed]


class GroupOffsets:
    """The offsets that the members of one group have committed: per partition the first one that
    they have not processed.

    They are records of the log, on every replica and in every snapshot. Any node takes and returns
    them. The members divide the partitions among themselves (`partitions` of `LogClient.read`); two
    with the same partition both receive its messages, and none is lost.
    """

    def __init__(self, name: str, servers: Servers) -> None:
        self.name = name
        self._servers = servers
        self._path = PATH + quote(name, safe="")
        self._committed: Offsets = {}

    def load(self) -> Offsets:
        """Returns the committed offsets. Raises AdminError.

        A node that lags may not know the newest ones yet, so all nodes are asked.
        """
        newest: dict[int, _Committed] = {}
        for answer in self._servers.ask(lambda each: each.get(self._path, _GroupAnswer)):
            for item in answer.offsets:
                known = newest.get(item.partition)
                if known is None or item.at_us > known.at_us:
                    newest[item.partition] = item
        self._committed = {p: item.offset for p, item in newest.items()}
        return dict(self._committed)

    def commit(
        self, offsets: Mapping[int, int], processed: Collection[int], generation: int | None = None
    ) -> None:
        """Commits offsets of a generation of the log. `processed` are the partitions of which
        messages were processed since the last commit. Returns once they are durable. Raises
        AdminError if the log has another generation, or no server confirms it; they may be
        committed all the same.

        A commit is a record of each partition's topic, and so moves the ends of some partitions.
        Partitions without a message are left out, because two groups that follow the log would
        otherwise make each other commit for ever.
        """
        changed = {
            p: at
            for p, at in offsets.items()
            if p not in self._committed
            or (p in processed and at != self._committed[p])
            or abs(at - self._committed[p]) >= UNCOMMITTED_MAX
        }
        if not changed:
            return
        request: dict[str, object] = {"offsets": [*changed.items()]}
        if generation is not None:
            request["generation"] = generation
        self._servers.ask_one(lambda each: each.exchange("POST", self._path, request, _GroupAnswer))
        self._committed |= changed
