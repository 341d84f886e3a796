"""`GET /api/v1/topics`: the tree of topics, one level at a time."""

import asyncio
from functools import partial
from typing import Final

from holdfast.api.endpoints import Call, Endpoint, Text, Whole
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.views.pages import PAGE_MAX
from holdfast.api.views.topics import (
    Gathered,
    LevelScan,
    RecentTopics,
    TopicLevel,
    add_values,
    read_recent,
)
from holdfast.security.access.scopes import Scope

PREFIX: Final = Text("prefix", "whole levels, as plant/1; default: the first level", least=0,
                     most=65_535, default="")  # fmt: skip
AFTER: Final = Text("after", "`next` of the page before: a level", most=65_535)
LIMIT: Final = Whole("limit", "the most levels", least=1, most=PAGE_MAX, default=200)
BYTES: Final = Whole("bytes", "the most bytes of each value", default=200, most=4096)
FRESH_S: Final = 2.0
"""The time in seconds for which the newest records are not read again."""


class TopicRoutes:
    """The route of topics."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node
        self._lock = asyncio.Lock()
        self._recent = RecentTopics()
        self._read_at = -FRESH_S

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/topics", Scope.VIEWER,
                     "the topics below a prefix, with rates and, for readers, last values",
                     self._list, TopicLevel, (PREFIX, LIMIT, AFTER, BYTES), refusals=(421, 503)),
        ]  # fmt: skip

    async def _list(self, call: Call) -> TopicLevel:
        node = self._node
        recent = await self._newest()
        state = node.state
        scan = LevelScan(call[PREFIX].strip("/"), state.retained, list(state.routes), recent)
        await node.slices.run(scan.steps())
        after = call.get(AFTER)
        levels = sorted(level for level in scan.nodes if after is None or level > after)
        chosen = [scan.nodes[level] for level in levels[: call[LIMIT]]]
        bytes_max = call[BYTES] if call.caller.scope >= Scope.READER else 0
        add_values(chosen, state.retained, recent, bytes_max)
        following = chosen[-1].level if len(levels) > len(chosen) else ""
        return TopicLevel(chosen, round(recent.covers_s, 1), following, scan.is_cut)

    async def _newest(self) -> RecentTopics:
        """The topics of the newest records, at most FRESH_S old."""
        broker = self._node.readable_broker
        async with self._lock:
            if broker.loop.time() - self._read_at < FRESH_S:
                return self._recent
            log = await self._node.log()
            ends = log.ends
            first = [log.first_offset(partition) for partition in range(len(ends))]
            now_us = self._node.state.wall_us
            found = Gathered()
            for partition in range(len(ends)):
                work = partial(read_recent, log, first, ends, now_us, partition, found)
                await log.in_thread(work)
            self._recent = await log.in_thread(partial(found.topics, now_us))
            self._read_at = broker.loop.time()
            return self._recent
