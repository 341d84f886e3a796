"""Replies for all processes of one machine, of which process 0 has the admin port.

The others have no port. They are asked over the links between the nodes.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from holdfast.api.endpoints import ApiRefusal
from holdfast.api.metrics.catalog import gauge
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.process import ServedProcess
from holdfast.api.readiness import Obstacle, obstacles
from holdfast.io.settings.reload import Reloaded, ReloadError

TIMEOUT_S: Final = 1.0
"""The time in seconds that a process has for its reply. One that is down has none."""
RELOAD_S: Final = 30.0
"""The time in seconds that it has to reload."""


class NoParameters(Struct):
    """The parameters of a question without any."""


class ProcessReload(Struct):
    """The result of the reload of one process."""

    disconnected: int = 0
    error: str = ""


class Family(Struct, array_like=True):
    """A metric with its samples. Values are texts, because JSON has no infinity."""

    name: str
    text: str
    kind: str
    unit: str
    samples: list[tuple[str, dict[str, str], str]]


class MachineProcesses:
    """The obstacles, the metrics and the reload of all processes."""

    def __init__(
        self, server: ServedProcess, everywhere: Everywhere, registry: CollectorRegistry
    ) -> None:
        self._server = server
        self._everywhere = everywhere
        self._registry = registry
        everywhere.offer("process_obstacles", NoParameters, self._own_obstacles)
        everywhere.offer("process_metrics", NoParameters, self._own_metrics)
        everywhere.offer("process_reload", NoParameters, self._own_reload)

    async def obstacles(self) -> list[Obstacle]:
        """Returns the obstacles of all processes, those of this one first."""
        found = obstacles(self._server)
        siblings = self._server.siblings
        replies = await self._ask("process_obstacles", list[Obstacle])
        for index, (node, reply) in enumerate(zip(siblings, replies, strict=True), 1):
            known = {each.name for each in found}
            if reply is None and "process_down" not in known:
                text = f"process {index} ({node}) does not reply"
                found.append(Obstacle("process_down", text))
            found += [
                Obstacle(each.name, f"process {index}: {each.text}", each.is_expected)
                for each in reply or []
                if each.name not in known
            ]
        return found

    async def reload(self) -> Reloaded:
        """Reloads this process and then the others. Raises `ReloadError` with the first one that
        changes nothing, and `ApiRefusal` without a reply."""
        done = await self._server.reload()
        replies = await asyncio.gather(
            *(
                self._everywhere.ask(
                    node, "process_reload", NoParameters(), ProcessReload, RELOAD_S
                )
                for node in self._server.siblings
            )
        )
        for index, reply in enumerate(replies, 1):
            if reply.error:
                raise ReloadError(f"process {index}: {reply.error}")
        disconnected = sum(reply.disconnected for reply in replies)
        return replace(done, disconnected=done.disconnected + disconnected)

    async def _own_reload(self, _: NoParameters) -> ProcessReload:
        try:
            return ProcessReload((await self._server.reload()).disconnected)
        except ReloadError as error:
            return ProcessReload(error=str(error))

    async def families(self) -> list[Metric]:
        """Returns the metrics. With several processes each sample has the label `process`."""
        own = list(self._registry.collect())
        siblings = self._server.siblings
        if not siblings:
            return own
        replies = await self._ask("process_metrics", list[Family])
        up = gauge("local_process_up")
        up.add_metric(["0"], 1)
        merged = {each.name: each for each in own}
        for family in own:
            _label(family, "0")
        for index, reply in enumerate(replies, 1):
            up.add_metric([str(index)], int(reply is not None))
            for each in reply or []:
                found = merged.get(each.name)
                if found is None:
                    found = merged[each.name] = Metric(each.name, each.text, each.kind, each.unit)
                for name, labels, value in each.samples:
                    found.add_sample(name, {**labels, "process": str(index)}, float(value))
        return [*merged.values(), up]

    async def _ask(self, name: str, kind: type) -> list:  # type: ignore[type-arg]
        """Returns the replies of the other processes by their numbers; None without one."""
        return await asyncio.gather(
            *(self._reply(node, name, kind) for node in self._server.siblings)
        )

    async def _reply(self, node: str, name: str, kind: type) -> object:
        try:
            return await self._everywhere.ask(node, name, NoParameters(), kind, TIMEOUT_S)
        except ApiRefusal:
            return None

    async def _own_obstacles(self, _: NoParameters) -> list[Obstacle]:
        return obstacles(self._server)

    async def _own_metrics(self, _: NoParameters) -> Raw:
        families = list(self._registry.collect())
        return Raw(await asyncio.to_thread(_encoded, families))


def _label(family: Metric, process: str) -> None:
    family.samples = [
        each._replace(labels={**each.labels, "process": process}) for each in family.samples
    ]


def _encoded(families: Iterable[Metric]) -> bytes:
    return msgspec.json.encode(
        [
            Family(
                each.name,
                each.documentation,
                each.type,
                each.unit,
                [(one.name, dict(one.labels), repr(float(one.value))) for one in each.samples],
            )
            for each in families
        ]
    )
